"""Decode and extend for Hopper: 512 latent and 64 rope columns, 16 bits, row tiles of 64. The bits are those of kernels/one_pass.py.

Twelve warps, of which the last four hold one: two warpgroups, each with 256 of the 512 value columns of the 64 rows, and a warp that issues
all copies (decode_copies.py). The grid is persistent and works through a list made on the device (decode_work.py). A row tile is 64 / HEADS
query tokens of HEADS heads. KV tiles go in pairs, whose softmax the warpgroups pass on to each other, while each multiplies both with its own
value columns:

    0   S0 = Q K0;  reference and weights P0 -> 1;             O += P0 (registers) V0;  wait for P1;            O += P1 V1
    1   S1 = Q K1;  wait for P0;  O += P0 V0 meanwhile reference and weights P1 -> 0;   O += P1 (registers) V1;  row sums of both

With SLICES = 2 two programs share the value columns of an item, and each makes all of its scores: a warpgroup has 256 / SLICES of them. What it
costs in products it gains in time, while there are programs to spare: the other columns of K can be replaced as soon as the scores are made.
Programs take *units*: unit u is slice u % SLICES of item u // SLICES, so that the slices of an item run side by side and its latent rows come
from memory once.

Shared memory, in bytes of 16-bit data: Q 64 K, its rope columns 8 K, where P1 goes once they are in registers, K 2 x 64 K, its rope columns
2 x 8 K, P0 8 K, row values, ones and barriers 2 K: all of what one program can have.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from .assembly import pack_pairs, unpack_pairs, wait_for_grid
from .copies import SHARED
from .decode_copies import BARRIERS, K_EMPTY, K_FULL, NEXT_READY, Q_EMPTY, Q_FULL, REST0_READY, ROPE_FULL, SUM_READY, producer
from .decode_relay import LEFT, mask_scores, relay_0, relay_1
from .decode_rows import ROW, ROWS, SCORES, SUMS, close_split, load_run, next_unit, row_values


@gluon.jit
def qk_start(q, k, bars, phase, z, T: gl.constexpr):
    """Issues the product of latent columns 0 to 447. ``z`` is 0, but not for ptxas, which else takes the operands' descriptors out of the
    loop and spills them (128 requests of 8192 tokens and 128 heads on an H200: 594 against 526 us)."""
    DTYPE: gl.constexpr = k.dtype
    q128 = q._reinterpret(DTYPE, [4, 64, 128], SHARED)
    k128 = k._reinterpret(DTYPE, [8, 64, 128], SHARED)
    q64 = q._reinterpret(DTYPE, [8, 64, 64], SHARED)
    k64 = k._reinterpret(DTYPE, [16, 64, 64], SHARED)
    mbarrier.wait(bars[K_FULL + 4 * T], phase)
    s = warpgroup_mma(q128.index(z), k128.index(z + T * 4).permute((1, 0)), gl.zeros([ROWS, 64], gl.float32, SCORES), use_acc=False, is_async=True)
    for j in gl.static_range(1, 3):
        mbarrier.wait(bars[K_FULL + 4 * T + j], phase)
        s = warpgroup_mma(q128.index(z + j), k128.index(z + (T * 4 + j)).permute((1, 0)), s, is_async=True)
    mbarrier.wait(bars[K_FULL + 4 * T + 3], phase)
    return warpgroup_mma(q64.index(z + 6), k64.index(z + (T * 8 + 6)).permute((1, 0)), s, is_async=True)


@gluon.jit
def pack(x):
    """Neighbouring columns as one int32."""
    a, b = gl.split(gl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    return pack_pairs(a, b)


@gluon.jit
def unpack(x, DTYPE: gl.constexpr):
    a, b = unpack_pairs(x)
    return gl.convert_layout(gl.reshape(gl.join(a, b), [x.shape[0], x.shape[1] * 2]).to(DTYPE, bitcast=True), LEFT, assert_trivial=True)


@gluon.jit
def qk_finish(q, k, k_rope, q_rope, q7, s, z, T: gl.constexpr, WITH_LSE: gl.constexpr):
    """Columns 448 to 511 and rope, with Q in registers: rope because P1 takes its memory, the others because it saves shared-memory bandwidth
    (2 %), unless lse needs the registers. With 64 more, ptxas serialises the products for want of registers."""
    k64 = k._reinterpret(k.dtype, [16, 64, 64], SHARED)
    left = q._reinterpret(k.dtype, [8, 64, 64], SHARED).index(z + 7) if WITH_LSE else unpack(q7, k.dtype)
    s = warpgroup_mma(left, k64.index(z + (T * 8 + 7)).permute((1, 0)), s, is_async=True)
    return warpgroup_mma(unpack(q_rope, k.dtype), k_rope.index(z + T).permute((1, 0)), s, is_async=True)


@gluon.jit
def consumer(rows, WORK, kv_split, scale, zero, buffers, bars, HEADS: gl.constexpr, SLICES: gl.constexpr, W: gl.constexpr, WITH_LSE: gl.constexpr):
    q, rope, k, k_rope, p0, row, ones = buffers
    DTYPE: gl.constexpr = k.dtype
    PARTIALS, fold_at = rows[2], rows[4]
    COLS: gl.constexpr = 256 // SLICES
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    units = gl.load(WORK) * SLICES
    unit = gl.program_id(0)
    turn = 0
    pos, end, seen, slot = load_run(WORK, unit, units, SLICES)
    stop = gl.minimum(pos + kv_split, end)
    pair, splits = 0, 0
    fresh = 2  # at the first pair of a split 1, of a unit 2
    open_split = -1  # which acc belongs to, not stored yet: see close_split
    acc = gl.zeros([ROWS, COLS], gl.float32, ACC)
    sums = gl.zeros([ROWS, 8], gl.float32, SUMS)
    ref = gl.full([ROWS], float("-inf"), gl.float32, ROW)
    rest = gl.zeros([ROWS], gl.float32, ROW)
    q_rope = pack(gl.zeros([ROWS, 64], DTYPE, LEFT))
    q7 = q_rope
    # Q's rope columns wait here while a split is stored, for want of registers: K is full again, so its weights are not needed any more
    kept = p0 if W == 0 else rope
    while unit < units:
        phase = pair & 1
        z = pair & zero
        if fresh == 2:
            mbarrier.wait(bars[Q_FULL], turn & 1)
        s = qk_start(q, k, bars, phase, z, W)
        if fresh != 0:
            if fresh == 1:
                kept.store(unpack(q_rope, DTYPE))
            if open_split >= 0:  # the split before is stored behind the issue of Q K: the tensor cores work meanwhile
                if W == 0:
                    mbarrier.wait(bars[SUM_READY], (splits & 1) ^ 1)
                    total = row.index(2).load(ROW)
                else:  # complete already; but ptxas else waits for the four products of Q K too
                    acc, sums = warpgroup_mma_wait(4, deps=[acc, sums])
                    total = row_values(sums)
                close_split(acc, ref, total, rest, rows, open_split, W, HEADS, SLICES, WITH_LSE)
            if fresh == 2:
                mbarrier.wait(bars[ROPE_FULL], turn & 1)
                q_rope = pack(rope.load(LEFT))
            else:
                q_rope = pack(kept.load(LEFT))
            if not WITH_LSE:  # of each split again: not live while one is stored
                q7 = pack(q._reinterpret(DTYPE, [8, 64, 64], SHARED).index(7).load(LEFT))
            acc = gl.zeros([ROWS, COLS], gl.float32, ACC)
            sums = gl.zeros([ROWS, 8], gl.float32, SUMS)
            ref = gl.full([ROWS], float("-inf"), gl.float32, ROW)
            open_split = 8 * unit + 4 * (slot < 0).to(gl.int32) + 2 * (pos > 0).to(gl.int32) + (stop >= end).to(gl.int32)
            splits += 1
        s = warpgroup_mma_wait(0, deps=[qk_finish(q, k, k_rope, q_rope, q7, s, z, W, WITH_LSE)])
        if SLICES > 1:
            mbarrier.arrive(bars[K_EMPTY + 2 * W + 1], count=1)
        over = pos + 128 >= stop
        last = over & (stop >= end)
        if last:
            mbarrier.arrive(bars[Q_EMPTY], count=1)
            mbarrier.wait(bars[NEXT_READY], turn & 1)
            turn += 1
            unit = gl.load(next_unit(PARTIALS, fold_at) + (turn & 1))
        next_pos, next_end, next_seen, next_slot = load_run(WORK, unit, gl.where(last, units, 0), SLICES)  # its latency is hidden behind the softmax
        if gl.minimum(seen, stop) < pos + (64 * W + 64):
            s = mask_scores(s, seen - pos - 64 * W, stop - pos - 64 * W, HEADS)
        part = z if SLICES == 1 else (open_split >> 2) & (2 * SLICES - 2)  # twice the slice of the unit
        if W == 0:
            acc, ref = relay_0(s, acc, ref, fresh, part, buffers, bars, phase, scale, SLICES, WITH_LSE)
        else:
            acc, sums, ref, rest = relay_1(s, acc, sums, ref, part, buffers, bars, phase, scale, SLICES, WITH_LSE)
        pair += 1
        pos = gl.minimum(pos + 128, stop)
        fresh = over.to(gl.int32)
        if over:
            if W == 1:
                row.index(2).store(row_values(sums))
                mbarrier.arrive(bars[SUM_READY], count=1)
            stop = gl.minimum(stop + kv_split, end)
        if last:
            fresh = 2
            pos, end, seen, slot = next_pos, next_end, next_seen, next_slot
            stop = gl.minimum(pos + kv_split, end)
    if open_split >= 0:
        if W == 0:
            mbarrier.wait(bars[SUM_READY], (splits & 1) ^ 1)
            total = row.index(2).load(ROW)
        else:
            total = row_values(sums)
        close_split(acc, ref, total, rest, rows, open_split, W, HEADS, SLICES, WITH_LSE)


@gluon.jit(
    do_not_specialize=["page_rows", "stride_table", "num_heads", "kv_split", "num_splits", "num_rows", "work_at", "fold_at", "zero"],
    do_not_specialize_on_alignment=["BLOCK_TABLE", "LSE"],
)
def hopper_decode_kernel(
    qn_desc, qp_desc, kv_desc, BLOCK_TABLE, OUT, LSE, PARTIALS, scale_log2, page_rows, stride_table, stride_out_token, stride_out_head,
    num_heads, kv_split, num_splits, num_rows, work_at, fold_at, zero,
    HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr, SEG: gl.constexpr, SLICES: gl.constexpr, WITH_LSE: gl.constexpr, PDL: gl.constexpr,
):
    """Grid (programs). PARTIALS: kernels/partials.py; from 64 * work_at on the list of work, from 64 * fold_at on each
    program's 64 x 512 and then 2 x 3 x 64 fp32 of scratch memory. ``page_rows``: rows from a page to the next. ``zero`` is 0."""
    DTYPE: gl.constexpr = kv_desc.dtype
    buffers = (
        gl.allocate_shared_memory(DTYPE, [2, 64, 256], SHARED), gl.allocate_shared_memory(DTYPE, [64, 64], SHARED),
        gl.allocate_shared_memory(DTYPE, [4, 64, 256], SHARED), gl.allocate_shared_memory(DTYPE, [2, 64, 64], SHARED),
        gl.allocate_shared_memory(DTYPE, [64, 64], SHARED), gl.allocate_shared_memory(gl.float32, [4, 64], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        gl.allocate_shared_memory(DTYPE, [8, 64], SHARED),
    )
    buffers[6].store(gl.full([8, 64], 1.0, DTYPE, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])))
    fence_async_shared()
    bars = ()  # one allocation each: between operations on barriers of a common one stands a bar.sync (66 against 38 in all)
    for _i in gl.static_range(BARRIERS if WITH_LSE else REST0_READY):
        bars = bars + (gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),)
    for i in gl.static_range(BARRIERS if WITH_LSE else REST0_READY):
        mbarrier.init(bars[i], count=2 if i == Q_EMPTY or (SLICES > 1 and (i == K_EMPTY or i == K_EMPTY + 2)) else 1)
    if PDL:
        wait_for_grid(zero)
    WORK = (PARTIALS + work_at.to(gl.int64) * ROWS).to(gl.pointer_type(gl.int32))
    rows = (OUT, LSE, PARTIALS, WORK, fold_at, num_heads, num_splits, num_rows, stride_out_token, stride_out_head, zero)
    gl.warp_specialize([
        (consumer, (rows, WORK, kv_split, scale_log2, zero, buffers, bars, HEADS, SLICES, 0, WITH_LSE)),
        (consumer, (rows, WORK, kv_split, scale_log2, zero, buffers, bars, HEADS, SLICES, 1, WITH_LSE)),
        (producer, (qn_desc, qp_desc, kv_desc, BLOCK_TABLE, WORK, PARTIALS, fold_at, page_rows, stride_table, kv_split, buffers, bars, HEADS, PAGE_SIZE, SEG,
                    SLICES)),
    ], [4, 1], [240, 24])
