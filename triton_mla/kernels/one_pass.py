"""Decode and extend in one pass: a program walks the tiles of its splits — scores, softmax, P.V — and reads each latent row once."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from ._common import locate_rows, merge_states, operand, round_to, softmax_step, tree_to_1, tree_to_8
from .paging import row_offsets, tile_pages
from .partials import store_state


@triton.jit(
    do_not_specialize=["stride_table", "num_tokens", "batch_size", "num_heads", "max_seq_len", "kv_split", "fold_splits", "num_rows", "num_slots"],
    do_not_specialize_on_alignment=["BLOCK_TABLE", "CU_SEQLENS_Q", "SEQ_LENS", "LSE"],
)
def one_pass_kernel(
    Q_NOPE, Q_PE, KV, BLOCK_TABLE, CU_SEQLENS_Q, SEQ_LENS, OUT, LSE, PARTIALS, scale_log2,
    stride_qn_token, stride_qn_head, stride_qp_token, stride_qp_head, stride_page, stride_slot, stride_table, stride_out_token, stride_out_head,
    num_tokens, batch_size, num_heads, max_seq_len, kv_split, fold_splits, num_rows, num_slots,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT_TILES: tl.constexpr, R: tl.constexpr, BLOCK_R: tl.constexpr, P: tl.constexpr,
    BLOCK_P: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr, DECODE: tl.constexpr, PAGE_SIZE: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr, EMULATE_BF16: tl.constexpr,
):
    """Grid (row tiles, programs of a row tile).

    Program 0 folds splits 0 … fold_splits-1 of its rows in ascending order; program i > 0 takes the later splits
    fold_splits-1+i, then every (programs-1)-th after it, each for itself. Rows whose splits were all folded are finished
    here; the others leave one partial state for the fold and one for each later split.
    """
    if PDL:
        gdc_launch_dependents()
    program = tl.program_id(1)
    request, kv_len, token, head, seen, valid = locate_rows(tl.program_id(0), CU_SEQLENS_Q, SEQ_LENS, num_tokens, batch_size, num_heads, ROWS, DECODE)
    too_long = kv_len > max_seq_len
    seen = tl.where(too_long, 0, seen)
    visible = tl.maximum(tl.max(tl.where(valid, seen, 0), 0), 0)
    num_splits = tl.cdiv(visible, kv_split)
    folding = program == 0
    first_split = tl.where(folding, 0, fold_splits - 1 + program)
    last_split = tl.where(folding, tl.maximum(tl.minimum(num_splits, fold_splits), 1), num_splits)  # an empty row is stored too
    if first_split < last_split:
        row = token.to(tl.int64) * num_heads + head
        lat = tl.arange(0, BLOCK_R)
        lat_ok = lat < R
        q_ok = valid & (seen > 0)
        q_nope = tl.load(Q_NOPE + token.to(tl.int64)[:, None] * stride_qn_token + head[:, None] * stride_qn_head + lat[None, :],
                         mask=q_ok[:, None] & lat_ok[None, :], other=0.0)
        q_nope = operand(q_nope, EMULATE_BF16)
        if P > 0:
            rope = tl.arange(0, BLOCK_P)
            rope_ok = rope < P
            q_pe = tl.load(Q_PE + token.to(tl.int64)[:, None] * stride_qp_token + head[:, None] * stride_qp_head + rope[None, :],
                           mask=q_ok[:, None] & rope_ok[None, :], other=0.0)
            q_pe = operand(q_pe, EMULATE_BF16)
        ones = tl.full([BLOCK_N, 16], 1.0, q_nope.dtype)
        fold_ref = tl.full([ROWS], -float("inf"), tl.float32)
        fold_total = tl.zeros([ROWS], tl.float32)
        fold_mass = tl.zeros([ROWS], tl.float32)
        fold_acc = tl.zeros([ROWS, BLOCK_R], tl.float32)
        for split in range(first_split, last_split, tl.where(folding, 1, tl.num_programs(1) - 1)):
            end = tl.minimum((split + 1) * kv_split, visible)
            first_tile = split * (kv_split // BLOCK_N)
            pages = tile_pages(BLOCK_TABLE, request, stride_table, first_tile, end, PAGE_SIZE, BLOCK_N, SPLIT_TILES)
            ref = tl.full([ROWS], -float("inf"), tl.float32)
            totals = tl.zeros([ROWS, 16], tl.float32)
            mass8 = tl.zeros([ROWS, 8], tl.float32)
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
                totals = tl.dot(weights, ones, totals * alpha[:, None], input_precision=PRECISION)
                mass8 = mass8 * alpha[:, None] + tree_to_8(p)
                acc = tl.dot(weights, k, acc * alpha[:, None], input_precision=PRECISION)
            total = tl.max(totals, 1)  # the 16 columns are equal
            fold_ref, fold_total, fold_mass, fold_acc = merge_states(
                tl.where(folding, fold_ref, -float("inf")), tl.where(folding, fold_total, 0.0), tl.where(folding, fold_mass, 0.0),
                tl.where(folding, fold_acc, 0.0), ref, total, tree_to_1(mass8), acc)
            if (split + 1 == last_split) | (program > 0):
                store_state(OUT, LSE, PARTIALS, fold_ref, fold_total, fold_mass, fold_acc, row, token, head, lat, lat_ok, valid,
                            seen, tl.where(folding, 0, split - fold_splits + 1), 0, too_long, num_splits, stride_out_token, stride_out_head, kv_split,
                            fold_splits, num_rows, num_slots, R, EMULATE_BF16)
