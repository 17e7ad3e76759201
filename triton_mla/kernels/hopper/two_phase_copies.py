"""The producer of the second phase on Hopper: one warp that copies the weights and values of a split to shared memory, and which those are."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_wait

from .copies import AXIS, SHARED4
from .few_copies import segment_row
from .few_rows import locate_tile, visible_tokens

SLICES = gl.constexpr(8)
OUTSIDE = gl.constexpr(0x40000000)  # a row beyond any tensor


@gluon.jit
def place(BLOCK_ROWS: gl.constexpr, ROWS: gl.constexpr):
    """(row tile of the scratch memory, first row of it) of a program."""
    rows = gl.program_id(0) // SLICES
    return rows // (BLOCK_ROWS // ROWS), rows % (BLOCK_ROWS // ROWS) * ROWS


@gluon.jit
def locate_rows(batch, BLOCK_ROWS: gl.constexpr, ROWS: gl.constexpr, DECODE: gl.constexpr, WARPS: gl.constexpr):
    """`locate_tile` for the program's part of a row tile."""
    request, too_long, start, count, position, first_row = locate_tile(batch, BLOCK_ROWS, DECODE, WARPS)
    return request, too_long, start, count, position, first_row + place(BLOCK_ROWS, ROWS)[1]


@gluon.jit
def copy_values(kv_desc, row, offset, left, bar, v, slot, TILES: gl.constexpr, SEG: gl.constexpr):
    """The segment at ``offset`` of the split, for this program's columns, token rows from ``left`` on as zeros: see hopper_decode.cache_rows."""
    n = gl.minimum(gl.maximum(left, 0), SEG)
    last = gl.where(n > 0, row + n, 0)  # past the end the table may hold anything
    at = slot * (TILES * 64 // SEG) + offset % (TILES * 64) // SEG
    tma.async_copy_global_to_shared(kv_desc, [AXIS, last, AXIS - n, gl.program_id(0) % SLICES * 64], bar, v.index(at))


@gluon.jit
def expect_slot(bar, TILES: gl.constexpr, ROWS: gl.constexpr, WITH_LSE: gl.constexpr):
    if WITH_LSE:
        rests = gl.program_id(0) % SLICES == 0
        mbarrier.expect(bar, TILES * 64 * (64 + ROWS) * 2, pred=not rests)
        mbarrier.expect(bar, TILES * 64 * (64 + 2 * ROWS) * 2, pred=rests)
    else:
        mbarrier.expect(bar, TILES * 64 * (64 + ROWS) * 2)


@gluon.jit
def copy_weights(weights_desc, tile, tiles, row, num_blocks, bar, p, rest, at, BLOCK_ROWS: gl.constexpr, WITH_LSE: gl.constexpr):
    """Weights of a tile of the split; and, for the first slice alone, which stores their sum, what rounding took from them."""
    y = gl.where(tile < tiles, row + tile * BLOCK_ROWS, OUTSIDE)
    tma.async_copy_global_to_shared(weights_desc, [y, 0], bar, p.index(at))
    if WITH_LSE:
        tma.async_copy_global_to_shared(weights_desc, [y + num_blocks * BLOCK_ROWS, 0], bar, rest.index(at), pred=gl.program_id(0) % SLICES == 0)


@gluon.jit
def producer(weights_desc, kv_desc, BLOCK_TABLE, batch, split, kv_split, page_rows, stride_table, scratch, ring, BLOCK_ROWS: gl.constexpr, ROWS: gl.constexpr,
             TILES: gl.constexpr, SLOTS: gl.constexpr, PAGE_SIZE: gl.constexpr, SEG: gl.constexpr, DECODE: gl.constexpr, WITH_LSE: gl.constexpr,
             PDL: gl.constexpr):
    """Slots of TILES KV tiles. Those that fill the ring at once: their values first, their weights when the kernel before is done; the others when
    the slot is free. A tile past the end, whose weights nobody wrote, is zeros in both."""
    SCORES, num_blocks, num_tiles = scratch
    p, rest, v, full, empty = ring
    SLOT: gl.constexpr = TILES * 64  # tokens
    v = v._reinterpret(v.dtype, [SLOTS * SLOT // SEG, 1, 1, SEG, 64], SHARED4)
    tile = locate_rows(batch, BLOCK_ROWS, ROWS, DECODE, 1)
    row_tile, row_of_tile = place(BLOCK_ROWS, ROWS)
    pages = BLOCK_TABLE + tile[0].to(gl.int64) * stride_table
    limit = gl.where(tile[0] < batch[4], batch[6], 0)
    first = split * kv_split
    row = segment_row(pages, first, limit, page_rows, PAGE_SIZE)  # always one ahead
    end = gl.minimum(first + kv_split, visible_tokens(tile, batch[5], ROWS))
    tiles = (end - first + 63) // 64
    stop = (gl.maximum(end - first, 0) + SLOT - 1) // SLOT * SLOT
    weights_row = (row_tile * num_tiles + first // 64) * BLOCK_ROWS + row_of_tile
    at_once = gl.minimum(stop, SLOTS * SLOT)
    for offset in range(0, at_once, SEG):
        slot = offset // SLOT
        if offset % SLOT == 0:
            expect_slot(full.index(slot), TILES, ROWS, WITH_LSE)
        copy_values(kv_desc, row, offset, end - first - offset, full.index(slot), v, slot, TILES, SEG)
        row = segment_row(pages, first + offset + SEG, limit, page_rows, PAGE_SIZE)
    if PDL:
        gdc_wait()
    for i in range(0, at_once // 64):
        copy_weights(weights_desc, i, tiles, weights_row, num_blocks, full.index(i // TILES), p, rest, i, BLOCK_ROWS, WITH_LSE)
    for offset in range(SLOTS * SLOT, stop, SEG):
        turn = offset // SLOT
        slot = turn % SLOTS
        bar = full.index(slot)
        if offset % SLOT == 0:
            mbarrier.wait(empty.index(slot), ((turn // SLOTS) & 1) ^ 1)
            expect_slot(bar, TILES, ROWS, WITH_LSE)
        if offset % 64 == 0:
            at = slot * TILES + offset % SLOT // 64
            copy_weights(weights_desc, offset // 64, tiles, weights_row, num_blocks, bar, p, rest, at, BLOCK_ROWS, WITH_LSE)
        copy_values(kv_desc, row, offset, end - first - offset, bar, v, slot, TILES, SEG)
        row = segment_row(pages, first + offset + SEG, limit, page_rows, PAGE_SIZE)
