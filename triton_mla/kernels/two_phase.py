"""The same arithmetic in two kernels, for few rows: the scores of every tile first, then softmax and P.V by slices of value columns.

The reduction order binds only P.V, along the tokens. Scores are parallel over tiles and P.V over value columns, so a few rows fill the
machine although their splits are long, and every buffer is small enough for 64 KB of shared memory.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ._common import locate_rows, operand, round_to, softmax_step, sum_weights
from .paging import row_offsets, tile_pages
from .partials import store_state


@triton.jit(
    do_not_specialize=["stride_table", "num_tokens", "batch_size", "num_heads", "max_seq_len", "first_row_tile", "num_tiles"],
    do_not_specialize_on_alignment=["BLOCK_TABLE", "CU_SEQLENS_Q", "SEQ_LENS"],
)
def scores_kernel(
    Q_NOPE, Q_PE, KV, BLOCK_TABLE, CU_SEQLENS_Q, SEQ_LENS, SCORES,
    stride_qn_token, stride_qn_head, stride_qp_token, stride_qp_head, stride_page, stride_slot, stride_table,
    num_tokens, batch_size, num_heads, max_seq_len, first_row_tile, num_tiles,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, R: tl.constexpr, BLOCK_K: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr,
    PRECISION: tl.constexpr, DECODE: tl.constexpr, PAGE_SIZE: tl.constexpr, PDL: tl.constexpr, EMULATE_BF16: tl.constexpr,
):
    """Grid (row tiles of a wave, programs of a row tile): SCORES [rows of the wave, num_tiles * BLOCK_N] fp32 of tiles i, i + programs, ….

    The latent columns are walked in blocks of BLOCK_K, ascending, into one accumulator, so the size of a block changes no bit.
    """
    if PDL:
        gdc_launch_dependents()
    request, kv_len, token, head, seen, valid = locate_rows(first_row_tile + tl.program_id(0), CU_SEQLENS_Q, SEQ_LENS, num_tokens, batch_size,
                                                            num_heads, ROWS, DECODE)
    seen = tl.where(kv_len > max_seq_len, 0, seen)
    visible = tl.max(tl.where(valid, seen, 0), 0)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    q_ok = valid & (seen > 0)
    lat = tl.arange(0, BLOCK_K)
    q_row = Q_NOPE + token.to(tl.int64)[:, None] * stride_qn_token + head.to(tl.int64)[:, None] * stride_qn_head
    for tile in tl.range(tl.program_id(1), tl.cdiv(visible, BLOCK_N), tl.num_programs(1), num_stages=1):
        pages = tile_pages(BLOCK_TABLE, request, stride_table, tile, visible, PAGE_SIZE, BLOCK_N, 1)
        offset, pos, owned = row_offsets(pages, BLOCK_TABLE, request, stride_table, stride_page, stride_slot, tile, tile, visible,
                                         PAGE_SIZE, BLOCK_N, 1)
        s = tl.zeros([ROWS, BLOCK_N], tl.float32)
        for first in tl.range(0, R, BLOCK_K, num_stages=1):
            lat_ok = first + lat < R
            q = tl.load(q_row + first + lat[None, :], mask=q_ok[:, None] & lat_ok[None, :], other=0.0)
            k = tl.load(KV + offset[:, None] + first + lat[None, :], mask=owned[:, None] & lat_ok[None, :], other=0.0)
            s = tl.dot(operand(q, EMULATE_BF16), tl.trans(operand(k, EMULATE_BF16)), s, input_precision=PRECISION)
        if P > 0:
            rope = tl.arange(0, BLOCK_P)
            rope_ok = rope < P
            q_pe = tl.load(Q_PE + token.to(tl.int64)[:, None] * stride_qp_token + head.to(tl.int64)[:, None] * stride_qp_head + rope[None, :],
                           mask=q_ok[:, None] & rope_ok[None, :], other=0.0)
            k_pe = tl.load(KV + offset[:, None] + R + rope[None, :], mask=owned[:, None] & rope_ok[None, :], other=0.0)
            s = tl.dot(operand(q_pe, EMULATE_BF16), tl.trans(operand(k_pe, EMULATE_BF16)), s, input_precision=PRECISION)
        s = tl.where(pos[None, :] < seen[:, None], s, -float("inf"))
        tl.store(SCORES + row.to(tl.int64)[:, None] * (num_tiles * BLOCK_N) + pos[None, :], s, mask=valid[:, None])


@triton.jit(
    do_not_specialize=["stride_table", "num_tokens", "batch_size", "num_heads", "max_seq_len", "kv_split", "first_row_tile", "num_splits",
                       "num_rows", "num_tiles"],
    do_not_specialize_on_alignment=["BLOCK_TABLE", "CU_SEQLENS_Q", "SEQ_LENS", "LSE"],
)
def values_kernel(
    KV, BLOCK_TABLE, CU_SEQLENS_Q, SEQ_LENS, SCORES, OUT, LSE, PARTIALS, scale_log2,
    stride_page, stride_slot, stride_table, stride_out_token, stride_out_head,
    num_tokens, batch_size, num_heads, max_seq_len, kv_split, first_row_tile, num_splits, num_rows, num_tiles,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT_TILES: tl.constexpr, R: tl.constexpr, BLOCK_V: tl.constexpr, STEP: tl.constexpr,
    PRECISION: tl.constexpr, DECODE: tl.constexpr, PAGE_SIZE: tl.constexpr, STAGES: tl.constexpr, WITH_LSE: tl.constexpr, PDL: tl.constexpr,
    EMULATE_BF16: tl.constexpr,
):
    """Grid (row tiles of a wave * value slices, splits): one split of one row tile, for BLOCK_V value columns."""
    SLICES: tl.constexpr = (R + BLOCK_V - 1) // BLOCK_V
    if PDL:
        gdc_launch_dependents()
    column_slice = tl.program_id(0) % SLICES
    request, kv_len, token, head, seen, valid = locate_rows(first_row_tile + tl.program_id(0) // SLICES, CU_SEQLENS_Q, SEQ_LENS, num_tokens,
                                                            batch_size, num_heads, ROWS, DECODE)
    too_long = kv_len > max_seq_len
    seen = tl.where(too_long, 0, seen)
    visible = tl.max(tl.where(valid, seen, 0), 0)
    split = tl.program_id(1)
    row = (tl.program_id(0) // SLICES) * ROWS + tl.arange(0, ROWS)
    cols = column_slice * BLOCK_V + tl.arange(0, BLOCK_V)
    cols_ok = cols < R
    ones = tl.full([BLOCK_N, 16], 1.0, tl.float32 if EMULATE_BF16 else KV.dtype.element_ty)
    score_row = SCORES + row.to(tl.int64)[:, None] * (num_tiles * BLOCK_N)
    if PDL:
        gdc_wait()  # above: nothing that scores_kernel writes
    if (split * kv_split < visible) | (split == 0):  # the first split stores an empty row too
        end = tl.minimum((split + 1) * kv_split, visible)
        first_tile = split * (kv_split // BLOCK_N)
        pages = tile_pages(BLOCK_TABLE, request, stride_table, first_tile, end, PAGE_SIZE, BLOCK_N, SPLIT_TILES)
        ref = tl.full([ROWS], -float("inf"), tl.float32)
        totals = tl.zeros([ROWS, 16], tl.float32)
        rests = tl.zeros([ROWS, 16], tl.float32)
        acc = tl.zeros([ROWS, BLOCK_V], tl.float32)
        for tile in tl.range(first_tile, tl.cdiv(end, BLOCK_N), num_stages=STAGES):
            offset, pos, owned = row_offsets(pages, BLOCK_TABLE, request, stride_table, stride_page, stride_slot, tile, first_tile, end,
                                             PAGE_SIZE, BLOCK_N, SPLIT_TILES)
            s = tl.load(score_row + pos[None, :], mask=valid[:, None], other=-float("inf"))
            v = operand(tl.load(KV + offset[:, None] + cols[None, :], mask=owned[:, None] & cols_ok[None, :], other=0.0), EMULATE_BF16)
            ref, alpha, p = softmax_step(s, ref, scale_log2, STEP)
            weights = round_to(p, KV.dtype.element_ty, EMULATE_BF16)
            totals, rests = sum_weights(p, weights, ones, totals, rests, alpha, WITH_LSE, KV.dtype.element_ty, PRECISION, EMULATE_BF16)
            acc = tl.dot(weights, v, acc * alpha[:, None], input_precision=PRECISION)
        total = tl.max(totals, 1)  # the 16 columns are equal
        store_state(OUT, LSE, PARTIALS, ref, total, total + tl.max(rests, 1), acc, token, head, cols, cols_ok, valid, seen, split, column_slice, too_long,
                    num_heads, stride_out_token, stride_out_head, kv_split, num_splits, num_rows, tl.program_id(0) // SLICES, ROWS, R, WITH_LSE, EMULATE_BF16)
