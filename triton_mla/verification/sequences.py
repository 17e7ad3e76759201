"""A model of two `MLAAttention` layers and a small engine that runs it: chunks, preemptions, recomputation, page reuse.

The second layer's keys and values come from the first one's output, so that a token that took another form even once is
seen by all later ones.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import torch

from triton_mla.absorb import project_values
from triton_mla.batch import BatchLayout
from triton_mla.dims import MLADims
from triton_mla.module import MLAAttention
from triton_mla.paths import ABSORBED, MHA, PathRule
from triton_mla.testing import bitwise_equal
from triton_mla.verification.trial import VICTIM, Trial

FORMS = {"mha": PathRule(MHA), "absorbed": PathRule(ABSORBED)}
PREEMPT = 0
"""The event that takes a sequence's pages away."""
Events = Items[int]
"""Tokens of each step of a sequence, and preemptions."""


@dataclass(frozen=True)
class Model:
    """Two layers without norms or rotations, in which every product's rows are independent of each other."""

    trial: Trial
    form: str

    @property
    def num_heads(self) -> int:
        """Heads of a layer."""
        return self.trial.profile.prefill_heads or self.trial.num_heads

    @property
    def width(self) -> int:
        """Columns of the hidden state."""
        return 4 * self.trial.profile.qk_rope_head_dim

    @cached_property
    def dims(self) -> MLADims:
        """Of a layer."""
        p = self.trial.profile
        return MLADims(self.num_heads, p.kv_lora_rank, p.qk_rope_head_dim, p.qk_nope_head_dim, p.v_head_dim)

    @cached_property
    def layers(self) -> list[tuple[MLAAttention, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """(attention, weights of query, latent and output) of each layer."""
        dims, profile, chance = self.dims, self.trial.profile, torch.Generator().manual_seed(0)

        def weight(rows: int, columns: int) -> torch.Tensor:
            values = torch.randn(rows, columns, generator=chance) * rows**-0.5
            return values.to(self.trial.device, self.trial.dtype)

        def layer() -> tuple[MLAAttention, torch.Tensor, torch.Tensor, torch.Tensor]:
            kv_b = weight(dims.kv_lora_rank, self.num_heads * (dims.qk_nope_head_dim + dims.v_head_dim)).T.contiguous()
            attention = MLAAttention(
                dims,
                kv_b,
                paths=FORMS[self.form],
                order=profile.order,
                prefill_order=profile.prefill_order,
                chunk_tokens=4 * profile.prefill_order.block_n,
            )
            query = 2 * weight(self.width, self.num_heads * dims.qk_head_dim)
            return attention, query, weight(self.width, dims.latent_dim), weight(self.num_heads * dims.v_head_dim, self.width)

        return [layer() for _ in range(2)]

    def __call__(self, x: torch.Tensor, caches: Items[torch.Tensor], layout: BatchLayout) -> torch.Tensor:
        """The step's hidden states, [T, width] to [T, width]."""
        plan = self.layers[0][0].plan(layout)
        rank = self.dims.kv_lora_rank
        for (attention, w_q, w_kv, w_out), cache in zip(self.layers, caches, strict=True):
            kv = rows_times(x, w_kv)
            q = rows_times(x, w_q).unflatten(1, (self.num_heads, -1))
            x = x + rows_times(attention(q, kv[:, :rank], kv[:, rank:], cache, plan), w_out)
        return x

    def tokens(self, key: int, count: int) -> torch.Tensor:
        """[count, width] embeddings: a prefix of the endless sequence `key`."""
        rows = torch.randn(2048, self.width, generator=torch.Generator().manual_seed(key))[:count]
        return rows.to(self.trial.device, self.trial.dtype)


def rows_times(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight with bits of each row's own."""
    return project_values(x[:, None], weight[None])[:, 0]


@dataclass
class Sequence:
    """A request of an engine: its tokens, how many of them are prompt, how many are computed, its pages, its results."""

    tokens: torch.Tensor
    prompt_len: int
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    rows: dict[int, torch.Tensor] = field(default_factory=dict)
    consistent: bool = True
    """Whether every token that was computed again came out as before."""

    @property
    def done(self) -> bool:
        """Whether all tokens are computed."""
        return self.computed == len(self.tokens)


class Engine:
    """Paged caches, whose free pages hold NaN, and steps over any of the sequences.

    With `by_arrival`, which is wrong, tokens that come together pass for a prompt and one alone for a generated one.
    """

    def __init__(self, model: Model, *, seed: int = 0, by_arrival: bool = False, num_pages: int = 128) -> None:
        self.model, self.by_arrival, self.page_size = model, by_arrival, model.trial.profile.page_size
        trial, shape = model.trial, (num_pages, self.page_size, model.dims.latent_dim)
        self.caches = [torch.full(shape, float("nan"), dtype=trial.dtype, device=trial.device) for _ in model.layers]
        self.free = list(range(num_pages))
        random.Random(seed).shuffle(self.free)

    def step(self, *work: tuple[Sequence, int]) -> None:
        """Computes the next tokens of each (sequence, count)."""
        ends = [sequence.computed + count for sequence, count in work]
        for (sequence, _), end in zip(work, ends, strict=True):
            while len(sequence.pages) * self.page_size < end:
                sequence.pages.append(self.free.pop())
        counts = [count for _, count in work]
        roles = [sequence.prompt_len for sequence, _ in work]
        if self.by_arrival:
            roles = [end if count > 1 else end - 1 for end, count in zip(ends, counts, strict=True)]
        layout = BatchLayout(counts, ends, [sequence.pages for sequence, _ in work], self.page_size, roles)
        x = torch.cat([sequence.tokens[sequence.computed : end] for (sequence, _), end in zip(work, ends, strict=True)])
        out = iter(self.model(x, self.caches, layout))
        for (sequence, _), end in zip(work, ends, strict=True):
            for position in range(sequence.computed, end):
                row = next(out)
                sequence.consistent &= bitwise_equal(row, sequence.rows.get(position, row))
                sequence.rows[position] = row
            sequence.computed = end

    def preempt(self, sequence: Sequence) -> None:
        """Takes a sequence's pages away, and with them all that is computed."""
        for cache in self.caches:
            cache[sequence.pages] = float("nan")
        self.free = sequence.pages + self.free
        sequence.pages, sequence.computed = [], 0

    def run(self, sequence: Sequence, events: Events) -> Sequence:
        """Takes a sequence through steps of its own and preemptions."""
        for event in events:
            if event == PREEMPT:
                self.preempt(sequence)
            else:
                self.step((sequence, event))
        return sequence


def alone(model: Model, events: Events, **options: bool) -> Sequence:
    """The watched sequence by itself in an engine of its own."""
    prompt, total = model.trial.profile.sequence
    return Engine(model, seed=len(events), **options).run(Sequence(model.tokens(VICTIM, total), prompt), events)


def plain_events(trial: Trial) -> list[int]:
    """The prompt at once, then token by token."""
    prompt, total = trial.profile.sequence
    return [prompt] + [1] * (total - prompt)


@lru_cache(maxsize=2)
def plain(model: Model) -> Sequence:
    """The watched sequence's plain run, which all rows of a process share."""
    return alone(model, plain_events(model.trial))


def same_rows(a: Sequence, b: Sequence) -> bool:
    """Whether two runs gave the same bits for every token, without NaN."""
    finite = not any(bool(row.isnan().any()) for row in a.rows.values())
    return finite and a.done and b.done and all(bitwise_equal(a.rows[i], row) for i, row in b.rows.items())
