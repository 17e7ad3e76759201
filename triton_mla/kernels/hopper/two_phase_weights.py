"""Between the phases of the two-phase form on Hopper: the softmax weights of every KV tile, each a program's. Scratch memory: two_phase_scores.py.

The reference of a tile is the largest of those that the tiles of its split up to it would have alone, so no tile waits for another.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .._common import locate_rows, softmax_step

AHEAD = tl.constexpr(32)  # tiles whose references are loaded at once


@triton.jit(
    do_not_specialize=["num_tokens", "batch_size", "num_heads", "max_seq_len", "kv_split", "first_row_tile", "num_blocks", "num_tiles"],
    do_not_specialize_on_alignment=["CU_SEQLENS_Q", "SEQ_LENS"],
)
def hopper_weights_kernel(
    OUT, CU_SEQLENS_Q, SEQ_LENS, SCORES, scale_log2, num_tokens, batch_size, num_heads, max_seq_len, kv_split, first_row_tile, num_blocks, num_tiles,
    ROWS: tl.constexpr, STEP: tl.constexpr, DECODE: tl.constexpr, WITH_LSE: tl.constexpr, PDL: tl.constexpr,
):
    """Grid (row tiles of a wave, programs of a row tile). OUT has the type of the weights."""
    if PDL:
        gdc_launch_dependents()
    DTYPE: tl.constexpr = OUT.dtype.element_ty
    request, kv_len, token, head, seen, valid = locate_rows(first_row_tile + tl.program_id(0), CU_SEQLENS_Q, SEQ_LENS, num_tokens, batch_size,
                                                            num_heads, ROWS, DECODE)
    visible = tl.max(tl.where(valid & (kv_len <= max_seq_len), seen, 0), 0)
    blocks = num_blocks.to(tl.int64)
    weights = SCORES.to(tl.pointer_type(DTYPE))
    scores = SCORES + blocks * (ROWS * 64)
    refs = scores + blocks * (ROWS * 64)
    flags = (refs + blocks * (2 * ROWS)).to(tl.pointer_type(tl.int32))
    row = tl.arange(0, ROWS)
    inside = row[:, None] * 64 + tl.arange(0, 64)[None, :]
    split_tiles = kv_split // 64
    if PDL:
        gdc_wait()  # above: nothing that the scores kernel writes
    for tile in tl.range(tl.program_id(1), tl.cdiv(visible, 64), tl.num_programs(1), num_stages=1):
        block = tl.program_id(0).to(tl.int64) * num_tiles + tile
        first = tile // split_tiles * split_tiles
        s = tl.load(scores + block * (ROWS * 64) + inside)
        of_tiles = tl.full([ROWS, AHEAD], -float("inf"), tl.float32)
        for before in tl.range(first, tile, AHEAD, num_stages=1):
            i = before + tl.arange(0, AHEAD)
            at = (block - tile + i)[None, :] * ROWS + row[:, None]
            of_tiles = tl.maximum(of_tiles, tl.load(refs + at, mask=(i < tile)[None, :], other=-float("inf")))
        ref = tl.max(of_tiles, 1)
        new_ref, alpha, p = softmax_step(s, ref, scale_log2, STEP)
        rounded = p.to(DTYPE)
        tl.store(weights + block * (ROWS * 64) + inside, rounded)
        if WITH_LSE:
            tl.store(weights + (blocks + block) * (ROWS * 64) + inside, (p - rounded.to(tl.float32)).to(DTYPE))
        tl.store(refs + (blocks + block) * ROWS + row, new_ref)
        moved = (alpha != 1.0) & (new_ref != -float("inf"))  # with -inf acc is 0
        tl.store(flags + block, tl.max((moved & (tile > first)).to(tl.int32), 0))
