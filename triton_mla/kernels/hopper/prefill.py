"""Prefill for Hopper: heads of 128 + 64 columns for q.k and 128 for v, 16-bit inputs, KV tiles of 128. The bits are those of kernels/prefill.py.

Twelve warps, of which the last four hold one: two warpgroups with 64 query rows of an item each (`consumer`), and a warp that issues all
copies (`producer`). The warpgroups take turns on the tensor cores: QK(i) and PV(i-1) of one beside the softmax of the other; without turns
the kernel took 1.12 to 1.24 times as long (H200). The grid is persistent.

Shared memory, in bytes of 16-bit data: q_nope 2 x [64, 128] 32 K, q_rope 2 x [64, 64] 16 K, k_nope 2 x [128, 128] 64 K, k_rope 2 x [128, 64]
32 K, v 2 x [128, 128] 64 K. Barriers, two each: q by warpgroup, k and v by tile & 1, record by item & 1. ``full`` counts the copies' bytes, or
one arrival for a record; ``empty`` counts the warpgroups that have read.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from .assembly import border, pass_turn, rescale, wait_for_grid, wait_turn
from .copies import SHARED, producer
from .registers import SCORES, TILE, full_like
from .rows import load_acc, load_sums, mask_last, record_tiles, store_item
from .softmax import add_sums, first_step, operand, step


@gluon.jit
def qk(q_nope, q_rope, k_nope, k_rope, w, stage):
    """Scores [64, 128]: 128 columns, then the 64 of rope, in one accumulator.

    ``w`` comes with an opaque zero added, which differs between iterations for all ptxas knows; else it takes Q's descriptors out of the
    loop, into registers that O and P need.
    """
    s = warpgroup_mma(q_nope.index(w), k_nope.index(stage).permute((1, 0)), gl.zeros([64, 128], gl.float32, SCORES), use_acc=False, is_async=True)
    return warpgroup_mma(q_rope.index(w), k_rope.index(stage).permute((1, 0)), s, is_async=True)


@gluon.jit
def turn(acc, total, ref, alpha, weights, tile, last, n, buffers, barriers, scale, zero, W: gl.constexpr):
    """S(i) = Q K(i) and O += P(i-1) V(i-1); then, beside the other warpgroup's turn, the softmax of S(i). ``tile`` counts over all items."""
    q_nope, q_rope, k_nope, k_rope, v, record = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty, record_full, record_empty = barriers
    v_stage = tile & 1
    v_phase = (tile >> 1) & 1
    tile += 1
    k_stage = tile & 1
    mbarrier.wait(k_full.index(k_stage), (tile >> 1) & 1)
    wait_turn(W, zero)
    s = qk(q_nope, q_rope, k_nope, k_rope, W + (tile & zero), k_stage)
    mbarrier.wait(v_full.index(v_stage), v_phase)
    acc = rescale(acc, alpha)
    acc = warpgroup_mma(weights, v.index(v_stage), acc, is_async=True)
    pass_turn(W, zero)  # after QK already: the same or slower
    s = warpgroup_mma_wait(1, deps=[s])
    mbarrier.arrive(k_empty.index(k_stage), count=1)
    if tile == last:
        s = mask_last(s, record, n, W)
        mbarrier.arrive(q_empty.index(W), count=1)
    ref, alpha, p = step(s, ref, scale)
    total = add_sums(total, alpha, p)
    following = operand(p, v.dtype)
    border(zero)
    acc, weights, following = warpgroup_mma_wait(0, deps=[acc, weights, following])
    mbarrier.arrive(v_empty.index(v_stage), count=1)
    return acc, total, ref, alpha, following, tile


@gluon.jit
def begin(s, n, tiles, record, q_empty, rows, scale, DTYPE: gl.constexpr, W: gl.constexpr, RESUME: gl.constexpr):
    """Softmax of an item's first tile: there is no old reference to speculate with."""
    if tiles == 1:
        s = mask_last(s, record, n, W)
        mbarrier.arrive(q_empty.index(W), count=1)
    ref, total = load_sums(rows, record, n, W, RESUME)
    ref, alpha, p = first_step(s, ref, scale)
    if not RESUME:
        alpha = full_like(alpha, 1.0)  # nothing to rescale: O and the sums are 0
    return add_sums(total, alpha, p), ref, alpha, operand(p, DTYPE)


