"""Where the state of a row goes when its split ends: finished to ``out``, or kept as a partial; and the ascending merge of partials.

Partials of one wave of row tiles lie in one fp32 buffer: acc [splits, rows, R], (ref, total, mass) [splits, 3, rows], and two ints a row,
[2, rows]: how many partials it has (0: it is finished, or no row at all), and which (token, head) pair it is.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from ._common import finish, merge_states, round_to


@triton.jit
def store_state(
    OUT, LSE, PARTIALS, ref, total, mass, acc, token, head, cols, cols_ok, valid, seen, split, column_slice, too_long, num_heads, stride_out_token,
    stride_out_head, kv_split, num_splits, num_rows, row_tile, ROWS: tl.constexpr, R: tl.constexpr, WITH_LSE: tl.constexpr, EMULATE_BF16: tl.constexpr,
):
    """Store the state of a row tile for the columns ``cols``; slice 0 stores what a row has once.

    A row that sees one split is finished here, whatever the other rows of the tile see. A request longer than the plan or the block
    table allows becomes NaN: the host cannot see it, and a wrong number would be silent.
    """
    row_splits = tl.cdiv(tl.maximum(seen, 0), kv_split)
    row = token.to(tl.int64) * num_heads + head
    if split == 0:
        out, lse = finish(ref, total, mass, acc)
        out = tl.where(too_long, float("nan"), out)
        finished = valid & (row_splits <= 1)
        out_ptr = OUT + token.to(tl.int64)[:, None] * stride_out_token + head.to(tl.int64)[:, None] * stride_out_head + cols[None, :]
        tl.store(out_ptr, round_to(out, OUT.dtype.element_ty, EMULATE_BF16), mask=finished[:, None] & cols_ok[None, :])
        if WITH_LSE and column_slice == 0:
            tl.store(LSE + row, tl.where(too_long, float("nan"), lse), mask=finished)
    if num_splits > 1:
        partial = valid & (row_splits > 1) & (split < row_splits)
        slot = row_tile * ROWS + tl.arange(0, ROWS)
        at = num_rows.to(tl.int64) * split + slot
        tl.store(PARTIALS + at[:, None] * R + cols[None, :], acc, mask=partial[:, None] & cols_ok[None, :], eviction_policy="evict_last")
        if column_slice == 0:
            state = PARTIALS + num_rows.to(tl.int64) * num_splits * R
            tl.store(state + num_rows.to(tl.int64) * 3 * split + slot, ref, mask=partial)
            tl.store(state + num_rows.to(tl.int64) * (3 * split + 1) + slot, total, mask=partial)
            if WITH_LSE:
                tl.store(state + num_rows.to(tl.int64) * (3 * split + 2) + slot, mass, mask=partial)
            if split == 0:
                ints = state + num_rows.to(tl.int64) * num_splits * 3
                tl.store(ints + slot, tl.where(valid & (row_splits > 1), row_splits, 0).to(tl.float32, bitcast=True))
                tl.store(ints + num_rows + slot, row.to(tl.int32).to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=["num_heads", "num_splits", "num_rows"], do_not_specialize_on_alignment=["LSE"])
def combine_kernel(
    OUT, LSE, PARTIALS, stride_out_token, stride_out_head, num_heads, num_splits, num_rows,
    R: tl.constexpr, WIDTH: tl.constexpr, AHEAD: tl.constexpr, WITH_LSE: tl.constexpr, PDL: tl.constexpr, EMULATE_BF16: tl.constexpr,
):
    """Grid (rows of a wave, column slices of WIDTH): merge the partials of one row, ascending. AHEAD are loaded before the first is used."""
    slot = tl.program_id(0)
    cols = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    one = tl.arange(0, 1)
    states = PARTIALS + num_rows.to(tl.int64) * num_splits * R
    ints = states + num_rows.to(tl.int64) * num_splits * 3
    if PDL:
        gdc_wait()
    count = tl.load(ints + slot).to(tl.int32, bitcast=True)
    row = tl.load(ints + num_rows + slot).to(tl.int32, bitcast=True)
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
            split = (first + i + one).to(tl.int64)
            there = split < count
            state = states + split * 3 * num_rows + slot
            refs = refs + (tl.load(state, mask=there, other=-float("inf")),)
            totals = totals + (tl.load(state + num_rows, mask=there, other=0.0),)
            masses = masses + (tl.load(state + (2 * num_rows if WITH_LSE else num_rows), mask=there, other=0.0),)
            accs = accs + (tl.load(PARTIALS + (split * num_rows + slot)[:, None] * R + cols[None, :], mask=there[:, None] & (cols < R)[None, :], other=0.0),)
        for i in tl.static_range(AHEAD):
            ref, total, mass, acc = merge_states(ref, total, mass, acc, refs[i], totals[i], masses[i], accs[i])
    if count > 0:
        out, lse = finish(ref, total, mass, acc)
        token = row // num_heads
        out_ptr = OUT + token.to(tl.int64) * stride_out_token + (row % num_heads).to(tl.int64) * stride_out_head + cols
        tl.store(out_ptr[None, :], round_to(out, OUT.dtype.element_ty, EMULATE_BF16), mask=(cols < R)[None, :])
        if WITH_LSE and tl.program_id(1) == 0:
            tl.store(LSE + row + one, lse)
