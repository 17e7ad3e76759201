"""One tile's softmax by `_common.softmax_step` in the registers of a warpgroup, with the same bits.

The reference r of a row is a multiple of 8 and hardly ever moves, so the common case is made cheap: half of the exponentials are taken with
the old reference while the maximum is still being found; one vote of the warp tells whether any of its rows moves, and only then are the
maxima exchanged, the references moved and those exponentials taken again. Measured on an H200: speculation 1.7 to 1.9 %, test and repair in
one block behind one vote another 3 to 4 %. It is inline assembly because ptxas would if-convert the branch, or move the products of the
rescale in between those of the tensor cores.

A row that has seen no score has the reference NOTHING in place of -inf: finite, so that no special case is needed. exp2(-inf + 2^127) is
0, exp2(-2^127 - r) is 0, and every score moves it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .registers import SUMS, WEIGHTS, fold, full_like, halves, join_halves, lane_max, narrow, widen, widen8

NOTHING = gl.constexpr(-(2.0**127))

ONE, EIGHT, EIGHTH = "0f3F800000", "0f41000000", "0f3E000000"


def _move(xa: str, xb: str, ra: str, rb: str, scale: str, new_ra: str, new_rb: str, alpha_a: str, alpha_b: str) -> tuple[str, str]:
    """The reference of a thread's two rows, whose maxima over this thread's own columns are xa and xb: (test, move).

    ``test`` sets p if some row of the warp moves; new r = r, alpha = 1. ``move``, behind a branch on p, asks the row's other lanes for
    their maximum and moves. x < r + 8 on every lane means floor(x / 8) * 8 <= r, so that nobody else needs the whole maximum.
    """
    test = (
        f"mul.rn.f32 xa, {xa}, {scale}; mul.rn.f32 xb, {xb}, {scale}; add.rn.f32 ya, {ra}, {EIGHT}; add.rn.f32 yb, {rb}, {EIGHT}; "
        "setp.ge.f32 p, xa, ya; setp.ge.f32 q, xb, yb; or.pred p, p, q; vote.sync.any.pred p, p, 0xffffffff; "
        f"mov.f32 {new_ra}, {ra}; mov.f32 {new_rb}, {rb}; mov.f32 {alpha_a}, {ONE}; mov.f32 {alpha_b}, {ONE}; "
    )
    move = "".join(
        f"shfl.sync.bfly.b32 ya, xa, {lane}, 31, 0xffffffff; shfl.sync.bfly.b32 yb, xb, {lane}, 31, 0xffffffff; "
        "max.f32 xa, xa, ya; max.f32 xb, xb, yb; " for lane in (1, 2)
    )
    for x, r, new_r, alpha in (("xa", ra, new_ra, alpha_a), ("xb", rb, new_rb, alpha_b)):
        move += (
            f"mul.rn.f32 {x}, {x}, {EIGHTH}; cvt.rmi.f32.f32 {x}, {x}; mul.rn.f32 {x}, {x}, {EIGHT}; max.f32 {x}, {x}, {r}; "
            f"sub.rn.f32 ya, {r}, {x}; ex2.approx.ftz.f32 {alpha}, ya; mov.f32 {new_r}, {x}; "
        )
    return "{ .reg .pred p, q; .reg .f32 xa, xb, ya, yb, ra, rb, na, nb, t; " + test, move


def _move_only() -> str:
    """Outputs $0,$1 new r; $2,$3 alpha. Inputs $4,$5 lane maxima; $6,$7 r; $8 scale."""
    test, move = _move("$4", "$5", "$6", "$7", "$8", "$0", "$1", "$2", "$3")
    return test + "@!p bra SKIP; " + move + "SKIP: }"


def _move_and_repair() -> str:
    """For 32 values of a thread, whose rows a, b alternate in pairs.

    Outputs $0-31 p, $32-63 new r, $64-95 alpha. Inputs $96-127 scores, $128-159 speculative p, $160-191 r, $192-223 lane maxima, $224-255 scale.
    """
    test, move = _move("$192", "$194", "$160", "$162", "$224", "ra", "rb", "na", "nb")
    copy = "".join(f"mov.f32 ${i}, ${128 + i}; " for i in range(32))
    repair = "neg.f32 ya, ra; neg.f32 yb, rb; " + "".join(
        f"fma.rn.f32 t, ${96 + i}, $224, {'yb' if i & 2 else 'ya'}; ex2.approx.ftz.f32 ${i}, t; " for i in range(32)
    )
    spread = "".join(f"mov.f32 ${32 + i}, {'rb' if i & 2 else 'ra'}; mov.f32 ${64 + i}, {'nb' if i & 2 else 'na'}; " for i in range(32))
    return test + copy + "@!p bra SKIP; " + move + repair + "SKIP: " + spread + "}"


def _rescale() -> str:
    """Outputs $0-63 = inputs $64-127 times $128-191 (alpha), left out by a warp all of whose rows have alpha == 1."""
    test = f"setp.neu.f32 p, $128, {ONE}; setp.neu.f32 q, $130, {ONE}; or.pred p, p, q; vote.sync.any.pred p, p, 0xffffffff; "
    copy = "".join(f"mov.f32 ${i}, ${64 + i}; " for i in range(64))
    multiply = "".join(f"mul.f32 ${i}, ${i}, ${128 + i}; " for i in range(64))
    return "{ .reg .pred p, q; " + test + copy + "@!p bra SKIP; " + multiply + "SKIP: }"


def _sum_lanes() -> str:
    """$0 = $1 summed over the four lanes of a row: those 2 apart, then neighbours."""
    add = "".join(f"shfl.sync.bfly.b32 y, x, {lane}, 31, 0xffffffff; add.rn.f32 x, x, y; " for lane in (2, 1))
    return "{ .reg .f32 x, y; mov.f32 x, $1; " + add + "mov.f32 $0, x; }"


MOVE_ONLY = gl.constexpr(_move_only())
MOVE_AND_REPAIR = gl.constexpr(_move_and_repair())
MOVE_AND_REPAIR_REGISTERS = gl.constexpr(",".join(["=&f"] * 96 + ["f"] * 160))
RESCALE = gl.constexpr(_rescale())
RESCALE_REGISTERS = gl.constexpr(",".join(["=&f"] * 64 + ["f"] * 128))
SUM_LANES = gl.constexpr(_sum_lanes())


@gluon.jit
def rescale(o, alpha4):
    return gl.inline_asm_elementwise(RESCALE, RESCALE_REGISTERS, [o, widen(alpha4, o)], dtype=gl.float32, is_pure=False, pack=64)


@gluon.jit
def first_step(s, r4, scale):
    """(new reference [64, 4], alpha [64, 4], weights [64, 128]) of an item's first tile, whose reference is as good as certain to move."""
    x4 = lane_max(s)
    r4 = gl.convert_layout(r4, x4.type.layout, assert_trivial=True)
    r, alpha = gl.inline_asm_elementwise(
        MOVE_ONLY, "=&f,=&f,=&f,=&f,f,f,f,f,f,f", [x4, r4, full_like(x4, scale)], dtype=(gl.float32, gl.float32), is_pure=False, pack=2)
    return r, alpha, gl.exp2(gl.fma(s, full_like(s, scale), widen(-r, s)))


@gluon.jit
def step(s, r4, scale):
    """The same of any other tile."""
    a, b = halves(s)
    scales = full_like(a, scale)
    pa = gl.exp2(gl.fma(a, scales, widen(-r4, a)))
    pa, r, alpha = gl.inline_asm_elementwise(
        MOVE_AND_REPAIR, MOVE_AND_REPAIR_REGISTERS, [a, pa, widen(r4, a), widen(lane_max(s), a), scales], dtype=(gl.float32, gl.float32, gl.float32),
        is_pure=False, pack=32)
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
    return gl.inline_asm_elementwise(SUM_LANES, "=&f,f", [a + b], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def no_sums():
    return gl.zeros([64, 8], gl.float32, SUMS)
