"""Keys and values of each head from latent rows: a plain product, whose rows do not depend on how many are computed together."""

import triton
import triton.language as tl

from ._common import operand, round_to


@triton.jit(
    do_not_specialize=["stride_table", "num_columns", "kv_limit", "first_request", "chunk_start", "chunk_tokens"],
    do_not_specialize_on_alignment=["BLOCK_TABLE", "SEQ_LENS"],
)
def up_projection_kernel(
    KV, W, BLOCK_TABLE, SEQ_LENS, OUT, K_PE, stride_page, stride_slot, stride_table, stride_w, num_columns, kv_limit, first_request, chunk_start,
    chunk_tokens,
    R: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_O: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, EMULATE_BF16: tl.constexpr,
):
    """Grid (token tiles of a chunk * requests, column tiles): OUT [requests * chunk_tokens, num_columns] = latent rows . W^T.

    W [num_columns, R]. The latent columns are summed in ascending order in one accumulator, so no tile size changes a bit. Tokens of the
    chunk past a request's end are not written; the first column tile copies the rope keys to K_PE [requests * chunk_tokens, P].
    With PAGE_SIZE 0 row i of KV is token i of the only request.
    """
    tiles = tl.cdiv(chunk_tokens, BLOCK_S)
    request = tl.program_id(0) // tiles
    within = tl.program_id(0) % tiles * BLOCK_S + tl.arange(0, BLOCK_S)
    pos = chunk_start + within
    kv_len = tl.load(SEQ_LENS + first_request + request)
    kv_len = tl.where(kv_len > kv_limit, 0, kv_len)
    if chunk_start + tl.program_id(0) % tiles * BLOCK_S < kv_len:
        owned = (pos < kv_len) & (within < chunk_tokens)
        if PAGE_SIZE > 0:
            page = tl.load(BLOCK_TABLE + (first_request + request).to(tl.int64) * stride_table + pos // PAGE_SIZE, mask=owned, other=0)
            offset = page.to(tl.int64) * stride_page + pos % PAGE_SIZE * stride_slot
        else:
            offset = pos.to(tl.int64) * stride_slot
        column = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
        some = column < num_columns
        lat = tl.arange(0, BLOCK_K)
        acc = tl.zeros([BLOCK_S, BLOCK_O], tl.float32)
        for first in tl.range(0, R, BLOCK_K, num_stages=STAGES):
            x = tl.load(KV + offset[:, None] + first + lat[None, :], mask=owned[:, None], other=0.0)
            w = tl.load(W + column.to(tl.int64)[:, None] * stride_w + first + lat[None, :], mask=some[:, None], other=0.0)
            acc = tl.dot(operand(x, EMULATE_BF16), tl.trans(operand(w, EMULATE_BF16)), acc, input_precision=PRECISION)
        row = request.to(tl.int64) * chunk_tokens + within
        tl.store(OUT + row[:, None] * num_columns + column[None, :], round_to(acc, OUT.dtype.element_ty, EMULATE_BF16), mask=owned[:, None] & some[None, :])
        if P > 0 and tl.program_id(1) == 0:
            rope = tl.arange(0, BLOCK_P)
            ok = owned[:, None] & (rope < P)[None, :]
            tl.store(K_PE + row[:, None] * P + rope[None, :], tl.load(KV + offset[:, None] + R + rope[None, :], mask=ok), mask=ok)
