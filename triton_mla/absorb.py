"""W_UK folded into the query and W_UV applied to the attended latent, head by head, with bits that no batch can change."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from . import checks
from .companion.products import Operands, product_call


def split_kv_b(w_kv_b: torch.Tensor, num_heads: int, qk_nope_head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views (W_UK [H, nope, R], W_UV [H, R, V]) of a kv_b projection's weight [H * (nope + V), R]; nothing is copied.

    Args:
        w_kv_b: [H * (nope + V), R] of any dtype, dense: for each head W_UK's rows, then W_UV's.
        num_heads: H, 1 or more; it divides the rows.
        qk_nope_head_dim: nope, from 1 to a head's rows less one.

    Raises:
        ValueError: an argument is wrong.
    """
    if checks.strided("w_kv_b", w_kv_b).dim() != 2:
        raise ValueError(f"w_kv_b has shape {tuple(w_kv_b.shape)}; it must have 2 dimensions: num_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank")
    rows = w_kv_b.shape[0]
    if isinstance(num_heads, bool) or not isinstance(num_heads, int) or num_heads < 1 or rows % num_heads:
        raise ValueError(f"num_heads={num_heads!r} must be an int of at least 1 that divides the {rows} rows of w_kv_b")
    most = rows // num_heads - 1
    if isinstance(qk_nope_head_dim, bool) or not isinstance(qk_nope_head_dim, int) or not 1 <= qk_nope_head_dim <= most:
        raise ValueError(f"qk_nope_head_dim={qk_nope_head_dim!r} must be an int from 1 to {most}: W_UV has rows too of the {most + 1} of a head in w_kv_b")
    heads = w_kv_b.unflatten(0, (num_heads, -1))
    return heads[:, :qk_nope_head_dim], heads[:, qk_nope_head_dim:].transpose(1, 2)


def absorb_query(q_nope: torch.Tensor, w_uk: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """The query against the latent: ``out[t, h] = q_nope[t, h] @ w_uk[h]``, by `companion.bmm` over the heads.

    Args:
        q_nope: [T, H, nope], fp16, bf16 or fp32; rows and heads may have any stride.
        w_uk: [H, nope, R] of the same dtype; one of its last two dimensions is contiguous. `split_kv_b` gives it.
        out: preallocated [T, H, R].

    Returns:
        [T, H, R], rounded once from an fp32 sum in ascending order. A row's bits depend on nothing but that row and the weights.

    Raises:
        ValueError: an argument is wrong; nothing has been launched or written.
    """
    return product_call(_check_query, ("q_nope", "w_uk", ""), q_nope, w_uk, None, out)


def project_values(out_latent: torch.Tensor, w_uv: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Each head's values from the attended latent: ``out[t, h] = out_latent[t, h] @ w_uv[h]``.

    Args: out_latent [T, H, R]; w_uv [H, R, V]; out [T, H, V]. The rest is as in `absorb_query`.
    """
    return product_call(_check_values, ("out_latent", "w_uv", ""), out_latent, w_uv, None, out)


def _check(x_name: str, w_name: str, x: Any, w: Any, _: None, out: Any) -> Operands:
    x, w = checks.tensor(x_name, x, dims=3), checks.forward_only(w_name, checks.as_stored(w_name, w))
    checks.float_dtype(x_name, x)
    num_rows, num_heads, K = x.shape
    if w.dim() != 3 or w.dtype != x.dtype or w.device != x.device:
        raise ValueError(f"{w_name}={w.dtype} {list(w.shape)} on {w.device} must be {x.dtype} with 3 dimensions on {x.device}, as {x_name}")
    checks.shape(w_name, w, (num_heads, K, w.shape[2]), f"one matrix for each head of {x_name}, with a row for each of its last dimension")
    if 1 not in w.stride()[1:]:
        raise ValueError(f"{w_name} has strides {w.stride()}; one of its last two dimensions must be contiguous")
    shape = (num_rows, num_heads, w.shape[2])
    if out is not None:
        out = checks.tensor("out", out, dims=3, dtype=x.dtype, device=x.device)
        checks.shape("out", out, shape, f"one row for each of {x_name}")
        checks.no_overlap("out", out)
    return Operands(x.transpose(0, 1), w, None, shape, rows_first=True)


_check_query = partial(_check, "q_nope", "w_uk")
_check_values = partial(_check, "out_latent", "w_uv")
