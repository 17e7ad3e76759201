"""A matrix product of each head's own: what folds W_UK into a query, and applies W_UV to the attended latent."""

import triton
import triton.language as tl

from ._common import operand, round_to


@triton.jit(do_not_specialize=["num_rows", "num_heads"])
def head_matmul_kernel(
    X, W, OUT, stride_x_row, stride_x_head, stride_w_head, stride_w_k, stride_w_n, stride_out_row, stride_out_head, num_rows, num_heads,
    K: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
    EMULATE_BF16: tl.constexpr,
):
    """Grid (row tiles * heads, column tiles): OUT[m, h, n] = sum over ascending k of X[m, h, k] * W[h, k, n], in one fp32 accumulator.

    Row tiles come first in the grid, so that the programs that share a head's weights run together.
    """
    row_tiles = tl.cdiv(num_rows, BLOCK_M)
    head = (tl.program_id(0) // row_tiles).to(tl.int64)
    row = tl.program_id(0) % row_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = row.to(tl.int64)[:, None]
    there = row[:, None] < num_rows
    x = X + head * stride_x_head + rows * stride_x_row
    w = W + head * stride_w_head + col[None, :] * stride_w_n
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a = tl.load(x + k[None, :], mask=there & (k[None, :] < K), other=0.0)
        b = tl.load(w + k[:, None] * stride_w_k, mask=(k[:, None] < K) & (col[None, :] < N), other=0.0)
        acc = tl.dot(operand(a, EMULATE_BF16), operand(b, EMULATE_BF16), acc, input_precision=PRECISION)
    out = OUT + head * stride_out_head + rows * stride_out_row + col[None, :]
    tl.store(out, round_to(acc, OUT.dtype.element_ty, EMULATE_BF16), mask=there & (col[None, :] < N))
