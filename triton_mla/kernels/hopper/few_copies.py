"""The producer of the kernel for few work items: one warp that issues the copies of K tiles to shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .copies import AXIS, SHARED4
from .few_rows import locate_tile, visible_tokens

TILES = gl.constexpr(3)  # of the ring
BLOCKS = gl.constexpr(9)  # of a tile, 64 columns each: latent, and the last one rope


@gluon.jit
def segment_row(pages, token, limit, page_rows, PAGE_SIZE: gl.constexpr):
    """Row of the cache, in all its pages, where the segment at ``token`` begins. The table has room for ``limit`` tokens."""
    return gl.load(pages + token // PAGE_SIZE, mask=token < limit, other=0) * page_rows + token % PAGE_SIZE


@gluon.jit
def next_slot(slot, phase, FLIP: gl.constexpr):
    """Of the ring, and the phase to wait for there; with slot FLIP begins another one."""
    slot = gl.where(slot == TILES - 1, 0, slot + 1)
    return slot, gl.where(slot == FLIP, phase ^ 1, phase)


@gluon.jit
def copy_split(row, first, end, slot, phase, kv_desc, pages, limit, page_rows, ring, PAGE_SIZE: gl.constexpr, SEG: gl.constexpr):
    """The tiles of a split, whose first segment is at ``row``: (slot of the next tile, its phase)."""
    k, full, empty = ring
    SEGS: gl.constexpr = 64 // SEG
    # one loop over segments: those of a tile unrolled, ptxas runs out of uniform registers
    for token in range(first, (end + 63) // 64 * 64, SEG):
        bar = full.index(slot)
        if token % 64 == 0:
            mbarrier.wait(empty.index(slot), phase)
            mbarrier.expect(bar, 64 * 576 * 2)
        n = gl.minimum(gl.maximum(end - token, 0), SEG)
        last = gl.where(n > 0, row + n, 0)  # past the end the table may hold anything
        for j in gl.static_range(BLOCKS):
            tma.async_copy_global_to_shared(kv_desc, [AXIS, last, AXIS - n, j * 64], bar, k.index((slot * BLOCKS + j) * SEGS + token % 64 // SEG))
        row = segment_row(pages, token + SEG, limit, page_rows, PAGE_SIZE)  # its latency is hidden behind the wait
        if (token + SEG) % 64 == 0:
            slot, phase = next_slot(slot, phase, TILES - 1)  # Q is the first to leave the last slot
    return slot, phase


@gluon.jit
def producer(kv_desc, BLOCK_TABLE, batch, kv_split, page_rows, stride_table, ring,
             ROWS: gl.constexpr, PAGE_SIZE: gl.constexpr, SEG: gl.constexpr, DECODE: gl.constexpr, MORE: gl.constexpr):
    """The tiles of the program's splits, token rows past a split's end as zeros: see hopper_decode.cache_rows. The first two go at once, the third
    when Q has left its slot, the others when the tile before has. A tile is 64 / SEG segments, each within a page."""
    k, full, empty = ring
    ring = (k._reinterpret(k.dtype, [TILES * BLOCKS * (64 // SEG), 1, 1, SEG, 64], SHARED4), full, empty)
    tile = locate_tile(batch, ROWS, DECODE, 1)
    pages = BLOCK_TABLE + tile[0].to(gl.int64) * stride_table
    limit = gl.where(tile[0] < batch[4], batch[6], 0)  # not the request's length, which page ids need not wait for
    first = gl.program_id(1) * kv_split
    row = segment_row(pages, first, limit, page_rows, PAGE_SIZE)
    visible = visible_tokens(tile, batch[5], ROWS)
    slot, phase = gl.to_tensor(0), gl.to_tensor(1)
    slot, phase = copy_split(row, first, gl.minimum(first + kv_split, visible), slot, phase, kv_desc, pages, limit, page_rows, ring, PAGE_SIZE, SEG)
    if MORE:
        first += gl.num_programs(1) * kv_split
        while first < visible:
            row = segment_row(pages, first, limit, page_rows, PAGE_SIZE)
            slot, phase = copy_split(row, first, gl.minimum(first + kv_split, visible), slot, phase, kv_desc, pages, limit, page_rows, ring, PAGE_SIZE, SEG)
            first += gl.num_programs(1) * kv_split
