"""Argument checks of the public ops: every refusal names the argument, its value and what is allowed, and happens before any launch."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl

from . import launch
from .dims import MAX_NUM_HEADS, check_dims, check_page_size
from .plan import DTYPES
from .tuning import ARCHITECTURES, arch_of

_LANGUAGE_INTERPRETED = not isinstance(tl.cdiv, triton.runtime.JITFunction)
# Functions of Triton and of this package call each other: TRITON_INTERPRET is read when each is imported.
INTERPRETED = launch.INTERPRETED and _LANGUAGE_INTERPRETED
MIXED = launch.INTERPRETED != _LANGUAGE_INTERPRETED
Layout = tuple[int, tuple[int, ...], tuple[int, ...]]  # bytes of an element, shape, strides


def tensor(name: str, value: object, *, dims: int, dtype: torch.dtype | None = None, device: torch.device | None = None) -> torch.Tensor:
    """``value`` if it is a dense, strided tensor of this rank, dtype and device whose last dimension is contiguous, and no gradient of it is lost.

    Without ``device`` it is the tensor that decides where the call runs.
    """
    value = forward_only(name, as_stored(name, value))
    if value.dim() != dims:
        raise ValueError(f"{name} has shape {tuple(value.shape)}; it must have {dims} dimensions")
    if dtype is not None and value.dtype != dtype:
        raise ValueError(f"{name} has dtype {value.dtype}; it must be {dtype}")
    if device is None:
        runnable(value.device, name)
    elif value.device != device:
        raise ValueError(f"{name} is on {value.device}; it must be on {device}, where the call runs")
    if value.shape[-1] > 1 and value.stride(-1) != 1:
        raise ValueError(f"{name} has strides {value.stride()}; its last dimension must be contiguous")
    return value


def strided(name: str, value: object) -> torch.Tensor:
    """``value`` if it is a dense, strided tensor with memory of its own."""
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{name}={reprlib.repr(value)} must be a torch.Tensor")
    if value.layout != torch.strided or value.is_nested:
        kind = "is nested" if value.is_nested else f"has layout {value.layout}"
        raise ValueError(f"{name} {kind}; it must be a dense, strided tensor")
    if not (torch.compiler.is_compiling() or value.is_meta or _has_memory(value)):
        raise ValueError(f"{name} of type {type(value).__name__} has no memory of its own; it must be a tensor that has, as to_local() gives that of a DTensor")
    return value


def _has_memory(value: torch.Tensor) -> bool:
    """Not so a tensor that stands for others, as those of torch.distributed.tensor and of torch.func, or for none, as a fake one."""
    try:
        return bool(value.data_ptr()) or not value.numel()
    except RuntimeError:  # torch's, for some of them
        return False


def as_stored(name: str, value: object) -> torch.Tensor:
    """``value`` if it is a dense, strided tensor whose values are those in memory, not their negatives as in ``complex.conj().imag``."""
    value = strided(name, value)
    if not torch.compiler.is_compiling() and value.is_neg():  # operators resolve it
        raise ValueError(f"{name} is a view of the negatives of what is stored; it must hold its own values, as resolve_neg() gives them")
    return value


def forward_only(name: str, value: torch.Tensor) -> torch.Tensor:
    """``value``, if no gradient of it would be lost. While torch.compile traces, the operator is told by autograd."""
    if value.requires_grad and not torch.compiler.is_compiling() and recording():
        raise ValueError(f"{name} requires grad, and this operation has no gradient; call it under torch.no_grad(), or give it {name}.detach()")
    return value


def recording() -> bool:
    """Whether gradients are recorded here: not by the kernels of `batch_invariant_mode` and of operators, which autograd calls itself."""
    # Dynamo, which enters frames on its own after a graph break, cannot trace the question (torch 2.11); it compiles nothing below autograd
    below = not torch.compiler.is_compiling() and torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradOther)
    return torch.is_grad_enabled() and not below


def no_overlap(name: str, value: torch.Tensor) -> None:
    """Refuse a tensor to write to whose elements share memory, as those of an expanded one do."""
    reach = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1:
            if stride < reach:
                raise ValueError(f"{name} has shape {tuple(value.shape)} and strides {value.stride()}; it must not overlap itself, since it is written to")
            reach += stride * (size - 1)


def apart(written: Mapping[str, torch.Tensor | None], read: Mapping[str, torch.Tensor | None]) -> None:
    """Refuse a tensor to write to that shares memory with another of the call. Where it cannot be told, it is refused too."""
    before: list[tuple[str, torch.Tensor, int, int]] = []
    for name, value in (*read.items(), *written.items()):
        if value is None:
            continue
        memory = value.untyped_storage()
        begin = memory.data_ptr()
        end = begin + memory.nbytes()
        if name in written:
            for other, against, first, last in before:
                if begin < last and first < end and _may_share(against.data_ptr() - value.data_ptr(), _layout(value), _layout(against)):
                    where = f"{name} has shape {tuple(value.shape)} and strides {value.stride()} at {value.data_ptr():#x}"
                    raise ValueError(f"{where}; it must not share memory with {other}, since it is written to")
        before.append((name, value, begin, end))


def _layout(value: torch.Tensor) -> Layout:
    return value.itemsize, value.shape, value.stride()


def span(value: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    return _span(_layout(value))


def _span(layout: Layout) -> int:
    itemsize, shape, strides = layout
    return 0 if 0 in shape else itemsize * (1 + sum(stride * (size - 1) for stride, size in zip(strides, shape, strict=True)))


@lru_cache(maxsize=1024)
def _may_share(distance: int, a: Layout, b: Layout) -> bool:
    """Whether a byte may belong to both. ``distance``: bytes from a to b.

    False where their spans do not meet, or both repeat with one period and each has a part of it for its own, as have views of some columns,
    heads or layers of one buffer. True for all else, though strides without such a period may miss each other too.
    """
    spans = _span(a), _span(b)
    if not all(spans) or not -spans[1] < distance < spans[0]:
        return False
    steps = [[(itemsize * stride, size - 1) for stride, size in zip(strides, shape, strict=True) if size > 1] for itemsize, shape, strides in (a, b)]
    for period in {step for of_one in steps for step, _ in of_one if step}:
        part_a, part_b = (layout[0] + sum(step * n for step, n in of_one if step % period) for layout, of_one in zip((a, b), steps, strict=True))
        begin = distance % period  # of b's part, counted from a's
        if part_a <= begin and begin + part_b <= period:
            return False
    return True


def _reworded(what: str, check: Callable[..., None], *values: object) -> None:
    """A check of plan.py, in whose message ``what`` takes the place of an argument that the caller has not given."""
    try:
        check(*values)
    except ValueError as error:
        raise ValueError(f"{what} {str(error).partition(' ')[2]}") from None


def latent_dims(kv_lora_rank: Any, width: int) -> int:
    """Rope columns of a cache of this width."""
    check_dims(kv_lora_rank, 0)
    P: int = width - kv_lora_rank
    _reworded(f"kv_lora_rank={kv_lora_rank} leaves {P} of kv_cache's {width} columns to the rope key (qk_rope_head_dim); they", check_dims, kv_lora_rank, P)
    return P


def row_widths(R: int, P: int) -> None:
    """Columns of kv_c and k_pe."""
    _reworded(f"kv_c has {R} columns; they", check_dims, R, 0)
    _reworded(f"k_pe has {P} columns; they", check_dims, R, P)


def heads(num_heads: int) -> None:
    if not 1 <= num_heads <= MAX_NUM_HEADS:
        raise ValueError(f"q has {num_heads} heads; they must be from 1 to {MAX_NUM_HEADS}")


def paged_cache(cache: torch.Tensor) -> None:
    """Of a cache that is written or read: what cannot be read is not written either.

    Offsets within a page are 32 bits, in the innermost loop; those of pages are 64.
    """
    _reworded(f"kv_cache has pages of {cache.shape[1]} tokens; they", check_page_size, cache.shape[1])
    if (cache.shape[1] - 1) * cache.stride(1) + cache.shape[2] > 2**31:
        raise ValueError(f"kv_cache has strides {cache.stride()}; a page of {cache.shape[1]} slots must lie within 2**31 elements")


def shape(name: str, value: torch.Tensor, expected: tuple[int, ...], why: str) -> None:
    if tuple(value.shape) != expected:
        raise ValueError(f"{name} has shape {tuple(value.shape)}; it must be {expected}: {why}")


def float_dtype(name: str, value: torch.Tensor) -> None:
    if value.dtype not in DTYPES:
        raise ValueError(f"{name} has dtype {value.dtype}; it must be one of {', '.join(str(d) for d in DTYPES)}")


_arch = lru_cache(maxsize=64)(arch_of)


def runnable(device: torch.device, name: str = "device") -> None:
    """Kernels run on a GPU that has a table of schedules, or on the CPU through Triton's interpreter. ``name``: of what is on the device."""
    where = f"{name} is on {device}" if name != "device" else f"device={device}"
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{where}; it must be on a cuda device, or on the cpu with TRITON_INTERPRET=1")
    known = torch.compiler.is_compiling() or MIXED or _arch(device) in ARCHITECTURES  # while torch.compile traces, the operator's own call is still to come
    if device.type == "cpu" and not (INTERPRETED and known):
        raise ValueError(f"{where}, which needs Triton's interpreter: set TRITON_INTERPRET=1 in the environment before triton is imported, and leave it set")
    if MIXED:
        raise ValueError(f"{where}; TRITON_INTERPRET must not change between the imports of triton and of triton_mla: set or unset it before both")
    if not known:
        raise ValueError(f"{where}, a GPU of {_arch(device)}; kernels have schedules for {', '.join(sorted(set(ARCHITECTURES) - {'interpreter'}))}")


