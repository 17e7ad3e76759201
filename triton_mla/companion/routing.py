"""Choosing the experts of a token by scores of its own, with ties broken by index."""

from __future__ import annotations

from typing import Literal

import torch
import triton

from .. import checks
from ..kernels.companion.routing import route_kernel
from .rows import floats, start

MAX_EXPERTS = 1024


def route_tokens(
    logits: torch.Tensor, *, top_k: int, scoring: Literal["sigmoid", "softmax"] = "sigmoid", num_groups: int = 1, top_groups: int = 1,
    correction_bias: torch.Tensor | None = None, normalize: bool = True, scaling_factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``top_k`` experts of each token among those of its ``top_groups`` best groups (DeepSeek-V2 and V3).

    Scores are fp32: ``1 / (1 + exp(-logit))``, or a softmax whose sum is a tree of neighbours, over the experts of each group, then over the groups,
    both padded to powers of two. The choice is by score + ``correction_bias``, the weight by the score. A group counts as its best value for
    softmax without a bias (V2), else as the sum of its two best (V3). Of equal values the lower index is chosen; NaN ranks below every number.

    Args:
        logits: [T, E], fp16, bf16 or fp32, E up to 1024.
        top_k: experts of a token.
        scoring: "sigmoid" or "softmax".
        num_groups: groups of E / num_groups neighbouring experts.
        top_groups: groups that a token may choose from. With all of them, there is no choice of groups.
        correction_bias: [E], fp16, bf16 or fp32.
        normalize: divide weights by (their sum, in the order of slots, + 1e-20).
        scaling_factor: multiplies the weights at the end; finite in fp32.

    Returns:
        weights [T, top_k] fp32 and ids [T, top_k] int32, the best first.

    Raises:
        ValueError: an argument is wrong; nothing has been launched.
    """
    logits = floats("logits", logits)
    if logits.dim() != 2 or not 1 <= logits.shape[1] <= MAX_EXPERTS:
        raise ValueError(f"logits has shape {tuple(logits.shape)}; it must be [T, E] with E from 1 to {MAX_EXPERTS}")
    tokens, num_experts = logits.shape
    if scoring not in ("sigmoid", "softmax"):
        raise ValueError(f"scoring={scoring!r} must be 'sigmoid' or 'softmax'")
    _count("num_groups", num_groups, num_experts, "the number of experts")
    if num_experts % num_groups:
        raise ValueError(f"num_groups={num_groups} must divide the {num_experts} experts")
    _count("top_groups", top_groups, num_groups, "num_groups")
    size = num_experts // num_groups
    _count("top_k", top_k, top_groups * size, f"the number of experts in {top_groups} groups")
    if correction_bias is not None:
        floats("correction_bias", correction_bias, device=logits.device)
        checks.shape("correction_bias", correction_bias, (num_experts,), "one value for each expert")
    if size < 2 and top_groups < num_groups and (scoring == "sigmoid" or correction_bias is not None):
        raise ValueError(f"num_groups={num_groups} must leave two experts a group, whose scores are added; it leaves {size}")
    checks.boolean("normalize", normalize)
    if isinstance(scaling_factor, bool) or not isinstance(scaling_factor, (int, float)) or not abs(scaling_factor) <= torch.finfo(torch.float32).max:
        raise ValueError(f"scaling_factor={scaling_factor!r} must be a finite number of fp32")
    if torch.compiler.is_compiling():
        return torch.ops.triton_mla.route_tokens(logits, top_k, scoring, num_groups, top_groups, correction_bias, normalize, float(scaling_factor))
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((tokens, top_k), dtype=torch.int32, device=logits.device)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    bias = logits if correction_bias is None else correction_bias.contiguous()
    start(route_kernel, (tokens, 1), (logits, bias, weights, ids), (logits.stride(0), float(scaling_factor)),
          {"NUM_EXPERTS": num_experts, "NUM_GROUPS": num_groups, "TOP_GROUPS": top_groups, "TOP_K": top_k,
           "GROUPS": triton.next_power_of_2(num_groups), "EXPERTS": triton.next_power_of_2(size), "SLOTS": triton.next_power_of_2(top_k),
           "SIGMOID": scoring == "sigmoid", "WITH_BIAS": correction_bias is not None, "NORMALIZE": normalize}, 1)
    return weights, ids


def _count(name: str, value: object, most: int, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ValueError(f"{name}={value!r} must be an int from 1 to {most}, {what}")


@torch.library.custom_op("triton_mla::route_tokens", mutates_args=())
def _operator(
    logits: torch.Tensor, top_k: int, scoring: str, num_groups: int, top_groups: int, correction_bias: torch.Tensor | None, normalize: bool,
    scaling_factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    return route_tokens(logits, top_k=top_k, scoring="sigmoid" if scoring == "sigmoid" else "softmax", num_groups=num_groups, top_groups=top_groups,
                        correction_bias=correction_bias, normalize=normalize, scaling_factor=scaling_factor)


@_operator.register_fake
def _(
    logits: torch.Tensor, top_k: int, scoring: str, num_groups: int, top_groups: int, correction_bias: torch.Tensor | None, normalize: bool,
    scaling_factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)
