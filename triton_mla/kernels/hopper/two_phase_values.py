"""Second phase of the two-phase form on Hopper: weights times values, 64 value columns a program. Scratch memory: two_phase_scores.py; the bits are
those of kernels/two_phase.py.

A program has one split of a row tile, or of a part of one, and one slice of columns: a warpgroup that multiplies, and a warp that copies. Weights and
values pass through a ring whose slots hold some KV tiles each; tiles past the end of the split are zeros. V does not depend on the kernels before,
and is on its way before they end.

The products of a slot stay in flight while the next is waited for: a bare chain, since a reference moves in steps of 8 and seldom. A slot with a tile
before which acc must be rescaled ends the chain, and is multiplied tile by tile. The sums of weights are one more product, so that they have the
order of the others. Fewer than 64 rows cannot be the M of wgmma: there the columns are, and acc is [64, ROWS].
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .copies import SHARED
from .decode_rows import no_nan
from .few_rows import store_split, visible_tokens
from .two_phase_copies import SLICES, locate_rows, place, producer


@gluon.jit
def tile_products(acc, totals, rests, ones, p, rest, v, at, COLUMNS_AS_M: gl.constexpr, WITH_LSE: gl.constexpr):
    """acc + P V, and the sums of P and of what rounding took from it, in flight."""
    if COLUMNS_AS_M:
        weights = p.index(at).permute((1, 0))
        acc = warpgroup_mma(v.index(at).permute((1, 0)), weights, acc, is_async=True)
        totals = warpgroup_mma(ones, weights, totals, is_async=True)
        if WITH_LSE:
            rests = warpgroup_mma(ones, rest.index(at).permute((1, 0)), rests, is_async=True)
    else:
        acc = warpgroup_mma(p.index(at), v.index(at), acc, is_async=True)
        totals = warpgroup_mma(p.index(at), ones, totals, is_async=True)
        if WITH_LSE:
            rests = warpgroup_mma(rest.index(at), ones, rests, is_async=True)
    return acc, totals, rests


@gluon.jit
def products_done(acc, totals, rests, PENDING: gl.constexpr, WITH_LSE: gl.constexpr):
    if WITH_LSE:
        acc, totals, rests = warpgroup_mma_wait(PENDING, deps=[acc, totals, rests])
    else:
        acc, totals = warpgroup_mma_wait(PENDING, deps=[acc, totals])
    return acc, totals, rests


@gluon.jit
def rescale_by(x, before, after, there, AXIS_OF_ROWS: gl.constexpr):
    """x times the exact power of two of a tile whose rows' reference goes from ``before`` to ``after`` (pointers)."""
    row = gl.arange(0, x.shape[AXIS_OF_ROWS], gl.SliceLayout(1 - AXIS_OF_ROWS, x.type.layout))
    old, new = gl.load(before + row, mask=there, other=0.0), gl.load(after + row, mask=there, other=0.0)
    return x * gl.expand_dims(gl.exp2(old - no_nan(new)), 1 - AXIS_OF_ROWS)


