"""Decode and extend for few work items on Hopper: 512 latent and 64 rope columns, 16 bits, row tiles of 16. The bits are those of
kernels/one_pass.py.

A program is one row tile and one of its splits, or every n-th: eight warps that compute, by mma.sync, and one that issues all copies, across
splits (few_copies.py). Q lies in registers as left operands, 144 a thread. K tiles of 64 tokens pass through a ring of three, 216 KB of shared
memory; a tile is K in one step and V in the next. The step of tile i is

    scores of tile i + 1, latent columns 0 to 255, beside P V of tile i: a score is one chain of products, whose gaps those of P V fill
    the slot of tile i is free for tile i + 3
    scores of tile i + 1, the other columns; its reference and weights, which reach all warps through shared memory
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents

from .copies import SHARED
from .decode_relay import rescale, weights_of
from .decode_rows import no_nan
from .few_copies import BLOCKS, TILES, next_slot, producer
from .few_rows import load_q, locate_tile, store_split, tile_rows, visible_tokens

WARPS = gl.constexpr(8)  # that compute
LATENT_Q = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0]))
ROPE_Q = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))


@gluon.jit
def q_operands(query, tile, num_heads, k, ROWS: gl.constexpr, LEFT: gl.constexpr):
    """Nine left operands [ROWS, 64], by way of the last slot of the ring."""
    Q_NOPE, Q_PE, stride_qn_token, stride_qn_head, stride_qp_token, stride_qp_head = query
    AT: gl.constexpr = (TILES - 1) * BLOCKS * 64 // ROWS
    left = load_q(Q_NOPE, stride_qn_token, stride_qn_head, tile, num_heads, ROWS, 256, LATENT_Q)
    right = load_q(Q_NOPE + 256, stride_qn_token, stride_qn_head, tile, num_heads, ROWS, 256, LATENT_Q)
    rope = load_q(Q_PE, stride_qp_token, stride_qp_head, tile, num_heads, ROWS, 64, ROPE_Q)
    wide = k._reinterpret(k.dtype, [TILES * BLOCKS * 16 // ROWS, ROWS, 256], SHARED)
    blocks = k._reinterpret(k.dtype, [TILES * BLOCKS * 64 // ROWS, ROWS, 64], SHARED)
    wide.index(AT // 4).store(left)
    wide.index(AT // 4 + 1).store(right)
    blocks.index(AT + 8).store(rope)
    q = ()
    for j in gl.static_range(BLOCKS):
        q = q + (blocks.index(AT + j).load(LEFT),)
    return q


@gluon.jit
def row_maxima(s, maxima, ROWS: gl.constexpr):
    """Maxima [ROWS] of scores whose columns are spread over warps: through shared memory those of eight columns each, one barrier."""
    ALL: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0]], lane_bases=[[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[0, 0], [0, 0], [0, 0]], block_bases=[], shape=[ROWS, 8])
    maxima.store(gl.max(gl.reshape(s, [ROWS, 8, 8]), 2))
    return gl.convert_layout(gl.max(maxima.load(ALL), 1), gl.SliceLayout(1, s.type.layout), assert_trivial=True)


@gluon.jit
def weigh(s, ref, pos, seen, scale, buffers, ROWS: gl.constexpr, WITH_LSE: gl.constexpr):
    """Scores of the tile at ``pos`` to weights, and what rounding took from them, in shared memory: (new reference, exact rescale factor)."""
    weights, rest, maxima = buffers
    s = gl.where(pos + gl.arange(0, 64, gl.SliceLayout(0, s.type.layout))[None, :] < seen[:, None], s, float("-inf"))
    new_ref = gl.maximum(ref, gl.floor(row_maxima(s, maxima, ROWS) * scale * 0.125) * 8.0)
    p = weights_of(s, scale, new_ref)
    rounded = p.to(weights.dtype)
    weights.store(rounded)
    if WITH_LSE:
        rest.store((p - rounded.to(gl.float32)).to(weights.dtype))
    return new_ref, gl.exp2(ref - no_nan(new_ref))


@gluon.jit
def sum_weights(p, buffers, totals, rests, alpha, WITH_LSE: gl.constexpr):
    """`_common.sum_weights`; totals and rests [ROWS, 8], equal along a row."""
    ones = gl.full([64, 8], 1.0, p.dtype, gl.DotOperandLayout(1, totals.type.layout, 2))
    totals = mma_v2(p, ones, rescale(totals, alpha))
    if WITH_LSE:
        rests = mma_v2(buffers[1].load(p.type.layout), ones, rescale(rests, alpha))
    return totals, rests


@gluon.jit
def attend_split(q, split, visible, ahead, phase, rows, batch, scale, ring, buffers, tile, ROWS: gl.constexpr, DECODE: gl.constexpr, WITH_LSE: gl.constexpr):
    """(slot of the tile after the split's last, which filling of it to wait for), of those of its first one."""
    k, full, empty = ring
    num_heads, kv_split = batch[5], rows[5]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, ACC, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    first = split * kv_split
    end = gl.minimum(first + kv_split, visible)
    ref = gl.full([ROWS], float("-inf"), gl.float32, ROW)
    totals = gl.zeros([ROWS, 8], gl.float32, ACC)
    rests = totals
    acc = ()
    for _j in gl.static_range(8):
        acc = acc + (gl.zeros([ROWS, 64], gl.float32, ACC),)
    if first < end:
        seen = gl.full([ROWS], end, gl.int32, ROW) if DECODE else tile_rows(tile, num_heads, ROWS, ROW)[2]
        mbarrier.wait(full.index(ahead), phase)
        s = gl.zeros([ROWS, 64], gl.float32, ACC)
        for j in gl.static_range(BLOCKS):
            s = mma_v2(q[j], k.index(ahead * BLOCKS + j).permute((1, 0)).load(RIGHT), s)
        ref, alpha = weigh(s, ref, first, seen, scale, buffers, ROWS, WITH_LSE)
        slot = ahead  # of tile i
        ahead, phase = next_slot(ahead, phase, 0)

        for pos in range(first + 64, end, 64):  # of tile i + 1
            mbarrier.wait(full.index(ahead), phase)
            p = buffers[0].load(LEFT)
            s = gl.zeros([ROWS, 64], gl.float32, ACC)
            done = ()
            for j in gl.static_range(4):
                s = mma_v2(q[j], k.index(ahead * BLOCKS + j).permute((1, 0)).load(RIGHT), s)
                for v in gl.static_range(2 * j, 2 * j + 2):
                    done = done + (mma_v2(p, k.index(slot * BLOCKS + v).load(RIGHT), rescale(acc[v], alpha)),)
            acc = done
            totals, rests = sum_weights(p, buffers, totals, rests, alpha, WITH_LSE)
            mbarrier.arrive(empty.index(slot), count=1)
            for j in gl.static_range(4, BLOCKS):
                s = mma_v2(q[j], k.index(ahead * BLOCKS + j).permute((1, 0)).load(RIGHT), s)
            ref, alpha = weigh(s, ref, pos, seen, scale, buffers, ROWS, WITH_LSE)
            slot = ahead
            ahead, phase = next_slot(ahead, phase, 0)

        p = buffers[0].load(LEFT)
        totals, rests = sum_weights(p, buffers, totals, rests, alpha, WITH_LSE)
        done = ()
        for v in gl.static_range(8):
            done = done + (mma_v2(p, k.index(slot * BLOCKS + v).load(RIGHT), rescale(acc[v], alpha)),)
        acc = done
        mbarrier.arrive(empty.index(slot), count=1)
    tile = locate_tile(batch, ROWS, DECODE, WARPS)  # again: the loop has no registers to keep it in
    store_split(ref, gl.max(totals, 1), gl.max(rests, 1), acc, tile, split, gl.program_id(0), 0, rows, num_heads, ROWS, WITH_LSE)
    return ahead, phase


@gluon.jit
def consumer(query, rows, batch, scale, ring, buffers, ROWS: gl.constexpr, DECODE: gl.constexpr, WITH_LSE: gl.constexpr, MORE: gl.constexpr):
    k, full, empty = ring
    num_heads, kv_split = batch[5], rows[5]
    LEFT: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8]), 2)
    tile = locate_tile(batch, ROWS, DECODE, WARPS)
    visible = visible_tokens(tile, num_heads, ROWS)
    split = gl.program_id(1)
    if (split * kv_split < visible) | (split == 0):  # the first split stores an empty row too
        q = q_operands(query, tile, num_heads, k, ROWS, LEFT)
        fence_async_shared()
        mbarrier.arrive(empty.index(TILES - 1), count=1)
        ahead, phase = gl.to_tensor(0), gl.to_tensor(0)
        if MORE:
            while (split * kv_split < visible) | (split == 0):
                ahead, phase = attend_split(q, split, visible, ahead, phase, rows, batch, scale, ring, buffers, tile, ROWS, DECODE, WITH_LSE)
                split += gl.num_programs(1)
        else:
            attend_split(q, split, visible, ahead, phase, rows, batch, scale, ring, buffers, tile, ROWS, DECODE, WITH_LSE)


