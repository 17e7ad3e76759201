"""One tile's softmax by `_common.softmax_step` in the registers of a warpgroup, with the same bits.

The reference r of a row is a multiple of 8 and hardly ever moves, so the common case is made cheap: half of the exponentials are taken with
the old reference while the maximum is still being found; one vote of the warp tells whether any of its rows moves, and only then are the
maxima exchanged, the references moved and those exponentials taken again. Measured on an H200: speculation 1.7 to 1.9 %, test and repair in
one block behind one vote another 3 to 4 %. It is inline assembly (assembly.py) because ptxas would if-convert the branch, or move the products
of the rescale in between those of the tensor cores.

A row that has seen no score has the reference NOTHING in place of -inf: finite, so that no special case is needed. exp2(-inf + 2^127) is
0, exp2(-2^127 - r) is 0, and every score moves it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .assembly import move, move_and_repair, sum_lanes
from .registers import SUMS, WEIGHTS, fold, full_like, halves, join_halves, lane_max, narrow, widen, widen8

NOTHING = gl.constexpr(-(2.0**127))


@gluon.jit
def first_step(s, r4, scale):
    """(new reference [64, 4], alpha [64, 4], weights [64, 128]) of an item's first tile, whose reference is as good as certain to move."""
    x4 = lane_max(s)
    r4 = gl.convert_layout(r4, x4.type.layout, assert_trivial=True)
    r, alpha = move(x4, r4, scale)
    return r, alpha, gl.exp2(gl.fma(s, full_like(s, scale), widen(-r, s)))


@gluon.jit
def step(s, r4, scale):
    """The same of any other tile."""
    a, b = halves(s)
    scales = full_like(a, scale)
    pa = gl.exp2(gl.fma(a, scales, widen(-r4, a)))
    pa, r, alpha = move_and_repair(a, pa, widen(r4, a), widen(lane_max(s), a), scales)
    pb = gl.exp2(gl.fma(b, scales, -r))
    return narrow(r, r4), narrow(alpha, r4), join_halves(pa, pb)


@gluon.jit
def add_sums(total, alpha4, p):
    """[64, 8] partial row sums after this tile."""
    return gl.fma(total, widen8(alpha4), fold(p))


@gluon.jit
def operand(p, DTYPE: gl.constexpr):
    """Weights rounded to 16 bits, as the left operand of the product with V."""
    return gl.convert_layout(p.to(DTYPE), WEIGHTS, assert_trivial=True)


@gluon.jit
def row_sums(total):
    """[64, 8] -> [64, 4], equal along a row: the sums of tree_sum.fold_sums."""
    a, b = gl.split(gl.reshape(total, [total.shape[0], 4, 2]))
    return sum_lanes(a + b)


@gluon.jit
def no_sums():
    return gl.zeros([64, 8], gl.float32, SUMS)
