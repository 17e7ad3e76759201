"""The producer of the Hopper prefill: one warp that hands out work items and issues all copies from global to shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .registers import TILE

SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
SHARED4 = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4))
RECORD_WRITE = gl.constexpr(gl.BlockedLayout([8], [32], [1], [0]))
LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
# A descriptor over rows of a request has two more axes of this size, whose strides bring the address back: see hopper_prefill.request_rows.
AXIS = gl.constexpr(0x40000000)


@gluon.jit
def copy_rows(desc, start, length, row, col, bar, dst):
    """128 rows of a request from its row ``row`` on, those from ``length`` on as zeros."""
    tma.async_copy_global_to_shared(desc, [AXIS, start + length, AXIS - length + row, col], bar, dst)


@gluon.jit
def copy_q(q_desc, q_nope, q_rope, q_full, q_empty, n, row, col, w: gl.constexpr):
    """The query of warpgroup ``w``. Rows outside the request are a neighbour's or zeros, and reach only rows that are never stored."""
    mbarrier.wait(q_empty.index(w), (n & 1) ^ 1)
    mbarrier.expect(q_full.index(w), 64 * 192 * 2)
    tma.async_copy_global_to_shared(q_desc, [row + 64 * w, col], q_full.index(w), q_nope.index(2 * w))
    tma.async_copy_global_to_shared(q_desc, [row + 64 * w, col + 64], q_full.index(w), q_nope.index(2 * w + 1))
    tma.async_copy_global_to_shared(q_desc, [row + 64 * w, col + 128], q_full.index(w), q_rope.index(w))


@gluon.jit
def copy_k(k_desc, pe_desc, start, length, row, col, tile, k_empty, k_full, k_nope, k_rope):
    s = tile & 1
    mbarrier.wait(k_empty.index(s), ((tile >> 1) & 1) ^ 1)
    mbarrier.expect(k_full.index(s), 128 * 192 * 2)
    copy_rows(k_desc, start, length, row, col, k_full.index(s), k_nope.index(s))
    copy_rows(pe_desc, start, length, row, 0, k_full.index(s), k_rope.index(s))


@gluon.jit
def copy_v(v_desc, start, length, row, col, tile, v_empty, v_full, v):
    s = tile & 1
    mbarrier.wait(v_empty.index(s), ((tile >> 1) & 1) ^ 1)
    mbarrier.expect(v_full.index(s), 128 * 128 * 2)
    copy_rows(v_desc, start, length, row, col, v_full.index(s), v.index(s))


@gluon.jit
def producer(q_desc, k_desc, pe_desc, v_desc, WORK, COUNT, head_group, num_heads, stride_q_head, stride_k_head, stride_v_head, buffers, barriers):
    """All query tiles of a group of heads, in the order of the list, then the next group, so that its keys and values stay in L2.

    A program's first item is its own number, each further one the next that no program has taken. Dealt in advance, a group's items fill whole
    rounds of programs: of 12 query tiles and 3 heads 72 of 132 got any. The number is asked for before the last K tile of the item before,
    whose copy has to wait for longer than that.

    Order of an item: record, K0, half of Q, the last V of the item before, the other half of Q, then K(i), V(i-1). The next item's first
    QK stands in the same turn as the last PV, so its operands are asked for before the last V: the wait at the border of items fell from
    1521 to 570 clocks on an H200, 1.5 to 2 % on short rows.
    """
    q_nope, q_rope, k_nope, k_rope, v, record = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty, record_full, record_empty = barriers
    DTYPE: gl.constexpr = v.dtype
    q_nope = q_nope._reinterpret(DTYPE, [4, 64, 64], SHARED)  # (warpgroup, half of the columns)
    q_rope = q_rope._reinterpret(DTYPE, [2, 64, 64], SHARED)
    k_nope = k_nope._reinterpret(DTYPE, [2, 1, 1, 128, 128], SHARED4)
    k_rope = k_rope._reinterpret(DTYPE, [2, 1, 1, 128, 64], SHARED4)
    v = v._reinterpret(DTYPE, [2, 1, 1, 128, 128], SHARED4)
    i = gl.arange(0, 8, RECORD_WRITE)
    programs = gl.num_programs(0)
    lane = gl.arange(0, 32, LANES)
    one = gl.full([32], 1, gl.int32, LANES)
    counter = COUNT + one
    q_tiles = gl.load(COUNT)
    span = q_tiles * head_group
    total = q_tiles * num_heads
    item = gl.program_id(0)
    n, k_tile, v_tile = 0, 0, 0  # items, K tiles and V tiles so far
    last_start, last_length, last_row, last_col = 0, 0, 0, 0  # the last V of the item before
    while item < total:
        group = item // span
        within = item - group * span
        heads_here = gl.minimum(head_group, num_heads - group * head_group)
        tile = within // heads_here
        head = group * head_group + (within - tile * heads_here)
        row = WORK + tile * 8
        start, length, first, q_base = gl.load(row), gl.load(row + 1), gl.load(row + 2), gl.load(row + 3)
        begin, end, tiles, finished = gl.load(row + 4), gl.load(row + 5), gl.load(row + 6), gl.load(row + 7)
        mbarrier.wait(record_empty.index(n & 1), ((n >> 1) & 1) ^ 1)
        fields = gl.where(i == 0, tiles, gl.where(i == 1, first, gl.where(i == 2, q_base, gl.where(i == 3, begin, gl.where(
            i == 4, end, gl.where(i == 5, head, gl.where(i == 6, length, finished)))))))
        record.index(n & 1).store(fields)
        mbarrier.arrive(record_full.index(n & 1), count=1)
        copy_k(k_desc, pe_desc, start, length, 0, head * stride_k_head, k_tile, k_empty, k_full, k_nope, k_rope)
        k_tile += 1
        copy_q(q_desc, q_nope, q_rope, q_full, q_empty, n, q_base + first, head * stride_q_head, 0)
        if n > 0:
            copy_v(v_desc, last_start, last_length, last_row, last_col, v_tile, v_empty, v_full, v)
            v_tile += 1
        copy_q(q_desc, q_nope, q_rope, q_full, q_empty, n, q_base + first, head * stride_q_head, 1)
        taken = one
        for j in range(tiles):
            taken = gl.atomic_add(counter, one, mask=(lane == 0) & (j == tiles - 1), sem="relaxed")
            if j > 0:
                copy_k(k_desc, pe_desc, start, length, j * TILE, head * stride_k_head, k_tile, k_empty, k_full, k_nope, k_rope)
                k_tile += 1
                copy_v(v_desc, start, length, j * TILE - TILE, head * stride_v_head, v_tile, v_empty, v_full, v)
                v_tile += 1
        last_start, last_length, last_row, last_col = start, length, tiles * TILE - TILE, head * stride_v_head
        n += 1
        item = programs + gl.sum(gl.where(lane == 0, taken, 0), 0)
    if n > 0:
        copy_v(v_desc, last_start, last_length, last_row, last_col, v_tile, v_empty, v_full, v)
    mbarrier.wait(record_empty.index(n & 1), ((n >> 1) & 1) ^ 1)
    record.index(n & 1).store(gl.full([8], -1, gl.int32, RECORD_WRITE))  # -1 tiles: the end
    mbarrier.arrive(record_full.index(n & 1), count=1)
