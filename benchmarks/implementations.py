"""The registry: name -> what prepares one workload and returns the call that is timed.

A call takes nothing, launches the op asynchronously without allocating more than its output, and returns out [T, H, R].
What an implementation computes once for a step and reuses in every layer (split metadata, plans) is prepared outside.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.peers import Peers, Unavailable
from benchmarks.workloads import RANK, ROPE, SOFTMAX_SCALE, Inputs
from triton_mla import mla_decode, mla_extend
from triton_mla.plan import AttentionPlan, plan_attention
from triton_mla.tuning import DEFAULT_ORDER, ReductionOrder, Schedule, arch_of

Call = Callable[[], torch.Tensor]
Prepare = Callable[[Inputs, Peers], Call]

TORCH_LIMIT_BYTES = 24 << 30
"""The torch form writes the gathered cache and all scores; workloads beyond this are left out."""


def plan_for(inputs: Inputs, order: ReductionOrder = DEFAULT_ORDER, schedule: Schedule | None = None) -> AttentionPlan:
    """The plan of the package's op for these inputs."""
    w, device = inputs.workload, inputs.q.device
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return plan_attention(
        num_tokens=w.num_tokens,
        batch_size=w.batch,
        num_heads=w.heads,
        max_seq_len=w.pages * w.page_size,
        dtype=w.torch_dtype,
        page_size=w.page_size,
        decode=w.op == "decode",
        arch=arch_of(device),
        num_sms=num_sms,
        order=order,
        schedule=schedule,
    )


def planned_call(inputs: Inputs, plan: AttentionPlan, workspace: torch.Tensor, out: torch.Tensor) -> Call:
    """The package's op with everything reused: `plan`, `workspace` (uint8, at least plan.workspace_bytes) and `out`."""
    i = inputs
    keywords = {"softmax_scale": SOFTMAX_SCALE, "out": out, "plan": plan, "workspace": workspace}

    def decode() -> torch.Tensor:
        mla_decode(i.q, i.kv_cache, i.block_table, i.seq_lens, **keywords)
        return out

    def extend() -> torch.Tensor:
        mla_extend(i.q, i.kv_cache, i.block_table, i.cu_seqlens_q, i.seq_lens, **keywords)
        return out

    return decode if i.workload.op == "decode" else extend


def empty_workspace(size: int, device: torch.device) -> torch.Tensor:
    """`size` bytes that read as NaN in every float type, so that an element used unwritten shows."""
    return torch.full((size,), 0xFF, dtype=torch.uint8, device=device)


def empty_out(inputs: Inputs) -> torch.Tensor:
    """An output [T, H, R] full of NaN."""
    return torch.full((*inputs.q.shape[:2], RANK), float("nan"), dtype=inputs.q.dtype, device=inputs.q.device)


def triton_mla(inputs: Inputs, peers: Peers) -> Call:
    """This package, default order and schedule."""
    plan = plan_for(inputs)
    return planned_call(inputs, plan, empty_workspace(plan.workspace_bytes, inputs.q.device), empty_out(inputs))


def flashmla(inputs: Inputs, peers: Peers) -> Call:
    """FlashMLA's dense kernel, its tile metadata computed once."""
    w = inputs.workload
    if w.page_size != 64:
        raise Unavailable("FlashMLA needs pages of 64 tokens")
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


def fa3_mla(num_splits: int) -> Prepare:
    """FlashAttention-3's MLA form (q: rope part, q_v: latent part); 0 splits: it chooses. Metadata made once."""

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


def vllm_triton(automatic: bool) -> Prepare:
    """vLLM's Triton MLA decode: one split (its batch-invariant mode) or as many as it chooses; scratch made once."""

    def prepare(inputs: Inputs, peers: Peers) -> Call:
        if inputs.kv_cache.numel() >= 2**31:
            raise Unavailable("its page offsets are 32 bits: a pool of 2^31 elements or more is read out of bounds")
        w, device = inputs.workload, inputs.q.device
        if w.op != "decode":
            raise Unavailable("decode only")
        module = peers.vllm_triton
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


def torch_gather(inputs: Inputs, peers: Peers) -> Call:
    """Plain torch: the pages gathered, two batched products with float32 scores, a masked softmax."""
    w, device = inputs.workload, inputs.q.device
    rows = w.q_len * w.heads
    needed = w.batch * w.seq_len * (2 * (RANK + ROPE) * w.torch_dtype.itemsize + 10 * rows)
    if needed > TORCH_LIMIT_BYTES:
        raise Unavailable(f"would take {needed / 2**30:.0f} GiB")
    pages = inputs.block_table.long()
    q = inputs.q.view(w.batch, rows, RANK + ROPE)
    last = inputs.seq_lens[:, None] - w.q_len + torch.arange(w.q_len, device=device, dtype=torch.int32)
    positions = torch.arange(w.seq_len, device=device, dtype=torch.int32)
    hidden = (positions > last[..., None]).repeat_interleave(w.heads, dim=1)

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if device.type == "cuda":
            return torch.bmm(a, b, out_dtype=torch.float32)
        return torch.bmm(a.float(), b.float())

    def call() -> torch.Tensor:
        kv = inputs.kv_cache[pages].flatten(1, 2)[:, : w.seq_len]
        scores = product(q, kv.transpose(1, 2)).mul_(SOFTMAX_SCALE).masked_fill_(hidden, float("-inf"))
        p = torch.softmax(scores, -1).to(w.torch_dtype)
        return product(p, kv[..., :RANK]).to(w.torch_dtype).view(w.num_tokens, w.heads, RANK)

    return call


REGISTRY: dict[str, Prepare] = {
    "triton_mla": triton_mla,
    "flashmla": flashmla,
    "fa3_mla_auto": fa3_mla(0),
    "fa3_mla_1": fa3_mla(1),
    "vllm_triton_1": vllm_triton(automatic=False),
    "vllm_triton_auto": vllm_triton(automatic=True),
    "torch": torch_gather,
}
"""Implementations by the name that result rows carry. "floor" is the one name more: computed, not run."""

COMPILED = ("triton_mla", "vllm_triton_1", "vllm_triton_auto")
"""Those that compile Triton kernels at first use."""
