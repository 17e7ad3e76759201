"""One step's requests, validated once, for callers that hold them on the host: what the ops check themselves only on the CPU."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .dims import check_page_size


@dataclass(frozen=True)
class BatchLayout:
    """Requests of one step, as host integers.

    Attributes:
        query_lens: new tokens of each request.
        seq_lens: tokens of each request in the cache, the new ones included; 0 marks a padded row.
        page_ids: the pages of each request, in position order, each once; requests may share pages.
        page_size: tokens of a page.
        prompt_lens: tokens of each request's original prompt, which no preemption changes; None where the engine does not tell. A
            request's must be the same in all of its steps: it decides which form its tokens take (`paths`).

    Raises:
        ValueError: a length or a page list that cannot be, by name and index.
    """

    query_lens: Sequence[int]
    seq_lens: Sequence[int]
    page_ids: Sequence[Sequence[int]]
    page_size: int = 64
    prompt_lens: Sequence[int] | None = None

    def __post_init__(self) -> None:
        check_page_size(self.page_size)
        for name in ("query_lens", "seq_lens", "page_ids", "prompt_lens"):
            value = getattr(self, name)
            if (value is not None or name != "prompt_lens") and not _is_sequence(value):
                raise ValueError(f"{name}={value!r} must be a sequence with an entry for each request")
        if not len(self.query_lens) == len(self.seq_lens) == len(self.page_ids):
            raise ValueError(
                f"query_lens, seq_lens and page_ids have {len(self.query_lens)}, {len(self.seq_lens)} and {len(self.page_ids)} requests; "
                "they must have equally many"
            )
        for i, (q_len, seq_len, pages) in enumerate(zip(self.query_lens, self.seq_lens, self.page_ids, strict=True)):
            _check_int(f"query_lens[{i}]", q_len)
            _check_int(f"seq_lens[{i}]", seq_len)
            _check_pages(i, pages)
            if q_len < 0 or (seq_len and q_len > seq_len):
                raise ValueError(f"query_lens[{i}]={q_len} must be from 0 to seq_lens[{i}]={seq_len}, which includes it")
            if not 0 <= seq_len <= len(pages) * self.page_size:
                raise ValueError(f"seq_lens[{i}]={seq_len} must be from 0 to {len(pages) * self.page_size}: page_ids[{i}] has {len(pages)} pages")
        if self.prompt_lens is None:
            return
        if len(self.prompt_lens) != len(self.seq_lens):
            raise ValueError(f"prompt_lens has {len(self.prompt_lens)} requests; it must have {len(self.seq_lens)}, as seq_lens")
        for i, prompt_len in enumerate(self.prompt_lens):
            _check_int(f"prompt_lens[{i}]", prompt_len)
            if prompt_len < 0:
                raise ValueError(f"prompt_lens[{i}]={prompt_len!r} must be an int >= 0")

    @property
    def is_decode(self) -> bool:
        """One new token for every request: `mla_decode` takes it."""
        return all(n == 1 for n in self.query_lens)

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    @property
    def max_seq_len(self) -> int:
        return max(self.seq_lens, default=0)

    def table(self) -> torch.Tensor:
        """[B, W] int32 block table on the host; W is the longest page list, and 0 fills up the others."""
        width = max((len(pages) for pages in self.page_ids), default=0)
        if not width:
            return torch.zeros(len(self.page_ids), 0, dtype=torch.int32)
        # An array of C ints: a list of lists takes torch ten times as long, every step.
        ids = array("i")
        for pages in self.page_ids:
            ids.extend(pages)
            ids.extend([0] * (width - len(pages)))
        return torch.frombuffer(ids, dtype=torch.int32).view(len(self.page_ids), width)

    def tensors(self, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(block_table [B, W], cu_seqlens_q [B + 1], seq_lens [B]), int32 on ``device``; W is the longest page list."""
        starts = torch.tensor([0, *self.query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        lens = torch.tensor(list(self.seq_lens), dtype=torch.int32)
        return self.table().to(device), starts.to(device), lens.to(device)


def _check_int(name: str, value: object) -> None:
    if isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be an int")
    try:
        operator.index(value)  # type: ignore[arg-type]  # whatever was given
    except TypeError:
        raise ValueError(f"{name}={value!r} must be an int") from None


def _is_sequence(value: object) -> bool:
    return hasattr(value, "__len__") and not isinstance(value, (str, bytes, bytearray))


def _check_pages(request: int, pages: Sequence[int]) -> None:
    try:
        ids = array("i", pages) if _is_sequence(pages) else None  # refuses what is no int of 32 bits, in less time than a loop takes
    except (TypeError, OverflowError):
        ids = None
    if ids is not None and (not ids or min(ids) >= 0):
        if len(set(ids)) < len(ids):
            j = next(j for j, page in enumerate(ids) if page in ids[:j])
            raise ValueError(f"page_ids[{request}][{j}]={ids[j]} must be a page of its own; page_ids[{request}][{ids.index(ids[j])}] is the same")
        return
    if _is_sequence(pages):
        for j, page in enumerate(pages):
            if not hasattr(page, "__index__") or not 0 <= page < 2**31:
                raise ValueError(f"page_ids[{request}][{j}]={page!r} must be an int from 0 to 2**31 - 1")
    raise ValueError(f"page_ids[{request}]={pages!r} must be a sequence of ints from 0 to 2**31 - 1")
