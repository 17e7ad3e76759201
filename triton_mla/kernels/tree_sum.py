"""Sums along a row by a tree that is written in the program: `tl.sum` follows the register layout, additions of whole tensors do not."""

import triton
import triton.language as tl

SUMS = tl.constexpr(8)


@triton.jit
def halves(x):
    """x[:, :n/2], x[:, n/2:]"""
    return tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))


@triton.jit
def fold(x):
    """[M, N] -> [M, 8], halves added."""
    if x.shape[1] > 64:
        a, b = halves(x)
        x = a + b
    if x.shape[1] > 32:
        a, b = halves(x)
        x = a + b
    if x.shape[1] > 16:
        a, b = halves(x)
        x = a + b
    if x.shape[1] > 8:
        a, b = halves(x)
        x = a + b
    return x


@triton.jit
def fold_sums(sums):
    """[M, 8] -> [M]: neighbours, which one thread of an MMA holds, then halves."""
    a, b = tl.split(tl.reshape(sums, [sums.shape[0], 4, 2]))
    a, b = halves(a + b)
    a, b = tl.split(a + b)
    return a + b
