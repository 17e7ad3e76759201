"""Query rows of a work item: which they are, what they see, their state, and their result. ``W`` is the warpgroup, whose 64 rows of 128 are meant.

``rows``: (OUT, LSE, REFERENCE, TOTAL, ACC, num_heads, stride_out_token, stride_out_head, stride_lse) of the kernel.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .registers import COLUMN, ROW, ROWS, STORED, SUMS, TILE, across, lanes, to_rows
from .softmax import NOTHING, row_sums

RECORD_READ = gl.constexpr(gl.BlockedLayout([8], [32], [4], [0]))
SUMS_ROW = gl.constexpr(gl.SliceLayout(1, SUMS.value))
SUMS_COLUMN = gl.constexpr(gl.SliceLayout(0, SUMS.value))
STORED_ROW = gl.constexpr(gl.SliceLayout(1, STORED.value))
STORED_COLUMN = gl.constexpr(gl.SliceLayout(0, STORED.value))
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def _field(x, K: gl.constexpr):
    return gl.sum(gl.where(gl.arange(0, 8, RECORD_READ) == K, x, 0), 0)


@gluon.jit
def record_tiles(record, n):
    """KV tiles of item ``n``, or -1 past the last."""
    return _field(record.index(n & 1).load(RECORD_READ), 0)


@gluon.jit
def item_rows(record, n, W: gl.constexpr, LAYOUT: gl.constexpr):
    """(query tokens [64], whether they are the item's, head). Positions of the tile outside the request have no row."""
    x = record.index(n & 1).load(RECORD_READ)
    position = _field(x, 1) + ROWS * W + gl.arange(0, ROWS, LAYOUT)
    inside = (position >= _field(x, 3)) & (position < _field(x, 4)) & (_field(x, 0) >= 0)
    return (_field(x, 2) + position).to(gl.int64), inside, _field(x, 5)


@gluon.jit
def mask_last(s, record, n, W: gl.constexpr):
    """Scores of the item's last KV tile, the only one with tokens that some row does not see: those past its position, or past the end."""
    x = record.index(n & 1).load(RECORD_READ)
    last = gl.minimum(_field(x, 1) + ROWS * W + gl.arange(0, ROWS, ROW), _field(x, 6) - 1)
    token = (_field(x, 0) - 1) * TILE + gl.arange(0, TILE, COLUMN)
    return gl.where(token[None, :] <= last[:, None], s, float("-inf"))


@gluon.jit
def load_sums(rows, record, n, W: gl.constexpr, RESUME: gl.constexpr):
    """(reference [64, 4], sums [64, 8]) of rows before their first tile."""
    OUT, LSE, REFERENCE, TOTAL, ACC, num_heads, stride_out_token, stride_out_head, stride_lse = rows
    ref = gl.full([ROWS, 8], NOTHING, gl.float32, SUMS)
    total = gl.zeros([ROWS, 8], gl.float32, SUMS)
    if RESUME:
        token, inside, head = item_rows(record, n, W, SUMS_ROW)
        state = token * num_heads + head
        reference = gl.load(REFERENCE + state, mask=inside, other=0.0)
        ref = gl.maximum(ref, across(reference, ref))
        total = gl.load(TOTAL + (state[:, None] * 8 + gl.arange(0, 8, SUMS_COLUMN)[None, :]), mask=inside[:, None], other=0.0)
    return lanes(ref), total


@gluon.jit
def load_acc(rows, record, n, W: gl.constexpr):
    """O [64, 128] of rows that are gone on with."""
    OUT, LSE, REFERENCE, TOTAL, ACC, num_heads, stride_out_token, stride_out_head, stride_lse = rows
    token, inside, head = item_rows(record, n, W, ROW)
    return gl.load(ACC + ((token * num_heads + head)[:, None] * 128 + gl.arange(0, 128, COLUMN)[None, :]), mask=inside[:, None], other=0.0)


@gluon.jit
def store_state(rows, acc, ref, total, record, n, W: gl.constexpr):
    OUT, LSE, REFERENCE, TOTAL, ACC, num_heads, stride_out_token, stride_out_head, stride_lse = rows
    token, inside, head = item_rows(record, n, W, ROW)
    state = token * num_heads + head
    reference = to_rows(ref)
    gl.store(REFERENCE + state, gl.where(reference == NOTHING, float("-inf"), reference), mask=inside)
    gl.store(ACC + (state[:, None] * 128 + gl.arange(0, 128, COLUMN)[None, :]), acc, mask=inside[:, None])
    token, inside, head = item_rows(record, n, W, SUMS_ROW)
    state = token * num_heads + head
    gl.store(TOTAL + (state[:, None] * 8 + gl.arange(0, 8, SUMS_COLUMN)[None, :]), total, mask=inside[:, None])


@gluon.jit
def store_result(rows, acc, ref, total, record, n, W: gl.constexpr, WITH_LSE: gl.constexpr):
    """Out and lse as `_common.finish` makes them."""
    OUT, LSE, REFERENCE, TOTAL, ACC, num_heads, stride_out_token, stride_out_head, stride_lse = rows
    divisor = to_rows(row_sums(total))
    empty = divisor == 0.0
    divisor = gl.where(empty, 1.0, divisor)
    inverse = gl.div_rn(gl.full([ROWS], 1.0, gl.float32, ROW), divisor)
    if WITH_LSE:
        token, inside, head = item_rows(record, n, W, ROW)
        lse = gl.where(empty, float("-inf"), (to_rows(ref) + gl.log2(divisor)) * LN2)
        gl.store(LSE + (token * stride_lse + head), lse, mask=inside)
    x = gl.convert_layout((acc * across(inverse, acc)).to(OUT.dtype.element_ty), STORED)
    token, inside, head = item_rows(record, n, W, STORED_ROW)
    at = head.to(gl.int64) * stride_out_head + (token[:, None] * stride_out_token + gl.arange(0, 128, STORED_COLUMN)[None, :])
    gl.store(OUT + at, x, mask=inside[:, None])


@gluon.jit
def store_item(rows, acc, ref, total, record, n, W: gl.constexpr, KEEP: gl.constexpr, WITH_LSE: gl.constexpr):
    if KEEP:
        if _field(record.index(n & 1).load(RECORD_READ), 7) != 0:
            store_result(rows, acc, ref, total, record, n, W, WITH_LSE)
        else:
            store_state(rows, acc, ref, total, record, n, W)
    else:
        store_result(rows, acc, ref, total, record, n, W, WITH_LSE)
