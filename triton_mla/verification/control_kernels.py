"""Kernels that are wrong on purpose: each breaks one rule of the contract, and `verify` must see the difference."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["shift", "seq_len"])
def shifted_tiles_kernel(Q, KV, OUT, shift, seq_len, scale, ROWS: tl.constexpr, RANK: tl.constexpr, TILE: tl.constexpr):
    """Attention whose tiles start at -shift instead of 0: the same tokens at other columns of their tiles.

    Q [ROWS, RANK], KV [seq_len, RANK], OUT [ROWS, RANK] fp32, all contiguous; scale in the log2 domain.
    """
    rows = tl.arange(0, ROWS)[:, None]
    latent = tl.arange(0, RANK)[None, :]
    q = tl.load(Q + rows * RANK + latent)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, RANK], tl.float32)
    tiles = (seq_len + shift + TILE - 1) // TILE
    for tile in range(0, tiles):
        pos = tile * TILE - shift + tl.arange(0, TILE)
        seen = (pos >= 0) & (pos < seq_len)
        kv = tl.load(KV + pos[:, None] * RANK + latent, mask=seen[:, None], other=0.0)
        s = tl.where(seen[None, :], tl.dot(q, tl.trans(kv)) * scale, -float("inf"))
        new = tl.maximum(top, tl.floor(tl.max(s, 1) * 0.125) * 8.0)
        alpha = tl.exp2(top - new)
        p = tl.exp2(s - new[:, None])
        total = total * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(kv.dtype), kv, acc * alpha[:, None])
        top = new
    tl.store(OUT + rows * RANK + latent, acc / total[:, None])


@triton.jit
def row_sum_kernel(A, B, SCORES, SUMS, ROWS: tl.constexpr, INNER: tl.constexpr, COLUMNS: tl.constexpr):
    """exp2 of a product, and its row sums by `tl.sum`, whose order follows the register layout of the tile.

    A [rows, INNER], B [INNER, COLUMNS], SCORES [rows, COLUMNS] fp32, SUMS [rows] fp32, all contiguous. A program has
    ROWS rows.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inner = tl.arange(0, INNER)
    columns = tl.arange(0, COLUMNS)
    a = tl.load(A + rows[:, None] * INNER + inner[None, :])
    b = tl.load(B + inner[:, None] * COLUMNS + columns[None, :])
    p = tl.exp2(tl.dot(a, b))
    tl.store(SCORES + rows[:, None] * COLUMNS + columns[None, :], p)
    tl.store(SUMS + rows, tl.sum(p, 1))
