"""Rotary position embedding: no sums but those of two products, so a token's bits are its own."""

from __future__ import annotations

import torch
import triton

from .. import checks
from ..kernels.companion.rotary import rotary_kernel
from .rows import emulate_bf16, floats, start


def rotary_embedding(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """Rotate each pair (a, b) of a token's P values to (a cos - b sin, b cos + a sin).

    Computed in fp32, each product and sum rounded on its own, and rounded once to the dtype of x.

    Args:
        x: [T, H, P], fp16, bf16 or fp32, P even; tokens and heads may have any stride.
        cos, sin: [T, P / 2], fp16, bf16 or fp32, of each token's position.
        interleaved: pairs are (x[2 i], x[2 i + 1]), else (x[i], x[i + P / 2]). The result keeps that layout.

    Returns:
        [T, H, P] contiguous.

    Raises:
        ValueError: an argument is wrong; nothing has been launched.
    """
    x = floats("x", x)
    if x.dim() != 3 or x.shape[2] % 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; it must be [T, H, P] with an even P")
    tokens, heads, P = x.shape
    for name, angle in (("cos", cos), ("sin", sin)):
        floats(name, angle, device=x.device)
        checks.shape(name, angle, (tokens, P // 2), "one value for each token and pair of x")
    checks.boolean("interleaved", interleaved)
    if torch.compiler.is_compiling():
        return torch.ops.triton_mla.rotary_embedding(x, cos, sin, interleaved)
    out = torch.empty((tokens, heads, P), dtype=x.dtype, device=x.device)
    if out.numel():
        x, cos, sin = (t if t.shape[-1] < 2 or t.stride(-1) == 1 else t.contiguous() for t in (x, cos, sin))
        block = triton.next_power_of_2(P // 2)
        tile = max(1, min(triton.next_power_of_2(heads), 1024 // block))
        start(rotary_kernel, (tokens, triton.cdiv(heads, tile)), (x, cos, sin, out), (x.stride(0), x.stride(1), cos.stride(0), sin.stride(0), heads),
              {"HALF": P // 2, "BLOCK": block, "HEADS": tile, "INTERLEAVED": interleaved, "EMULATE_BF16": emulate_bf16(out)}, 4)
    return out


@torch.library.custom_op("triton_mla::rotary_embedding", mutates_args=())
def _operator(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    return rotary_embedding(x, cos, sin, interleaved=interleaved)


@_operator.register_fake
def _(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    return x.new_empty(x.shape)
