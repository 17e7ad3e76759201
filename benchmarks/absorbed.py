"""The absorbed form by this package and by plain torch: decode, verify and extend. A call returns out [T, H, R]."""

from __future__ import annotations

import torch

from benchmarks.implementation import Call
from benchmarks.peers import Peers, Unavailable
from benchmarks.timing import fastest
from benchmarks.workloads import RANK, ROPE, SOFTMAX_SCALE, Inputs, Workload
from triton_mla import mla_decode, mla_extend
from triton_mla.plan import AttentionPlan, plan_attention
from triton_mla.tuning import DEFAULT_ORDER, ReductionOrder, Schedule, arch_of

TORCH_LIMIT_BYTES = 24 << 30
"""The torch form writes the gathered cache and all scores; workloads beyond this are left out."""
ADAPTIVE_SPLITS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)


def plan_for(
    workload: Workload, device: torch.device | str, order: ReductionOrder = DEFAULT_ORDER, schedule: Schedule | None = None
) -> AttentionPlan:
    """The plan of the package's op for a workload."""
    w, device = workload, torch.device(device)
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

    return decode if plan.decode else extend


def empty_workspace(size: int, device: torch.device) -> torch.Tensor:
    """`size` bytes that read as NaN in every float type, so that an element used unwritten shows."""
    return torch.full((size,), 0xFF, dtype=torch.uint8, device=device)


def empty_out(inputs: Inputs) -> torch.Tensor:
    """An output [T, H, R] full of NaN."""
    return torch.full((*inputs.q.shape[:2], RANK), float("nan"), dtype=inputs.q.dtype, device=inputs.q.device)


def ours(inputs: Inputs, peers: Peers) -> Call:
    """Default order and schedule."""
    plan = plan_for(inputs.workload, inputs.q.device)
    return planned_call(inputs, plan, empty_workspace(plan.workspace_bytes, inputs.q.device), empty_out(inputs))


def adaptive_orders(workload: Workload) -> list[ReductionOrder]:
    """The split sizes that `adaptive` chooses from: all that cut the longest request, and the next one, which does not."""
    cutting = sum(split < workload.seq_len for split in ADAPTIVE_SPLITS)
    return [ReductionOrder(kv_split=split) for split in ADAPTIVE_SPLITS[: cutting + 1]]


def adaptive(inputs: Inputs, peers: Peers) -> Call:
    """With the split size that is fastest for this very batch, as a kernel may choose it that is not batch-invariant."""
    device, out = inputs.q.device, empty_out(inputs)
    plans = [plan_for(inputs.workload, device, order) for order in adaptive_orders(inputs.workload)]
    workspace = empty_workspace(max(plan.workspace_bytes for plan in plans), device)
    return fastest([planned_call(inputs, plan, workspace, out) for plan in plans])


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