@gluon.jit(
    do_not_specialize=["page_rows", "stride_table", "num_tokens", "batch_size", "num_heads", "max_seq_len", "kv_split", "first_row_tile", "num_splits",
                       "num_rows"],
    do_not_specialize_on_alignment=["BLOCK_TABLE", "CU_SEQLENS_Q", "SEQ_LENS", "LSE"],
)
def hopper_few_kernel(
    kv_desc, Q_NOPE, Q_PE, BLOCK_TABLE, CU_SEQLENS_Q, SEQ_LENS, OUT, LSE, PARTIALS, scale_log2,
    stride_qn_token, stride_qn_head, stride_qp_token, stride_qp_head, page_rows, stride_table, stride_out_token, stride_out_head,
    num_tokens, batch_size, num_heads, max_seq_len, kv_split, first_row_tile, num_splits, num_rows,
    ROWS: gl.constexpr, PAGE_SIZE: gl.constexpr, SEG: gl.constexpr, DECODE: gl.constexpr, WITH_LSE: gl.constexpr, MORE: gl.constexpr, PDL: gl.constexpr,
):
    """Grid (row tiles of a wave, programs for their splits; with MORE fewer than splits). ``page_rows``: rows from a page to the next."""
    if PDL:
        gdc_launch_dependents()
    DTYPE: gl.constexpr = kv_desc.dtype
    ring = (
        gl.allocate_shared_memory(DTYPE, [TILES * BLOCKS, 64, 64], SHARED),
        gl.allocate_shared_memory(gl.int64, [TILES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [TILES, 1], mbarrier.MBarrierLayout()),
    )
    weights = gl.allocate_shared_memory(DTYPE, [ROWS, 64], SHARED)
    rest = gl.allocate_shared_memory(DTYPE, [ROWS, 64], SHARED) if WITH_LSE else weights
    buffers = (weights, rest, gl.allocate_shared_memory(gl.float32, [ROWS, 8], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])))
    for i in gl.static_range(TILES):
        mbarrier.init(ring[1].index(i), count=1)
        mbarrier.init(ring[2].index(i), count=1)
    fence_async_shared()
    batch = (first_row_tile + gl.program_id(0), CU_SEQLENS_Q, SEQ_LENS, num_tokens, batch_size, num_heads, max_seq_len)
    query = (Q_NOPE, Q_PE, stride_qn_token, stride_qn_head, stride_qp_token, stride_qp_head)
    rows = (OUT, LSE, PARTIALS, stride_out_token, stride_out_head, kv_split, num_splits, num_rows)
    gl.warp_specialize([
        (consumer, (query, rows, batch, scale_log2, ring, buffers, ROWS, DECODE, WITH_LSE, MORE)),
        (producer, (kv_desc, BLOCK_TABLE, batch, kv_split, page_rows, stride_table, ring, ROWS, PAGE_SIZE, SEG, DECODE, MORE)),
    ], [1], [24])
