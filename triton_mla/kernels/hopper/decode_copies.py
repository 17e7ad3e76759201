"""The producer of the Hopper decode: one warp that issues all copies from global to shared memory, ahead of the warpgroups across work items."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .copies import AXIS, SHARED4
from .decode_rows import ITEM, load_run, next_unit

SHARED3 = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3))
LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))

# Barriers. FULL ones count the copies' bytes, the others one arrival unless stated. P0 and P1 need no barrier that says they may be written: a
# K tile is full again only after both warpgroups have multiplied it, and its weights are written only after its scores are made.
Q_FULL = gl.constexpr(0)  # latent columns of Q
ROPE_FULL = gl.constexpr(1)  # rope columns of Q
Q_EMPTY = gl.constexpr(2)  # last Q K of a unit is done: 2 arrivals
K_FULL = gl.constexpr(3)  # + 4 * tile + j: 128 latent columns of K, and with j = 3 the rope columns
K_EMPTY = gl.constexpr(11)  # + 2 * tile + W: warpgroup W has multiplied its half of the columns; with value slices see copy_slices
REF1_READY = gl.constexpr(15)  # reference after tile 1, 1 -> 0
P0_READY = gl.constexpr(16)  # weights of tile 0 and the reference after it, 0 -> 1
P1_READY = gl.constexpr(17)  # weights of tile 1, 1 -> 0
SUM_READY = gl.constexpr(18)  # row sums of a split, 1 -> 0
NEXT_READY = gl.constexpr(19)  # number of the next unit, producer -> 0 and 1
REST0_READY = gl.constexpr(20)  # with lse: what rounding took from the weights, summed through tile 0, 0 -> 1
REST1_READY = gl.constexpr(21)  # the same through tile 1, 1 -> 0
BARRIERS = gl.constexpr(22)


@gluon.jit
def copy_keys(kv_desc, k, k_rope, bars, rows, lane, left, SEG: gl.constexpr, T: gl.constexpr, J: gl.constexpr):
    """128 latent columns (group J) of K tile T, with the rope columns in group 3; rows from ``left`` on as zeros: see hopper_decode.key_rows.

    A tile is 64 / SEG segments, each within a page.
    """
    SEGS: gl.constexpr = 64 // SEG
    bar = bars[K_FULL + 4 * T + J]
    mbarrier.expect(bar, 64 * 128 * 2 + (64 * 64 * 2 if J == 3 else 0))
    for i in gl.static_range(SEGS):
        n = gl.minimum(gl.maximum(left - (T * 64 + i * SEG), 0), SEG)
        y = rows[T] if SEGS == 1 else gl.sum(gl.where(lane == T * SEGS + i, rows, 0), 0)
        for c in gl.static_range(2):
            tma.async_copy_global_to_shared(kv_desc, [AXIS, y + n, AXIS - n, J * 128 + c * 64], bar, k.index((T * 8 + J * 2 + c) * SEGS + i))
        if J == 3:
            tma.async_copy_global_to_shared(kv_desc, [AXIS, y + n, AXIS - n, 512], bar, k_rope.index(T * SEGS + i))


@gluon.jit
def first_row(pages, token, page_rows, PAGE_SIZE: gl.constexpr, SEG: gl.constexpr):
    """Row of the cache, in all its pages, where the segment of a token begins."""
    return gl.load(pages + token // PAGE_SIZE) * page_rows + token % PAGE_SIZE // SEG * SEG


@gluon.jit
def copy_query_rope(qp_desc, q_rope, bars, q_token, head):
    """When K_EMPTY says that the weights of the last tile 1, in the same memory, are no longer needed."""
    mbarrier.expect(bars[ROPE_FULL], 64 * 64 * 2)
    tma.async_copy_global_to_shared(qp_desc, [q_token, head, 0], bars[ROPE_FULL], q_rope.index(0))


@gluon.jit
def copy_halves(qp_desc, kv_desc, q_rope, k, k_rope, bars, phase, rows, lane, left, q_token, head, first, SEG: gl.constexpr):
    """A pair of K tiles, of each first the columns of warpgroup 0, then those of 1, each as soon as its own are multiplied."""
    for t in gl.static_range(2):
        for w in gl.static_range(2):
            mbarrier.wait(bars[K_EMPTY + 2 * t + w], phase)
            if t == 1 and w == 0 and first != 0:
                copy_query_rope(qp_desc, q_rope, bars, q_token, head)
            for j in gl.static_range(2):
                copy_keys(kv_desc, k, k_rope, bars, rows, lane, left, SEG, t, 2 * w + j)


@gluon.jit
def copy_slices(qp_desc, kv_desc, q_rope, k, k_rope, bars, phase, rows, lane, left, q_token, head, first, value_slice, SEG: gl.constexpr,
                SLICES: gl.constexpr):
    """A pair of K tiles with value slices. K_EMPTY + 2 * tile: both warpgroups have multiplied the slice of the tile, 2 arrivals; and + 1:
    warpgroup ``tile`` has made the scores of the tile, so that the columns outside the slice are free, those of both tiles before the slice of one.

    The unit before may have had another slice, so the first pair waits for both. It then copies whole tiles, and the second half must not wait
    again: the warpgroups may be done with this pair by then, and the phase would not come back.
    """
    for t in gl.static_range(2):
        mbarrier.wait(bars[K_EMPTY + 2 * t + 1], phase)
        if first != 0:
            mbarrier.wait(bars[K_EMPTY + 2 * t], phase)
            if t == 1:
                copy_query_rope(qp_desc, q_rope, bars, q_token, head)
        for j in gl.static_range(4):
            if (first != 0) | (value_slice != j * SLICES // 4):
                copy_keys(kv_desc, k, k_rope, bars, rows, lane, left, SEG, t, j)
    if first == 0:
        for t in gl.static_range(2):
            mbarrier.wait(bars[K_EMPTY + 2 * t], phase)
            for j in gl.static_range(4):
                if value_slice == j * SLICES // 4:
                    copy_keys(kv_desc, k, k_rope, bars, rows, lane, left, SEG, t, j)


@gluon.jit
def producer(qn_desc, qp_desc, kv_desc, BLOCK_TABLE, WORK, PARTIALS, fold_at, page_rows, stride_table, kv_split, buffers, bars,
             HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr, SEG: gl.constexpr, SLICES: gl.constexpr):
    """Queries and pairs of K tiles of all units. A program's first unit is its own number, each further one the next that no program has taken."""
    q, q_rope, k, k_rope, p0, row, ones = buffers
    DTYPE: gl.constexpr = k.dtype
    TOKENS: gl.constexpr = 64 // HEADS
    SEGS: gl.constexpr = 64 // SEG
    q = q._reinterpret(DTYPE, [8, TOKENS, HEADS, 64], SHARED3)
    q_rope = q_rope._reinterpret(DTYPE, [1, TOKENS, HEADS, 64], SHARED3)
    k = k._reinterpret(DTYPE, [16 * SEGS, 1, 1, SEG, 64], SHARED4)
    k_rope = k_rope._reinterpret(DTYPE, [2 * SEGS, 1, 1, SEG, 64], SHARED4)
    lane = gl.arange(0, 32, LANES)
    one = gl.full([32], 1, gl.int32, LANES)
    counter = WORK + one
    units = gl.load(WORK) * SLICES
    unit = gl.program_id(0)
    turn = 0
    pair = 0
    while unit < units:
        pos, end, seen, slot = load_run(WORK, unit, units, SLICES)
        at = WORK + (1 + unit // SLICES) * ITEM
        q_token = gl.load(at + 3)
        head = (gl.load(at + 4) & 255) * 64
        pages = BLOCK_TABLE + gl.load(at + 5).to(gl.int64) * stride_table
        stop = gl.minimum(pos + kv_split, end)
        mbarrier.wait(bars[Q_EMPTY], (turn & 1) ^ 1)
        mbarrier.expect(bars[Q_FULL], 64 * 512 * 2)
        for j in gl.static_range(8):
            tma.async_copy_global_to_shared(qn_desc, [q_token, head, j * 64], bars[Q_FULL], q.index(j))
        first = 1
        more = 1
        taken = one
        while more != 0:
            phase = (pair & 1) ^ 1
            # before the waits, so that their latency is hidden; of a page that the item has tokens in
            if SEGS == 1:
                rows = (first_row(pages, pos, page_rows, PAGE_SIZE, SEG),
                        first_row(pages, gl.maximum(gl.minimum(pos + SEG, end - 1), 0), page_rows, PAGE_SIZE, SEG))
            else:
                rows = first_row(pages, gl.maximum(gl.minimum(pos + lane * SEG, end - 1), 0), page_rows, PAGE_SIZE, SEG)
            taken = gl.atomic_add(counter, one, mask=(lane == 0) & (pos + 128 >= stop) & (stop >= end), sem="relaxed")
            if SLICES == 1:
                copy_halves(qp_desc, kv_desc, q_rope, k, k_rope, bars, phase, rows, lane, stop - pos, q_token, head, first, SEG)
            else:
                copy_slices(qp_desc, kv_desc, q_rope, k, k_rope, bars, phase, rows, lane, stop - pos, q_token, head, first, unit % SLICES, SEG, SLICES)
            first = 0
            pair += 1
            pos = gl.minimum(pos + 128, stop)
            more = (pos < end).to(gl.int32)
            if pos >= stop:
                stop = gl.minimum(stop + kv_split, end)
        turn += 1
        unit = gl.num_programs(0) + gl.sum(gl.where(lane == 0, taken, 0), 0)
        gl.store(next_unit(PARTIALS, fold_at) + (turn & 1), unit)
        mbarrier.arrive(bars[NEXT_READY], count=1)
