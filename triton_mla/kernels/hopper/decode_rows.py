"""Where the state of 64 query rows goes when a split ends: a partial, the scratch memory that its tile is folded in, or the result.

A *fold* is the merge of a tile's splits, ascending, by the program that makes them all: the arithmetic of `_common.merge_states`. Its
scratch memory has room for 512 fp32 columns a row, of which warpgroup ``W`` has those from 256 / SLICES * W on, and so have partials and the
result, behind the columns of the slices before. What a row has once is stored by slice 0.
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
# 64 columns of O as scratch memory that only the warp reads that wrote it: 16 bytes a thread, in the order of its registers.
SCRATCH = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], lane_bases=[[0, 4], [0, 8], [0, 16], [0, 32], [0, 64]],
        warp_bases=[[0, 128], [0, 256]], block_bases=[], shape=[8, 512]))
SCRATCH_COLUMN = gl.constexpr(gl.SliceLayout(0, SCRATCH.value))
# A row of the list of work (decode_work.py) has 8 ints, the first of which begins at the 8th.
ITEM = gl.constexpr(8)


@gluon.jit
def load_run(WORK, unit, units, SLICES: gl.constexpr):
    """(first token, end, tokens that the first query token sees, partial of the first row or -1) of a unit's item; zeros past the last."""
    at = WORK + (1 + unit // SLICES) * ITEM
    real = unit < units
    return gl.load(at, mask=real, other=0), gl.load(at + 1, mask=real, other=0), gl.load(at + 2, mask=real, other=0), gl.load(at + 6, mask=real, other=0)


@gluon.jit
def fold_rows(PARTIALS, fold_at):
    """Scratch memory of a program: its 64 rows."""
    return PARTIALS + (fold_at.to(gl.int64) * ROWS + gl.program_id(0).to(gl.int64) * (ROWS * LATENT))


@gluon.jit
def fold_state(PARTIALS, fold_at):
    """Scratch memory of a program, behind the rows of all: 6 times 64 values."""
    return PARTIALS + (fold_at.to(gl.int64) * ROWS + gl.num_programs(0).to(gl.int64) * (ROWS * LATENT) + gl.program_id(0) * (6 * ROWS))


@gluon.jit
def next_unit(PARTIALS, fold_at):
    """Two ints of a program, where the producer hands over unit numbers: what would be the mass of warpgroup 0, which has none."""
    return (fold_state(PARTIALS, fold_at) + 2 * ROWS).to(gl.pointer_type(gl.int32))


@gluon.jit
def no_nan(ref):
    return gl.where(ref == float("-inf"), 0.0, ref)


@gluon.jit
def row_values(sums):
    """[64, 8], equal along a row, to [64] of ROW."""
    return gl.convert_layout(gl.max(sums, 1), ROW, assert_trivial=True)


@gluon.jit
def chunk(acc, C: gl.constexpr):
    """Columns 64 C to 64 C + 63 of [64, 128 or 256]. No data move."""
    a, b = halves(acc)
    if acc.shape[1] == 256:
        a, b = halves(a if C < 2 else b)
    return gl.convert_layout(a if C % 2 == 0 else b, SCORES, assert_trivial=True)


@gluon.jit
def to_scratch(x):
    return gl.convert_layout(gl.reshape(gl.permute(gl.reshape(x, [4, 2, 8, 4, 2, 4, 2]), (3, 4, 0, 2, 5, 1, 6)), [8, 512]), SCRATCH, assert_trivial=True)


@gluon.jit
def from_scratch(x):
    return gl.convert_layout(gl.reshape(gl.permute(gl.reshape(x, [4, 2, 4, 8, 4, 2, 2]), (2, 5, 3, 0, 1, 4, 6)), [64, 64]), SCORES, assert_trivial=True)


@gluon.jit
def tile_rows(packed, num_heads, z, HEADS: gl.constexpr, LAYOUT: gl.constexpr):
    """(token of the tile [64], head [64], whether it is a row). ``z`` is 0, but not for the compiler, which else keeps all this in registers."""
    r = gl.arange(0, ROWS, LAYOUT) + z
    token = r // HEADS
    head = (packed & 255) * ROWS + r % HEADS
    return token, head, (token < (packed >> 8)) & (head < num_heads)


@gluon.jit
def merged(x, old, keep, weight, empty):
    """x [64, 64] of a split joined to what the splits before it left in the scratch memory."""
    old = from_scratch(old)
    return gl.where(across(empty.to(gl.int32), x) != 0, old, gl.fma(x, across(weight, x), old * across(keep, x)))


@gluon.jit
def put(x, C: gl.constexpr, final, inverse, scratch, out, inside):
    """64 columns of a folded tile: into the result, or back."""
    if final:
        y = gl.convert_layout((x * across(inverse, x)).to(out.dtype.element_ty), STORED)
        gl.store(out[:, None] + (gl.arange(0, 64, STORED_COLUMN)[None, :] + C * 64), y, mask=inside[:, None])
    else:
        gl.store(scratch + C * (ROWS * 64), to_scratch(x), eviction_policy="evict_last")


@gluon.jit
def close_split(acc, ref, total, rest, rows, split, W: gl.constexpr, HEADS: gl.constexpr, SLICES: gl.constexpr, WITH_LSE: gl.constexpr):
    """``split``: 8 * unit + 4 * (folded) + 2 * (not its tile's first) + (its item's last). acc [64, 256 / SLICES]; ref, total and, where W = 1,
    rest [64]: mass = total + rest."""
    OUT, LSE, PARTIALS, WORK, fold_at, num_heads, num_splits, num_rows, stride_out_token, stride_out_head, zero = rows
    CHUNKS: gl.constexpr = 4 // SLICES
    unit = split >> 3
    at = WORK + (1 + unit // SLICES) * ITEM
    value_slice = unit % SLICES
    column = value_slice * (128 * CHUNKS) + W * (64 * CHUNKS)
    q_token = gl.load(at + 3).to(gl.int64)
    packed = gl.load(at + 4)
    slot = gl.load(at + 6)
    final = (split & 1) != 0
    z = split & zero
    r = gl.arange(0, ROWS, ROW) + z
    mass = total + rest
    if (split & 4) != 0:
        state = fold_state(PARTIALS, fold_at) + W * (3 * ROWS) + r
        lanes = gl.arange(0, ROWS * 8, SCRATCH_COLUMN) + z * 16
        scratch = fold_rows(PARTIALS, fold_at) + (gl.arange(0, 8, gl.SliceLayout(1, SCRATCH))[:, None] * (ROWS * 8) + lanes[None, :] + W * (ROWS * 64 * CHUNKS))
        keep = gl.full([ROWS], 1.0, gl.float32, ROW)
        weight = keep
        empty = keep == 0.0
        merge = (split & 2) != 0
        first = gl.zeros([8, ROWS * 8], gl.float32, SCRATCH)
        if merge:
            first = gl.load(scratch)  # as many columns as there are registers for, before anything waits
            old_ref = gl.load(state)
            old_total = gl.load(state + ROWS)
            new_ref = gl.maximum(old_ref, ref)
            keep = gl.exp2(old_ref - no_nan(new_ref))
            weight = gl.exp2(ref - no_nan(new_ref))
            empty = ref == float("-inf")
            ref = new_ref
            total = gl.where(empty, old_total, gl.fma(total, weight, old_total * keep))
            if WITH_LSE and W == 1:
                old_mass = gl.load(state + 2 * ROWS)
                mass = gl.where(empty, old_mass, gl.fma(mass, weight, old_mass * keep))
        nothing = total == 0.0
        inverse = gl.div_rn(gl.full([ROWS], 1.0, gl.float32, ROW), gl.where(nothing, 1.0, total))
        out_token, out_head, out_inside = tile_rows(packed, num_heads, z, HEADS, STORED_ROW)
        out = OUT + (q_token + out_token) * stride_out_token + out_head.to(gl.int64) * stride_out_head + column
        if merge:
            put(merged(chunk(acc, 0), first, keep, weight, empty), 0, final, inverse, scratch, out, out_inside)
            if CHUNKS == 4:
                second = gl.load(scratch + ROWS * 64)
                third = gl.load(scratch + 2 * (ROWS * 64))
                put(merged(chunk(acc, 1), second, keep, weight, empty), 1, final, inverse, scratch, out, out_inside)
                put(merged(chunk(acc, 2), third, keep, weight, empty), 2, final, inverse, scratch, out, out_inside)
            LAST: gl.constexpr = CHUNKS - 1
            put(merged(chunk(acc, LAST), gl.load(scratch + LAST * (ROWS * 64)), keep, weight, empty), LAST, final, inverse, scratch, out, out_inside)
        else:
            for c in gl.static_range(CHUNKS):
                put(chunk(acc, c), c, final, inverse, scratch, out, out_inside)
        if final:
            if WITH_LSE and W == 1:
                token, head, inside = tile_rows(packed, num_heads, z, HEADS, ROW)
                lse = gl.where(nothing, float("-inf"), (ref + gl.log2(gl.where(nothing, 1.0, mass))) * LN2)
                gl.store(LSE + ((q_token + token) * num_heads + head), lse, mask=inside & (value_slice == 0))
        else:
            gl.store(state, ref)
            gl.store(state + ROWS, total)
            if WITH_LSE and W == 1:
                gl.store(state + 2 * ROWS, mass)
    else:
        token, head, inside = tile_rows(packed, num_heads, z, HEADS, ROW)
        row = slot.to(gl.int64) + r
        if W == 1:
            state = PARTIALS + (num_rows.to(gl.int64) * (num_splits * LATENT + 2 * (slot // num_rows)) + row)
            once = inside & (value_slice == 0)
            gl.store(state, ref, mask=once)
            gl.store(state + num_rows, total, mask=once)
            if WITH_LSE:
                gl.store(state + 2 * num_rows, mass, mask=once)
        partial = PARTIALS + row[:, None] * LATENT + gl.arange(0, 64, COLUMN)[None, :]
        for c in gl.static_range(CHUNKS):
            gl.store(partial + (column + c * 64), chunk(acc, c), mask=inside[:, None], eviction_policy="evict_last")
