"""Prefill in the MHA form: ragged attention with keys and values of each head, and one rope key a token that the heads share.

A program has BLOCK_M query tokens of one head and walks KV tiles of BLOCK_N tokens at multiples of BLOCK_N from the request's first
token. The state (reference, total, acc) of a row can be left after any tile and taken up again: it is not normalised, and rescaling it is exact.
"""

import triton
import triton.language as tl

from ._common import finish, fma_scalar_rows, operand, round_to, softmax_step
from .tree_sum import SUMS, fold, fold_sums, halves


@triton.jit
def load_rows(POINTERS, row_ok, col, COLS: tl.constexpr, ALL_ROWS: tl.constexpr):
    """[rows, block] with zeros in columns from COLS on and, unless ALL_ROWS, in rows that are not ok."""
    if POINTERS.shape[1] == COLS:
        if ALL_ROWS:
            return tl.load(POINTERS)
        else:
            return tl.load(POINTERS, mask=row_ok[:, None], other=0.0)
    else:
        if ALL_ROWS:
            return tl.load(POINTERS, mask=(col < COLS)[None, :], other=0.0)
        else:
            return tl.load(POINTERS, mask=row_ok[:, None] & (col < COLS)[None, :], other=0.0)


@triton.jit
def find_request(tile, CU_SEQLENS_Q, num_tokens, batch_size, BLOCK_M: tl.constexpr):
    """(request, its first query token, its query tokens, first token of this tile within the request).

    Tile numbers of request r begin at floor(cu[r] / BLOCK_M) + r: an upper bound that needs no host knowledge, so a tile may be empty.
    Tokens from cu[batch_size] on are padding, and count as one more request.
    """
    CHUNK: tl.constexpr = 256
    begun = 0
    for chunk in range(0, batch_size + 1, CHUNK):
        i = chunk + tl.arange(0, CHUNK)
        start = tl.load(CU_SEQLENS_Q + i, mask=i <= batch_size, other=0)
        begun += tl.sum(((i <= batch_size) & (start // BLOCK_M + i <= tile)).to(tl.int32), 0)
    request = tl.maximum(begun - 1, 0)
    q_start = tl.load(CU_SEQLENS_Q + request)
    q_end = tl.load(CU_SEQLENS_Q + request + 1, mask=request < batch_size, other=num_tokens)
    return request, q_start, q_end - q_start, (tile - q_start // BLOCK_M - request) * BLOCK_M


@triton.jit
def add_values(weights, V_ROWS, start, kv_len, acc, STRIDE_V: tl.constexpr, V_DIM: tl.constexpr, TOKENS: tl.constexpr, PRECISION: tl.constexpr,
               ALL_ROWS: tl.constexpr, EMULATE_BF16: tl.constexpr):
    """acc + weights . V, tokens ascending, at most TOKENS in one product."""
    if weights.shape[1] > TOKENS:
        HALF: tl.constexpr = weights.shape[1] // 2
        a, b = halves(weights)
        acc = add_values(a, V_ROWS, start, kv_len, acc, STRIDE_V, V_DIM, TOKENS, PRECISION, ALL_ROWS, EMULATE_BF16)
        return add_values(b, V_ROWS + HALF * STRIDE_V, start + HALF, kv_len, acc, STRIDE_V, V_DIM, TOKENS, PRECISION, ALL_ROWS, EMULATE_BF16)
    else:
        token = tl.arange(0, weights.shape[1])
        val = tl.arange(0, acc.shape[1])
        v = load_rows(V_ROWS + token[:, None] * STRIDE_V + val[None, :], start + token < kv_len, val, V_DIM, ALL_ROWS)
        return tl.dot(weights, operand(v, EMULATE_BF16), acc, input_precision=PRECISION)


@triton.jit
def attend_tiles(
    first, end, q, q_rest, q_pe, Q_ROWS, q_ok, K, K_PE, V, kv_start, kv_len, seen, ref, total, acc, scale_log2,
    STRIDE_K: tl.constexpr, STRIDE_PE: tl.constexpr, STRIDE_V: tl.constexpr, BLOCK_N: tl.constexpr, NOPE: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_REST: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr, V_DIM: tl.constexpr, STEP: tl.constexpr,
    PRECISION: tl.constexpr, HOLD_Q: tl.constexpr,
    MASKED: tl.constexpr, STAGES: tl.constexpr, EMULATE_BF16: tl.constexpr,
):
    """State after the KV tiles from token ``first`` to ``end``. Without MASKED every row sees all of each."""
    token = tl.arange(0, BLOCK_N)
    col = tl.arange(0, BLOCK_K)
    rope = tl.arange(0, BLOCK_P)
    DTYPE: tl.constexpr = V.dtype.element_ty
    K_TILE = K + token[:, None] * STRIDE_K + col[None, :]
    PE_TILE = K_PE + token[:, None] * STRIDE_PE + rope[None, :]
    for start in tl.range(first, end, BLOCK_N, num_stages=STAGES):
        # rows past the end count as zeros, not as whatever lies there: 0 * NaN is NaN
        inside = start + token < kv_len
        row = kv_start + start
        if HOLD_Q:
            k = load_rows(K_TILE + row * STRIDE_K, inside, col, BLOCK_K, not MASKED)
            s = tl.dot(q, tl.trans(operand(k, EMULATE_BF16)), input_precision=PRECISION)
            if BLOCK_REST > 0:
                rest = tl.arange(0, BLOCK_REST)
                k_rest = load_rows(K + BLOCK_K + row * STRIDE_K + token[:, None] * STRIDE_K + rest[None, :], inside, rest, NOPE - BLOCK_K, not MASKED)
                s = tl.dot(q_rest, tl.trans(operand(k_rest, EMULATE_BF16)), s, input_precision=PRECISION)
        else:
            s = tl.zeros([q.shape[0], BLOCK_N], tl.float32)
            for at in tl.range(0, NOPE, BLOCK_K, num_stages=1):
                q_part = load_rows(Q_ROWS + at, q_ok, col, BLOCK_K, False)
                k = load_rows(K_TILE + row * STRIDE_K + at, inside, col, BLOCK_K, not MASKED)
                s = tl.dot(operand(q_part, EMULATE_BF16), tl.trans(operand(k, EMULATE_BF16)), s, input_precision=PRECISION)
        if P > 0:
            k_pe = load_rows(PE_TILE + row * STRIDE_PE, inside, rope, P, not MASKED)
            s = tl.dot(q_pe, tl.trans(operand(k_pe, EMULATE_BF16)), s, input_precision=PRECISION)
        if MASKED:
            s = tl.where((start + token)[None, :] < seen[:, None], s, -float("inf"))
        ref, alpha, p = softmax_step(s, ref, scale_log2, STEP)
        weights = round_to(p, DTYPE, EMULATE_BF16)
        total = fma_scalar_rows(total, alpha, fold(p))
        acc = add_values(weights, V + row * STRIDE_V, start, kv_len, acc * alpha[:, None], STRIDE_V, V_DIM, BLOCK_N if HOLD_Q else BLOCK_K, PRECISION,
                         not MASKED, EMULATE_BF16)
    return ref, total, acc


@triton.jit(
    do_not_specialize=["num_tokens", "batch_size", "num_heads", "kv_limit", "head_group", "first_request", "last_request", "chunk_start", "chunk_tokens"],
    do_not_specialize_on_alignment=["CU_SEQLENS_Q", "KV_LENGTHS", "POSITIONS", "LSE"],
)
def prefill_kernel(
    Q, K_NOPE, K_PE, V, OUT, LSE, REFERENCE, TOTAL, ACC, CU_SEQLENS_Q, KV_LENGTHS, POSITIONS, scale_log2,
    stride_q_token, stride_q_head, stride_k_head, stride_v_head, stride_out_token, stride_out_head, stride_lse,
    num_tokens, batch_size, num_heads, kv_limit, head_group, first_request, last_request, chunk_start, chunk_tokens,
    STRIDE_K: tl.constexpr, STRIDE_PE: tl.constexpr, STRIDE_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NOPE: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_REST: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr, V_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
    STEP: tl.constexpr, PRECISION: tl.constexpr, HOLD_Q: tl.constexpr, CAUSAL: tl.constexpr, HAS_POSITIONS: tl.constexpr,
    CHUNKED: tl.constexpr, RESUME: tl.constexpr, KEEP: tl.constexpr, WITH_LSE: tl.constexpr, STAGES: tl.constexpr, EMULATE_BF16: tl.constexpr,
):
    """Grid (row tiles * heads): the longest causal tiles of ``head_group`` heads first, heads side by side so that they meet in L2.

    KV_LENGTHS is cu_seqlens_k, and K_NOPE holds all KV; or, if CHUNKED, seq_lens, and K_NOPE holds the tokens from chunk_start on of the
    requests from first_request to last_request, chunk_tokens each: then a tile is finished by the chunk in which its last row ends.
    """
    tiles = tl.num_programs(0) // num_heads
    group = tl.program_id(0) // (tiles * head_group)
    within = tl.program_id(0) - group * tiles * head_group
    heads_here = tl.minimum(head_group, num_heads - group * head_group)
    head = group * head_group + within % heads_here
    request, q_start, q_len, first_row = find_request(tiles - 1 - within // heads_here, CU_SEQLENS_Q, num_tokens, batch_size, BLOCK_M)
    real = request < batch_size
    if CHUNKED:
        length = tl.load(KV_LENGTHS + request, mask=real, other=0)
        broken = length > kv_limit
        kv_start = (request - first_request).to(tl.int64) * chunk_tokens
        kv_len = tl.minimum(tl.maximum(length - chunk_start, 0), chunk_tokens)
        position = length - q_len - chunk_start
        last = tl.where(real & (broken == 0), position + tl.minimum(first_row + BLOCK_M, q_len), 0)
        active = (first_row < q_len) & (request >= first_request) & (request < last_request) & ((last > 0) | (chunk_start == 0))
        finished = last <= chunk_tokens
    else:
        start = tl.load(KV_LENGTHS + request, mask=real, other=0)
        kv_len = tl.load(KV_LENGTHS + request + 1, mask=real, other=0) - start
        broken = start + kv_len > kv_limit
        kv_start = start.to(tl.int64)
        position = tl.load(POSITIONS + request, mask=real, other=0) if HAS_POSITIONS else kv_len - q_len
        active = first_row < q_len
        finished = not KEEP
    if active:
        kv_len = tl.where(real & (broken == 0), kv_len, 0)
        index = first_row + tl.arange(0, BLOCK_M)
        # starts outside the tokens, which only the device sees, must not lead out of the tensors
        valid = (index >= 0) & (index >= -q_start) & (index < q_len) & (index < num_tokens - q_start)
        position = tl.minimum(position, kv_len)  # from there on a query sees every key, and sums of positions stay within 32 bits
        if CAUSAL:
            seen = tl.minimum(position + index + 1, kv_len)
            least = tl.minimum(position + first_row + 1, kv_len)
            most = tl.minimum(position + tl.minimum(first_row + BLOCK_M, q_len), kv_len)
        else:
            seen = index * 0 + kv_len
            least = kv_len
            most = kv_len
        token = (q_start + index).to(tl.int64)
        col = tl.arange(0, BLOCK_K)
        rope = tl.arange(0, BLOCK_P)
        val = tl.arange(0, BLOCK_V)
        Q_ROW = Q + token[:, None] * stride_q_token + head.to(tl.int64) * stride_q_head
        q = operand(load_rows(Q_ROW + col[None, :], valid, col, BLOCK_K, False), EMULATE_BF16)
        q_rest = q
        q_pe = q
        if BLOCK_REST > 0:
            rest = tl.arange(0, BLOCK_REST)
            q_rest = operand(load_rows(Q_ROW + BLOCK_K + rest[None, :], valid, rest, NOPE - BLOCK_K, False), EMULATE_BF16)
        if P > 0:
            q_pe = operand(load_rows(Q_ROW + NOPE + rope[None, :], valid, rope, P, False), EMULATE_BF16)
        eight = tl.arange(0, SUMS)
        state = token * num_heads + head
        if RESUME:
            ref = tl.load(REFERENCE + state, mask=valid, other=-float("inf"))
            total = tl.load(TOTAL + state[:, None] * SUMS + eight[None, :], mask=valid[:, None], other=0.0)
            acc = tl.load(ACC + state[:, None] * V_DIM + val[None, :], mask=valid[:, None] & (val < V_DIM)[None, :], other=0.0)
        else:
            ref = tl.full([BLOCK_M], -float("inf"), tl.float32)
            total = tl.zeros([BLOCK_M, SUMS], tl.float32)
            acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        K = K_NOPE + head.to(tl.int64) * stride_k_head
        VALUES = V + head.to(tl.int64) * stride_v_head
        masked_from = tl.maximum(least, 0) // BLOCK_N * BLOCK_N
        ref, total, acc = attend_tiles(
            0, masked_from, q, q_rest, q_pe, Q_ROW + col[None, :], valid, K, K_PE, VALUES, kv_start, kv_len, seen, ref, total, acc, scale_log2,
            STRIDE_K, STRIDE_PE, STRIDE_V, BLOCK_N, NOPE, BLOCK_K, BLOCK_REST, P, BLOCK_P, V_DIM, STEP, PRECISION, HOLD_Q,
            False, STAGES, EMULATE_BF16)
        ref, total, acc = attend_tiles(
            masked_from, most, q, q_rest, q_pe, Q_ROW + col[None, :], valid, K, K_PE, VALUES, kv_start, kv_len, seen, ref, total, acc, scale_log2,
            STRIDE_K, STRIDE_PE, STRIDE_V, BLOCK_N, NOPE, BLOCK_K, BLOCK_REST, P, BLOCK_P, V_DIM, STEP, PRECISION, HOLD_Q,
            True, STAGES, EMULATE_BF16)
        acc_ok = valid[:, None] & (val < V_DIM)[None, :]
        if finished:
            row_total = fold_sums(total)
            out, lse = finish(ref, row_total, row_total, acc)
            out = tl.where(broken, float("nan"), out)
            tl.store(OUT + token[:, None] * stride_out_token + head.to(tl.int64) * stride_out_head + val[None, :],
                     round_to(out, OUT.dtype.element_ty, EMULATE_BF16), mask=acc_ok)
            if WITH_LSE:
                tl.store(LSE + token * stride_lse + head, tl.where(broken, float("nan"), lse), mask=valid)
        elif KEEP:
            tl.store(REFERENCE + state, ref, mask=valid)
            tl.store(TOTAL + state[:, None] * SUMS + eight[None, :], total, mask=valid[:, None])
            tl.store(ACC + state[:, None] * V_DIM + val[None, :], tl.where(broken, float("nan"), acc), mask=acc_ok)
