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
def producer(kv_desc, BLOCK_TABLE, batch, split, kv_split, page_rows, stride_table, ring,
             ROWS: gl.constexpr, PAGE_SIZE: gl.constexpr, SEG: gl.constexpr, DECODE: gl.constexpr):
    """The tiles of the split, token rows past its end as zeros: see hopper_decode.cache_rows. The first two go at once, the third when Q has
    left its slot, the others when the tile before has. A tile is 64 / SEG segments, each within a page."""
    k, full, empty = ring
    SEGS: gl.constexpr = 64 // SEG
    k = k._reinterpret(k.dtype, [TILES * BLOCKS * SEGS, 1, 1, SEG, 64], SHARED4)
    tile = locate_tile(batch, ROWS, DECODE, 1)
    pages = BLOCK_TABLE + tile[0].to(gl.int64) * stride_table
    limit = gl.where(tile[0] < batch[4], batch[6], 0)  # not the request's length, which page ids need not wait for
    first = split * kv_split
    row = segment_row(pages, first, limit, page_rows, PAGE_SIZE)
    end = gl.minimum(first + kv_split, visible_tokens(tile, batch[5], ROWS))
    slot, phase = 0, 1
    # one loop over segments: those of a tile unrolled, ptxas runs out of uniform registers
    for token in range(first, (end + 63) // 64 * 64, SEG):
        bar = full.index(slot)
        if token % 64 == 0:
            if token >= first + 128:
                mbarrier.wait(empty.index(slot), phase)
            mbarrier.expect(bar, 64 * 576 * 2)
        n = gl.minimum(gl.maximum(end - token, 0), SEG)
        last = gl.where(n > 0, row + n, 0)  # past the end the table may hold anything
        for j in gl.static_range(BLOCKS):
            tma.async_copy_global_to_shared(kv_desc, [AXIS, last, AXIS - n, j * 64], bar, k.index((slot * BLOCKS + j) * SEGS + token % 64 // SEG))
        row = segment_row(pages, token + SEG, limit, page_rows, PAGE_SIZE)  # its latency is hidden behind the wait
        if (token + SEG) % 64 == 0:
            slot = gl.where(slot == TILES - 1, 0, slot + 1)
            phase = gl.where(slot == TILES - 1, phase ^ 1, phase)  # Q is the first to leave the last slot
