"""The ops as torch.library operators: what `torch.compile` sees in place of the Python of attention.py. Eager calls do not pass here."""

from __future__ import annotations

from typing import Any

import torch

from . import attention, calls
from . import prefill as mha
from .plan import plan_attention
from .tuning import PrefillOrder, ReductionOrder


@torch.library.custom_op("triton_mla::attend", mutates_args=())
def attend(
    q_nope: torch.Tensor, q_pe: torch.Tensor, kv_cache: torch.Tensor, block_table: torch.Tensor, cu_seqlens_q: torch.Tensor | None,
    seq_lens: torch.Tensor, softmax_scale: float, kv_lora_rank: int, max_seq_len: int, block_n: int, kv_split: int, reference_step: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    order = ReductionOrder(block_n=block_n, kv_split=kv_split, reference_step=reference_step)
    arch, num_sms = calls.device_facts(kv_cache.device)
    plan = plan_attention(num_tokens=q_nope.shape[0], batch_size=seq_lens.shape[0], num_heads=q_nope.shape[1], max_seq_len=max_seq_len,
                          kv_lora_rank=kv_lora_rank, qk_rope_head_dim=q_pe.shape[2], dtype=kv_cache.dtype, page_size=kv_cache.shape[1],
                          decode=cu_seqlens_q is None, arch=arch, num_sms=num_sms, order=order)
    keywords: dict[str, Any] = {"softmax_scale": softmax_scale, "kv_lora_rank": kv_lora_rank, "return_lse": True, "plan": plan}
    if cu_seqlens_q is None:
        out, lse = attention.mla_decode((q_nope, q_pe), kv_cache, block_table, seq_lens, **keywords)
    else:
        out, lse = attention.mla_extend((q_nope, q_pe), kv_cache, block_table, cu_seqlens_q, seq_lens, **keywords)
    return out, lse


@attend.register_fake
def _(
    q_nope: torch.Tensor, q_pe: torch.Tensor, kv_cache: torch.Tensor, block_table: torch.Tensor, cu_seqlens_q: torch.Tensor | None,
    seq_lens: torch.Tensor, softmax_scale: float, kv_lora_rank: int, max_seq_len: int, block_n: int, kv_split: int, reference_step: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads, _ = q_nope.shape
    return q_nope.new_empty((tokens, heads, kv_lora_rank)), q_nope.new_empty((tokens, heads), dtype=torch.float32)


@torch.library.custom_op("triton_mla::write_kv_cache", mutates_args=("kv_cache",))
def write_kv_cache(kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    attention.write_kv_cache(kv_c, k_pe, kv_cache, slot_mapping)


@torch.library.custom_op("triton_mla::merge_attn_states", mutates_args=())
def merge_attn_states(out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return attention.merge_attn_states(out_a, lse_a, out_b, lse_b)


@merge_attn_states.register_fake
def _(out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)


@torch.library.custom_op("triton_mla::prefill", mutates_args=())
def prefill(
    q: torch.Tensor, k_nope: torch.Tensor, k_pe: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    softmax_scale: float, causal: bool, positions: torch.Tensor | None, reference: torch.Tensor | None, total: torch.Tensor | None,
    acc: torch.Tensor | None, block_n: int, reference_step: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    order = PrefillOrder(block_n, reference_step)
    state = None if reference is None or total is None or acc is None else mha.PrefillState(reference, total, acc, order)
    out, lse = mha.mla_prefill(q, k_nope, k_pe, v, cu_seqlens_q, cu_seqlens_k, softmax_scale=softmax_scale, causal=causal, positions=positions,
                               state=state, return_lse=True, order=order)
    return out, lse


@prefill.register_fake
def _(
    q: torch.Tensor, k_nope: torch.Tensor, k_pe: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    softmax_scale: float, causal: bool, positions: torch.Tensor | None, reference: torch.Tensor | None, total: torch.Tensor | None,
    acc: torch.Tensor | None, block_n: int, reference_step: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty((*q.shape[:2], v.shape[2])), q.new_empty(q.shape[:2], dtype=torch.float32)


@torch.library.custom_op("triton_mla::prefill_state", mutates_args=("reference", "total", "acc"))
def prefill_state(
    q: torch.Tensor, k_nope: torch.Tensor, k_pe: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    softmax_scale: float, causal: bool, positions: torch.Tensor | None, reference: torch.Tensor, total: torch.Tensor, acc: torch.Tensor,
    block_n: int, reference_step: int,
) -> None:
    state = mha.PrefillState(reference, total, acc, PrefillOrder(block_n, reference_step))
    mha.mla_prefill(q, k_nope, k_pe, v, cu_seqlens_q, cu_seqlens_k, softmax_scale=softmax_scale, causal=causal, positions=positions, state=state,
                    return_state=True)


@torch.library.custom_op("triton_mla::prefill_paged", mutates_args=())
def prefill_paged(
    q: torch.Tensor, kv_cache: torch.Tensor, w_kv_b: torch.Tensor, block_table: torch.Tensor, cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor,
    softmax_scale: float, qk_nope_head_dim: int, v_head_dim: int, kv_lora_rank: int, chunk_tokens: int, max_seq_len: int, block_n: int,
    reference_step: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = mha.mla_prefill_paged(q, kv_cache, w_kv_b, block_table, cu_seqlens_q, seq_lens, softmax_scale=softmax_scale,
                                     qk_nope_head_dim=qk_nope_head_dim, v_head_dim=v_head_dim, kv_lora_rank=kv_lora_rank, chunk_tokens=chunk_tokens,
                                     max_seq_len=max_seq_len, return_lse=True, order=PrefillOrder(block_n, reference_step))
    return out, lse


@prefill_paged.register_fake
def _(
    q: torch.Tensor, kv_cache: torch.Tensor, w_kv_b: torch.Tensor, block_table: torch.Tensor, cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor,
    softmax_scale: float, qk_nope_head_dim: int, v_head_dim: int, kv_lora_rank: int, chunk_tokens: int, max_seq_len: int, block_n: int,
    reference_step: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty((*q.shape[:2], v_head_dim)), q.new_empty(q.shape[:2], dtype=torch.float32)
