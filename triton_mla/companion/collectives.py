"""Sums over the ranks of a process group in one order: what tensor parallelism adds to a row-parallel product."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .. import checks


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's
def ordered_all_reduce(x: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """The sum of all ranks' tensors, on every rank: ``((x of rank 0 + x of rank 1) + x of rank 2) + ...`` in fp32, rounded once to the dtype of x.

    Values travel in the dtype of x. The order is that of the ranks in the group for each element, so neither the number of rows nor the
    place of a row in x nor the receiving rank can change a bit. NCCL's all-reduce chooses its algorithm, and with it the order, by the size
    of x, and a ring begins the sum of each chunk at another rank. In exchange, here each rank receives the whole x of every other one.

    Args:
        x: [...], fp16, bf16 or fp32, with any strides; of one shape and dtype on all ranks. On a CPU no interpreter is needed.
        group: of `torch.distributed`, with a backend for the device of x, such as gloo for a CPU and NCCL for a GPU; None is the default group.

    Returns:
        Like x, contiguous.

    Raises:
        ValueError: an argument is wrong, or there is no such group; nothing has been sent.
    """
    checks.float_dtype("x", checks.forward_only("x", checks.strided("x", x)))
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(f"group={group!r} must be a process group, and there is none: call torch.distributed.init_process_group before")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"group={group!r} must be a torch.distributed.ProcessGroup that this rank is in, or None for the default one")
    backends = dist.get_backend_config(group)
    if f"{x.device.type}:" not in backends:
        raise ValueError(f"x is on {x.device}; it must be on a device that the group has a backend for: {backends}")
    first, *others = gathered(x, group)
    total = first.to(torch.float32, copy=True)  # not a view, which would keep all that was gathered
    for part in others:
        total += part
    return total.to(x.dtype)


def gathered(x: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """[ranks, ...]: x of each rank."""
    ranks = dist.get_world_size(group)
    parts = torch.empty(ranks * x.numel(), dtype=x.dtype, device=x.device)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name from torch 2.13 on, and before
    gather(parts, x.contiguous().view(-1), group=group)
    return parts.view(ranks, *x.shape)
