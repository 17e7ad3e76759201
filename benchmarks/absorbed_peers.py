"""The absorbed form by others. A call returns out [T, H, R]; metadata and scratch memory are made once, before it."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch

from benchmarks.absorbed import empty_out
from benchmarks.implementation import Call
from benchmarks.peers import Peers, Unavailable
from benchmarks.workloads import RANK, ROPE, SOFTMAX_SCALE, Inputs

SGLANG_TILE = 256
"""Tokens of a split in SGLang's deterministic mode, whose number of splits is ceil(length / this), of each request by itself."""
SCRATCH_LIMIT_BYTES = 24 << 30


def flashmla(inputs: Inputs, peers: Peers) -> Call:
    """FlashMLA's dense kernel."""
    w = inputs.workload
    if w.page_size != 64:
        raise Unavailable("needs pages of 64 tokens")
    op = peers.flashmla.dense_decode_fwd
    q = inputs.q.view(w.batch, w.q_len, w.heads, RANK + ROPE)
    kv = inputs.kv_cache.unsqueeze(2)
    metadata: list[torch.Tensor | None] = [None, None]

    def call() -> torch.Tensor:
        out, _, metadata[0], metadata[1] = op(
            q, kv, RANK, inputs.seq_lens, inputs.block_table, SOFTMAX_SCALE, w.q_len > 1, *metadata, None
        )
        return out.view(w.num_tokens, w.heads, RANK)

    return call


def fa3_mla(num_splits: int) -> Callable[[Inputs, Peers], Call]:
    """FlashAttention-3's MLA form (q: rope part, q_v: latent part); 0 splits: it chooses."""

    def prepare(inputs: Inputs, peers: Peers) -> Call:
        w, ops = inputs.workload, peers.fa3
        q_latent, q_rope = inputs.q[..., :RANK], inputs.q[..., RANK:]
        kv = inputs.kv_cache.unsqueeze(2)
        k_rope, latent = kv[..., RANK:], kv[..., :RANK]
        metadata = ops.get_scheduler_metadata(
            w.batch, w.q_len, w.seq_len, w.heads, 1, ROPE, RANK, w.torch_dtype, inputs.seq_lens, inputs.cu_seqlens_q,
            None, None, None, None, w.page_size, 0, True, -1, -1, False, num_splits, None, 0,
        )  # fmt: skip

        def call() -> torch.Tensor:
            return ops.fwd(
                q_rope, k_rope, latent, None, None, q_latent, None, inputs.cu_seqlens_q, None, None, None,
                inputs.seq_lens, w.q_len, w.seq_len, inputs.block_table, *[None] * 8, SOFTMAX_SCALE, True, -1, -1, 0.0,
                True, metadata, num_splits, None, 0, None, 1, 0, None,
            )[0]  # fmt: skip

        return call

    return prepare


def vllm_triton(automatic: bool) -> Callable[[Inputs, Peers], Call]:
    """vLLM's Triton MLA decode: one split (its batch-invariant mode) or as many as it chooses."""

    def prepare(inputs: Inputs, peers: Peers) -> Call:
        w, device, module = inputs.workload, inputs.q.device, peers.vllm_triton
        if w.batch * w.pages * w.page_size * (RANK + ROPE) >= 2**31:
            raise Unavailable("its page offsets are 32 bits: a pool of 2^31 elements or more is read out of bounds")
        splits = 1
        if automatic:
            wanted = max(1, w.seq_len // 512)
            limit = 2 * torch.cuda.get_device_properties(device).multi_processor_count
            splits = min(1 << (wanted - 1).bit_length(), limit)
        out = empty_out(inputs)
        lse = torch.empty(w.num_tokens, w.heads, dtype=w.torch_dtype, device=device)
        scratch = torch.empty(w.num_tokens, w.heads, splits, RANK + 1, dtype=torch.float32, device=device)
        one = torch.ones((), dtype=torch.float32, device=device)
        kv = inputs.kv_cache.unsqueeze(2)

        def call() -> torch.Tensor:
            module.decode_attention_fwd(
                inputs.q, kv, kv[..., :RANK], out, lse, inputs.block_table, inputs.seq_lens, scratch, splits,
                SOFTMAX_SCALE, w.page_size, k_scale=one, v_scale=one, is_mla=True,
            )  # fmt: skip
            return out

        return call

    return prepare


def slots_of(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """(starts [B + 1] int32, slots int64) of all requests' tokens, one request after another, as engines without pages keep them."""
    w = inputs.workload
    positions = torch.arange(w.pages * w.page_size, device=inputs.q.device)
    slots = inputs.block_table.long()[:, positions // w.page_size] * w.page_size + positions % w.page_size
    lens = inputs.seq_lens.to(torch.int64)
    starts = torch.zeros(w.batch + 1, dtype=torch.int32, device=inputs.q.device)
    starts[1:] = lens.cumsum(0)
    return starts, slots[positions < lens[:, None]]


def sglang_det(inputs: Inputs, peers: Peers) -> Call:
    """SGLang's Triton decode with the splits of its deterministic mode."""
    w, device, decode = inputs.workload, inputs.q.device, peers.sglang
    splits = -(-w.seq_len // SGLANG_TILE)
    if (needed := 4 * w.batch * w.heads * splits * (RANK + 1)) > SCRATCH_LIMIT_BYTES:
        raise Unavailable(f"its partial results would take {needed / 2**30:.0f} GiB")
    out = empty_out(inputs)
    starts, slots = slots_of(inputs)
    own_splits = (inputs.seq_lens + SGLANG_TILE - 1) // SGLANG_TILE
    partials = torch.empty(w.batch, w.heads, splits, RANK, dtype=torch.float32, device=device)
    lse = torch.empty(w.batch, w.heads, splits, dtype=torch.float32, device=device)
    kv = inputs.kv_cache.view(-1, 1, RANK + ROPE)
    known = inspect.signature(decode).parameters  # older releases have fewer
    options = {name: value for name, value in (("k_scale", 1.0), ("v_scale", 1.0), ("has_mla", True)) if name in known}

    def call() -> torch.Tensor:
        decode(inputs.q, kv, kv[..., :RANK], out, starts, slots, partials, lse, own_splits, splits, SOFTMAX_SCALE, **options)
        return out

    return call


def flashinfer(inputs: Inputs, peers: Peers) -> Call:
    """FlashInfer's paged MLA, its backend chosen by itself."""
    w, device = inputs.workload, inputs.q.device
    wrapper = peers.flashinfer.mla.BatchMLAPagedAttentionWrapper(torch.empty(128 << 20, dtype=torch.int8, device=device))
    pages = (inputs.seq_lens + w.page_size - 1) // w.page_size
    starts = torch.zeros(w.batch + 1, dtype=torch.int32, device=device)
    starts[1:] = pages.cumsum(0)
    ids = inputs.block_table[torch.arange(w.pages, device=device) < pages[:, None]]
    wrapper.plan(
        inputs.cu_seqlens_q, starts, ids, inputs.seq_lens, w.heads, RANK, ROPE, w.page_size, True, SOFTMAX_SCALE, w.torch_dtype, w.torch_dtype
    )
    q_latent, q_rope = inputs.q[..., :RANK].contiguous(), inputs.q[..., RANK:].contiguous()
    latent, k_rope = inputs.kv_cache[..., :RANK], inputs.kv_cache[..., RANK:]
    return lambda: wrapper.run(q_latent, q_rope, latent, k_rope)
