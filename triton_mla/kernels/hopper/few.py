"""Decode and extend for few work items on Hopper: 512 latent and 64 rope columns, 16 bits, row tiles of 16 or 32. The bits are those of
kernels/one_pass.py.

A program is one split of one row tile: eight warps, mma.sync. Q lies in registers as left operands, 144 a thread at 16 rows. K tiles of 64
tokens go by TMA through a ring of three, 216 KB; a tile is K in one step and V in the next. The step of tile i is

    scores of tile i+1, columns 0 to 255, beside P V of tile i: the products of P V fill the gaps of those of a score, which wait for each other
    tile i+3 goes where tile i lay
    scores of tile i+1, further columns; reference and weights, through shared memory
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents

from .copies import AXIS, SHARED, SHARED4
from .decode_relay import rescale, weights_of
from .decode_rows import no_nan
from .few_rows import WARPS, locate_tile, store_split, tile_rows, visible_tokens

TILES = gl.constexpr(3)  # of the ring
LATENT_Q = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0]))
ROPE_Q = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))


@gluon.jit
def load_q(Q, stride_token, stride_head, tile, num_heads, ROWS: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """Queries [ROWS, COLUMNS] of a tile, zeros where it has no row."""
    token, head, seen, valid = tile_rows(tile, num_heads, ROWS, gl.SliceLayout(1, LAYOUT))
    rows = Q + token.to(gl.int64)[:, None] * stride_token + head.to(gl.int64)[:, None] * stride_head
    return gl.load(rows + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))[None, :], mask=valid[:, None], other=0.0)


@gluon.jit
def segment_rows(pages, token, limit, page_rows, PAGE_SIZE: gl.constexpr, SEG: gl.constexpr):
    """Row of the cache, in all its pages, where each segment of the K tile at ``token`` begins. The table has room for ``limit`` tokens."""
    rows = ()
    for i in gl.static_range(64 // SEG):
        t = token + i * SEG
        rows = rows + (gl.load(pages + t // PAGE_SIZE, mask=t < limit, other=0) * page_rows + t % PAGE_SIZE,)
    return rows


@gluon.jit
def copy_tile(latent_desc, rope_desc, rows, left, slot, ring, SEG: gl.constexpr):
    """A K tile into a slot of the ring, token rows from ``left`` on as zeros: see hopper_decode.descriptions."""
    latent, rope, full = ring
    SEGS: gl.constexpr = 64 // SEG
    WIDTH: gl.constexpr = latent_desc.block_shape[3]
    GROUPS: gl.constexpr = 512 // WIDTH
    latent = latent._reinterpret(latent.dtype, [TILES * GROUPS * SEGS, 1, 1, SEG, WIDTH], SHARED4)
    rope = rope._reinterpret(rope.dtype, [TILES * SEGS, 1, 1, SEG, 64], SHARED4)
    bar = full.index(slot)
    mbarrier.expect(bar, 64 * 576 * 2)
    for i in gl.static_range(SEGS):
        n = gl.minimum(gl.maximum(left - i * SEG, 0), SEG)
        for c in gl.static_range(GROUPS):
            tma.async_copy_global_to_shared(latent_desc, [AXIS, rows[i] + n, AXIS - n, c * WIDTH], bar, latent.index((slot * GROUPS + c) * SEGS + i))
        tma.async_copy_global_to_shared(rope_desc, [AXIS, rows[i] + n, AXIS - n, 512], bar, rope.index(slot * SEGS + i))


@gluon.jit
def row_maxima(s, maxima, ROWS: gl.constexpr):
    """Maxima [ROWS] of scores whose columns are spread over warps: of eight columns each to shared memory, and from there of all."""
    ALL: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0]], lane_bases=[[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[0, 0], [0, 0], [ROWS // 2 if ROWS == 32 else 0, 0]], block_bases=[], shape=[ROWS, 8])
    maxima.store(gl.max(gl.reshape(s, [ROWS, 8, 8]), 2))
    return gl.convert_layout(gl.max(maxima.load(ALL), 1), gl.SliceLayout(1, s.type.layout), assert_trivial=True)


@gluon.jit
def weigh(s, ref, pos, seen, scale, weights, rest, maxima, ROWS: gl.constexpr, WITH_LSE: gl.constexpr):
    """One tile's scores to weights and what rounding took from them, in shared memory: (new reference, exact rescale factor)."""
    s = gl.where(pos + gl.arange(0, 64, gl.SliceLayout(0, s.type.layout))[None, :] < seen[:, None], s, float("-inf"))
    new_ref = gl.maximum(ref, gl.floor(row_maxima(s, maxima, ROWS) * scale * 0.125) * 8.0)
    p = weights_of(s, scale, new_ref)
    rounded = p.to(weights.dtype)
    weights.store(rounded)
    if WITH_LSE:
        rest.store((p - rounded.to(gl.float32)).to(weights.dtype))
    return new_ref, gl.exp2(ref - no_nan(new_ref))


