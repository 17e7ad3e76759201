"""Layouts of a warpgroup's 64 query rows, and views of registers in them. No view moves data between lanes.

A thread of SCORES has two rows, 8 apart, and of each the columns c and c + 1 of every 8; the four lanes of a row are neighbours.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROWS = gl.constexpr(64)  # of a warpgroup
TILE = gl.constexpr(128)  # tokens of a KV tile, and query rows of a work item
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))  # scores and O [64, 128]
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16]))  # row sums [64, 8]
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, SCORES.value, 2))  # the left operand of a product, in registers
ROW = gl.constexpr(gl.SliceLayout(1, SCORES.value))
COLUMN = gl.constexpr(gl.SliceLayout(0, SCORES.value))
# O in 16 bits: a thread stores 8 bytes, the four lanes of a row a whole sector. SCORES becomes it by shuffles; 16 bytes a thread would need
# shared memory.
STORED = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0], [0, 16], [0, 32], [0, 64]], lane_bases=[[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]], block_bases=[], shape=[64, 128]))


@gluon.jit
def halves(x):
    """x[:, :n/2], x[:, n/2:]"""
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))


@gluon.jit
def join_halves(a, b):
    """Two [64, 64] to one [64, 128] of SCORES."""
    return gl.convert_layout(gl.reshape(gl.permute(gl.join(a, b), (0, 2, 1)), [a.shape[0], 2 * a.shape[1]]), SCORES, assert_trivial=True)


@gluon.jit
def fold(p):
    """[64, 128] -> [64, 8] of SUMS, halves added: the sums of tree_sum.fold."""
    a, b = halves(p)
    a, b = halves(a + b)
    c, d = halves(a + b)
    e, f = halves(c + d)
    return gl.convert_layout(e + f, SUMS, assert_trivial=True)


@gluon.jit
def lane_max(s):
    """Maximum over each lane's own columns: [64, 4], one number for a row and lane."""
    a, b = halves(s)
    a, b = halves(gl.maximum(a, b))
    c, d = halves(gl.maximum(a, b))
    e, f = halves(gl.maximum(c, d))
    y, z = gl.split(gl.reshape(gl.maximum(e, f), [s.shape[0], 4, 2]))
    return gl.maximum(y, z)


@gluon.jit
def lanes(x8):
    """[64, 8], equal along a row, to [64, 4]: one number for a row and lane."""
    x, _ = gl.split(gl.reshape(x8, [x8.shape[0], 4, 2]))
    return x


@gluon.jit
def _twice(x):
    return gl.reshape(gl.permute(gl.join(x, x), (0, 2, 1)), [x.shape[0], x.shape[1] * 2])


@gluon.jit
def widen8(x4):
    """[64, 4], equal along a row, to [64, 8] of SUMS."""
    return gl.convert_layout(gl.reshape(gl.join(x4, x4), [x4.shape[0], 8]), SUMS, assert_trivial=True)


@gluon.jit
def widen(x4, like):
    """[64, 4], equal along a row, to the 64 or 128 columns of ``like``."""
    y = _twice(_twice(_twice(gl.reshape(gl.join(x4, x4), [x4.shape[0], 8]))))
    if like.shape[1] == 128:
        return gl.convert_layout(_twice(y), like.type.layout, assert_trivial=True)
    else:
        return gl.convert_layout(y, like.type.layout, assert_trivial=True)


@gluon.jit
def narrow(x, like):
    """[64, 64], equal along a row, to [64, 4] of the layout of ``like``."""
    a, b = halves(x)
    c, d = halves(a)
    e, f = halves(c)
    return gl.convert_layout(lanes(e), like.type.layout, assert_trivial=True)


@gluon.jit
def to_rows(x4):
    """[64, 4], equal along a row, to [64] of ROW."""
    return gl.convert_layout(gl.max(widen8(x4), 1), ROW, assert_trivial=True)


@gluon.jit
def across(x, like):
    """[64] of ROW to the shape of ``like``."""
    return gl.broadcast(gl.convert_layout(x, gl.SliceLayout(1, like.type.layout), assert_trivial=True)[:, None], like)[0]


@gluon.jit
def full_like(x, value):
    return gl.full(x.shape, 0.0, gl.float32, x.type.layout) + value