@gluon.jit
def consumer(rows, batch, split, scratch, ring, ones_memory, BLOCK_ROWS: gl.constexpr, ROWS: gl.constexpr, TILES: gl.constexpr, SLOTS: gl.constexpr,
             SPLIT_TILES: gl.constexpr, DECODE: gl.constexpr, WITH_LSE: gl.constexpr, PDL: gl.constexpr):
    SCORES, num_blocks, num_tiles = scratch
    p, rest, v, full, empty = ring
    num_heads, kv_split = batch[5], rows[5]
    COLUMNS_AS_M: gl.constexpr = ROWS < 64
    AXIS_OF_ROWS: gl.constexpr = 1 if COLUMNS_AS_M else 0
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS if COLUMNS_AS_M else 8, 16])
    WHOLE: gl.constexpr = gl.BlockedLayout([SPLIT_TILES // 32], [32], [4], [0])  # all of it in every warp
    tile = locate_rows(batch, BLOCK_ROWS, ROWS, DECODE, 4)
    first = split * kv_split
    end = gl.minimum(first + kv_split, visible_tokens(tile, num_heads, ROWS))
    row_tile, row_of_tile = place(BLOCK_ROWS, ROWS)
    block = row_tile.to(gl.int64) * num_tiles + first // 64
    refs = SCORES + (num_blocks.to(gl.int64) * (129 * BLOCK_ROWS) + block * BLOCK_ROWS + row_of_tile)  # after the first tile of the split
    flags = (SCORES + num_blocks.to(gl.int64) * (130 * BLOCK_ROWS)).to(gl.pointer_type(gl.int32)) + block
    if PDL:
        gdc_wait()
    if (first < end) | (split == 0):  # the first split stores an empty row too
        tiles = (gl.maximum(end - first, 0) + 63) // 64
        slots = (tiles + TILES - 1) // TILES
        acc = gl.zeros([64, ROWS], gl.float32, ACC)
        if COLUMNS_AS_M:
            totals = gl.zeros([64, ROWS], gl.float32, SUMS)
            ones = gl.full([64, 64], 1.0, p.dtype, gl.DotOperandLayout(0, SUMS, 2))
        else:
            totals = gl.zeros([64, 8], gl.float32, SUMS)
            ones = ones_memory.permute((1, 0))
        rests = totals
        i = gl.arange(0, SPLIT_TILES, WHOLE)
        moved = gl.where(gl.load(flags + i, mask=i < tiles, other=0) != 0, i // TILES, slots)  # slots with a rescale
        begin = slots * 0
        while begin < slots:
            stop = gl.min(gl.where(moved >= begin, moved, slots), 0)
            for n in range(begin, stop):
                slot = n % SLOTS
                mbarrier.wait(full.index(slot), (n // SLOTS) & 1)
                for u in gl.static_range(TILES):
                    acc, totals, rests = tile_products(acc, totals, rests, ones, p, rest, v, slot * TILES + u, COLUMNS_AS_M, WITH_LSE)
                acc, totals, rests = products_done(acc, totals, rests, TILES * (3 if WITH_LSE else 2), WITH_LSE)  # those of the slot before are
                mbarrier.arrive(empty.index((n + SLOTS - 1) % SLOTS), count=1, pred=n > begin)
            acc, totals, rests = products_done(acc, totals, rests, 0, WITH_LSE)
            mbarrier.arrive(empty.index((stop + SLOTS - 1) % SLOTS), count=1, pred=stop > begin)
            if stop < slots:
                slot = stop % SLOTS
                mbarrier.wait(full.index(slot), (stop // SLOTS) & 1)
                for u in gl.static_range(TILES):
                    at = stop * TILES + u
                    there = (at > 0) & (at < tiles)  # before the first tile of a split acc is 0
                    after = refs + at * BLOCK_ROWS
                    acc = rescale_by(acc, after - BLOCK_ROWS, after, there, AXIS_OF_ROWS)
                    totals = rescale_by(totals, after - BLOCK_ROWS, after, there, AXIS_OF_ROWS)
                    if WITH_LSE:
                        rests = rescale_by(rests, after - BLOCK_ROWS, after, there, AXIS_OF_ROWS)
                    acc, totals, rests = tile_products(acc, totals, rests, ones, p, rest, v, slot * TILES + u, COLUMNS_AS_M, WITH_LSE)
                    acc, totals, rests = products_done(acc, totals, rests, 0, WITH_LSE)
                mbarrier.arrive(empty.index(slot), count=1)
            begin = stop + 1
        if COLUMNS_AS_M:
            acc = gl.permute(acc, (1, 0))
        ROW: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
        total = gl.convert_layout(gl.max(totals, 1 - AXIS_OF_ROWS), ROW)  # equal along a row
        rest_sum = gl.convert_layout(gl.max(rests, 1 - AXIS_OF_ROWS), ROW)
        last = refs + (tiles - 1) * BLOCK_ROWS + gl.arange(0, ROWS, ROW)
        ref = gl.load(last, mask=gl.full([ROWS], tiles, gl.int32, ROW) > 0, other=float("-inf"))
        store_split(ref, total, rest_sum, (acc,), tile, split, gl.program_id(0) // SLICES, gl.program_id(0) % SLICES * 64, rows, num_heads, ROWS, WITH_LSE)


@gluon.jit(
    do_not_specialize=["page_rows", "stride_table", "num_tokens", "batch_size", "num_heads", "max_seq_len", "kv_split", "first_row_tile", "num_splits",
                       "num_rows", "num_blocks", "num_tiles"],
    do_not_specialize_on_alignment=["BLOCK_TABLE", "CU_SEQLENS_Q", "SEQ_LENS", "LSE"],
)
def hopper_values_kernel(
    weights_desc, kv_desc, BLOCK_TABLE, CU_SEQLENS_Q, SEQ_LENS, SCORES, OUT, LSE, PARTIALS,
    page_rows, stride_table, stride_out_token, stride_out_head,
    num_tokens, batch_size, num_heads, max_seq_len, kv_split, first_row_tile, num_splits, num_rows, num_blocks, num_tiles,
    BLOCK_ROWS: gl.constexpr, ROWS: gl.constexpr, TILES: gl.constexpr, SLOTS: gl.constexpr, SPLIT_TILES: gl.constexpr, PAGE_SIZE: gl.constexpr,
    SEG: gl.constexpr, DECODE: gl.constexpr, WITH_LSE: gl.constexpr, PDL: gl.constexpr,
):
    """Grid (row tiles of a wave * parts of ROWS rows * value slices, splits). ``page_rows``: rows from a page to the next; SPLIT_TILES: at least
    those of a split."""
    if PDL:
        gdc_launch_dependents()
    DTYPE: gl.constexpr = kv_desc.dtype
    p = gl.allocate_shared_memory(DTYPE, [SLOTS * TILES, ROWS, 64], SHARED)
    rest = gl.allocate_shared_memory(DTYPE, [SLOTS * TILES, ROWS, 64], SHARED) if WITH_LSE else p
    v = gl.allocate_shared_memory(DTYPE, [SLOTS * TILES, 64, 64], SHARED)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    ones = gl.allocate_shared_memory(DTYPE, [8, 64], SHARED)
    if ROWS == 64:
        ones.store(gl.full([8, 64], 1.0, DTYPE, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])))
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    split = gl.program_id(1)
    batch = (first_row_tile + place(BLOCK_ROWS, ROWS)[0], CU_SEQLENS_Q, SEQ_LENS, num_tokens, batch_size, num_heads, max_seq_len)
    rows = (OUT, LSE, PARTIALS, stride_out_token, stride_out_head, kv_split, num_splits, num_rows)
    scratch = (SCORES, num_blocks, num_tiles)
    ring = (p, rest, v, full, empty)
    gl.warp_specialize([
        (consumer, (rows, batch, split, scratch, ring, ones, BLOCK_ROWS, ROWS, TILES, SLOTS, SPLIT_TILES, DECODE, WITH_LSE, PDL)),
        (producer, (weights_desc, kv_desc, BLOCK_TABLE, batch, split, kv_split, page_rows, stride_table, scratch, ring, BLOCK_ROWS, ROWS, TILES, SLOTS,
                    PAGE_SIZE, SEG, DECODE, WITH_LSE, PDL)),
    ], [1], [40])
