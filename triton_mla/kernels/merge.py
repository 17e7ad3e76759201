"""Merging two normalised attention results of the same rows over different tokens (context parallelism, prefix + suffix)."""

import triton
import triton.language as tl

from ._common import round_to


@triton.jit(do_not_specialize=["num_heads"], do_not_specialize_on_alignment=["LSE_A", "LSE_B", "LSE"])
def merge_attn_states_kernel(
    OUT_A, LSE_A, OUT_B, LSE_B, OUT, LSE, stride_a_token, stride_a_head, stride_b_token, stride_b_head, stride_out_token, stride_out_head,
    stride_lse_a, stride_lse_b, num_heads, V: tl.constexpr, BLOCK_V: tl.constexpr, EMULATE_BF16: tl.constexpr,
):
    """Grid (rows). An lse of -inf or +inf marks a side that saw no token: its ``out`` is not used, and the other side passes bit for bit."""
    row = tl.program_id(0).to(tl.int64)
    token = row // num_heads
    head = row % num_heads
    cols = tl.arange(0, BLOCK_V)
    ok = cols < V
    lse_a = tl.load(LSE_A + token * stride_lse_a + head)
    lse_b = tl.load(LSE_B + token * stride_lse_b + head)
    lse_a = tl.where(lse_a == float("inf"), -float("inf"), lse_a)
    lse_b = tl.where(lse_b == float("inf"), -float("inf"), lse_b)
    a = tl.load(OUT_A + token * stride_a_token + head * stride_a_head + cols, mask=ok, other=0.0).to(tl.float32)
    b = tl.load(OUT_B + token * stride_b_token + head * stride_b_head + cols, mask=ok, other=0.0).to(tl.float32)
    no_a = lse_a == -float("inf")
    no_b = lse_b == -float("inf")
    top = tl.maximum(lse_a, lse_b)
    base = tl.where(no_a & no_b, 0.0, top)
    weight_a = tl.exp(lse_a - base)
    weight_b = tl.exp(lse_b - base)
    total = tl.where(no_a & no_b, 1.0, weight_a + weight_b)
    inverse = tl.div_rn(1.0, total)
    merged = tl.where(no_a, 0.0, a) * (weight_a * inverse) + tl.where(no_b, 0.0, b) * (weight_b * inverse)
    merged = tl.where(no_b, tl.where(no_a, 0.0, a), tl.where(no_a, b, merged))
    lse = tl.where(no_b, lse_a, tl.where(no_a, lse_b, top + tl.log(total)))
    tl.store(OUT + token * stride_out_token + head * stride_out_head + cols, round_to(merged, OUT.dtype.element_ty, EMULATE_BF16), mask=ok)
    tl.store(LSE + row, lse)
