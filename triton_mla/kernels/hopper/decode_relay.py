"""A pair of KV tiles in the Hopper decode: how the two warpgroups pass its softmax on to each other (the table in decode.py).

The arithmetic is that of `_common.softmax_step` and `_common.sum_weights`. ``buffers`` and ``bars``: decode.py and decode_copies.py. Row values
in shared memory: the reference after tiles 0 and 1, sums of a split's rounded weights, and of what rounding took from them. ``part``: where
in K, cut into 4 * SLICES parts, the value columns of tile 0 and warpgroup 0 lie.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from .copies import SHARED
from .decode_copies import K_EMPTY, P0_READY, P1_READY, REF1_READY, REST0_READY, REST1_READY
from .decode_rows import COLUMN, ROW, ROWS, SCORES, SUMS, no_nan, row_values
from .registers import across, full_like

LEFT = gl.constexpr(gl.DotOperandLayout(0, SCORES.value, 2))  # the left operand of a product, in registers
LEFT_OF_SUMS = gl.constexpr(gl.DotOperandLayout(0, SUMS.value, 2))


@gluon.jit
def mask_scores(s, seen, stop, HEADS: gl.constexpr):
    """``seen``: columns that the tile's first query token sees, each further one sees one more; ``stop``: columns until the split ends."""
    limit = gl.minimum(seen + gl.arange(0, ROWS, ROW) // HEADS, stop)
    return gl.where(gl.arange(0, 64, COLUMN)[None, :] < limit[:, None], s, float("-inf"))


@gluon.jit
def on_grid(s, scale):
    """Row maximum in the log2 domain, rounded down to a multiple of 8."""
    return gl.floor(gl.max(s, 1) * scale * 0.125) * 8.0


@gluon.jit
def weights_of(s, scale, ref):
    return gl.exp2(gl.fma(s, full_like(s, scale), across(-no_nan(ref), s)))


@gluon.jit
def rescale(x, alpha):
    return x * across(alpha, x)


@gluon.jit
def rest_of(p, rounded):
    """What rounding took from the weights, as the left operand of a product."""
    return gl.convert_layout((p - rounded.to(gl.float32)).to(rounded.dtype), LEFT_OF_SUMS, assert_trivial=True)


@gluon.jit
def spread(x):
    """[64] of ROW to [64, 8] of SUMS."""
    return across(x, gl.zeros([ROWS, 8], gl.float32, SUMS))


@gluon.jit
def relay_0(s, acc, ref, fresh, part, buffers, bars, phase, scale, SLICES: gl.constexpr, WITH_LSE: gl.constexpr):
    q, rope, k, k_rope, p0, row, ones = buffers
    LEFT_OF_ACC: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    values = k._reinterpret(k.dtype, [4 * SLICES, 64, 256 // SLICES], SHARED)
    ref0 = gl.maximum(ref, on_grid(s, scale))
    row.index(0).store(ref0)
    alpha = gl.exp2(ref - no_nan(ref0))
    p = weights_of(s, scale, ref0)
    rounded = p.to(k.dtype)
    p0.store(rounded)
    fence_async_shared()
    mbarrier.arrive(bars[P0_READY], count=1)
    if WITH_LSE:
        mbarrier.wait(bars[REST1_READY], phase ^ 1)
        rest = gl.where(fresh != 0, 0.0, row.index(3).load(ROW))
        rests = warpgroup_mma(rest_of(p, rounded), ones.permute((1, 0)), rescale(spread(rest), alpha), is_async=True)
    acc = rescale(acc, alpha)
    pv = warpgroup_mma(gl.convert_layout(rounded, LEFT_OF_ACC, assert_trivial=True), values.index(part), acc, is_async=True)
    if WITH_LSE:
        rests = warpgroup_mma_wait(1, deps=[rests])
        row.index(3).store(row_values(rests))
        mbarrier.arrive(bars[REST0_READY], count=1)
    mbarrier.wait(bars[REF1_READY], phase)
    ref = row.index(1).load(ROW)
    alpha = gl.exp2(ref0 - no_nan(ref))
    acc = warpgroup_mma_wait(0, deps=[pv])
    mbarrier.arrive(bars[K_EMPTY], count=1)
    acc = rescale(acc, alpha)
    mbarrier.wait(bars[P1_READY], phase)
    acc = warpgroup_mma_wait(0, deps=[warpgroup_mma(rope, values.index(part + 2 * SLICES), acc, is_async=True)])
    mbarrier.arrive(bars[K_EMPTY + 2], count=1)
    return acc, ref


@gluon.jit
def relay_1(s, acc, sums, ref, part, buffers, bars, phase, scale, SLICES: gl.constexpr, WITH_LSE: gl.constexpr):
    """Also the row sums of tiles 0 and 1, and of the rests of tile 1."""
    q, rope, k, k_rope, p0, row, ones = buffers
    LEFT_OF_ACC: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    FREED: gl.constexpr = K_EMPTY + (1 if SLICES == 1 else 0)
    values = k._reinterpret(k.dtype, [4 * SLICES, 64, 256 // SLICES], SHARED)
    own = on_grid(s, scale)
    mbarrier.wait(bars[P0_READY], phase)
    ref0 = row.index(0).load(ROW)
    alpha = gl.exp2(ref - no_nan(ref0))
    acc = rescale(acc, alpha)
    sums = rescale(sums, alpha)
    p_sum = warpgroup_mma(p0, ones.permute((1, 0)), sums, is_async=True)
    pv = warpgroup_mma(p0, values.index(part + 1), acc, is_async=True)
    ref = gl.maximum(ref0, own)
    row.index(1).store(ref)
    mbarrier.arrive(bars[REF1_READY], count=1)
    alpha = gl.exp2(ref0 - no_nan(ref))
    p = weights_of(s, scale, ref)
    rounded = p.to(k.dtype)
    rope.store(rounded)  # both warpgroups have had Q's rope columns in registers since P0_READY
    fence_async_shared()
    mbarrier.arrive(bars[P1_READY], count=1)
    rest = gl.zeros([ROWS], gl.float32, ROW)
    sums, acc = warpgroup_mma_wait(0, deps=[p_sum, pv])
    sums = rescale(sums, alpha)
    mbarrier.arrive(bars[FREED], count=1)
    if WITH_LSE:
        mbarrier.wait(bars[REST0_READY], phase)
        rests = warpgroup_mma(rest_of(p, rounded), ones.permute((1, 0)), rescale(spread(row.index(3).load(ROW)), alpha), is_async=True)
    acc = rescale(acc, alpha)
    p_sum = warpgroup_mma(gl.convert_layout(rounded, LEFT_OF_SUMS, assert_trivial=True), ones.permute((1, 0)), sums, is_async=True)
    pv = warpgroup_mma(gl.convert_layout(rounded, LEFT_OF_ACC, assert_trivial=True), values.index(part + 2 * SLICES + 1), acc, is_async=True)
    if WITH_LSE:
        rests, sums, acc = warpgroup_mma_wait(0, deps=[rests, p_sum, pv])
        rest = row_values(rests)
        row.index(3).store(rest)
        mbarrier.arrive(bars[REST1_READY], count=1)
    else:
        sums, acc = warpgroup_mma_wait(0, deps=[p_sum, pv])
    mbarrier.arrive(bars[FREED + 2], count=1)
    return acc, sums, ref, rest
