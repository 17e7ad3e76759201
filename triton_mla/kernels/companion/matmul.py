"""Matrix products whose rows do not know of each other: k ascending in one fp32 accumulator, or in one for each split of K, added in ascending order."""

import triton
import triton.language as tl

from .._common import operand, round_to


@triton.jit
def place(tile, row_tiles, col_tiles, GROUP_M: tl.constexpr):
    """(row tile, column tile) of a number: GROUP_M row tiles go through the columns together, so that what they share stays in L2."""
    group = tile // (GROUP_M * col_tiles)
    first = group * GROUP_M
    height = tl.minimum(row_tiles - first, GROUP_M)
    within = tile % (GROUP_M * col_tiles)
    return first + within % height, within // height


@triton.jit
def add_product(x, w, acc, SWAP: tl.constexpr, PRECISION: tl.constexpr, EMULATE_BF16: tl.constexpr):
    """acc + x . w of x [M, K] and w [K, N]; SWAP has the accumulator transposed, with the weights as the wide operand of the matrix unit."""
    x = operand(x, EMULATE_BF16)
    w = operand(w, EMULATE_BF16)
    if SWAP:
        return tl.dot(tl.trans(w), tl.trans(x), acc, input_precision=PRECISION)
    else:
        return tl.dot(x, w, acc, input_precision=PRECISION)


@triton.jit
def add_products(
    acc, a, b, rows, cols, start, end, stride_a_k, stride_b_k,
    BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, SWAP: tl.constexpr, PRECISION: tl.constexpr, EMULATE_BF16: tl.constexpr,
):
    """acc + the products of k from ``start`` to ``end``, ascending. a [M, 1] and b [1, N]: pointers to k = 0; rows and cols: which of them exist."""
    k = tl.arange(0, BLOCK_K)
    whole = end
    if not EVEN_K:
        whole = end - (end - start) % BLOCK_K
    for at in range(start, whole, BLOCK_K):
        offset = (at + k).to(tl.int64)
        x = tl.load(a + (offset * stride_a_k)[None, :], mask=rows, other=0.0)
        w = tl.load(b + (offset * stride_b_k)[:, None], mask=cols, other=0.0)
        acc = add_product(x, w, acc, SWAP, PRECISION, EMULATE_BF16)
    if not EVEN_K:
        offset = (whole + k).to(tl.int64)
        x = tl.load(a + (offset * stride_a_k)[None, :], mask=rows & (offset < end)[None, :], other=0.0)
        w = tl.load(b + (offset * stride_b_k)[:, None], mask=cols & (offset < end)[:, None], other=0.0)
        acc = add_product(x, w, acc, SWAP, PRECISION, EMULATE_BF16)
    return acc


