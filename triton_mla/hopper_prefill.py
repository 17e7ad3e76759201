"""The launches of the Hopper form of a prefill: its work, made on the device, then one persistent kernel. Its bits are those of the portable form."""

from __future__ import annotations

from typing import Any

import torch

from .calls import device_facts
from .kernels.hopper import available
from .launch import LOG2E, launch
from .plan import PREFILL_TILE, prefill_work_size
from .tuning import PrefillOrder, PrefillSchedule

HEAD = (128, 64, 128)  # nope, rope and value columns
ORDER = PrefillOrder(block_n=128, reference_step=8)
AXIS = 1 << 30
# Mean keys from which twice the schedule's bytes of keys and values are worked on together: 2 to 3 % faster there, up to 3 % slower below (H200).
LONG_KEYS = 4096


def serves(q: torch.Tensor, k_nope: torch.Tensor, k_pe: torch.Tensor, v: torch.Tensor, order: PrefillOrder) -> bool:
    """Whether this form computes these arguments of `mla_prefill`. TMA wants addresses and strides that are multiples of 16 bytes.

    All chunks of a paged prefill get the same answer: which of them finishes a row is not the same in the two forms.
    """
    if (k_nope.shape[2], k_pe.shape[1], v.shape[2]) != HEAD or order != ORDER or q.dtype not in (torch.bfloat16, torch.float16):
        return False
    if device_facts(q.device)[0] != "sm_90" or not available():
        return False
    return all(0 < t.shape[0] < AXIS and t.data_ptr() % 16 == 0 and row_width(t) < 1 << 31 and all(0 < s < 1 << 33 and s % 8 == 0 for s in t.stride()[:-1])
               for t in (q, k_nope, k_pe, v))


def row_width(rows: torch.Tensor) -> int:
    """Elements from the first to the last of a token of [S, H, D] or [S, D]."""
    return rows.shape[-1] + (rows.shape[1] - 1) * rows.stride(1) if rows.dim() == 3 else rows.shape[1]


def request_rows(rows: torch.Tensor, cols: int) -> Any:
    """TMA descriptor of blocks of 128 rows of a request, in which rows past its end come as zeros and need no mask.

    The coordinates [AXIS, start + length, AXIS - length + row, column] wrap around to the address of (start + row, column), since the
    strides of the first three add up to 2^64 bytes at AXIS; and row >= length lies outside the third axis.
    """
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from .kernels.hopper.copies import SHARED4

    stride, shape = rows.stride(0), [0x7FFF0000, 0x7FFF0000, AXIS, row_width(rows)]
    return TensorDescriptor(rows, shape, [2**34 - stride, stride, stride, 1], [1, 1, PREFILL_TILE, cols], SHARED4.value)


def query_rows(q: torch.Tensor) -> Any:
    """TMA descriptor of blocks of 64 rows and 64 columns of q; rows outside come as zeros."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from .kernels.hopper.copies import SHARED

    return TensorDescriptor(q, [q.shape[0], row_width(q)], [q.stride(0), 1], [64, 64], SHARED.value)


def groups(keys: int, num_heads: int, group_bytes: int, itemsize: int) -> tuple[int, int]:
    """(heads, keys) that are worked on together, with keys and values of about ``group_bytes``: some heads of all requests, or one head of some.

    All requests, since the longest query tiles of each come first. When that many bytes of each request were taken instead, so that 128 pairs
    of request and head ran side by side and none of 132 programs shared its keys with another, 4 x 2048 with 128 heads read 4.5 GB and took
    1271 us (H200).
    """
    token_bytes = (HEAD[0] + HEAD[2]) * itemsize
    together = max(1, group_bytes // token_bytes)
    head_groups = -(-num_heads // max(1, min(num_heads, together // max(1, keys))))
    return -(-num_heads // head_groups), -(-keys // max(1, -(-keys // together)))


def attend(
    q: torch.Tensor, k_nope: torch.Tensor, k_pe: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None, state: Any,
    starts: torch.Tensor, kv_lengths: torch.Tensor, positions: torch.Tensor | None, scale: float, schedule: PrefillSchedule, *,
    resume: bool, keep: bool, causal: bool, kv_limit: int, mean_keys: int, requests: tuple[int, int], chunk: tuple[int, int] | None,
    work: torch.Tensor | None = None,
) -> None:
    """As `prefill_launch.attend`, for arguments that this form `serves`."""
    from .kernels.hopper.prefill import hopper_prefill_kernel
    from .kernels.hopper.work import hopper_work_kernel

    num_tokens, num_heads, _ = q.shape
    batch_size, dtype = starts.shape[0] - 1, q.dtype
    num_sms = device_facts(q.device)[1]
    if work is None:
        work = torch.empty(prefill_work_size(num_tokens, batch_size), dtype=torch.int32, device=q.device)
    tiles = work.shape[0] // 8 - 1  # at least as many as there can be
    count = work[8 * tiles :]
    unused = out if lse is None else lse
    rows = (out, unused, *((unused,) * 3 if state is None else (state.reference, state.total, state.acc)))
    strides = (out.stride(0), out.stride(1), 0 if lse is None else lse.stride(0))
    flags = {"RESUME": resume, "KEEP": keep, "WITH_LSE": lse is not None}
    kind = {"CAUSAL": causal, "HAS_POSITIONS": positions is not None, "CHUNKED": chunk is not None}
    group_bytes = schedule.group_bytes * (2 if mean_keys >= LONG_KEYS else 1)
    head_group, group_keys = groups(k_nope.shape[0], num_heads, group_bytes, dtype.itemsize)
    key = (dtype, strides[:2], tuple(t.data_ptr() % 16 for t in rows), *flags.values())
    launch(hopper_work_kernel, (*key, *kind.values()), (batch_size + 1, -(-4 * num_sms // (batch_size + 1))),
           (work, count, *rows, starts, kv_lengths, starts if positions is None else positions, *strides,
            num_tokens, batch_size, num_heads, kv_limit, *requests, *(chunk or (0, 0)), group_keys),
           {**kind, **flags, "PDL": True}, {"num_warps": 4})
    launch(hopper_prefill_kernel, key, (min(num_sms, tiles * num_heads), 1),
           (query_rows(q), request_rows(k_nope, 128), request_rows(k_pe, 64), request_rows(v, 128), *rows, work, count, scale * LOG2E,
            q.stride(1), k_nope.stride(1), v.stride(1), *strides, num_heads, head_group, 0),
           flags, {"num_warps": 4, "launch_pdl": True})
