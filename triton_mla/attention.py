"""The public attention ops: argument checks, outputs, and the launches of a plan.

A query row's ``out`` and ``lse`` are a function of its query, its KV tokens in position order, the scale, the dtypes and the
`ReductionOrder` alone: never of the batch, the pages, the schedule or how a prompt was cut. See docs/numerics.md.
"""

from __future__ import annotations

import torch
import triton

from . import checks
from .calls import Given, Query, attend, on_device
from .kernels.cache import write_kv_cache_kernel
from .kernels.merge import merge_attn_states_kernel
from .launch import INTERPRETED, launch
from .plan import AttentionPlan
from .tuning import ReductionOrder

MAX_MERGED_DIM = 1 << 15


def write_kv_cache(
    kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, *, k_scale: float | None = None
) -> None:
    """Write new tokens' latent rows into the paged cache, in place.

    Args:
        kv_c: [T, R] compressed KV after its norm; k_pe: [T, P] rotated rope key. Same dtype as the cache.
        kv_cache: [num_blocks, block_size, R + P], any strides with a contiguous last dimension, in memory of its own.
        slot_mapping: [T] int64, page id * block_size + offset; -1 skips the token. Slots must be distinct.
            A wrong slot is refused on the CPU; on a GPU, where the host cannot see it, one past the pool is not written, and one
            given twice holds a mixture.
        k_scale: must be None (fp8 caches are not supported).

    Raises:
        ValueError: an argument is wrong; nothing has been written.
    """
    checks.no_scale(k_scale)
    cache = checks.tensor("kv_cache", kv_cache, dims=3)
    checks.float_dtype("kv_cache", cache)
    kv_c = checks.tensor("kv_c", kv_c, dims=2, dtype=cache.dtype, device=cache.device)
    k_pe = checks.tensor("k_pe", k_pe, dims=2, dtype=cache.dtype, device=cache.device)
    slots = checks.tensor("slot_mapping", slot_mapping, dims=1, dtype=torch.int64, device=cache.device)
    num_tokens, R = kv_c.shape
    P = k_pe.shape[1]
    num_pages, page_size, width = cache.shape
    checks.row_widths(R, P)
    checks.paged_cache(cache)
    checks.no_overlap("kv_cache", cache)
    checks.shape("k_pe", k_pe, (num_tokens, P), "one row for each row of kv_c")
    checks.shape("slot_mapping", slots, (num_tokens,), "one slot for each row of kv_c")
    if width != R + P:
        raise ValueError(f"kv_cache has shape {tuple(cache.shape)}; its last dimension must be {R + P}, the sum of kv_c's {R} and k_pe's {P}")
    if torch.compiler.is_compiling():
        torch.ops.triton_mla.write_kv_cache(kv_c, k_pe, kv_cache, slots)
        return
    if slots.device.type == "cpu" and num_tokens and not (int(slots.min()) >= -1 and int(slots.max()) < num_pages * page_size):
        raise ValueError(f"slot_mapping has slots from {int(slots.min())} to {int(slots.max())}; they must be from -1 (skip) to {num_pages * page_size - 1}")
    if slots.device.type == "cpu" and (written := slots[slots >= 0]).numel() != written.unique().numel():
        raise ValueError(f"slot_mapping={slots.tolist()} must not name a slot twice")
    checks.apart({"kv_cache": cache}, {"kv_c": kv_c, "k_pe": k_pe, "slot_mapping": slots})
    strides = (kv_c.stride(0), k_pe.stride(0), cache.stride(0), cache.stride(1))
    key = (cache.dtype, R, P, strides, kv_c.data_ptr() % 16, k_pe.data_ptr() % 16, cache.data_ptr() % 16)
    with on_device(cache.device):
        launch(write_kv_cache_kernel, key, (num_tokens, 1), (kv_c, k_pe, cache, slots, *strides, page_size, num_pages * page_size),
               {"R": R, "BLOCK_R": triton.next_power_of_2(R), "P": P, "BLOCK_P": triton.next_power_of_2(max(P, 16))}, {"num_warps": 1})


