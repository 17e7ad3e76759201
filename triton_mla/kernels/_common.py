"""The arithmetic that every attention kernel shares, so that it is written once and has one set of bits.

Names in the kernels: a *row* is one (query token, head) pair, a *tile* is BLOCK_N tokens at an absolute multiple of BLOCK_N,
a *split* is a run of tiles between two absolute cut positions. Per row a state (ref, total, mass, acc) is kept, where
``ref`` is the softmax reference in the log2 domain (a multiple of STEP), ``total`` the sum of the rounded weights (divides
``acc``), ``mass`` the sum of the unrounded weights (gives lse), and ``acc`` the weighted sum of the values.
"""

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def operand(x, EMULATE_BF16: tl.constexpr):
    """A tensor-core operand. The interpreter multiplies raw bf16 bit patterns, so there bf16 is widened first."""
    if EMULATE_BF16:
        return x.to(tl.float32)
    else:
        return x


@triton.jit
def round_to(x, DTYPE: tl.constexpr, EMULATE_BF16: tl.constexpr):
    """fp32 ``x`` rounded to nearest even. The interpreter truncates to bf16: there the rounding is done on the bits, kept in fp32."""
    if EMULATE_BF16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    else:
        return x.to(DTYPE)


@triton.jit
def sum_weights(
    p, weights, ones, totals, rests, alpha, WITH_LSE: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, EMULATE_BF16: tl.constexpr
):
    """Row sums of one tile's rounded weights, and of what rounding took from them, through the tensor core in ascending order.

    ``totals`` divides acc, which the same rounded weights made. With it alone lse is off by up to 4e-3 where one token dominates;
    total + rest is right to 2^-16, and only lse needs it. A written tree over fp32 p cost 4 % here (its halves lie in different warps).
    """
    totals = tl.dot(weights, ones, totals * alpha[:, None], input_precision=PRECISION)
    if WITH_LSE and tl.float32 != DTYPE:
        rest = round_to(p - weights.to(tl.float32), DTYPE, EMULATE_BF16)
        rests = tl.dot(rest, ones, rests * alpha[:, None], input_precision=PRECISION)
    return totals, rests


@triton.jit
def fma_scalar_rows(x, factor, addend):
    """``fma(x, factor[:, None], addend)`` for [M, N] tensors; the builtin takes equal shapes only."""
    return tl.fma(x, tl.zeros_like(x) + factor[:, None], addend)


@triton.jit
def no_nan(ref):
    """A reference to subtract: -inf (nothing seen yet) counts as 0, since -inf - -inf is NaN."""
    return tl.where(ref == -float("inf"), 0.0, ref)


@triton.jit
def softmax_step(s, ref, scale_log2, STEP: tl.constexpr):
    """One tile of scores [M, N] against the running reference: (new reference, exact rescale factor, weights in fp32).

    The reference moves only in multiples of STEP in the log2 domain, so the factor is an exact power of two, mostly 1:
    rescaling never rounds, and may happen at any time.
    """
    INVERSE: tl.constexpr = 1.0 / STEP
    new_ref = tl.maximum(ref, tl.floor(tl.max(s, 1) * scale_log2 * INVERSE) * STEP)
    base = no_nan(new_ref)
    zeros = tl.zeros_like(s)
    p = tl.exp2(tl.fma(s, zeros + scale_log2, zeros - base[:, None]))
    return new_ref, tl.exp2(ref - base), p


@triton.jit
def merge_states(ref_a, total_a, mass_a, acc_a, ref_b, total_b, mass_b, acc_b):
    """State a, then state b, in this order. Weights are exact; each value is rounded once, by its fma. An empty b changes nothing.

    refs, totals, masses [M]; accs [M, N].
    """
    ref = tl.maximum(ref_a, ref_b)
    base = no_nan(ref)
    keep = tl.exp2(ref_a - base)
    weight = tl.exp2(ref_b - base)
    empty = ref_b == -float("inf")
    total = tl.where(empty, total_a, tl.fma(total_b, weight, total_a * keep))
    mass = tl.where(empty, mass_a, tl.fma(mass_b, weight, mass_a * keep))
    acc = tl.where(empty[:, None], acc_a, fma_scalar_rows(acc_b, weight, acc_a * keep[:, None]))
    return ref, total, mass, acc


@triton.jit
def finish(ref, total, mass, acc):
    """State -> (out in fp32, lse in natural log). A row that saw nothing: 0 and -inf."""
    empty = total == 0.0
    inverse = tl.div_rn(tl.zeros_like(total) + 1.0, tl.where(empty, 1.0, total))
    lse = tl.where(empty, -float("inf"), (ref + tl.log2(tl.where(empty, 1.0, mass))) * LN2)
    return acc * inverse[:, None], lse


@triton.jit
def locate_rows(row_tile, CU_SEQLENS_Q, SEQ_LENS, num_tokens, batch_size, num_heads, ROWS: tl.constexpr, DECODE: tl.constexpr):
    """The query rows of a row tile: (request, kv length, token [ROWS], head [ROWS], seen [ROWS], valid [ROWS]).

    The (token, head) pairs of a request are numbered token by token and cut into tiles of ROWS. ``seen`` is the number of
    tokens that a row may attend to: its own position + 1. In an extend, tile numbers of request r begin at
    floor(cu[r] * H / ROWS) + r: an upper bound that needs no host knowledge, so some tiles are empty. Tokens after
    cu[batch_size] are padding: they form one more request, of kv length 0.
    """
    r = tl.arange(0, ROWS)
    if DECODE:
        tiles = tl.cdiv(num_heads, ROWS)
        request = row_tile // tiles
        row = (row_tile % tiles) * ROWS + r
        kv_len = tl.load(SEQ_LENS + request)
        head = row
        token = row * 0 + request
        valid = row < num_heads
        seen = row * 0 + kv_len
    else:
        CHUNK: tl.constexpr = 256
        starts_before = 0
        for chunk in range(0, batch_size + 1, CHUNK):
            i = chunk + tl.arange(0, CHUNK)
            start = tl.load(CU_SEQLENS_Q + i, mask=i <= batch_size, other=0)
            first_tile = start.to(tl.int64) * num_heads // ROWS + i
            starts_before += tl.sum(((i <= batch_size) & (first_tile <= row_tile)).to(tl.int32), 0)
        request = tl.maximum(starts_before - 1, 0)
        real = request < batch_size
        q_start = tl.load(CU_SEQLENS_Q + request)
        q_end = tl.load(CU_SEQLENS_Q + request + 1, mask=real, other=num_tokens)
        q_len = q_end - q_start
        kv_len = tl.load(SEQ_LENS + request, mask=real, other=0)
        row = (row_tile - (q_start.to(tl.int64) * num_heads // ROWS + request)).to(tl.int32) * ROWS + r
        head = row % num_heads
        token = row // num_heads
        # starts outside the tokens, which only the device sees, must not lead out of the tensors
        valid = (row >= 0) & (token >= -q_start) & (token < q_len) & (token < num_tokens - q_start)
        seen = tl.where(real, kv_len - q_len + token + 1, 0)
        token += q_start
    return request, kv_len, token, head, seen, valid