@gluon.jit
def consumer(rows, scale, zero, buffers, barriers, W: gl.constexpr, RESUME: gl.constexpr, KEEP: gl.constexpr, WITH_LSE: gl.constexpr):
    q_nope, q_rope, k_nope, k_rope, v, record = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty, record_full, record_empty = barriers
    n, tile = 0, 0  # items and KV tiles so far
    mbarrier.wait(record_full.index(0), 0)
    tiles = record_tiles(record, 0)
    real = tiles >= 0
    mbarrier.wait(q_full.index(W), 0, pred=real)
    mbarrier.wait(k_full.index(0), 0, pred=real)
    if W == 1:
        pass_turn(1, zero)  # warpgroup 0 begins
    wait_turn(W, zero)
    s = qk(q_nope, q_rope, k_nope, k_rope, W, 0)
    pass_turn(W, zero)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_empty.index(0), count=1)
    if RESUME:
        acc = load_acc(rows, record, n, W)
    total, ref, alpha, weights = begin(s, n, tiles, record, q_empty, rows, scale, v.dtype, W, RESUME)
    while tiles >= 0:
        last = tile + tiles - 1
        if not RESUME:
            acc = gl.zeros([64, 128], gl.float32, SCORES)
        while tile < last:
            acc, total, ref, alpha, weights, tile = turn(acc, total, ref, alpha, weights, tile, last, n, buffers, barriers, scale, zero, W)
        # The border of items, one turn: last PV of this one, first QK of the next; this one is stored while that QK runs.
        acc = rescale(acc, alpha)
        n += 1
        mbarrier.wait(record_full.index(n & 1), (n >> 1) & 1)
        next_tiles = record_tiles(record, n)
        real = next_tiles >= 0
        v_stage = tile & 1
        mbarrier.wait(v_full.index(v_stage), (tile >> 1) & 1)
        tile += 1
        k_stage = tile & 1
        wait_turn(W, zero)
        acc = warpgroup_mma(weights, v.index(v_stage), acc, is_async=True)
        mbarrier.wait(q_full.index(W), n & 1, pred=real)
        mbarrier.wait(k_full.index(k_stage), (tile >> 1) & 1, pred=real)
        s = qk(q_nope, q_rope, k_nope, k_rope, W + (n & zero), k_stage)  # of stale data, and unused, after the last item
        pass_turn(W, zero)
        acc, weights = warpgroup_mma_wait(2, deps=[acc, weights])  # QK is two
        mbarrier.arrive(v_empty.index(v_stage), count=1)
        store_item(rows, acc, ref, total, record, n - 1, W, KEEP, WITH_LSE)
        mbarrier.arrive(record_empty.index((n - 1) & 1), count=1)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_empty.index(k_stage), count=1)
        tiles = next_tiles
        if RESUME:
            acc = load_acc(rows, record, n, W)
        total, ref, alpha, weights = begin(s, n, tiles, record, q_empty, rows, scale, v.dtype, W, RESUME)


@gluon.jit
def pair(COUNT: gl.constexpr):
    """Two barriers that wait for ``COUNT`` arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(bars.index(i), count=COUNT)
    return bars


@gluon.jit(
    do_not_specialize=["num_heads", "head_group", "stride_q_head", "stride_k_head", "stride_v_head", "stride_lse", "zero"],
    do_not_specialize_on_alignment=["LSE", "WORK", "COUNT"],
)
def hopper_prefill_kernel(
    q_desc, k_desc, pe_desc, v_desc, OUT, LSE, REFERENCE, TOTAL, ACC, WORK, COUNT, scale_log2, stride_q_head, stride_k_head, stride_v_head,
    stride_out_token, stride_out_head, stride_lse, num_heads, head_group, zero, RESUME: gl.constexpr, KEEP: gl.constexpr, WITH_LSE: gl.constexpr,
):
    """Grid (programs). ``zero`` is 0. WORK [tiles, 8] and COUNT [2] int32: hopper/work.py; OUT, LSE and the state as in kernels/prefill.py."""
    DTYPE: gl.constexpr = q_desc.dtype
    buffers = (
        gl.allocate_shared_memory(DTYPE, [2, 64, 128], SHARED), gl.allocate_shared_memory(DTYPE, [2, 64, 64], SHARED),
        gl.allocate_shared_memory(DTYPE, [2, TILE, 128], SHARED), gl.allocate_shared_memory(DTYPE, [2, TILE, 64], SHARED),
        gl.allocate_shared_memory(DTYPE, [2, TILE, 128], SHARED), gl.allocate_shared_memory(gl.int32, [2, 8], gl.SwizzledSharedLayout(1, 1, 1, [0])),
    )
    barriers = (pair(1), pair(1), pair(1), pair(2), pair(1), pair(2), pair(1), pair(2))
    # what the kernel before stores is read from here on
    wait_for_grid(zero)
    rows = (OUT, LSE, REFERENCE, TOTAL, ACC, num_heads, stride_out_token, stride_out_head, stride_lse)
    gl.warp_specialize([
        (consumer, (rows, scale_log2, zero, buffers, barriers, 0, RESUME, KEEP, WITH_LSE)),
        (consumer, (rows, scale_log2, zero, buffers, barriers, 1, RESUME, KEEP, WITH_LSE)),
        (producer, (q_desc, k_desc, pe_desc, v_desc, WORK, COUNT, head_group, num_heads, stride_q_head, stride_k_head, stride_v_head, buffers, barriers)),
    ], [4, 1], [240, 24])
