"""Operations along rows, with one order of additions for all of them; `triton_mla.companion.rows.RowOrder` words it.

A tile is [M, WIDTH]: each of its rows is one part of one row of the tensor, so that a program may hold any parts of any rows.
"""

import triton
import triton.language as tl

from .._common import no_nan, round_to

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def tree(x):
    """[M, N] -> [M]: neighbours are added until one value is left, N a power of two up to 1024.

    A sum of two terms has one order, so no layout changes it. Neighbours and not halves: a thread has loaded those, and 8 become 1 before
    a shuffle.
    """
    for _ in tl.static_range(10):
        if x.shape[1] > 1:
            x = tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]), 2)
    return tl.reshape(x, [x.shape[0]])


@triton.jit
def locate_parts(num_rows, length, ROWS: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr):
    """This program's rows with all their parts: (row [M, 1] int64, first columns [M, WIDTH], there [M, 1])."""
    i = tl.arange(0, ROWS * PARTS)[:, None]
    row = tl.program_id(0) * ROWS + i // PARTS
    return row.to(tl.int64), i % PARTS * length + tl.arange(0, WIDTH)[None, :], row < num_rows


@triton.jit
def load_step(at, col, there, num_cols, OTHER: tl.constexpr, CHUNKS: tl.constexpr, POLICY: tl.constexpr):
    """CHUNKS tensors [M, WIDTH] in fp32, each WIDTH columns after the one before; OTHER past the row's end."""
    xs = ()
    for i in tl.static_range(CHUNKS):
        step = i * col.shape[1]
        xs = xs + (tl.load(at + step, mask=there & (col + step < num_cols), other=OTHER, eviction_policy=POLICY).to(tl.float32),)
    return xs


@triton.jit
def add_step(xs, acc, SQUARES: tl.constexpr, CHUNKS: tl.constexpr):
    """acc + xs[0] + xs[1] ..., element by element, or their squares."""
    for i in tl.static_range(CHUNKS):
        if SQUARES:
            acc = tl.fma(xs[i], xs[i], acc)
        else:
            acc += xs[i]
    return acc


