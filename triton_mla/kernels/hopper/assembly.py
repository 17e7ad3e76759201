"""All inline assembly of the Hopper kernels: what neither Gluon nor its compiler gives, each piece with what it is for."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .registers import full_like, widen

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


# Named barriers of 256 threads pass the turn: warpgroup w waits at 8 + w, and hands over by arriving at 9 - w. The compiler numbers its own from 0.
WAIT_TURN = gl.constexpr(tuple(f"{{ bar.sync {8 + w}, 256; mov.u32 $0, $1; }}" for w in (0, 1)))
PASS_TURN = gl.constexpr(tuple(f"{{ bar.arrive {9 - w}, 256; mov.u32 $0, $1; }}" for w in (0, 1)))
BORDER = gl.constexpr("{ .reg .pred p; setp.eq.s32 p, $1, 0; @p bra SKIP; " + "nanosleep.u32 1000; " * 12 + "SKIP: mov.u32 $0, $1; }")
WAIT_FOR_GRID = gl.constexpr("griddepcontrol.wait; mov.u32 $0, $1;")
MOVE_ONLY = gl.constexpr(_move_only())
MOVE_AND_REPAIR = gl.constexpr(_move_and_repair())
MOVE_AND_REPAIR_REGISTERS = gl.constexpr(",".join(["=&f"] * 96 + ["f"] * 160))
RESCALE = gl.constexpr(_rescale())
RESCALE_REGISTERS = gl.constexpr(",".join(["=&f"] * 64 + ["f"] * 128))
SUM_LANES = gl.constexpr(_sum_lanes())


@gluon.jit
def run(ASM: gl.constexpr, zero):
    """Assembly for its effect: an elementwise operation has to return something."""
    gl.inline_asm_elementwise(ASM, "=ref,r", [zero], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_for_grid(zero):
    """Waits for the kernel before, which a dependent launch does not: Triton's own function for it is not Gluon's."""
    gl.inline_asm_elementwise(WAIT_FOR_GRID, "=r,r", [zero], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_turn(W: gl.constexpr, zero):
    """Warpgroups that take turns on the tensor cores have barriers of their own, of which Gluon has none for a part of a program's warps."""
    ASM: gl.constexpr = WAIT_TURN[W]
    run(ASM, zero)


@gluon.jit
def pass_turn(W: gl.constexpr, zero):
    ASM: gl.constexpr = PASS_TURN[W]
    run(ASM, zero)


@gluon.jit
def border(zero):
    """The border of a basic block: without it ptxas hoists the wait for PV above the softmax. The sleeps never run, but cannot be removed."""
    run(BORDER, zero)


@gluon.jit
def rescale(o, alpha4):
    """o * alpha, in one branch for a warp: ptxas would take it apart, and put its products between those of the tensor cores."""
    return gl.inline_asm_elementwise(RESCALE, RESCALE_REGISTERS, [o, widen(alpha4, o)], dtype=gl.float32, is_pure=False, pack=64)


@gluon.jit
def move(x4, r4, scale):
    """(new reference, alpha), each [64, 4], from maxima and reference [64, 4]: an exchange between lanes only where some row of a warp moves."""
    return gl.inline_asm_elementwise(
        MOVE_ONLY, "=&f,=&f,=&f,=&f,f,f,f,f,f,f", [x4, r4, full_like(x4, scale)], dtype=(gl.float32, gl.float32), is_pure=False, pack=2)


@gluon.jit
def move_and_repair(s, p, r, x, scales):
    """(weights, new reference, alpha), each [64, 64], of scores s, whose weights p were made with the old reference r while the maxima x were found."""
    return gl.inline_asm_elementwise(
        MOVE_AND_REPAIR, MOVE_AND_REPAIR_REGISTERS, [s, p, r, x, scales], dtype=(gl.float32, gl.float32, gl.float32), is_pure=False, pack=32)


@gluon.jit
def sum_lanes(x):
    """Sums over the four lanes of a row, in the order of the portable kernel's tree."""
    return gl.inline_asm_elementwise(SUM_LANES, "=&f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def pack_pairs(a, b):
    """16-bit values in pairs, as int32. Carried through a loop one by one, ptxas may give each a register, and spills them."""
    return gl.inline_asm_elementwise("mov.b32 $0, {$1, $2};", "=r,h,h", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def unpack_pairs(x):
    return gl.inline_asm_elementwise("mov.b32 {$0, $1}, $2;", "=h,=h,r", [x], dtype=(gl.int16, gl.int16), is_pure=True, pack=1)