@gluon.jit(
    do_not_specialize=["page_rows", "stride_table", "num_tokens", "batch_size", "num_heads", "max_seq_len", "kv_split", "first_row_tile", "num_splits",
                       "num_rows"],
    do_not_specialize_on_alignment=["BLOCK_TABLE", "CU_SEQLENS_Q", "SEQ_LENS", "LSE"],
)
def hopper_few_kernel(
    latent_desc, rope_desc, Q_NOPE, Q_PE, BLOCK_TABLE, CU_SEQLENS_Q, SEQ_LENS, OUT, LSE, PARTIALS, scale_log2,
    stride_qn_token, stride_qn_head, stride_qp_token, stride_qp_head, page_rows, stride_table, stride_out_token, stride_out_head,
    num_tokens, batch_size, num_heads, max_seq_len, kv_split, first_row_tile, num_splits, num_rows,
    ROWS: gl.constexpr, PAGE_SIZE: gl.constexpr, SEG: gl.constexpr, DECODE: gl.constexpr, WITH_LSE: gl.constexpr, PDL: gl.constexpr,
):
    """Grid (row tiles of a wave, splits), as of one_pass_kernel. ``page_rows``: rows from a page to the next."""
    if PDL:
        gdc_launch_dependents()
    DTYPE: gl.constexpr = latent_desc.dtype
    ACC: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [ROWS // 16, WARPS // (ROWS // 16)], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, ACC, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    latent = gl.allocate_shared_memory(DTYPE, [TILES * 8, 64, 64], SHARED)  # of each tile its groups of 64 columns
    rope = gl.allocate_shared_memory(DTYPE, [TILES, 64, 64], SHARED)
    full = gl.allocate_shared_memory(gl.int64, [TILES, 1], mbarrier.MBarrierLayout())
    weights = gl.allocate_shared_memory(DTYPE, [ROWS, 64], SHARED)
    rest = gl.allocate_shared_memory(DTYPE, [ROWS, 64], SHARED) if WITH_LSE else weights
    maxima = gl.allocate_shared_memory(gl.float32, [ROWS, 8], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    ring = (latent, rope, full)
    for i in gl.static_range(TILES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()

    split = gl.program_id(1)
    tile = locate_tile(first_row_tile + gl.program_id(0), CU_SEQLENS_Q, SEQ_LENS, num_tokens, batch_size, num_heads, max_seq_len, ROWS, DECODE)
    end = gl.minimum((split + 1) * kv_split, visible_tokens(tile, num_heads, ROWS))
    pos = split * kv_split
    if (pos < end) | (split == 0):  # the first split stores an empty row too
        ref = gl.full([ROWS], float("-inf"), gl.float32, ROW)
        totals = gl.zeros([ROWS, 8], gl.float32, ACC)
        rests = totals
        acc = ()
        for _j in gl.static_range(8):
            acc = acc + (gl.zeros([ROWS, 64], gl.float32, ACC),)
        if pos < end:
            pages = BLOCK_TABLE + tile[0].to(gl.int64) * stride_table
            for i in gl.static_range(2):
                if pos + i * 64 < end:
                    copy_tile(latent_desc, rope_desc, segment_rows(pages, pos + i * 64, max_seq_len, page_rows, PAGE_SIZE, SEG), end - pos - i * 64, i, ring,
                              SEG)
            # Q passes through the third slot
            FIRST: gl.constexpr = 2 * 8 * 64 // ROWS
            latent._reinterpret(DTYPE, [TILES * 64 // ROWS, ROWS, 512], SHARED).index(2 * 64 // ROWS).store(
                load_q(Q_NOPE, stride_qn_token, stride_qn_head, tile, num_heads, ROWS, 512, LATENT_Q))
            q_blocks = latent._reinterpret(DTYPE, [TILES * 8 * 64 // ROWS, ROWS, 64], SHARED)
            q_blocks.index(FIRST + 8).store(load_q(Q_PE, stride_qp_token, stride_qp_head, tile, num_heads, ROWS, 64, ROPE_Q))
            q = ()
            for j in gl.static_range(9):
                q = q + (q_blocks.index(FIRST + j).load(LEFT),)
            fence_async_shared()
            gl.thread_barrier()
            if pos + 128 < end:
                copy_tile(latent_desc, rope_desc, segment_rows(pages, pos + 128, max_seq_len, page_rows, PAGE_SIZE, SEG), end - pos - 128, 2, ring, SEG)
            rows = segment_rows(pages, pos + 192, max_seq_len, page_rows, PAGE_SIZE, SEG)

            seen = tile_rows(tile, num_heads, ROWS, ROW)[2]
            ones = gl.full([64, 8], 1.0, DTYPE, RIGHT)
            mbarrier.wait(full.index(0), 0)
            s = gl.zeros([ROWS, 64], gl.float32, ACC)
            for j in gl.static_range(8):
                s = mma_v2(q[j], latent.index(j).permute((1, 0)).load(RIGHT), s)
            s = mma_v2(q[8], rope.index(0).permute((1, 0)).load(RIGHT), s)
            ref, alpha = weigh(s, ref, pos, seen, scale_log2, weights, rest, maxima, ROWS, WITH_LSE)

            slot, ahead, phase = 0, 1, 0  # of the ring: where tile i lies; tile i + 1, and the phase of its barrier
            for pos in range(pos + 64, end, 64):  # of tile i + 1
                mbarrier.wait(full.index(ahead), phase)
                p = weights.load(LEFT)
                s = gl.zeros([ROWS, 64], gl.float32, ACC)
                done = ()
                for j in gl.static_range(4):
                    s = mma_v2(q[j], latent.index(ahead * 8 + j).permute((1, 0)).load(RIGHT), s)
                    for c in gl.static_range(2):
                        done = done + (mma_v2(p, latent.index(slot * 8 + 2 * j + c).load(RIGHT), rescale(acc[2 * j + c], alpha)),)
                acc = done
                gl.thread_barrier()  # all warps have read tile i
                if pos + 128 < end:
                    copy_tile(latent_desc, rope_desc, rows, end - pos - 128, slot, ring, SEG)
                rows = segment_rows(pages, pos + 192, max_seq_len, page_rows, PAGE_SIZE, SEG)
                for j in gl.static_range(4, 8):
                    s = mma_v2(q[j], latent.index(ahead * 8 + j).permute((1, 0)).load(RIGHT), s)
                s = mma_v2(q[8], rope.index(ahead).permute((1, 0)).load(RIGHT), s)
                totals = mma_v2(p, ones, rescale(totals, alpha))
                if WITH_LSE:
                    rests = mma_v2(rest.load(LEFT), ones, rescale(rests, alpha))
                ref, alpha = weigh(s, ref, pos, seen, scale_log2, weights, rest, maxima, ROWS, WITH_LSE)
                slot = ahead
                ahead = gl.where(ahead == TILES - 1, 0, ahead + 1)
                phase = gl.where(ahead == 0, phase ^ 1, phase)

            p = weights.load(LEFT)
            totals = mma_v2(p, ones, rescale(totals, alpha))
            if WITH_LSE:
                rests = mma_v2(rest.load(LEFT), ones, rescale(rests, alpha))
            done = ()
            for j in gl.static_range(8):
                done = done + (mma_v2(p, latent.index(slot * 8 + j).load(RIGHT), rescale(acc[j], alpha)),)
            acc = done
        store_split(ref, gl.max(totals, 1), gl.max(rests, 1), acc, tile, split, OUT, LSE, PARTIALS, stride_out_token, stride_out_head, num_heads, kv_split,
                    num_splits, num_rows, ROWS, WITH_LSE)
