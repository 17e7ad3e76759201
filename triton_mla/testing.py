"""Inputs and comparisons for tests of attention over a paged latent cache.

`make_paged_batch` builds hostile batches: every byte that no token owns is NaN, and every table entry that no token
uses is an id far outside the cache. The comparisons see single bits, and no NaN slips through them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from triton_mla.reference import gather_kv

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Request:
    """`seq_len` tokens, the last `q_len` of which are query tokens. `key` names the contents.

    Requests of one key are prefixes of one endless sequence: the q and KV of the token at a position depend on the
    key and the position, never on the lengths or on the batch. A request of `seq_len` 0 with query tokens is padding.
    """

    seq_len: int
    q_len: int = 1
    key: int = 0


@dataclass(frozen=True)
class PagedBatch:
    """A batch as the attention operations take it. T query tokens, B requests, H heads, D = R + P.

    Attributes:
        q: [T, H, D].
        kv_cache: [num_blocks, block_size, D].
        block_table: [B, W] int32.
        seq_lens: [B] int32.
        cu_seqlens_q: [B + 1] int32.
        kv_lora_rank: R.
        softmax_scale: factor of the scores.
        requests: what the batch was made from.
    """

    q: torch.Tensor
    kv_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    kv_lora_rank: int
    softmax_scale: float
    requests: Sequence[Request]

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.kv_cache.shape[1]

    def rows(self, i: int) -> slice:
        """Where the query tokens of request i lie in `q`."""
        first = sum(request.q_len for request in self.requests[:i])
        return slice(first, first + self.requests[i].q_len)

    def kv(self, i: int) -> torch.Tensor:
        """[seq_len, D] tokens of request i in position order, a copy."""
        return gather_kv(self.kv_cache, self.block_table[i], self.requests[i].seq_len)

    def slots(self, i: int) -> torch.Tensor:
        """[seq_len] int64 slots of the tokens of request i: `page * block_size + offset`."""
        return _slots(self.block_table[i], self.requests[i].seq_len, self.page_size)

    def to(self, device: torch.device | str) -> PagedBatch:
        """The same bytes on another device."""
        tensors: dict[str, Any] = {
            field.name: value.to(device)
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), torch.Tensor)
        }
        return dataclasses.replace(self, **tensors)


def make_paged_batch(
    requests: Sequence[Request],
    *,
    num_heads: int = 16,
    kv_lora_rank: int = 512,
    qk_rope_head_dim: int = 64,
    page_size: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    gain: float = 0.5,
    softmax_scale: float = 192**-0.5,
    stale: float = float("nan"),
    table_tail: int = 2**31 - 1,
    page_order: Literal["random", "sequential", "reversed"] = "random",
    extra_pages: int = 3,
    extra_width: int = 2,
    seed: int = 0,
) -> PagedBatch:
    """A batch whose tokens are `gain` x N(0, 1), rounded to `dtype`.

    The data are generated on `device`, in blocks of positions with a generator of their own; CPU and CUDA generators
    differ. To have the same bytes on two devices, make the batch on one and move it with `PagedBatch.to`.

    Args:
        requests: in batch order; equal keys are allowed, each request has pages of its own.
        stale: value of every cache element that no token owns.
        table_tail: value of every table entry past a request's own pages.
        page_order: which pages of the cache the requests get, in batch order.
        extra_pages: pages that no request owns.
        extra_width: table columns past those of the longest request.
        seed: of the data and of the random page order.

    Raises:
        ValueError: for an unknown `page_order`.
    """
    device = torch.device(device)
    width = kv_lora_rank + qk_rope_head_dim
    page_counts = [math.ceil(request.seq_len / page_size) for request in requests]
    num_pages = sum(page_counts) + extra_pages
    free = _page_ids(page_order, num_pages, seed)
    cache = torch.full((num_pages, page_size, width), stale, dtype=dtype, device=device)
    table = torch.full((len(requests), max(page_counts, default=0) + extra_width), table_tail, dtype=torch.int32)
    for row, count in enumerate(page_counts):
        table[row, :count], free = free[:count], free[count:]
    table = table.to(device)

    queries = [torch.empty(0, num_heads, width, dtype=dtype, device=device)]
    for row, request in enumerate(requests):
        kv = _tokens("kv", request.key, 0, request.seq_len, (width,), gain, dtype, device, seed)
        cache.view(-1, width)[_slots(table[row], request.seq_len, page_size)] = kv
        first = max(request.seq_len - request.q_len, 0)
        shape = (num_heads, width)
        queries.append(_tokens("q", request.key, first, first + request.q_len, shape, gain, dtype, device, seed))

    starts = torch.tensor([0] + [request.q_len for request in requests]).cumsum(0)
    return PagedBatch(
        q=torch.cat(queries),
        kv_cache=cache,
        block_table=table,
        seq_lens=torch.tensor([request.seq_len for request in requests], dtype=torch.int32, device=device),
        cu_seqlens_q=starts.to(device=device, dtype=torch.int32),
        kv_lora_rank=kv_lora_rank,
        softmax_scale=softmax_scale,
        requests=tuple(requests),
    )


def bitwise_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True when shape, dtype and every bit agree: -0.0 is not 0.0, and a NaN equals only a NaN of the same bits."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b).to(a.device))


def mismatches(a: torch.Tensor, b: torch.Tensor) -> int:
    """How many elements differ in some bit.

    Raises:
        ValueError: when shapes or dtypes differ.
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        raise ValueError(f"a is {_describe(a)} and b is {_describe(b)}; shapes and dtypes must be equal")
    return int((_bits(a) != _bits(b).to(a.device)).sum())