@triton.jit(do_not_specialize=["M"])
def matmul_kernel(
    A, B, OUT, BIAS, stride_a_batch, stride_a_m, stride_a_k, stride_b_batch, stride_b_k, stride_b_n, stride_out_batch, stride_out_m, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, EVEN_K: tl.constexpr, SWAP: tl.constexpr,
    SPLIT_K: tl.constexpr, SPLITS: tl.constexpr, ACROSS: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr, EMULATE_BF16: tl.constexpr,
):
    """Grid (row tiles * column tiles * batches, 1): OUT[i, m, n] = BIAS[n] + the sum over k of A[i, m, k] * B[i, k, n].

    With SPLITS > 1 each SPLIT_K of K has an accumulator of its own. ACROSS gives each a program too: the grid has SPLITS times as many, and
    OUT holds their fp32 results, batch and split its first axis.
    """
    row_tiles = tl.cdiv(M, BLOCK_M)
    col_tiles = tl.cdiv(N, BLOCK_N)
    tiles = row_tiles * col_tiles
    place_out = tl.program_id(0) // tiles
    batch = place_out.to(tl.int64)
    if ACROSS:
        batch = batch // SPLITS
    row_tile, col_tile = place(tl.program_id(0) % tiles, row_tiles, col_tiles, GROUP_M)
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    col = col_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = (row < M)[:, None]
    cols = (col < N)[None, :]
    a = A + batch * stride_a_batch + row.to(tl.int64)[:, None] * stride_a_m
    b = B + batch * stride_b_batch + col.to(tl.int64)[None, :] * stride_b_n
    zeros = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), dtype=tl.float32)
    if SPLITS == 1:
        acc = add_products(zeros, a, b, rows, cols, 0, K, stride_a_k, stride_b_k, BLOCK_K, EVEN_K, SWAP, PRECISION, EMULATE_BF16)
    elif ACROSS:
        start = place_out % SPLITS * SPLIT_K
        end = tl.minimum(start + SPLIT_K, K)
        acc = add_products(zeros, a, b, rows, cols, start, end, stride_a_k, stride_b_k, BLOCK_K, EVEN_K, SWAP, PRECISION, EMULATE_BF16)
    else:
        acc = zeros
        for start in range(0, K, SPLIT_K):
            end = tl.minimum(start + SPLIT_K, K)
            acc += add_products(zeros, a, b, rows, cols, start, end, stride_a_k, stride_b_k, BLOCK_K, EVEN_K, SWAP, PRECISION, EMULATE_BF16)
    if SWAP:
        acc = tl.trans(acc)
    out = OUT + place_out.to(tl.int64) * stride_out_batch + row.to(tl.int64)[:, None] * stride_out_m + col[None, :]
    if ACROSS:
        tl.store(out, acc, mask=rows & cols)
    else:
        if HAS_BIAS:
            acc += tl.load(BIAS + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
        tl.store(out, round_to(acc, OUT.dtype.element_ty, EMULATE_BF16), mask=rows & cols)


@triton.jit(do_not_specialize=["M"])
def add_splits_kernel(
    PARTIALS, OUT, BIAS, stride_out_batch, stride_out_m, M, N,
    SPLITS: tl.constexpr, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, EMULATE_BF16: tl.constexpr,
):
    """Grid (rows of all batches, column tiles): the partial sums [batch, SPLITS, M, N] of a row in ascending order, then the bias, rounded once."""
    row = tl.program_id(0).to(tl.int64)
    batch, m = row // M, row % M
    col = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    there = col < N
    total = tl.zeros((WIDTH,), dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(PARTIALS + ((batch * SPLITS + split) * M + m) * N + col, mask=there, other=0.0)
    if HAS_BIAS:
        total += tl.load(BIAS + col, mask=there, other=0.0).to(tl.float32)
    tl.store(OUT + batch * stride_out_batch + m * stride_out_m + col, round_to(total, OUT.dtype.element_ty, EMULATE_BF16), mask=there)


@triton.jit
def load_block(DESCRIPTOR, batch, row, col, BY_ROWS: tl.constexpr):
    """A block [rows, cols] of one matrix of a batch, which lies so in memory if BY_ROWS, else as [cols, rows]. Outside are zeros."""
    block = DESCRIPTOR.load([batch, row, col] if BY_ROWS else [batch, col, row])
    block = block.reshape(block.shape[1], block.shape[2])
    return block if BY_ROWS else block.T


@triton.jit
def add_blocks(
    acc, A, B, batch, row, col, start, end, BLOCK_K: tl.constexpr, A_BY_ROWS: tl.constexpr, B_BY_ROWS: tl.constexpr, SWAP: tl.constexpr,
):
    """`add_products` from descriptors."""
    for k in range(start, end, BLOCK_K):
        acc = add_product(load_block(A, batch, row, k, A_BY_ROWS), load_block(B, batch, k, col, B_BY_ROWS), acc, SWAP, "ieee", False)
    return acc


@triton.jit
def store_block(OUT, block, place_out, row, col):
    """By `reshape`: with another axis by indexing the block goes through shared memory twice."""
    OUT.store([place_out, row, col], block.to(OUT.dtype).reshape(1, block.shape[0], block.shape[1]))


@triton.jit
def store_tile(OUT, BIAS, acc, place_out, row, col, N, HAS_BIAS: tl.constexpr, SUBTILES: tl.constexpr):
    """One tile of the result, in SUBTILES runs of columns: what it is staged in takes as much less of shared memory."""
    if HAS_BIAS:
        c = col + tl.arange(0, acc.shape[1])
        acc += tl.load(BIAS + c, mask=c < N, other=0.0).to(tl.float32)[None, :]
    if SUBTILES == 2:
        left, right = tl.split(tl.permute(tl.reshape(acc, (acc.shape[0], 2, acc.shape[1] // 2)), (0, 2, 1)))
        store_block(OUT, left, place_out, row, col)
        store_block(OUT, right, place_out, row, col + left.shape[1])
    else:
        store_block(OUT, acc, place_out, row, col)


@triton.jit(do_not_specialize=["batches", "M", "N", "K"])
def matmul_tma_kernel(
    A, B, OUT, BIAS, batches, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, A_BY_ROWS: tl.constexpr, B_BY_ROWS: tl.constexpr,
    SWAP: tl.constexpr, SPLIT_K: tl.constexpr, SPLITS: tl.constexpr, ACROSS: tl.constexpr, HAS_BIAS: tl.constexpr, SUBTILES: tl.constexpr,
):
    """`matmul_kernel` by descriptors (TMA). Grid (programs, 1): each takes every program-count-th tile of all batches, and with ACROSS of all splits."""
    row_tiles = tl.cdiv(M, BLOCK_M)
    col_tiles = tl.cdiv(N, BLOCK_N)
    tiles = row_tiles * col_tiles
    for tile in tl.range(tl.program_id(0), tiles * batches * (SPLITS if ACROSS else 1), tl.num_programs(0), flatten=ACROSS or SPLITS == 1):
        place_out = tile // tiles
        row_tile, col_tile = place(tile % tiles, row_tiles, col_tiles, GROUP_M)
        row, col = row_tile * BLOCK_M, col_tile * BLOCK_N
        acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), dtype=tl.float32)
        if ACROSS:
            start = place_out % SPLITS * SPLIT_K
            acc = add_blocks(acc, A, B, place_out // SPLITS, row, col, start, tl.minimum(start + SPLIT_K, K), BLOCK_K, A_BY_ROWS, B_BY_ROWS, SWAP)
        elif SPLITS == 1:
            acc = add_blocks(acc, A, B, place_out, row, col, 0, K, BLOCK_K, A_BY_ROWS, B_BY_ROWS, SWAP)
        else:
            zeros = acc
            for start in range(0, K, SPLIT_K):
                acc += add_blocks(zeros, A, B, place_out, row, col, start, tl.minimum(start + SPLIT_K, K), BLOCK_K, A_BY_ROWS, B_BY_ROWS, SWAP)
        if SWAP:
            acc = tl.trans(acc)
        store_tile(OUT, BIAS, acc, place_out, row, col, N, HAS_BIAS, SUBTILES)
