"""The work of a Hopper prefill, made on the device: its query tiles, longest first within a group of requests, and the rows that see no token."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from .._common import finish
from ..tree_sum import SUMS, fold_sums

TILE = tl.constexpr(128)


@triton.jit
def request_work(
    request, CU_SEQLENS_Q, KV_LENGTHS, POSITIONS, num_tokens, batch_size, kv_limit, first_request, last_request, chunk_start, chunk_tokens,
    CAUSAL: tl.constexpr, HAS_POSITIONS: tl.constexpr, CHUNKED: tl.constexpr,
):
    """Of the requests ``request`` (a number or a vector, up to batch_size: the padding): (first query token, query tokens, first row and
    number of keys, position of the first query token, first and last query tile, whether the keys end past kv_limit).

    Query tiles are 128 positions at multiples of 128. A request without any has last = first - 1; without keys it has none.
    """
    real = request < batch_size
    # starts outside the tokens, which only the device sees, must not lead out of the tensors
    q_start = tl.minimum(tl.maximum(tl.load(CU_SEQLENS_Q + request, mask=request <= batch_size, other=0), 0), num_tokens)
    q_len = tl.minimum(tl.load(CU_SEQLENS_Q + request + 1, mask=real, other=num_tokens), num_tokens) - q_start
    if CHUNKED:
        length = tl.load(KV_LENGTHS + request, mask=real, other=0)
        broken = length > kv_limit
        start = (request - first_request) * chunk_tokens
        kv_len = tl.minimum(tl.maximum(length - chunk_start, 0), chunk_tokens)
        position = length - q_len - chunk_start
        real = real & (request >= first_request) & (request < last_request)
    else:
        start = tl.load(KV_LENGTHS + request, mask=real, other=0)
        kv_len = tl.load(KV_LENGTHS + request + 1, mask=real, other=0) - start
        broken = start + kv_len > kv_limit
        position = kv_len - q_len
        if HAS_POSITIONS:
            # tokens are fewer than 2^30: the same rows see the same keys, and sums of positions stay within 32 bits
            position = tl.minimum(tl.maximum(tl.load(POSITIONS + request, mask=real, other=0), -(1 << 30)), (1 << 30) - 1)
    if not CAUSAL:
        position = (tl.maximum(kv_len, 0) + TILE - 1) // TILE * TILE  # every key lies before it
    kv_len = tl.where(real & (broken == 0), tl.maximum(kv_len, 0), 0)
    first = tl.maximum(position, 0) // TILE
    some = (kv_len > 0) & (q_len > 0) & (position + q_len > 0)
    last = tl.where(some, (position + q_len - 1) // TILE, first - 1)
    return q_start, q_len, start, kv_len, position, first, last, broken


@triton.jit
def tiles_before(n, request, group, first, last, kv_tiles, others, groups):
    """Of the requests ``others`` [M]: how many query tiles belong to an earlier group, or to this one and have more KV tiles than n [N], or
    as many and belong to an earlier request; [N].

    Query tile j has min(j + 1, kv_tiles) of them.
    """
    every = tl.where(groups < group, last - first + 1, 0)[None, :]
    same = (groups == group)[None, :]
    first, last, kv_tiles, n = first[None, :], last[None, :], kv_tiles[None, :], n[:, None]
    more = tl.where(kv_tiles > n, tl.maximum(last - tl.maximum(first, n) + 1, 0), 0)
    one = ((first <= n - 1) & (n - 1 <= last)).to(tl.int32)
    as_many = tl.where(n < kv_tiles, one, tl.where(n == kv_tiles, tl.maximum(last - tl.maximum(first, kv_tiles - 1) + 1, 0), 0))
    return tl.sum(every + tl.where(same, more + tl.where(others[None, :] < request, as_many, 0), 0), 1)


@triton.jit(
    do_not_specialize=[
        "num_tokens", "batch_size", "num_heads", "kv_limit", "first_request", "last_request", "chunk_start", "chunk_tokens", "group_keys", "stride_lse",
    ],
    do_not_specialize_on_alignment=["CU_SEQLENS_Q", "KV_LENGTHS", "POSITIONS", "LSE", "WORK", "COUNT"],
)
def hopper_work_kernel(
    WORK, COUNT, OUT, LSE, REFERENCE, TOTAL, ACC, CU_SEQLENS_Q, KV_LENGTHS, POSITIONS, stride_out_token, stride_out_head, stride_lse,
    num_tokens, batch_size, num_heads, kv_limit, first_request, last_request, chunk_start, chunk_tokens, group_keys,
    CAUSAL: tl.constexpr, HAS_POSITIONS: tl.constexpr, CHUNKED: tl.constexpr, RESUME: tl.constexpr, KEEP: tl.constexpr, WITH_LSE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (batch_size + 1, slices). WORK [tiles, 8] int32, a row for a query tile: first key row, keys of the request, position of the
    tile's first row, query token of position 0, first and past-the-last position of the request's query, KV tiles, whether this call is
    the last for these rows. COUNT [2] int32: rows of WORK, and 0, where programs count the items they have taken besides the first one each.
    Requests whose keys begin within the same ``group_keys`` are worked on together. The other arguments' meaning is that of kernels/prefill.py.
    """
    if PDL:
        gdc_launch_dependents()
    request = tl.program_id(0)
    q_start, q_len, start, kv_len, position, first, last, broken = request_work(
        request, CU_SEQLENS_Q, KV_LENGTHS, POSITIONS, num_tokens, batch_size, kv_limit, first_request, last_request, chunk_start, chunk_tokens,
        CAUSAL, HAS_POSITIONS, CHUNKED)
    if tl.program_id(1) == 0:
        BLOCK: tl.constexpr = 64
        room = num_tokens // TILE + 2 * batch_size  # rows of WORK: only starts that fall want more
        kv_tiles = (kv_len + TILE - 1) // TILE
        if request == 0:
            count = 0
            for r in range(0, batch_size, BLOCK):
                _a, _b, _c, _d, _e, firsts, lasts, _f = request_work(
                    r + tl.arange(0, BLOCK), CU_SEQLENS_Q, KV_LENGTHS, POSITIONS, num_tokens, batch_size, kv_limit, first_request, last_request,
                    chunk_start, chunk_tokens, CAUSAL, HAS_POSITIONS, CHUNKED)
                count += tl.sum(lasts - firsts + 1, 0)
            tl.store(COUNT, tl.minimum(count, room))
            tl.store(COUNT + 1, 0)
        for tile in range(first, last + 1, BLOCK):
            j = tile + tl.arange(0, BLOCK)
            n = tl.minimum(j + 1, kv_tiles)
            rank = tl.where(j + 1 > kv_tiles, j - tl.maximum(first, kv_tiles - 1), 0)  # earlier ones of this request with as many
            for r in range(0, batch_size, BLOCK):
                others = r + tl.arange(0, BLOCK)
                _a, _b, begins, keys, _e, firsts, lasts, _f = request_work(
                    others, CU_SEQLENS_Q, KV_LENGTHS, POSITIONS, num_tokens, batch_size, kv_limit, first_request, last_request, chunk_start,
                    chunk_tokens, CAUSAL, HAS_POSITIONS, CHUNKED)
                rank += tiles_before(
                    n, request, start // group_keys, firsts, lasts, (keys + TILE - 1) // TILE, others, begins // group_keys)
            row = WORK + rank * 8
            ok = (j <= last) & (rank < room)
            end = position + q_len
            finished = tl.minimum(j * TILE + TILE, end) <= chunk_tokens if CHUNKED else j * 0 + (0 if KEEP else 1)
            tl.store(row, start + j * 0, mask=ok)
            tl.store(row + 1, kv_len + j * 0, mask=ok)
            tl.store(row + 2, j * TILE, mask=ok)
            tl.store(row + 3, q_start - position + j * 0, mask=ok)
            tl.store(row + 4, tl.maximum(position, 0) + j * 0, mask=ok)
            tl.store(row + 5, end + j * 0, mask=ok)
            tl.store(row + 6, n, mask=ok)
            tl.store(row + 7, finished.to(tl.int32), mask=ok)
    # rows that see no token: those before the first key, and all without keys; of a cache in chunks with the first one
    unseen = tl.where(kv_len > 0, tl.minimum(tl.maximum(-position, 0), q_len), q_len)
    if CHUNKED:
        mine = (request >= first_request) & (request < last_request) & (chunk_start == 0)
        unseen = tl.where(mine, unseen, 0)
    FINISHED: tl.constexpr = CHUNKED or not KEEP
    ROWS: tl.constexpr = 16
    eight = tl.arange(0, SUMS)
    val = tl.arange(0, 128)
    for at in range(tl.program_id(1) * ROWS, unseen * num_heads, tl.num_programs(1) * ROWS):
        index = at + tl.arange(0, ROWS)
        ok = index < unseen * num_heads
        token = (q_start + index // num_heads).to(tl.int64)
        head = index % num_heads
        state = token * num_heads + head
        ref = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS, SUMS], tl.float32)
        acc = tl.zeros([ROWS, 128], tl.float32)
        if RESUME:
            ref = tl.load(REFERENCE + state, mask=ok, other=0.0)
            total = tl.load(TOTAL + state[:, None] * SUMS + eight[None, :], mask=ok[:, None], other=0.0)
            acc = tl.load(ACC + state[:, None] * 128 + val[None, :], mask=ok[:, None], other=0.0)
        acc = tl.where(broken, float("nan"), acc)
        if FINISHED:
            row_total = fold_sums(total)
            out, lse = finish(ref, row_total, row_total, acc)
            at_out = OUT + token[:, None] * stride_out_token + head.to(tl.int64)[:, None] * stride_out_head + val[None, :]
            tl.store(at_out, out.to(OUT.dtype.element_ty), mask=ok[:, None])
            if WITH_LSE:
                tl.store(LSE + token * stride_lse + head, tl.where(broken, float("nan"), lse), mask=ok)
        else:
            tl.store(REFERENCE + state, ref, mask=ok)
            tl.store(TOTAL + state[:, None] * SUMS + eight[None, :], total, mask=ok[:, None])
            tl.store(ACC + state[:, None] * 128 + val[None, :], acc, mask=ok[:, None])
