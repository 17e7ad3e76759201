"""Where the state of 64 query rows goes when a split ends: a partial, the scratch memory that its tile is folded in, or the result.

A *fold* is the merge of a tile's splits, ascending, by the program that makes them all: the arithmetic of `_common.merge_states`. Its
scratch memory and the partials have one form, rows of 512 fp32 columns, of which warpgroup ``W`` has 256 W to 256 W + 255.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .registers import across, halves

ROWS = gl.constexpr(64)  # of a tile
LATENT = gl.constexpr(512)
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))  # scores, or 64 columns of O
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16]))  # row sums: weights times 8 columns of ones
ROW = gl.constexpr(gl.SliceLayout(1, SCORES.value))
COLUMN = gl.constexpr(gl.SliceLayout(0, SCORES.value))
# 64 columns of O in 16 bits: a thread stores 8 bytes, the four lanes of a row a whole sector.
STORED = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0], [0, 16], [0, 32]], lane_bases=[[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]], block_bases=[], shape=[64, 64]))
STORED_ROW = gl.constexpr(gl.SliceLayout(1, STORED.value))
STORED_COLUMN = gl.constexpr(gl.SliceLayout(0, STORED.value))
LN2 = gl.constexpr(0.6931471805599453)
# A row of the list of work (decode_work.py) has 8 ints, the first of which begins at the 8th.
ITEM = gl.constexpr(8)


@gluon.jit
def load_run(WORK, item, items):
    """(first token, end, tokens that the first query token sees) of an item; zeros past the last."""
    at = WORK + (1 + item) * ITEM
    real = item < items
    return gl.load(at, mask=real, other=0), gl.load(at + 1, mask=real, other=0), gl.load(at + 2, mask=real, other=0)


@gluon.jit
def no_nan(ref):
    return gl.where(ref == float("-inf"), 0.0, ref)


@gluon.jit
def row_values(sums):
    """[64, 8], equal along a row, to [64] of ROW."""
    return gl.convert_layout(gl.max(sums, 1), ROW, assert_trivial=True)


@gluon.jit
def chunk(acc, C: gl.constexpr):
    """Columns 64 C to 64 C + 63 of [64, 256]. No data move."""
    a, b = halves(acc)
    x, y = halves(a if C < 2 else b)
    return gl.convert_layout(x if C % 2 == 0 else y, SCORES, assert_trivial=True)


@gluon.jit
def tile_rows(packed, num_heads, z, HEADS: gl.constexpr, LAYOUT: gl.constexpr):
    """(token of the tile [64], head [64], whether it is a row). ``z`` is 0, but not for the compiler, which else keeps all this in registers."""
    r = gl.arange(0, ROWS, LAYOUT) + z
    token = r // HEADS
    head = (packed & 255) * ROWS + r % HEADS
    return token, head, (token < (packed >> 8)) & (head < num_heads)


@gluon.jit
def close_split(acc, ref, total, rest, rows, split, W: gl.constexpr, HEADS: gl.constexpr, WITH_LSE: gl.constexpr):
    """``split``: 4 * item + 2 * (not its tile's first) + (its item's last). acc [64, 256]; ref, total and, where W = 1, rest [64]: mass = total + rest."""
    OUT, LSE, PARTIALS, WORK, fold_at, num_heads, num_splits, num_rows, stride_out_token, stride_out_head, zero = rows
    at = WORK + (1 + (split >> 2)) * ITEM
    q_token = gl.load(at + 3).to(gl.int64)
    packed = gl.load(at + 4)
    slot = gl.load(at + 6)
    whole = slot < 0
    merge = whole & ((split & 2) != 0)
    final = whole & ((split & 1) != 0)
    program = gl.program_id(0).to(gl.int64)
    first_fold = fold_at.to(gl.int64) * ROWS
    into = PARTIALS + gl.where(whole, first_fold + program * (ROWS * LATENT), slot.to(gl.int64) * LATENT)
    of_fold = first_fold + gl.num_programs(0).to(gl.int64) * (ROWS * LATENT) + (program * 2 + W) * (3 * ROWS)
    of_partial = num_rows.to(gl.int64) * (num_splits * LATENT + 2 * (slot // num_rows)) + slot
    stride = gl.where(whole, ROWS, num_rows)
    z = split & zero
    r = gl.arange(0, ROWS, ROW) + z
    state = PARTIALS + gl.where(whole, of_fold, of_partial) + r
    token, head, inside = tile_rows(packed, num_heads, z, HEADS, ROW)
    mass = total + rest
    keep = gl.full([ROWS], 1.0, gl.float32, ROW)
    weight = keep
    empty = keep == 0.0
    if merge:
        old_ref = gl.load(state)
        old_total = gl.load(state + stride)
        new_ref = gl.maximum(old_ref, ref)
        keep = gl.exp2(old_ref - no_nan(new_ref))
        weight = gl.exp2(ref - no_nan(new_ref))
        empty = ref == float("-inf")
        ref = new_ref
        total = gl.where(empty, old_total, gl.fma(total, weight, old_total * keep))
        if WITH_LSE and W == 1:
            old_mass = gl.load(state + 2 * stride)
            mass = gl.where(empty, old_mass, gl.fma(mass, weight, old_mass * keep))
    nothing = total == 0.0
    inverse = gl.div_rn(gl.full([ROWS], 1.0, gl.float32, ROW), gl.where(nothing, 1.0, total))
    if final:
        if WITH_LSE and W == 1:
            lse = gl.where(nothing, float("-inf"), (ref + gl.log2(gl.where(nothing, 1.0, mass))) * LN2)
            gl.store(LSE + ((q_token + token) * num_heads + head), lse, mask=inside)
    else:
        if whole | (W == 1):
            gl.store(state, ref, mask=inside)
            gl.store(state + stride, total, mask=inside)
            if WITH_LSE and W == 1:
                gl.store(state + 2 * stride, mass, mask=inside)
    out_token, out_head, out_inside = tile_rows(packed, num_heads, z, HEADS, STORED_ROW)
    out = OUT + (q_token + out_token) * stride_out_token + out_head.to(gl.int64) * stride_out_head
    for c in gl.static_range(4):
        x = chunk(acc, c)
        here = into + (r[:, None] * LATENT + (gl.arange(0, 64, COLUMN)[None, :] + (W * 256 + c * 64)))
        if merge:
            old = gl.load(here, mask=inside[:, None], other=0.0)
            x = gl.where(across(empty.to(gl.int32), x) != 0, old, gl.fma(x, across(weight, x), old * across(keep, x)))
        if final:
            y = gl.convert_layout((x * across(inverse, x)).to(OUT.dtype.element_ty), STORED)
            gl.store(out[:, None] + (gl.arange(0, 64, STORED_COLUMN)[None, :] + (W * 256 + c * 64)), y, mask=out_inside[:, None])
        else:
            gl.store(here, x, mask=inside[:, None], eviction_policy="evict_last")
