"""Where the state of a row goes when its splits end: finished to ``out``, or kept as a partial; and the ascending merge of partials.

Partials lie in one fp32 buffer: acc [slots, rows, R], then (ref, total, mass) [slots, 3, rows], then count [rows] (0: the row is finished).
Slot 0 holds the folded first splits of a row, slot s > 0 its split fold_splits - 1 + s.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from ._common import finish, merge_states, round_to


@triton.jit
def state_pointer(PARTIALS, num_rows, num_slots, R: tl.constexpr):
    return PARTIALS + num_slots.to(tl.int64) * num_rows * R


@triton.jit
def count_pointer(PARTIALS, num_rows, num_slots, R: tl.constexpr):
    return PARTIALS + num_slots.to(tl.int64) * num_rows * (R + 3)


@triton.jit
def store_state(
    OUT, LSE, PARTIALS, ref, total, mass, acc, row, token, head, cols, cols_ok, valid, seen, slot, column_slice, too_long,
    num_splits, stride_out_token, stride_out_head, kv_split, fold_splits, num_rows, num_slots, R: tl.constexpr, EMULATE_BF16: tl.constexpr,
):
    """Store the state of a row tile for the columns ``cols``; slice 0 stores what a row has once.

    Rows that see no more than the folded splits are finished here, whatever the other rows of the tile see. A request longer
    than the plan or the block table allows becomes NaN: the host cannot see it, and a wrong number would be silent.
    """
    row_splits = tl.cdiv(tl.maximum(seen, 0), kv_split)
    finished = row_splits <= fold_splits
    if slot == 0:
        out, lse = finish(ref, total, mass, acc)
        out = tl.where(too_long, float("nan"), out)
        out_ptr = OUT + token.to(tl.int64)[:, None] * stride_out_token + head[:, None] * stride_out_head + cols[None, :]
        tl.store(out_ptr, round_to(out, OUT.dtype.element_ty, EMULATE_BF16), mask=(valid & finished)[:, None] & cols_ok[None, :])
        if column_slice == 0:
            tl.store(LSE + row, tl.where(too_long, float("nan"), lse), mask=valid & finished)
            if num_slots > 0:
                count = tl.where(finished, 0, row_splits - fold_splits + 1)
                tl.store(count_pointer(PARTIALS, num_rows, num_slots, R) + row, count.to(tl.float32), mask=valid)
    if num_splits > fold_splits:
        partial = valid & (slot <= row_splits - fold_splits) & (row_splits > fold_splits)
        at = num_rows.to(tl.int64) * slot + row
        tl.store(PARTIALS + at[:, None] * R + cols[None, :], acc, mask=partial[:, None] & cols_ok[None, :])
        if column_slice == 0:
            state = state_pointer(PARTIALS, num_rows, num_slots, R) + num_rows.to(tl.int64) * 3 * slot + row
            tl.store(state, ref, mask=partial)
            tl.store(state + num_rows, total, mask=partial)
            tl.store(state + 2 * num_rows, mass, mask=partial)


@triton.jit(
    do_not_specialize=["num_heads", "num_rows", "num_slots"],
    do_not_specialize_on_alignment=["LSE"],
)
def combine_kernel(
    OUT, LSE, PARTIALS, stride_out_token, stride_out_head, num_heads, num_rows, num_slots,
    R: tl.constexpr, WIDTH: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr, EMULATE_BF16: tl.constexpr,
):
    """Grid (rows, column slices of WIDTH): merge the partials of one row, ascending. AHEAD partials are loaded before the first is used."""
    row = tl.program_id(0)
    cols = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    one = tl.arange(0, 1)
    if PDL:
        gdc_wait()
    count = tl.load(count_pointer(PARTIALS, num_rows, num_slots, R) + row).to(tl.int32)
    ref = tl.full([1], -float("inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    mass = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, WIDTH], tl.float32)
    for first in range(0, count, AHEAD):
        refs = ()
        totals = ()
        masses = ()
        accs = ()
        for i in tl.static_range(AHEAD):
            slot = (first + i + one).to(tl.int64)
            there = slot < count
            state = state_pointer(PARTIALS, num_rows, num_slots, R) + slot * 3 * num_rows + row
            refs = refs + (tl.load(state, mask=there, other=-float("inf")),)
            totals = totals + (tl.load(state + num_rows, mask=there, other=0.0),)
            masses = masses + (tl.load(state + 2 * num_rows, mask=there, other=0.0),)
            accs = accs + (tl.load(PARTIALS + (slot * num_rows + row)[:, None] * R + cols[None, :], mask=there[:, None] & (cols < R)[None, :], other=0.0),)
        for i in tl.static_range(AHEAD):
            ref, total, mass, acc = merge_states(ref, total, mass, acc, refs[i], totals[i], masses[i], accs[i])
    if count > 0:
        out, lse = finish(ref, total, mass, acc)
        token = row // num_heads
        out_ptr = OUT + token.to(tl.int64) * stride_out_token + (row % num_heads) * stride_out_head + cols
        tl.store(out_ptr[None, :], round_to(out, OUT.dtype.element_ty, EMULATE_BF16), mask=(cols < R)[None, :])
        if tl.program_id(1) == 0:
            tl.store(LSE + row + one, lse)
