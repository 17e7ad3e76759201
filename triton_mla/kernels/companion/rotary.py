"""Rotary position embedding of the last dimension, in both layouts of its pairs."""

import triton
import triton.language as tl

from .._common import round_to


@triton.jit(do_not_specialize=["num_heads"])
def rotary_kernel(
    X, COS, SIN, OUT, stride_x_token, stride_x_head, stride_cos, stride_sin, num_heads,
    HALF: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr, EMULATE_BF16: tl.constexpr,
):
    """Grid (tokens, head tiles): each pair (a, b) becomes (a cos - b sin, b cos + a sin), every operation rounded to fp32."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]).to(tl.int64)
    i = tl.arange(0, BLOCK)[None, :]
    ok = (head < num_heads) & (i < HALF)
    cos = tl.load(COS + token * stride_cos + i, mask=i < HALF, other=0.0).to(tl.float32)
    sin = tl.load(SIN + token * stride_sin + i, mask=i < HALF, other=0.0).to(tl.float32)
    first = 2 * i if INTERLEAVED else i
    second = first + 1 if INTERLEAVED else first + HALF
    x = X + token * stride_x_token + head * stride_x_head
    out = OUT + (token * num_heads + head) * (2 * HALF)
    a = tl.load(x + first, mask=ok, other=0.0).to(tl.float32)
    b = tl.load(x + second, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + first, round_to(a * cos - b * sin, OUT.dtype.element_ty, EMULATE_BF16), mask=ok)
    tl.store(out + second, round_to(b * cos + a * sin, OUT.dtype.element_ty, EMULATE_BF16), mask=ok)
