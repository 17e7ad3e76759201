"""Products of rows with the matrix of their group, and sums of a token's rows: what a mixture of experts is made of."""

import triton
import triton.language as tl

from .._common import round_to
from .matmul import add_products


@triton.jit
def group_of_tile(tile, GROUP_STARTS, num_rows, num_groups, BLOCK_M: tl.constexpr):
    """(group, first row, end of the group's rows) of a row tile.

    Tile numbers of group e begin at floor(starts[e] / BLOCK_M) + e: an upper bound that needs no host knowledge, so some tiles are empty.
    Rows behind the last group are one group more, of number ``num_groups``.
    """
    CHUNK: tl.constexpr = 256
    begun = 0
    for chunk in range(0, num_groups + 1, CHUNK):
        i = chunk + tl.arange(0, CHUNK)
        first_tile = tl.load(GROUP_STARTS + i, mask=i <= num_groups, other=0) // BLOCK_M + i
        begun += tl.sum(((i <= num_groups) & (first_tile <= tile)).to(tl.int32), 0)
    group = tl.maximum(begun - 1, 0)
    start = tl.load(GROUP_STARTS + group)
    end = tl.load(GROUP_STARTS + group + 1, mask=group < num_groups, other=num_rows)
    # starts outside the rows or falling, which only the device sees, must not lead out of the tensors
    first = tl.maximum(start, 0) + (tile - (start // BLOCK_M + group)) * BLOCK_M
    return group, tl.maximum(first, 0), tl.minimum(end, num_rows)


@triton.jit(do_not_specialize=["num_rows", "num_groups"])
def grouped_kernel(
    X, ROWS, W, GROUP_STARTS, OUT, stride_x_row, stride_w_group, stride_w_n, stride_w_k, stride_out_row, num_rows, num_groups, N, K,
    TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, SWAP: tl.constexpr,
    PRECISION: tl.constexpr, EMULATE_BF16: tl.constexpr,
):
    """Grid (column tiles * row tiles, 1): OUT[s] = X[s] . W[e]^T for row s of group e, k ascending in one fp32 accumulator; 0 for rows of no group.

    With TOP_K > 0 row s reads X[ROWS[s] // TOP_K] instead, rows being sorted pairs of a token and one of its TOP_K slots.
    """
    col_tiles = tl.cdiv(N, BLOCK_N)
    group, first, end = group_of_tile(tl.program_id(0) // col_tiles, GROUP_STARTS, num_rows, num_groups, BLOCK_M)
    if first < end:
        row = first + tl.arange(0, BLOCK_M)
        col = tl.program_id(0) % col_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
        rows = (row < end)[:, None]
        cols = (col < N)[None, :]
        source = row
        if TOP_K > 0:
            source = tl.load(ROWS + row, mask=row < end, other=0) // TOP_K
        real = group < num_groups
        a = X + source.to(tl.int64)[:, None] * stride_x_row
        b = W + tl.minimum(group, num_groups - 1).to(tl.int64) * stride_w_group + col.to(tl.int64)[None, :] * stride_w_n
        acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), dtype=tl.float32)
        acc = add_products(acc, a, b, rows, cols, 0, tl.where(real, K, 0), 1, stride_w_k, BLOCK_K, EVEN_K, SWAP, PRECISION, EMULATE_BF16)
        if SWAP:
            acc = tl.trans(acc)
        out = OUT + row.to(tl.int64)[:, None] * stride_out_row + col[None, :]
        tl.store(out, round_to(acc, OUT.dtype.element_ty, EMULATE_BF16), mask=rows & cols)


@triton.jit(do_not_specialize=["num_experts"])
def add_slots_kernel(
    Y, PLACES, IDS, WEIGHTS, OUT, stride_y_row, stride_out_row, num_experts, N, TOP_K: tl.constexpr, WIDTH: tl.constexpr, EMULATE_BF16: tl.constexpr
):
    """Grid (tokens, column tiles): OUT[t] = the sum over slots j, ascending, of WEIGHTS[t, j] * Y[PLACES[t, j]], each added by one fma; rounded once.

    The weight of a slot whose IDS[t, j] is no expert counts as 0, as its row of Y is: not every weight times 0 is 0.
    """
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), dtype=tl.float32)
    for slot in range(TOP_K):
        pair = token * TOP_K + slot
        expert = tl.load(IDS + pair)
        weight = tl.where((expert >= 0) & (expert < num_experts), tl.load(WEIGHTS + pair), 0.0)
        y = tl.load(Y + tl.load(PLACES + pair).to(tl.int64) * stride_y_row + col, mask=col < N, other=0.0).to(tl.float32)
        total = tl.fma(y, tl.zeros_like(y) + weight, total)
    tl.store(OUT + token * stride_out_row + col, round_to(total, OUT.dtype.element_ty, EMULATE_BF16), mask=col < N)
