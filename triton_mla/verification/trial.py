"""What checks work with: inputs of one dtype and head count, calls of the public operations, and rows to compare."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from triton_mla import attention
from triton_mla.testing import PagedBatch, Request, bitwise_equal, make_paged_batch
from triton_mla.verification.profiles import Profile

Comparisons = Iterator[tuple[str, bool]]
"""What was compared, and whether it was as it must be."""

VICTIM = 7
"""Key of the request whose bits are watched."""


class NotHereError(RuntimeError):
    """A check that cannot run on this machine; the message says what it needs."""


@dataclass(frozen=True)
class Rows:
    """`out` [T, H, R] and `lse` [T, H] of some query rows."""

    out: torch.Tensor
    lse: torch.Tensor

    def __getitem__(self, index: Any) -> Rows:
        return Rows(self.out[index], self.lse[index])


def need_gpu(trial: Trial) -> None:
    """Leaves a check out where there is none."""
    if trial.device.type != "cuda":
        raise NotHereError("needs a GPU")


@contextlib.contextmanager
def where_it_fits() -> Iterator[None]:
    """Leaves out a schedule that this GPU's registers or shared memory do not hold, however a call says so."""
    try:
        yield
    except OutOfResources:
        pass
    except ValueError as error:
        if not isinstance(error.__cause__, OutOfResources):
            raise


def same(a: Rows, b: Rows) -> bool:
    """True when two sets of rows are equal byte for byte and hold no NaN."""
    finite = not (bool(a.out.isnan().any()) or bool(a.lse.isnan().any()))
    return finite and bitwise_equal(a.out, b.out) and bitwise_equal(a.lse, b.lse)


def empty(rows: Rows) -> bool:
    """True when every row says that it saw no token: `out` 0 and `lse` -inf."""
    return not bool(rows.out.any()) and bool(torch.isneginf(rows.lse).all())


def pick(batch: PagedBatch, rows: Sequence[int]) -> PagedBatch:
    """The requests `rows` (repeats allowed) of a batch with one query token a request, over the same cache."""
    index = torch.as_tensor(rows, device=batch.seq_lens.device)
    return dataclasses.replace(
        batch,
        q=batch.q[index],
        block_table=batch.block_table[index],
        seq_lens=batch.seq_lens[index],
        cu_seqlens_q=torch.arange(len(rows) + 1, dtype=torch.int32, device=index.device),
        requests=tuple(batch.requests[i] for i in rows),
    )


@dataclass(frozen=True)
class Trial:
    """One case of a run: `num_heads` query heads of type `dtype` on `device`, sizes from `profile`."""

    device: torch.device
    profile: Profile
    dtype: torch.dtype
    num_heads: int

    def batch(self, requests: Sequence[Request], **options: Any) -> PagedBatch:
        """A paged batch of these requests; a request's q and KV follow from its key."""
        sizes = {
            "num_heads": self.num_heads,
            "kv_lora_rank": self.profile.kv_lora_rank,
            "qk_rope_head_dim": self.profile.qk_rope_head_dim,
            "page_size": self.profile.page_size,
        }
        return make_paged_batch(requests, dtype=self.dtype, device=self.device, **{**sizes, **options})

    def decode(self, batch: PagedBatch, **options: Any) -> Rows:
        """`mla_decode` into `out` and `lse` that were full of NaN."""
        q = options.pop("q", batch.q)
        return self._call(attention.mla_decode, batch, q, (batch.seq_lens,), options)

    def extend(self, batch: PagedBatch, **options: Any) -> Rows:
        """`mla_extend` into `out` and `lse` that were full of NaN."""
        return self._call(attention.mla_extend, batch, batch.q, (batch.cu_seqlens_q, batch.seq_lens), options)

    def _call(self, op: Callable[..., Any], batch: PagedBatch, q: Any, lengths: tuple[Any, ...], options: Any) -> Rows:
        options = {"order": self.profile.order, **options}
        tokens, heads = (q if isinstance(q, torch.Tensor) else q[0]).shape[:2]
        nan = float("nan")
        out = torch.full((tokens, heads, batch.kv_lora_rank), nan, dtype=self.dtype, device=self.device)
        lse = torch.full((tokens, heads), nan, dtype=torch.float32, device=self.device)
        scale, rank = batch.softmax_scale, batch.kv_lora_rank
        shared = {"softmax_scale": scale, "kv_lora_rank": rank, "out": out, "lse": lse, "return_lse": True}
        return Rows(*op(q, batch.kv_cache, batch.block_table, *lengths, **shared, **options))

    def part(self, prompt: PagedBatch, start: int, end: int) -> Rows:
        """Tokens start..end of a single prompt, extended over a cache that holds their prefix (and later tokens)."""
        lens = torch.tensor([end], dtype=torch.int32, device=self.device)
        starts = torch.tensor([0, end - start], dtype=torch.int32, device=self.device)
        return self.extend(dataclasses.replace(prompt, q=prompt.q[start:end], seq_lens=lens, cu_seqlens_q=starts))

    def step(self, prompt: PagedBatch, position: int) -> Rows:
        """The decode call of the token at `position` of a single prompt."""
        lens = torch.tensor([position + 1], dtype=torch.int32, device=self.device)
        return self.decode(dataclasses.replace(prompt, q=prompt.q[position : position + 1], seq_lens=lens))

    def prompt(self, tokens: int, key: int = VICTIM) -> PagedBatch:
        """A batch of one request whose `tokens` tokens are all query tokens."""
        return self.batch([Request(tokens, q_len=tokens, key=key)])

    def neighbours(self, count: int) -> list[Request]:
        """`count` requests of mixed lengths 1 ... profile.neighbour, the same in every run."""
        longest = self.profile.neighbour
        return [Request(1 + (2_654_435_761 * (i + 1) >> 5) % longest, key=1000 + i) for i in range(count)]

    @cached_property
    def victim(self) -> Request:
        """The request whose bits are watched."""
        return Request(self.profile.victim, key=VICTIM)

    @cached_property
    def alone(self) -> Rows:
        """The watched request's row, decoded in a batch of one."""
        return self.decode(self.batch([self.victim]))

    @cached_property
    def crowd(self) -> PagedBatch:
        """The watched request as row 0, with as many neighbours as the largest batch has, and at least two."""
        return self.batch([self.victim, *self.neighbours(max(2, max(self.profile.batch_sizes) - 1))])


@dataclass(frozen=True)
class Check:
    """One row of the report. `body` yields (what was compared, whether it was equal).

    `every_case` runs it for each dtype and head count; `measures` means that the names carry measured values, which the
    report keeps when they pass too. `first` starts it before the others where several processes share the rows: it
    compiles most, and others find what it has compiled.
    """

    name: str
    contract_line: str
    every_case: bool
    body: Callable[[Trial], Comparisons]
    measures: bool = False
    first: bool = False


def register(
    checks: list[Check],
    contract_line: str,
    name: str,
    *,
    every_case: bool = False,
    measures: bool = False,
    first: bool = False,
) -> Callable[[Callable[[Trial], Comparisons]], Callable[[Trial], Comparisons]]:
    """Adds the decorated body to `checks`."""

    def add(body: Callable[[Trial], Comparisons]) -> Callable[[Trial], Comparisons]:
        checks.append(Check(name, contract_line, every_case, body, measures, first))
        return body

    return add