def softmax_scale(value: object) -> float:
    # 1e-30 to 1e30: with it and its product with log2(e), fp32 has no subnormal and no infinity
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1e-30 <= value <= 1e30:
        raise ValueError(
            f"softmax_scale={value!r} must be a float from 1e-30 to 1e30, such as (qk_nope_head_dim + qk_rope_head_dim) ** -0.5 of the model; "
            "it cannot be derived from the latent dims"
        )
    return float(value)


def boolean(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be True or False")


def no_scale(k_scale: object) -> None:
    if k_scale is not None:
        raise ValueError(f"k_scale={k_scale!r} must be None: it belongs to fp8 caches, which are not supported")


def lengths(
    seq_lens: torch.Tensor, block_table: torch.Tensor, page_size: int, num_pages: int, cu_seqlens_q: torch.Tensor | None, num_tokens: int,
    max_seq_len: int | None = None,
) -> None:
    """The values of the batch's integers, where the host can see them: on the CPU. A GPU tensor is never read back.

    ``max_seq_len``: of the call's plan.
    """
    if seq_lens.device.type != "cpu":
        return
    capacity = block_table.shape[1] * page_size
    lens = seq_lens.tolist()
    for i, n in enumerate(lens):
        if not 0 <= n <= capacity:
            raise ValueError(f"seq_lens[{i}]={n} must be from 0 to {capacity}: block_table has {block_table.shape[1]} pages of {page_size} tokens a request")
        if max_seq_len is not None and n > max_seq_len:
            raise ValueError(f"seq_lens[{i}]={n} must be from 0 to plan.max_seq_len={max_seq_len}")
        used = block_table[i, : -(-n // page_size)]
        if used.numel() and not (int(used.min()) >= 0 and int(used.max()) < num_pages):
            raise ValueError(f"block_table[{i}] has page ids from {int(used.min())} to {int(used.max())}; kv_cache has pages 0 to {num_pages - 1}")
    if cu_seqlens_q is None:
        return
    starts = cu_seqlens_q.tolist()
    if starts[0] != 0 or starts[-1] > num_tokens or any(b < a for a, b in pairwise(starts)):
        raise ValueError(f"cu_seqlens_q={starts} must begin with 0, never fall, and end at no more than the {num_tokens} tokens of q")
    for i, n in enumerate(lens):
        q_len = starts[i + 1] - starts[i]
        if 0 < n < q_len:
            raise ValueError(f"seq_lens[{i}]={n} must be at least the request's {q_len} query tokens, whose KV it includes")


def are_dims(x: torch.Tensor, dims: Sequence[int]) -> bool:
    """Whether these name dimensions of x, each at most once."""
    limit = max(1, x.dim())
    return all(-limit <= d < limit for d in dims) and len({d % limit for d in dims}) == len(dims)
