"""First phase of the two-phase form on Hopper: the scores of every KV tile, and the reference that each tile alone would have. 16 bits, 512 latent
and 64 rope columns, row tiles of 16, 32 or 64; the bits are those of kernels/two_phase.py.

A program has one row tile and every so many KV tiles: two warpgroups that multiply, each its own half of a ring of two tiles, and one warp that
copies. Q lies in shared memory. A score is one chain of 36 products; one warpgroup stores while the other multiplies. Fewer than 64 rows cannot be
the M of wgmma: there the tokens are, and scores are made as [64, ROWS].

Scratch memory of a wave, in *blocks*, one for each row tile and KV tile, row tile by row tile; a block is ROWS x 64 or ROWS values:

    weights, 16 bits: ROWS x 64       what rounding took from them, 16 bits: ROWS x 64       scores, fp32: ROWS x 64
    reference of the tile alone: ROWS     reference after the tile: ROWS     whether a row's accumulator must be rescaled before it, int32: 1
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents

from .copies import AXIS, SHARED, SHARED4
from .few_copies import BLOCKS, segment_row
from .few_rows import load_q, locate_tile, tile_rows, visible_tokens

SLOTS = gl.constexpr(2)  # KV tiles of the ring, one for each warpgroup
PARTS = gl.constexpr(3)  # of a tile: 192 columns with barriers of their own, so that products begin, and copies go on, before all of a tile is
LATENT_Q = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))
ROPE_Q = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def producer(kv_desc, BLOCK_TABLE, batch, page_rows, stride_table, ring, ROWS: gl.constexpr, PAGE_SIZE: gl.constexpr, SEG: gl.constexpr,
             DECODE: gl.constexpr):
    """The KV tiles of the program, token rows that no row sees as zeros: see hopper_decode.cache_rows. A tile is 64 / SEG segments, each in a page."""
    k, full, empty = ring
    SEGS: gl.constexpr = 64 // SEG
    k = k._reinterpret(k.dtype, [SLOTS * BLOCKS * SEGS, 1, 1, SEG, 64], SHARED4)
    tile = locate_tile(batch, ROWS, DECODE, 1)
    pages = BLOCK_TABLE + tile[0].to(gl.int64) * stride_table
    limit = gl.where(tile[0] < batch[4], batch[6], 0)  # not the request's length, which page ids need not wait for
    start = gl.program_id(1) * 64
    row = segment_row(pages, start, limit, page_rows, PAGE_SIZE)
    end = visible_tokens(tile, batch[5], ROWS)
    slot, phase = 0, 1
    stride = gl.num_programs(1) * 64
    for first in range(start, end, stride):
        for part in range(PARTS):
            bar = full.index(slot * PARTS + part)
            mbarrier.wait(empty.index(slot * PARTS + part), phase)
            mbarrier.expect(bar, 64 * 192 * 2)
            for i in range(SEGS):
                n = gl.minimum(gl.maximum(end - first - i * SEG, 0), SEG)
                last = gl.where(n > 0, row + n, 0)  # past the end the table may hold anything
                for j in gl.static_range(3):
                    tma.async_copy_global_to_shared(kv_desc, [AXIS, last, AXIS - n, part * 192 + j * 64], bar,
                                                    k.index((slot * BLOCKS + part * 3 + j) * SEGS + i))
                after = gl.where(i < SEGS - 1, first + i * SEG + SEG, gl.where(part < PARTS - 1, first, first + stride))
                row = segment_row(pages, after, limit, page_rows, PAGE_SIZE)  # its latency is hidden behind the wait
        slot ^= 1
        phase = gl.where(slot == 0, phase ^ 1, phase)


@gluon.jit
def store_q(query, tile, num_heads, q, ROWS: gl.constexpr):
    """Q to shared memory, nine blocks of 64 columns."""
    Q_NOPE, Q_PE, stride_qn_token, stride_qn_head, stride_qp_token, stride_qp_head = query
    wide = q._reinterpret(q.dtype, [2, ROWS, 256], SHARED)
    for j in gl.static_range(2):
        wide.index(j).store(load_q(Q_NOPE + j * 256, stride_qn_token, stride_qn_head, tile, num_heads, ROWS, 256, LATENT_Q))
    q.index(BLOCKS - 1).store(load_q(Q_PE, stride_qp_token, stride_qp_head, tile, num_heads, ROWS, 64, ROPE_Q))


@gluon.jit
def consumer(query, batch, scratch, scale, q, q_full, ring, ROWS: gl.constexpr, DECODE: gl.constexpr, W: gl.constexpr):
    """KV tiles of warpgroup ``W``: every second one of the program."""
    SCORES, num_blocks, num_tiles = scratch
    k, full, empty = ring
    TOKENS_AS_M: gl.constexpr = ROWS < 64
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    ROW: gl.constexpr = gl.SliceLayout(0 if TOKENS_AS_M else 1, S)
    COLUMN: gl.constexpr = gl.SliceLayout(1 if TOKENS_AS_M else 0, S)
    AXIS_OF_ROWS: gl.constexpr = 1 if TOKENS_AS_M else 0
    tile = locate_tile(batch, ROWS, DECODE, 4)
    end = visible_tokens(tile, batch[5], ROWS)
    if W == 0:
        store_q(query, tile, batch[5], q, ROWS)  # without work too: it need not wait for the length
        fence_async_shared()
        mbarrier.arrive(q_full, count=1)
    mbarrier.wait(q_full, 0)
    seen = gl.expand_dims(tile_rows(tile, batch[5], ROWS, ROW)[2], 1 - AXIS_OF_ROWS)
    row = gl.arange(0, ROWS, ROW)
    column = gl.expand_dims(gl.arange(0, 64, COLUMN), AXIS_OF_ROWS)
    block = gl.program_id(0).to(gl.int64) * num_tiles
    scores = SCORES + num_blocks.to(gl.int64) * (ROWS * 64)
    refs = scores + num_blocks.to(gl.int64) * (ROWS * 64)
    phase = 0
    for first in range((gl.program_id(1) + W * gl.num_programs(1)) * 64, end, SLOTS * gl.num_programs(1) * 64):
        s = gl.zeros([64, ROWS], gl.float32, S)
        for part in gl.static_range(PARTS):
            mbarrier.wait(full.index(W * PARTS + part), phase)
            for j in gl.static_range(3 * part, 3 * part + 3):
                if TOKENS_AS_M:
                    s = warpgroup_mma(k.index(W * BLOCKS + j), q.index(j).permute((1, 0)), s, is_async=True)
                else:
                    s = warpgroup_mma(q.index(j), k.index(W * BLOCKS + j).permute((1, 0)), s, is_async=True)
            if part > 0:
                s = warpgroup_mma_wait(3, deps=[s])  # the products of the part before are done
                mbarrier.arrive(empty.index(W * PARTS + part - 1), count=1)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(empty.index(W * PARTS + PARTS - 1), count=1)
        phase ^= 1
        s = gl.where(first + column < seen, s, float("-inf"))
        at = block + first // 64
        gl.store(scores + at * (ROWS * 64) + (gl.expand_dims(row, 1 - AXIS_OF_ROWS) * 64 + column), s)
        gl.store(refs + at * ROWS + row, gl.floor(gl.max(s, 1 - AXIS_OF_ROWS) * scale * 0.125) * 8.0)


@gluon.jit(
    do_not_specialize=["page_rows", "stride_table", "num_tokens", "batch_size", "num_heads", "max_seq_len", "first_row_tile", "num_blocks", "num_tiles"],
    do_not_specialize_on_alignment=["BLOCK_TABLE", "CU_SEQLENS_Q", "SEQ_LENS"],
)
def hopper_scores_kernel(
    kv_desc, Q_NOPE, Q_PE, BLOCK_TABLE, CU_SEQLENS_Q, SEQ_LENS, SCORES, scale_log2,
    stride_qn_token, stride_qn_head, stride_qp_token, stride_qp_head, page_rows, stride_table,
    num_tokens, batch_size, num_heads, max_seq_len, first_row_tile, num_blocks, num_tiles,
    ROWS: gl.constexpr, PAGE_SIZE: gl.constexpr, SEG: gl.constexpr, DECODE: gl.constexpr, PDL: gl.constexpr,
):
    """Grid (row tiles of a wave, programs of a row tile). ``page_rows``: rows from a page to the next."""
    if PDL:
        gdc_launch_dependents()
    DTYPE: gl.constexpr = kv_desc.dtype
    ring = (
        gl.allocate_shared_memory(DTYPE, [SLOTS * BLOCKS, 64, 64], SHARED),
        gl.allocate_shared_memory(gl.int64, [SLOTS * PARTS, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [SLOTS * PARTS, 1], mbarrier.MBarrierLayout()),
    )
    q = gl.allocate_shared_memory(DTYPE, [BLOCKS, ROWS, 64], SHARED)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS * PARTS):
        mbarrier.init(ring[1].index(i), count=1)
        mbarrier.init(ring[2].index(i), count=1)
    mbarrier.init(q_full, count=1)
    fence_async_shared()
    batch = (first_row_tile + gl.program_id(0), CU_SEQLENS_Q, SEQ_LENS, num_tokens, batch_size, num_heads, max_seq_len)
    query = (Q_NOPE, Q_PE, stride_qn_token, stride_qn_head, stride_qp_token, stride_qp_head)
    scratch = (SCORES, num_blocks, num_tiles)
    gl.warp_specialize([
        (consumer, (query, batch, scratch, scale_log2, q, q_full, ring, ROWS, DECODE, 0)),
        (consumer, (query, batch, scratch, scale_log2, q, q_full, ring, ROWS, DECODE, 1)),
        (producer, (kv_desc, BLOCK_TABLE, batch, page_rows, stride_table, ring, ROWS, PAGE_SIZE, SEG, DECODE)),
    ], [4, 1], [120, 56])