def assert_bitwise_equal(a: torch.Tensor, b: torch.Tensor, what: str = "", *, allow_nan: bool = False) -> None:
    """Assert `bitwise_equal(a, b)`, and that neither holds a NaN unless `allow_nan`.

    Raises:
        AssertionError: with the number of differing elements, the first one's index, and its values and bits.
    """
    prefix = f"{what}: " if what else ""
    if a.shape != b.shape or a.dtype != b.dtype:
        raise AssertionError(f"{prefix}{_describe(a)} against {_describe(b)}")
    b = b.to(a.device)
    different = _bits(a) != _bits(b)
    if bool(different.any()):
        index = tuple(different.nonzero()[0].tolist())
        digits = 2 * a.element_size()
        hexes = [f"0x{int(_bits(t)[index]) & (1 << 4 * digits) - 1:0{digits}x}" for t in (a, b)]
        raise AssertionError(
            f"{prefix}{int(different.sum())} of {a.numel()} elements differ, first at {index}: "
            f"{a[index].item()!r} ({hexes[0]}) against {b[index].item()!r} ({hexes[1]})"
        )
    if not allow_nan and a.is_floating_point() and bool(a.isnan().any()):
        index = tuple(a.isnan().nonzero()[0].tolist())
        raise AssertionError(f"{prefix}equal, but NaN at {index}")


def assert_close(actual: torch.Tensor, expected64: torch.Tensor, atol: float, what: str = "") -> None:
    """Assert |actual - expected64| <= atol everywhere. An infinity matches itself only; a NaN on either side fails.

    Raises:
        AssertionError: with the worst element, or with the first one that is not a number.
    """
    prefix = f"{what}: " if what else ""
    if actual.shape != expected64.shape:
        raise AssertionError(f"{prefix}{_describe(actual)} against {_describe(expected64)}")
    actual64, expected64 = actual.double(), expected64.double().to(actual.device)
    for name, tensor in (("actual", actual64), ("expected", expected64)):
        if bool(tensor.isnan().any()):
            raise AssertionError(f"{prefix}{name} is NaN at {tuple(tensor.isnan().nonzero()[0].tolist())}")
    error = (actual64 - expected64).abs().masked_fill(actual64 == expected64, 0.0)
    if not bool((error <= atol).all()):
        index = tuple((error == error.max()).nonzero()[0].tolist())
        raise AssertionError(
            f"{prefix}off by {error[index].item():.3e} at {index}, {atol:.3e} allowed: "
            f"{actual64[index].item()!r} against {expected64[index].item()!r}; "
            f"{int((error > atol).sum())} of {error.numel()} are off by too much"
        )


def _tokens(
    what: str,
    key: int,
    start: int,
    end: int,
    shape: tuple[int, ...],
    gain: float,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
) -> torch.Tensor:
    """[end - start, *shape] values of the tokens at these positions of sequence `key`.

    Whole blocks of positions are generated and cut, because a generator's first values depend on how many are asked
    for. The block of a GPU holds about 1 M values, that of a CPU about 64 k: a launch there, a short request here.
    """
    values = (1 << 20 if device.type == "cuda" else 1 << 16) // math.prod(shape)
    block = max(1, values)
    generator = torch.Generator(device)
    parts = [torch.empty(0, *shape, dtype=dtype, device=device)]
    for first in range(start - start % block, end, block):
        name = f"{seed}/{what}/{key}/{first}/{block}".encode()
        generator.manual_seed(int.from_bytes(hashlib.blake2b(name, digest_size=4).digest(), "little"))
        normal = torch.randn(block, *shape, generator=generator, device=device)
        parts.append((normal[max(start - first, 0) : end - first] * gain).to(dtype))
    return torch.cat(parts)


def _page_ids(order: str, count: int, seed: int) -> torch.Tensor:
    if order == "random":
        return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    if order == "sequential":
        return torch.arange(count, dtype=torch.int32)
    if order == "reversed":
        return torch.arange(count - 1, -1, -1, dtype=torch.int32)
    raise ValueError(f"page_order is {order!r}; it must be 'random', 'sequential' or 'reversed'")


def _slots(table_row: torch.Tensor, seq_len: int, page_size: int) -> torch.Tensor:
    position = torch.arange(seq_len, device=table_row.device)
    return table_row[position // page_size].to(torch.int64) * page_size + position % page_size


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()])


def _describe(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
