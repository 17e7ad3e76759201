"""Keys and values of each head from latent rows: a plain product, whose rows do not depend on how many are computed together.

The rows of a chunk are gathered from their pages first, so that the product reads them as a matrix.
"""

import triton
import triton.language as tl

from ._common import operand, round_to
from .companion.matmul import add_blocks, place, store_tile


@triton.jit
def tokens_of(SEQ_LENS, request, real, kv_limit, chunk_start, chunk_tokens):
    """How many tokens of the chunk requests have; none of a request that is too long."""
    length = tl.load(SEQ_LENS + request, mask=real, other=0)
    return tl.minimum(tl.maximum(tl.where(length > kv_limit, 0, length) - chunk_start, 0), chunk_tokens)


@triton.jit(
    do_not_specialize=["stride_table", "kv_limit", "first_request", "chunk_start", "chunk_tokens"],
    do_not_specialize_on_alignment=["BLOCK_TABLE", "SEQ_LENS"],
)
def gather_kernel(
    KV, BLOCK_TABLE, SEQ_LENS, LATENT, K_PE, stride_page, stride_slot, stride_table, kv_limit, first_request, chunk_start, chunk_tokens,
    R: tl.constexpr, BLOCK_R: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_S: tl.constexpr,
):
    """Grid (token tiles of a chunk * requests, 1): LATENT [requests * chunk_tokens, R] and K_PE [requests * chunk_tokens, P] of the tokens of a
    chunk. Rows past a request's end are not written."""
    tiles = tl.cdiv(chunk_tokens, BLOCK_S)
    request = tl.program_id(0) // tiles
    within = tl.program_id(0) % tiles * BLOCK_S + tl.arange(0, BLOCK_S)
    owned = within < tokens_of(SEQ_LENS, first_request + request, True, kv_limit, chunk_start, chunk_tokens)
    pos = chunk_start + within
    page = tl.load(BLOCK_TABLE + (first_request + request).to(tl.int64) * stride_table + pos // PAGE_SIZE, mask=owned, other=0)
    slot = KV + (page.to(tl.int64) * stride_page + pos % PAGE_SIZE * stride_slot)[:, None]
    row = (request.to(tl.int64) * chunk_tokens + within)[:, None]
    lat = tl.arange(0, BLOCK_R)[None, :]
    ok = owned[:, None] & (lat < R)
    tl.store(LATENT + row * R + lat, tl.load(slot + lat, mask=ok), mask=ok)
    if P > 0:
        rope = tl.arange(0, BLOCK_P)[None, :]
        ok = owned[:, None] & (rope < P)
        tl.store(K_PE + row * P + rope, tl.load(slot + R + rope, mask=ok), mask=ok)


@triton.jit(
    do_not_specialize=["num_columns", "kv_limit", "first_request", "chunk_start", "chunk_tokens"],
    do_not_specialize_on_alignment=["SEQ_LENS"],
)
def up_projection_kernel(
    LATENT, W, OUT, SEQ_LENS, stride_row, stride_w, num_columns, kv_limit, first_request, chunk_start, chunk_tokens,
    R: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    EMULATE_BF16: tl.constexpr,
):
    """Grid (token tiles of a chunk * requests, column tiles): OUT [requests * chunk_tokens, num_columns] = LATENT . W^T, W [num_columns, R].

    The latent columns are summed in ascending order in one accumulator, so no tile size changes a bit. Rows past a request's end are not
    written.
    """
    tiles = tl.cdiv(chunk_tokens, BLOCK_S)
    request = tl.program_id(0) // tiles
    first = tl.program_id(0) % tiles * BLOCK_S
    tokens = tokens_of(SEQ_LENS, first_request + request, True, kv_limit, chunk_start, chunk_tokens)
    if first < tokens:
        within = first + tl.arange(0, BLOCK_S)
        owned = (within < tokens)[:, None]
        row = (request.to(tl.int64) * chunk_tokens + within)[:, None]
        column = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
        some = column < num_columns
        lat = tl.arange(0, BLOCK_K)[None, :]
        acc = tl.zeros([BLOCK_S, BLOCK_O], tl.float32)
        for k in tl.range(0, R, BLOCK_K, num_stages=STAGES):
            x = tl.load(LATENT + row * stride_row + k + lat, mask=owned, other=0.0)
            w = tl.load(W + column.to(tl.int64)[:, None] * stride_w + k + lat, mask=some[:, None], other=0.0)
            acc = tl.dot(operand(x, EMULATE_BF16), tl.trans(operand(w, EMULATE_BF16)), acc, input_precision=PRECISION)
        tl.store(OUT + row * num_columns + column[None, :], round_to(acc, OUT.dtype.element_ty, EMULATE_BF16), mask=owned & some[None, :])


@triton.jit(
    do_not_specialize=["num_columns", "kv_limit", "first_request", "num_requests", "chunk_start", "chunk_tokens"],
    do_not_specialize_on_alignment=["SEQ_LENS"],
)
def up_projection_tma_kernel(
    LATENT, W, OUT, SEQ_LENS, num_columns, kv_limit, first_request, num_requests, chunk_start, chunk_tokens,
    R: tl.constexpr, REQUESTS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, SUBTILES: tl.constexpr,
):
    """`up_projection_kernel` by descriptors (TMA) of [1, rows, columns]. Grid (programs, 1): each takes every program-count-th of the tiles that
    have a token. BLOCK_S divides chunk_tokens. Rows past a request's end, up to the next tile, may be written with anything.
    """
    v = tl.arange(0, REQUESTS)
    tiles = tl.cdiv(tokens_of(SEQ_LENS, first_request + v, v < num_requests, kv_limit, chunk_start, chunk_tokens), BLOCK_S)
    ends = tl.cumsum(tiles, 0)
    row_tiles = tl.sum(tiles, 0)
    col_tiles = tl.cdiv(num_columns, BLOCK_O)
    for tile in tl.range(tl.program_id(0), row_tiles * col_tiles, tl.num_programs(0), flatten=True):
        row_tile, col_tile = place(tile, row_tiles, col_tiles, 8)
        request = tl.sum((ends <= row_tile).to(tl.int32), 0)
        row = request * chunk_tokens + (row_tile - tl.sum(tl.where(v < request, tiles, 0), 0)) * BLOCK_S
        acc = add_blocks(tl.zeros((BLOCK_S, BLOCK_O), dtype=tl.float32), LATENT, W, 0, row, col_tile * BLOCK_O, 0, R, BLOCK_K, True, False, False)
        store_tile(OUT, OUT, acc, 0, row, col_tile * BLOCK_O, num_columns, False, SUBTILES)