@triton.jit
def row_sums(acc, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """Accumulators [ROWS * PARTS, WIDTH] -> [ROWS]"""
    return tree(tl.reshape(tree(acc), [ROWS, PARTS]))


@triton.jit
def each_part(x, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """[ROWS] -> [ROWS * PARTS, 1]"""
    return tl.reshape(tl.broadcast_to(x[:, None], [ROWS, PARTS]), [ROWS * PARTS, 1])


@triton.jit
def add_residual(xs, rs, DTYPE: tl.constexpr, EMULATE_BF16: tl.constexpr, CHUNKS: tl.constexpr):
    """xs + rs as the tensor's dtype holds it, in fp32."""
    sums = ()
    for i in tl.static_range(CHUNKS):
        sums = sums + (round_to(xs[i] + rs[i], DTYPE, EMULATE_BF16).to(tl.float32),)
    return sums


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    X, RESIDUAL, WEIGHT, OUT, SUM, stride_x, stride_residual, num_rows, num_cols, length, eps, WITH_RESIDUAL: tl.constexpr, WITH_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr, SINGLE: tl.constexpr, EMULATE_BF16: tl.constexpr,
):
    """Grid (row tiles): OUT = x / sqrt(mean(x^2) + eps) * WEIGHT, x = X or the rounded X + RESIDUAL, which goes to SUM.

    SINGLE: a part is one step, and is kept; else it is loaded a second time.
    """
    row, col, there = locate_parts(num_rows, length, ROWS, PARTS, WIDTH)
    DTYPE: tl.constexpr = OUT.dtype.element_ty
    x_row, r_row, out, sums = X + row * stride_x, RESIDUAL + row * stride_residual, OUT + row * num_cols, SUM + row * num_cols
    acc = tl.zeros([ROWS * PARTS, WIDTH], tl.float32)
    if SINGLE:
        xs = load_step(x_row + col, col, there, num_cols, 0.0, CHUNKS, "")
        if WITH_RESIDUAL:
            xs = add_residual(xs, load_step(r_row + col, col, there, num_cols, 0.0, CHUNKS, ""), DTYPE, EMULATE_BF16, CHUNKS)
        acc = add_step(xs, acc, True, CHUNKS)
    else:
        for start in range(0, length, CHUNKS * WIDTH):
            xs = load_step(x_row + col + start, col + start, there, num_cols, 0.0, CHUNKS, "")
            if WITH_RESIDUAL:
                xs = add_residual(xs, load_step(r_row + col + start, col + start, there, num_cols, 0.0, CHUNKS, ""), DTYPE, EMULATE_BF16, CHUNKS)
            acc = add_step(xs, acc, True, CHUNKS)
    total = row_sums(acc, ROWS, PARTS)
    scale = tl.div_rn(tl.zeros_like(total) + 1.0, tl.sqrt_rn(tl.div_rn(total, tl.zeros_like(total) + num_cols) + eps))
    scale = each_part(scale, ROWS, PARTS)
    if SINGLE:
        _store_normed(xs, scale, WEIGHT, out + col, sums + col, col, there, num_cols, WITH_RESIDUAL, WITH_WEIGHT, CHUNKS, EMULATE_BF16)
    else:
        for start in range(0, length, CHUNKS * WIDTH):
            at = col + start
            xs = load_step(x_row + at, at, there, num_cols, 0.0, CHUNKS, "")
            if WITH_RESIDUAL:
                xs = add_residual(xs, load_step(r_row + at, at, there, num_cols, 0.0, CHUNKS, ""), DTYPE, EMULATE_BF16, CHUNKS)
            _store_normed(xs, scale, WEIGHT, out + at, sums + at, at, there, num_cols, WITH_RESIDUAL, WITH_WEIGHT, CHUNKS, EMULATE_BF16)


@triton.jit
def _store_normed(
    xs, scale, WEIGHT, out, sums, col, there, num_cols, WITH_RESIDUAL: tl.constexpr, WITH_WEIGHT: tl.constexpr, CHUNKS: tl.constexpr, EMULATE_BF16: tl.constexpr
):
    for i in tl.static_range(CHUNKS):
        step = i * col.shape[1]
        ok = there & (col + step < num_cols)
        y = xs[i] * scale
        if WITH_WEIGHT:
            y *= tl.load(WEIGHT + col + step, mask=col + step < num_cols, other=0.0).to(tl.float32)
        tl.store(out + step, round_to(y, out.dtype.element_ty, EMULATE_BF16), mask=ok)
        if WITH_RESIDUAL:
            tl.store(sums + step, xs[i].to(sums.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["num_rows"])
def mean_kernel(
    X, OUT, stride_x, num_rows, num_cols, length,
    ROWS: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr, SINGLE: tl.constexpr, EMULATE_BF16: tl.constexpr,
):
    """Grid (row tiles): OUT [num_rows], the sum of each row over num_cols."""
    row, col, there = locate_parts(num_rows, length, ROWS, PARTS, WIDTH)
    acc = tl.zeros([ROWS * PARTS, WIDTH], tl.float32)
    for start in range(0, length, CHUNKS * WIDTH):
        acc = add_step(load_step(X + row * stride_x + col + start, col + start, there, num_cols, 0.0, CHUNKS, ""), acc, False, CHUNKS)
    total = row_sums(acc, ROWS, PARTS)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.store(OUT + rows, round_to(tl.div_rn(total, tl.zeros_like(total) + num_cols), OUT.dtype.element_ty, EMULATE_BF16), mask=rows < num_rows)


@triton.jit
def exp_step(xs, m, s, CHUNKS: tl.constexpr):
    """The running maximum and sum of exponentials of each accumulator, and one more chunk after the other against their common maximum."""
    new = m
    for i in tl.static_range(CHUNKS):
        new = tl.maximum(new, xs[i])
    base = no_nan(new)
    s *= tl.exp2((m - base) * LOG2E)
    for i in tl.static_range(CHUNKS):
        s += tl.exp2((xs[i] - base) * LOG2E)
    return new, s


@triton.jit
def reduce_state(m, s):
    """[M, N] -> [M] maxima, and the tree of the sums against them."""
    top = tl.max(m, 1)
    return top, tree(s * tl.exp2((m - no_nan(top)[:, None]) * LOG2E))


@triton.jit
def store_results(xs, top, total, out, col, there, num_cols, LOG: tl.constexpr, CHUNKS: tl.constexpr, POLICY: tl.constexpr, EMULATE_BF16: tl.constexpr):
    """exp(x - top) / total or its logarithm; ``top`` and ``total`` [M, 1]. A row of nothing but -inf becomes NaN, as in torch."""
    top = no_nan(top)
    if LOG:
        log_total = tl.log(total)
    else:
        inverse = tl.div_rn(tl.zeros_like(total) + 1.0, total)
    for i in tl.static_range(CHUNKS):
        step = i * col.shape[1]
        y = (xs[i] - top) - log_total if LOG else tl.exp2((xs[i] - top) * LOG2E) * inverse
        tl.store(out + step, round_to(y, out.dtype.element_ty, EMULATE_BF16), mask=there & (col + step < num_cols), eviction_policy=POLICY)


@triton.jit(do_not_specialize=["num_rows"])
def softmax_kernel(
    X, OUT, stride_x, num_rows, num_cols, length, LOG: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr, SINGLE: tl.constexpr, EMULATE_BF16: tl.constexpr,
):
    """Grid (row tiles): whole rows. A row that is not kept is read a second time from its end, where the L2 cache holds most of it."""
    row, col, there = locate_parts(num_rows, length, ROWS, PARTS, WIDTH)
    x, out = X + row * stride_x, OUT + row * num_cols
    m = tl.full([ROWS * PARTS, WIDTH], -float("inf"), tl.float32)
    s = tl.zeros([ROWS * PARTS, WIDTH], tl.float32)
    if SINGLE:
        xs = load_step(x + col, col, there, num_cols, -float("inf"), CHUNKS, "")
        m, s = exp_step(xs, m, s, CHUNKS)
    else:
        for start in range(0, length, CHUNKS * WIDTH):
            m, s = exp_step(load_step(x + col + start, col + start, there, num_cols, -float("inf"), CHUNKS, "evict_last"), m, s, CHUNKS)
    m, s = reduce_state(m, s)
    m, s = reduce_state(tl.reshape(m, [ROWS, PARTS]), tl.reshape(s, [ROWS, PARTS]))
    m, s = each_part(m, ROWS, PARTS), each_part(s, ROWS, PARTS)
    if SINGLE:
        store_results(xs, m, s, out + col, col, there, num_cols, LOG, CHUNKS, "", EMULATE_BF16)
    else:
        for done in range(0, length, CHUNKS * WIDTH):
            at = col + (length - CHUNKS * WIDTH - done)
            xs = load_step(x + at, at, there, num_cols, -float("inf"), CHUNKS, "evict_first")
            store_results(xs, m, s, out + at, at, there, num_cols, LOG, CHUNKS, "evict_first", EMULATE_BF16)


@triton.jit
def softmax_states_kernel(X, STATES, stride_x, num_cols, length, PARTS: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr):
    """Grid (rows, parts): STATES [rows, 2, PARTS], the maximum and the sum of each part, for rows too few to fill the machine."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    col = part * length + tl.arange(0, WIDTH)[None, :]
    m = tl.full([1, WIDTH], -float("inf"), tl.float32)
    s = tl.zeros([1, WIDTH], tl.float32)
    for start in range(0, length, CHUNKS * WIDTH):
        m, s = exp_step(load_step(X + row * stride_x + col + start, col + start, True, num_cols, -float("inf"), CHUNKS, ""), m, s, CHUNKS)
    m, s = reduce_state(m, s)
    state = STATES + (row * 2 * PARTS + part) + tl.arange(0, 1)
    tl.store(state, m)
    tl.store(state + PARTS, s)


@triton.jit
def softmax_results_kernel(
    X, STATES, OUT, stride_x, num_cols, length, LOG: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr, EMULATE_BF16: tl.constexpr
):
    """Grid (rows, parts): the results of one part, from the states of all."""
    row = tl.program_id(0).to(tl.int64)
    state = STATES + row * 2 * PARTS + tl.arange(0, PARTS)[None, :]
    m, s = reduce_state(tl.load(state), tl.load(state + PARTS))
    m, s = m[:, None], s[:, None]
    for start in range(0, length, CHUNKS * WIDTH):
        col = tl.program_id(1) * length + start + tl.arange(0, WIDTH)[None, :]
        xs = load_step(X + row * stride_x + col, col, True, num_cols, -float("inf"), CHUNKS, "")
        store_results(xs, m, s, OUT + row * num_cols + col, col, True, num_cols, LOG, CHUNKS, "", EMULATE_BF16)


@triton.jit(do_not_specialize=["num_rows"])
def silu_and_mul_kernel(X, OUT, stride_x, num_rows, num_cols, ROWS: tl.constexpr, WIDTH: tl.constexpr, EMULATE_BF16: tl.constexpr):
    """Grid (row tiles, column tiles): OUT[:, i] = silu(X[:, i]) * X[:, num_cols + i]"""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    col = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)[None, :]
    ok = (row < num_rows) & (col < num_cols)
    gate = tl.load(X + row * stride_x + col, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(X + row * stride_x + num_cols + col, mask=ok, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp2(-gate * LOG2E)) * up
    tl.store(OUT + row * num_cols + col, round_to(y, OUT.dtype.element_ty, EMULATE_BF16), mask=ok)