def mla_decode(
    q: Query, kv_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, *, softmax_scale: float | None = None,
    kv_lora_rank: int = 512, k_scale: float | None = None, out: torch.Tensor | None = None, return_lse: bool = False,
    plan: AttentionPlan | None = None, order: ReductionOrder | None = None, workspace: torch.Tensor | None = None, lse: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Absorbed MLA attention of one query token a request over the paged latent cache (DeepSeek-V2, arXiv:2405.04434, §2.1).

    ``out[b, h] = sum_j softmax_j(scale * q[b, h] . kv[j]) * kv[j, :R]`` over the first ``seq_lens[b]`` tokens of request b.

    Args:
        q: [B, H, R + P], or the pair (q_nope [B, H, R], q_pe [B, H, P]); q_nope has been multiplied by W_UK. fp16, bf16 or fp32.
        kv_cache: [num_blocks, block_size, R + P], dtype of q. R a multiple of 16 up to 512, P 0 or a multiple of 16 up to 64,
            block_size 1 or a multiple of 16. Memory past ``seq_lens`` may hold anything, NaN too.
        block_table: [B, W] int32 page ids; entries past a request's last page are not read.
        seq_lens: [B] int32 tokens of each request, the new one included. 0: out is 0 and lse -inf.
        softmax_scale: required; of the model, e.g. 192 ** -0.5 times the square of its YaRN mscale.
        kv_lora_rank: R.
        out: preallocated [B, H, R] of q's dtype; lse: preallocated [B, H] fp32, with ``return_lse=True``. Neither they nor the workspace may
            share memory with another argument; columns, heads or layers of one buffer share none.
        plan: of `plan_attention` for these shapes, reusable for every layer and step whose lengths it covers; workspace: uint8 tensor
            of at least ``plan.workspace_bytes``, used by one stream at a time. With plan, workspace, out and lse nothing is allocated.
        order: `ReductionOrder`; the plan's, else the default.

    Returns:
        out [B, H, R], and lse [B, H] (fp32, natural log) with ``return_lse=True``. On a GPU a request whose length is more than its
        block table or the plan can hold becomes NaN: reading the length back to refuse it would stall the stream.

    Raises:
        ValueError: an argument is wrong; nothing has been launched or written, but scratch memory where a given plan asks for more shared
            memory or registers than the device has.
    """
    return attend(Given(True, q, kv_cache, block_table, None, seq_lens, softmax_scale, kv_lora_rank, k_scale, out, return_lse, plan, order, workspace,
                        lse))


def mla_extend(
    q: Query, kv_cache: torch.Tensor, block_table: torch.Tensor, cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor, *,
    softmax_scale: float | None = None, kv_lora_rank: int = 512, k_scale: float | None = None, out: torch.Tensor | None = None,
    return_lse: bool = False, plan: AttentionPlan | None = None, order: ReductionOrder | None = None, workspace: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Causal absorbed MLA attention of any number of new tokens a request, whose KV is already in the cache.

    Query i of request r is at position ``seq_lens[r] - q_len[r] + i`` and sees the tokens up to and including itself. Each row has the
    bits that `mla_decode` gives at its position.

    Args:
        q: [T, H, R + P] or (q_nope [T, H, R], q_pe [T, H, P]), the requests' tokens one after another.
        cu_seqlens_q: [B + 1] int32, begins of the requests' tokens in q; tokens from ``cu_seqlens_q[B]`` on are padding (out 0, lse -inf).
        seq_lens: [B] int32 tokens of each request, the new ones included.
        The others are as in `mla_decode`, with T in place of B in q, out and lse.
    """
    return attend(Given(False, q, kv_cache, block_table, cu_seqlens_q, seq_lens, softmax_scale, kv_lora_rank, k_scale, out, return_lse, plan, order,
                        workspace, lse))


def merge_attn_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint sets of tokens, from the results over each.

    ``lse = log(exp(lse_a) + exp(lse_b))``, ``out = out_a * exp(lse_a - lse) + out_b * exp(lse_b - lse)``, in fp32.

    Args:
        out_a, out_b: [T, H, V], one dtype; lse_a, lse_b: [T, H] fp32, natural log. An lse of -inf or +inf marks an empty side, whose out may
            hold anything: the other side is returned bit for bit. Both empty: 0 and -inf.

    Returns:
        out [T, H, V] of the inputs' dtype, lse [T, H] fp32.
    """
    out_a = checks.tensor("out_a", out_a, dims=3)
    checks.float_dtype("out_a", out_a)
    device = out_a.device
    num_tokens, num_heads, V = out_a.shape
    if not 1 <= V <= MAX_MERGED_DIM:
        raise ValueError(f"out_a has shape {tuple(out_a.shape)}; its last dimension must be from 1 to {MAX_MERGED_DIM}")
    out_b = checks.tensor("out_b", out_b, dims=3, dtype=out_a.dtype, device=device)
    checks.shape("out_b", out_b, tuple(out_a.shape), "the shape of out_a")
    for name, value in (("lse_a", lse_a), ("lse_b", lse_b)):
        checks.shape(name, checks.tensor(name, value, dims=2, dtype=torch.float32, device=device), (num_tokens, num_heads), "one value for each row")
    if torch.compiler.is_compiling():
        return torch.ops.triton_mla.merge_attn_states(out_a, lse_a, out_b, lse_b)
    out = torch.empty((num_tokens, num_heads, V), dtype=out_a.dtype, device=device)
    lse = torch.empty((num_tokens, num_heads), dtype=torch.float32, device=device)
    strides = (out_a.stride(0), out_a.stride(1), out_b.stride(0), out_b.stride(1), out.stride(0), out.stride(1))
    key = (out.dtype, V, strides, lse_a.stride(0), lse_b.stride(0), out_a.data_ptr() % 16, out_b.data_ptr() % 16)
    with on_device(device):
        launch(merge_attn_states_kernel, key, (num_tokens * num_heads, 1),
               (out_a, lse_a, out_b, lse_b, out, lse, *strides, lse_a.stride(0), lse_b.stride(0), num_heads),
               {"V": V, "BLOCK_V": triton.next_power_of_2(V), "EMULATE_BF16": INTERPRETED and out.dtype == torch.bfloat16}, {"num_warps": 1})
    return out, lse
