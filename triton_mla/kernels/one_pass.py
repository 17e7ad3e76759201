"""Decode and extend in one pass: a program walks the tiles of its splits — scores, softmax, P.V — and reads each latent row once."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from ._common import locate_rows, operand, round_to, softmax_step, sum_weights
from .paging import row_offsets, tile_pages
from .partials import store_state


@triton.jit(
    do_not_specialize=["stride_table", "num_tokens", "batch_size", "num_heads", "max_seq_len", "kv_split", "first_row_tile", "num_splits", "num_rows"],
    do_not_specialize_on_alignment=["BLOCK_TABLE", "CU_SEQLENS_Q", "SEQ_LENS", "LSE"],
)
def one_pass_kernel(
    Q_NOPE, Q_PE, KV, BLOCK_TABLE, CU_SEQLENS_Q, SEQ_LENS, OUT, LSE, PARTIALS, scale_log2,
    stride_qn_token, stride_qn_head, stride_qp_token, stride_qp_head, stride_page, stride_slot, stride_table, stride_out_token, stride_out_head,
    num_tokens, batch_size, num_heads, max_seq_len, kv_split, first_row_tile, num_splits, num_rows,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT_TILES: tl.constexpr, R: tl.constexpr, BLOCK_R: tl.constexpr, P: tl.constexpr,
    BLOCK_P: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr, DECODE: tl.constexpr, PAGE_SIZE: tl.constexpr, STAGES: tl.constexpr,
    WITH_LSE: tl.constexpr, PDL: tl.constexpr, EMULATE_BF16: tl.constexpr,
):
    """Grid (row tiles of a wave, splits): one split of one row tile. Rows that see one split are finished here, others leave a partial."""
    if PDL:
        gdc_launch_dependents()
    split = tl.program_id(1)
    request, kv_len, token, head, seen, valid = locate_rows(first_row_tile + tl.program_id(0), CU_SEQLENS_Q, SEQ_LENS, num_tokens, batch_size,
                                                            num_heads, ROWS, DECODE)
    too_long = kv_len > max_seq_len
    seen = tl.where(too_long, 0, seen)
    visible = tl.max(tl.where(valid, seen, 0), 0)
    if (split * kv_split < visible) | (split == 0):  # the first split stores an empty row too
        lat = tl.arange(0, BLOCK_R)
        lat_ok = lat < R
        q_ok = valid & (seen > 0)
        q_nope = tl.load(Q_NOPE + token.to(tl.int64)[:, None] * stride_qn_token + head.to(tl.int64)[:, None] * stride_qn_head + lat[None, :],
                         mask=q_ok[:, None] & lat_ok[None, :], other=0.0)
        q_nope = operand(q_nope, EMULATE_BF16)
        if P > 0:
            rope = tl.arange(0, BLOCK_P)
            rope_ok = rope < P
            q_pe = tl.load(Q_PE + token.to(tl.int64)[:, None] * stride_qp_token + head.to(tl.int64)[:, None] * stride_qp_head + rope[None, :],
                           mask=q_ok[:, None] & rope_ok[None, :], other=0.0)
            q_pe = operand(q_pe, EMULATE_BF16)
        ones = tl.full([BLOCK_N, 16], 1.0, q_nope.dtype)
        end = tl.minimum((split + 1) * kv_split, visible)
        first_tile = split * (kv_split // BLOCK_N)
        pages = tile_pages(BLOCK_TABLE, request, stride_table, first_tile, end, PAGE_SIZE, BLOCK_N, SPLIT_TILES)
        ref = tl.full([ROWS], -float("inf"), tl.float32)
        totals = tl.zeros([ROWS, 16], tl.float32)
        rests = tl.zeros([ROWS, 16], tl.float32)
        acc = tl.zeros([ROWS, BLOCK_R], tl.float32)
        for tile in tl.range(first_tile, tl.cdiv(end, BLOCK_N), num_stages=STAGES):
            offset, pos, owned = row_offsets(pages, BLOCK_TABLE, request, stride_table, stride_page, stride_slot, tile, first_tile, end,
                                             PAGE_SIZE, BLOCK_N, SPLIT_TILES)
            # rows past the end count as zeros, not as whatever lies there: 0 * NaN is NaN
            k = operand(tl.load(KV + offset[:, None] + lat[None, :], mask=owned[:, None] & lat_ok[None, :], other=0.0), EMULATE_BF16)
            s = tl.dot(q_nope, tl.trans(k), input_precision=PRECISION)
            if P > 0:
                k_pe = operand(tl.load(KV + offset[:, None] + R + rope[None, :], mask=owned[:, None] & rope_ok[None, :], other=0.0), EMULATE_BF16)
                s = tl.dot(q_pe, tl.trans(k_pe), s, input_precision=PRECISION)
            s = tl.where(pos[None, :] < seen[:, None], s, -float("inf"))
            ref, alpha, p = softmax_step(s, ref, scale_log2, STEP)
            weights = round_to(p, KV.dtype.element_ty, EMULATE_BF16)
            totals, rests = sum_weights(p, weights, ones, totals, rests, alpha, WITH_LSE, KV.dtype.element_ty, PRECISION, EMULATE_BF16)
            acc = tl.dot(weights, k, acc * alpha[:, None], input_precision=PRECISION)
        total = tl.max(totals, 1)  # the 16 columns are equal
        store_state(OUT, LSE, PARTIALS, ref, total, total + tl.max(rests, 1), acc, token, head, lat, lat_ok, valid, seen, split, 0, too_long, num_heads,
                    stride_out_token, stride_out_head, kv_split, num_splits, num_rows, tl.program_id(0), ROWS, R, WITH_LSE, EMULATE_BF16)
