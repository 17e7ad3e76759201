"""W_UK folded into the query and W_UV applied to the attended latent, head by head, with bits that no batch can change."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from . import checks
from .calls import on_device
from .kernels.absorb import head_matmul_kernel
from .launch import INTERPRETED, launch


@dataclass(frozen=True)
class Tile:
    """How `head_matmul` is spread over the machine. No field can change a bit."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# By the most rows they serve. fp32 products are unrolled multiplications, which want small tiles.
TILES = {
    16: Tile(16, 128, 64, 4, 4),
    64: Tile(64, 128, 64, 4, 3),
    128: Tile(128, 128, 64, 8, 3),
}
FP32_TILE = Tile(16, 64, 32, 4, 2)
INTERPRETED_TILE = Tile(64, 128, 64, 4, 1)


def tile_for(num_rows: int, dtype: torch.dtype) -> Tile:
    """The tile for a number of rows; one for all under the interpreter, whose products follow the shape of the tile."""
    if INTERPRETED:
        return INTERPRETED_TILE
    if dtype == torch.float32:
        return FP32_TILE
    return next((tile for rows, tile in TILES.items() if num_rows <= rows), TILES[128])


def split_kv_b(w_kv_b: torch.Tensor, num_heads: int, qk_nope_head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views (W_UK [H, nope, R], W_UV [H, R, V]) of a kv_b projection's weight [H * (nope + V), R]; nothing is copied."""
    heads = w_kv_b.unflatten(0, (num_heads, -1))
    return heads[:, :qk_nope_head_dim], heads[:, qk_nope_head_dim:].transpose(1, 2)


def absorb_query(q_nope: torch.Tensor, w_uk: torch.Tensor, *, out: torch.Tensor | None = None, tile: Tile | None = None) -> torch.Tensor:
    """The query against the latent: ``out[t, h] = q_nope[t, h] @ w_uk[h]``.

    Args:
        q_nope: [T, H, nope], fp16, bf16 or fp32; rows and heads may have any stride.
        w_uk: [H, nope, R] of the same dtype; one of its last two dimensions is contiguous. `split_kv_b` gives it.
        out: preallocated [T, H, R].
        tile: overrides the choice by T; it cannot change a bit.

    Returns:
        [T, H, R], rounded once from an fp32 sum in ascending order. A row's bits depend on nothing but that row and the weights.

    Raises:
        ValueError: an argument is wrong; nothing has been launched or written.
    """
    return _head_matmul("q_nope", q_nope, "w_uk", w_uk, out, tile)


def project_values(out_latent: torch.Tensor, w_uv: torch.Tensor, *, out: torch.Tensor | None = None, tile: Tile | None = None) -> torch.Tensor:
    """Each head's values from the attended latent: ``out[t, h] = out_latent[t, h] @ w_uv[h]``.

    Args: out_latent [T, H, R]; w_uv [H, R, V]; out [T, H, V]. The rest is as in `absorb_query`.
    """
    return _head_matmul("out_latent", out_latent, "w_uv", w_uv, out, tile)


def _head_matmul(x_name: str, x: torch.Tensor, w_name: str, w: torch.Tensor, out: torch.Tensor | None, tile: Tile | None) -> torch.Tensor:
    x = checks.tensor(x_name, x, dims=3)
    checks.float_dtype(x_name, x)
    device = x.device
    num_rows, num_heads, K = x.shape
    if not isinstance(w, torch.Tensor) or w.dim() != 3 or w.dtype != x.dtype or w.device != device:
        what = f"{w.dtype} {list(w.shape)} on {w.device}" if isinstance(w, torch.Tensor) else repr(w)
        raise ValueError(f"{w_name}={what} must be {x.dtype} with 3 dimensions on {device}, as {x_name}")
    checks.shape(w_name, w, (num_heads, K, w.shape[2]), f"one matrix for each head of {x_name}, with a row for each of its last dimension")
    if 1 not in w.stride()[1:]:
        raise ValueError(f"{w_name} has strides {w.stride()}; one of its last two dimensions must be contiguous")
    N = w.shape[2]
    if out is not None:
        out = checks.tensor("out", out, dims=3, dtype=x.dtype, device=device)
        checks.shape("out", out, (num_rows, num_heads, N), f"one row for each of {x_name}")
        checks.no_overlap("out", out)
    if torch.compiler.is_compiling():
        result = torch.ops.triton_mla.head_matmul(x, w)
        return result if out is None else out.copy_(result)
    if out is None:
        out = torch.empty((num_rows, num_heads, N), dtype=x.dtype, device=device)
    tile = tile_for(num_rows, x.dtype) if tile is None else tile
    strides = (x.stride(0), x.stride(1), *w.stride(), out.stride(0), out.stride(1))
    block_n, block_k = min(tile.block_n, triton.next_power_of_2(max(N, 16))), min(tile.block_k, triton.next_power_of_2(max(K, 16)))
    key = (x.dtype, K, N, tile, strides, tuple(t.data_ptr() % 16 for t in (x, w, out)))
    with on_device(device):
        launch(head_matmul_kernel, key, (triton.cdiv(num_rows, tile.block_m) * num_heads, triton.cdiv(N, block_n)),
               (x, w, out, *strides, num_rows, num_heads),
               {"K": K, "N": N, "BLOCK_M": tile.block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "PRECISION": "ieee",
                "EMULATE_BF16": INTERPRETED and x.dtype == torch.bfloat16},
               {"num_warps": tile.num_warps, "num_stages": tile.num_stages})
    return out


@torch.library.custom_op("triton_mla::head_matmul", mutates_args=())
def _operator(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """What `torch.compile` sees of both operations."""
    return _head_matmul("x", x, "w", w, None, None)


@_operator.register_fake
def _(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:2], w.shape[2]))
