"""The producer of the kernel for few work items: one warp that issues the copies of K tiles to shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .copies import AXIS, SHARED4
from .few_rows import locate_tile, visible_tokens

TILES = gl.constexpr(3)  # of the ring
BLOCKS = gl.constexpr(9)  # of a tile, 64 columns each: latent, and the last one rope


@gluon.jit
def segment_rows(pages, token, limit, page_rows, PAGE_SIZE: gl.constexpr, SEG: gl.constexpr):
    """Row of the cache, in all its pages, where each segment of the K tile at ``token`` begins. The table has room for ``limit`` tokens."""
    rows = ()
    for i in gl.static_range(64 // SEG):
        t = token + i * SEG
        rows = rows + (gl.load(pages + t // PAGE_SIZE, mask=t < limit, other=0) * page_rows + t % PAGE_SIZE,)
    return rows


@gluon.jit
def producer(kv_desc, BLOCK_TABLE, batch, split, kv_split, page_rows, stride_table, ring,
             ROWS: gl.constexpr, PAGE_SIZE: gl.constexpr, SEG: gl.constexpr, DECODE: gl.constexpr):
    """The tiles of the split, token rows past its end as zeros: see hopper_decode.cache_rows. The first two go at once, the third when Q has
    left its slot, the others when the tile before has. A tile is 64 / SEG segments, each within a page."""
    k, full, empty = ring
    SEGS: gl.constexpr = 64 // SEG
    k = k._reinterpret(k.dtype, [TILES * BLOCKS * SEGS, 1, 1, SEG, 64], SHARED4)
    max_seq_len = batch[6]
    tile = locate_tile(batch, ROWS, DECODE, 1)
    pages = BLOCK_TABLE + tile[0].to(gl.int64) * stride_table
    first = split * kv_split
    rows = segment_rows(pages, first, max_seq_len, page_rows, PAGE_SIZE, SEG)
    end = gl.minimum(first + kv_split, visible_tokens(tile, batch[5], ROWS))
    slot, phase = 0, 1
    for pos in range(first, end, 64):
        if pos >= first + 128:
            mbarrier.wait(empty.index(slot), phase)
        bar = full.index(slot)
        mbarrier.expect(bar, 64 * 576 * 2)
        for j in range(0, BLOCKS, 3):  # unrolled further, copies of short segments run out of uniform registers
            for u in gl.static_range(3):
                for i in gl.static_range(SEGS):
                    n = gl.minimum(gl.maximum(end - pos - i * SEG, 0), SEG)
                    tma.async_copy_global_to_shared(kv_desc, [AXIS, rows[i] + n, AXIS - n, (j + u) * 64], bar, k.index((slot * BLOCKS + j + u) * SEGS + i))
        rows = segment_rows(pages, pos + 64, max_seq_len, page_rows, PAGE_SIZE, SEG)  # its latency is hidden behind the wait
        slot = gl.where(slot == TILES - 1, 0, slot + 1)
        phase = gl.where(slot == TILES - 1, phase ^ 1, phase)  # Q is the first to leave the last slot
