"""One engine step for all layers: which query rows take which form, and where their keys and values lie, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import index

import torch

from . import checks
from .batch import BatchLayout
from .dims import check_page_size
from .paths import PathRule, Segment, split_batch


@dataclass(frozen=True)
class Rows:
    """The query rows of one form: at most one segment of each request.

    tokens: which of the step's tokens, as a slice where they lie together, else as int64 indices [n].
    block_table [B', W], cu_seqlens_q [B' + 1], seq_lens [B']: int32, as `mla_extend` takes them; a request's seq_len ends with its segment.
    one_each: whether every segment is one token, as `mla_decode` takes it. max_seq_len: bound of seq_lens; None: that of the block table.
    """

    tokens: slice | torch.Tensor
    block_table: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    one_each: bool
    max_seq_len: int | None = None

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """These rows of a tensor that has one for each of the step's tokens; a view where they lie together."""
        return _of(tensor, self.tokens)


@dataclass(frozen=True)
class StepPlan:
    """What every layer of a step needs of the batch. Made once a step, on the host and without waiting for the device.

    num_tokens: query tokens T, padding included. page_size: tokens of a page of the cache that table and slots are of.
    slot_mapping: [T] int64, as `write_kv_cache` takes it, -1 for padding.
    mha, absorbed: the rows of each form, None where there are none. padded: whether some tokens belong to neither; their output is 0.
    paths: the rule that gave the rows their form; None where every token is a generated one, whose form no rule changes.
    """

    num_tokens: int
    page_size: int
    slot_mapping: torch.Tensor
    mha: Rows | None
    absorbed: Rows | None
    padded: bool = False
    paths: PathRule | None = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Each by the name of it that a message of ``plan`` has."""
        parts = {"plan": self, "plan.mha": self.mha, "plan.absorbed": self.absorbed}
        named = {f"{name}.{f.name}": getattr(part, f.name) for name, part in parts.items() if part is not None for f in fields(part)}
        return {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}

    @classmethod
    def from_layout(cls, layout: BatchLayout, *, paths: PathRule, device: torch.device | str) -> StepPlan:
        """The plan of a step that the host knows all of, `layout.page_ids` included.

        Raises ValueError: the rule needs `layout.prompt_lens`, or a prompt is cut that it wants whole; or an argument is wrong.
        """
        if not isinstance(layout, BatchLayout):
            raise ValueError(f"layout={layout!r} must be a BatchLayout")
        _check_rule(paths)
        try:
            device = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"device={device!r} must name a device of torch: {error}") from error
        if device.type != "cpu" and not (device.type == "cuda" and (device.index or 0) < torch.cuda.device_count()):
            raise ValueError(f"device={device} must be the cpu or one of torch's {torch.cuda.device_count()} cuda devices")
        table = layout.table()
        lengths = torch.tensor(layout.query_lens, dtype=torch.int64), torch.tensor(layout.seq_lens, dtype=torch.int64)
        slots = _slots(*lengths, table, layout.page_size)
        return cls.from_lengths(layout.query_lens, layout.seq_lens, _sent(table, device), _sent(slots, device), page_size=layout.page_size, paths=paths,
                                prompt_lens=layout.prompt_lens)

    @classmethod
    def from_lengths(
        cls, query_lens: Sequence[int], seq_lens: Sequence[int], block_table: torch.Tensor, slot_mapping: torch.Tensor, *, page_size: int,
        paths: PathRule, prompt_lens: Sequence[int | None] | None = None, generated_lens: torch.Tensor | None = None,
    ) -> StepPlan:
        """The plan for an engine that has the lengths on the host, and table and slots on the device already.

        Args:
            query_lens, seq_lens, prompt_lens: of each request, as in `BatchLayout`.
            block_table: [B, W] int32; slot_mapping: [T] int64. Tokens past the sum of query_lens are padding.
            page_size: tokens of a page of the cache that both are of.
            generated_lens: [B] int32 on the table's device: seq_lens that rows of the absorbed form take, where those of the host are upper bounds,
                as while drafts are verified.

        Raises ValueError: an argument is wrong, or a prompt is cut that the rule wants whole.
        """
        _check_rule(paths)
        query_lens, seq_lens = _integers("query_lens", query_lens), _integers("seq_lens", seq_lens)
        _check_tensors(block_table, slot_mapping, page_size, len(query_lens))
        if len(seq_lens) != len(query_lens):
            raise ValueError(f"seq_lens has {len(seq_lens)} requests; it must have {len(query_lens)}, as query_lens")
        capacity = block_table.shape[1] * page_size
        for i, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
            if not 0 <= seq_len <= capacity:
                raise ValueError(f"seq_lens[{i}]={seq_len} must be from 0 to {capacity}: block_table has {block_table.shape[1]} pages of {page_size} tokens")
            if query_len < 0 or (seq_len and query_len > seq_len):
                raise ValueError(f"query_lens[{i}]={query_len} must be from 0 to seq_lens[{i}]={seq_len}, which includes it")
        if generated_lens is not None:
            checks.tensor("generated_lens", generated_lens, dims=1, dtype=torch.int32, device=block_table.device)
            checks.shape("generated_lens", generated_lens, (len(query_lens),), "one length for each request")
        total = sum(query_lens)
        num_tokens = slot_mapping.shape[0]
        if num_tokens < total:
            raise ValueError(f"slot_mapping has shape {tuple(slot_mapping.shape)}; it must have a slot for each of the {total} query tokens")
        mha, absorbed = split_batch(query_lens, seq_lens, prompt_lens, paths)
        return cls(num_tokens, page_size, slot_mapping, _rows(mha, block_table), _rows(absorbed, block_table, generated_lens), num_tokens > total, paths)

    @classmethod
    def decode(cls, block_table: torch.Tensor, seq_lens: torch.Tensor, slot_mapping: torch.Tensor, *, page_size: int) -> StepPlan:
        """The plan of one *generated* token for each request, over tensors on the device only: what a CUDA graph captures.

        A row of padding has seq_len 0 and slot -1. A prompt's last token is no generated one, even if it comes alone.
        page_size: tokens of a page of the cache that table and slots are of.

        Raises ValueError: a tensor has another shape, dtype or device than the step needs.
        """
        _check_tensors(block_table, slot_mapping, page_size)
        checks.shape("seq_lens", checks.tensor("seq_lens", seq_lens, dims=1, dtype=torch.int32, device=slot_mapping.device), tuple(slot_mapping.shape),
                     "one length for each of slot_mapping")
        starts = torch.arange(len(slot_mapping) + 1, dtype=torch.int32, device=slot_mapping.device)
        return cls(len(slot_mapping), page_size, slot_mapping, None, Rows(slice(None), block_table, starts, seq_lens, True))


def _integers(name: str, values: Sequence[int]) -> list[int]:
    try:
        return [index(value) for value in values]
    except TypeError:
        raise ValueError(f"{name}={values!r} must be a sequence of ints, one for each request") from None


def _check_rule(paths: object) -> None:
    if not isinstance(paths, PathRule):
        raise ValueError(f"paths={paths!r} must be a PathRule")


def _check_tensors(block_table: torch.Tensor, slot_mapping: torch.Tensor, page_size: int, num_requests: int | None = None) -> None:
    """All that the layers' operations will ask of them, so that no layer writes its cache and then refuses the plan.

    num_requests: None where each has one slot.
    """
    check_page_size(page_size)
    slots = checks.tensor("slot_mapping", slot_mapping, dims=1, dtype=torch.int64, device=getattr(slot_mapping, "device", None))
    table = checks.tensor("block_table", block_table, dims=2, dtype=torch.int32, device=slots.device)
    if num_requests is None:
        num_requests = len(slots)
    if table.shape[0] != num_requests:
        raise ValueError(f"block_table has shape {tuple(table.shape)}; it must have a row for each of the {num_requests} requests")


def _rows(segments: Sequence[Segment], block_table: torch.Tensor, ends: torch.Tensor | None = None) -> Rows | None:
    """``ends``: [B] where the segments' own are upper bounds; each is then the last one of its request."""
    if not segments:
        return None
    device = block_table.device
    first, last = segments[0], segments[-1]
    counts = torch.tensor([s.query_len for s in segments])
    starts = torch.zeros(len(segments) + 1, dtype=torch.int64)
    torch.cumsum(counts, 0, out=starts[1:])
    total = int(starts[-1])
    tokens: slice | torch.Tensor = slice(first.first, first.first + total)
    if last.first + last.query_len != first.first + total:
        firsts = torch.tensor([s.first for s in segments])
        tokens = _sent(torch.arange(total) + torch.repeat_interleave(firsts - starts[:-1], counts), device)
    lens = [s.seq_len for s in segments]
    together = last.request - first.request + 1 == len(segments)
    requests = slice(first.request, last.request + 1) if together else _sent(torch.tensor([s.request for s in segments]), device)
    seq_lens = _sent(torch.tensor(lens, dtype=torch.int32), device) if ends is None else _of(ends, requests)
    return Rows(tokens, _of(block_table, requests), _sent(starts.to(torch.int32), device), seq_lens, total == len(segments), max(lens))


def _of(tensor: torch.Tensor, rows: slice | torch.Tensor) -> torch.Tensor:
    """Rows of a tensor; a view where they lie together."""
    return tensor[rows] if isinstance(rows, slice) else tensor.index_select(0, rows)


def _slots(query_lens: torch.Tensor, seq_lens: torch.Tensor, table: torch.Tensor, page_size: int) -> torch.Tensor:
    """[T] int64 slots of the query tokens; -1 for those of a request of length 0, which is padding."""
    ends = query_lens.cumsum(0)
    total = int(query_lens.sum())
    request = torch.repeat_interleave(torch.arange(len(query_lens)), query_lens)
    position = torch.arange(total) - (ends - seq_lens)[request]
    there = seq_lens[request] > 0
    page = table[request[there], position[there] // page_size]
    slots = torch.full((total,), -1, dtype=torch.int64)
    slots[there] = page.to(torch.int64) * page_size + position[there] % page_size
    return slots


def _sent(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on ``device``: from pinned memory, since a copy from pageable memory waits for the stream."""
    return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)
