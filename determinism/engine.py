"""A small continuous-batching engine that is nasty on purpose: whatever may happen to a request in a serving engine happens here."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from determinism.models import Model
from determinism.pages import PagePool, block_key
from determinism.replay import Replays
from triton_mla.batch import BatchLayout

NO_BUDGET = 1 << 30
MOST_PREEMPTIONS = 3


@dataclass(frozen=True)
class Request:
    """What a client asks for: `new_tokens` behind `prompt`. With `parent`, the whole sequence of that request comes before the prompt."""

    name: str
    prompt: tuple[int, ...]
    new_tokens: int
    parent: str | None = None


@dataclass(frozen=True)
class Policy:
    """What an engine does to its requests. The defaults are the plain run: one request at a time, its prompt whole, then token by token.

    Attributes:
        max_batch: requests of a step.
        budgets: tokens of a step; each step draws one.
        shuffled: requests arrive in any order and at any time, and stand in any order in a step.
        prefix_cache: which blocks later requests find: none, those within prompts, or generated tokens too.
        preempt: chance of each request to lose its pages before a step. num_pages: of the caches; too few preempt the youngest requests.
        drafts: draft tokens of a decode step, from `oracle` (tokens by request), where a third of them is replaced by wrong ones.
        padded: steps of nothing but generated tokens run in padded batches; on a GPU they are replays of CUDA graphs.
        every_row: whether log-probabilities of all tokens are asked for, or of those that are sampled from only.
        by_arrival: wrong on purpose: tokens that a resumed request brings again pass for a prompt.
        seed: of all that is drawn.
    """

    max_batch: int = 1
    budgets: tuple[int, ...] = (NO_BUDGET,)
    shuffled: bool = False
    prefix_cache: Literal["off", "prompts", "all"] = "off"
    preempt: float = 0.0
    num_pages: int | None = None
    drafts: int = 0
    oracle: Mapping[str, Sequence[int]] = field(default_factory=dict)
    padded: bool = False
    every_row: bool = True
    by_arrival: bool = False
    seed: int = 0


@dataclass
class Run:
    """What came out of a run.

    tokens: of each finished request, its prompt included. rows: by request, (first position, [n, vocab] log-probabilities of the token
    after each of n positions), once for each time that they were computed. events: how often something happened.
    """

    tokens: dict[str, list[int]] = field(default_factory=dict)
    rows: dict[str, list[tuple[int, torch.Tensor]]] = field(default_factory=dict)
    events: Counter[str] = field(default_factory=Counter)


@dataclass(eq=False)
class _Sequence:
    """A request in the engine: `tokens` known, the first `computed` of them in the cache; the prompt is the first `prompt_len`."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    prompt_len: int = 0
    arrived_len: int = 0
    age: int = -1
    computed: int = 0
    preemptions: int = 0
    pages: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)

    @property
    def total(self) -> int:
        return self.prompt_len + self.request.new_tokens

    @property
    def decoding(self) -> bool:
        """Whether nothing but its newest token, a generated one, is to be computed."""
        return self.computed == len(self.tokens) - 1 >= self.prompt_len


class Engine:
    """Runs requests through a model under a policy. Caches, and with them the prefix cache, live as long as the engine."""

    def __init__(self, model: Model, policy: Policy, *, page_size: int, max_len: int) -> None:
        """max_len: tokens of the longest sequence.

        Raises ValueError: the pages do not hold one such sequence.
        """
        width = -(-max_len // page_size)
        num_pages = policy.num_pages if policy.num_pages is not None else (policy.max_batch + 1) * width
        if num_pages < width:
            raise ValueError(f"num_pages={num_pages} must be at least {width}: a sequence may have {max_len} tokens")
        self.model, self.policy, self.page_size = model, policy, page_size
        self.caches = model.new_caches(num_pages, page_size)
        self.pool = PagePool(num_pages, seed=policy.seed)
        self.chance = random.Random(policy.seed)
        self.replays = Replays(model, self.caches, page_size, width) if policy.padded else None
        self.running: list[_Sequence] = []
        self.waiting: list[_Sequence] = []
        self.admitted = 0
        self.generated: set[bytes] = set()  # blocks of the prefix cache that hold generated tokens

    def run(self, requests: Sequence[Request]) -> Run:
        """Takes all requests to their ends.

        Raises ValueError: a parent is not among them.
        """
        names = {request.name for request in requests}
        for request in requests:
            if request.parent is not None and request.parent not in names:
                raise ValueError(f"request {request.name!r} has parent={request.parent!r}; it must be one of the requests: {', '.join(sorted(names))}")
        run = Run()
        self.waiting = [_Sequence(request) for request in requests]
        while self.waiting or self.running:
            self._preempt_some(run)
            self._admit(run)
            work = self._schedule(run)
            if work:
                self._compute(work, run)
        return run

    def _preempt_some(self, run: Run) -> None:
        for sequence in list(self.running):
            if self.chance.random() < self.policy.preempt and sequence.preemptions < MOST_PREEMPTIONS:
                self._preempt(sequence, run)

    def _preempt(self, sequence: _Sequence, run: Run) -> None:
        """Takes a sequence's pages away, and with them all that is computed."""
        run.events["preempted"] += bool(sequence.computed)
        run.events["generated tokens lost"] += max(sequence.computed - sequence.prompt_len, 0)
        self.running.remove(sequence)
        self._release(sequence)
        sequence.preemptions += 1
        self.waiting.insert(0, sequence)

    def _release(self, sequence: _Sequence) -> None:
        for page in sequence.pages:
            self.pool.release(page)
        sequence.pages, sequence.keys, sequence.drafts, sequence.computed = [], [], [], 0

    def _admit(self, run: Run) -> None:
        ready = [s for s in self.waiting if s.request.parent is None or s.request.parent in run.tokens]
        if self.policy.shuffled:
            self.chance.shuffle(ready)
            ready = ready[: self.chance.randint(0 if self.running else 1, len(ready))]
        for sequence in ready[: self.policy.max_batch - len(self.running)]:
            self.waiting.remove(sequence)
            self.running.append(sequence)
            if sequence.age < 0:
                sequence.age = self.admitted
                self.admitted += 1
                request = sequence.request
                sequence.tokens = [*(run.tokens[request.parent] if request.parent else ()), *request.prompt]
                sequence.prompt_len = len(sequence.tokens)
            sequence.arrived_len = len(sequence.tokens)
            if self.policy.prefix_cache != "off":
                self._find_prefix(sequence)
                run.events["cached"] += sequence.computed
                run.events["cached generated"] += sum(key in self.generated for key in sequence.keys)

    def _find_prefix(self, sequence: _Sequence) -> None:
        """Takes the blocks from the prefix cache that it holds; one token at least is left, to have log-probabilities."""
        while (end := (len(sequence.keys) + 1) * self.page_size) <= self._cacheable(sequence, len(sequence.tokens) - 1):
            key = self._next_key(sequence)
            page = self.pool.find(key)
            if page is None:
                return
            sequence.pages.append(page)
            sequence.keys.append(key)
            sequence.computed = end

    def _publish(self, sequence: _Sequence) -> None:
        while (len(sequence.keys) + 1) * self.page_size <= self._cacheable(sequence, sequence.computed):
            key = self._next_key(sequence)
            self.pool.publish(sequence.pages[len(sequence.keys)], key)
            sequence.keys.append(key)
            if len(sequence.keys) * self.page_size > sequence.prompt_len:
                self.generated.add(key)

    def _cacheable(self, sequence: _Sequence, end: int) -> int:
        return min(end, sequence.prompt_len) if self.policy.prefix_cache == "prompts" else end

    def _next_key(self, sequence: _Sequence) -> bytes:
        start = len(sequence.keys) * self.page_size
        return block_key(sequence.keys[-1] if sequence.keys else b"", sequence.tokens[start : start + self.page_size])

    def _schedule(self, run: Run) -> dict[_Sequence, int]:
        """How many tokens of which sequences the next step computes; they have pages for them."""
        order = list(self.running)
        if self.policy.shuffled:
            self.chance.shuffle(order)
        left = self.chance.choice(self.policy.budgets)
        work: dict[_Sequence, int] = {}
        for sequence in order:
            if sequence not in self.running:
                continue
            sequence.drafts = self._draft(sequence) if sequence.decoding else []
            wanted = len(sequence.tokens) + len(sequence.drafts) - sequence.computed
            count = min(wanted, left)
            if count and self._grow(sequence, sequence.computed + count, work, run):
                run.events["chunks"] += count < wanted and not sequence.drafts
                work[sequence] = count
                left -= count
        return work

    def _grow(self, sequence: _Sequence, end: int, work: dict[_Sequence, int], run: Run) -> bool:
        """Gives a sequence pages up to `end`, if need be those of the youngest sequences; False where it is itself the youngest."""
        while len(sequence.pages) * self.page_size < end:
            page = self.pool.take()
            if page is not None:
                sequence.pages.append(page)
                continue
            youngest = max(self.running, key=lambda s: s.age)
            self._preempt(youngest, run)
            work.pop(youngest, None)
            if youngest is sequence:
                return False
        return True

    def _draft(self, sequence: _Sequence) -> list[int]:
        known = len(sequence.tokens)
        count = min(self.policy.drafts, sequence.total - known - 1)
        drafts = list(self.policy.oracle.get(sequence.request.name, ())[known : known + count])
        return [(t + 1) % self.model.vocab_size if self.chance.random() < 1 / 3 else t for t in drafts]

    def _compute(self, work: dict[_Sequence, int], run: Run) -> None:
        for cache in self.caches:
            cache[self.pool.stale] = float("nan")
        self.pool.stale.clear()
        tokens: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        first_rows: list[int] = []
        for sequence, count in work.items():
            start, end = sequence.computed, sequence.computed + count
            first_row = start if self.policy.every_row else min(max(start, len(sequence.tokens) - 1), end)
            rows += range(len(tokens) + first_row - start, len(tokens) + count)
            first_rows.append(first_row)
            tokens += (sequence.tokens + sequence.drafts)[start:end]
            positions += range(start, end)
        run.events["steps"] += 1
        run.events["largest batch"] = max(run.events["largest batch"], len(work))
        if self.replays is not None and all(s.decoding and not s.drafts for s in work):
            logprobs = self.replays(tokens, positions, [s.pages for s in work])
            run.events["padded steps"] += 1
        else:
            logprobs = self._call(work, tokens, positions, rows)
        sampled = logprobs.argmax(-1).tolist()
        done = 0
        for (sequence, count), first_row in zip(work.items(), first_rows, strict=True):
            end = sequence.computed + count
            mine = slice(done, done + end - first_row)
            self._accept(sequence, end, first_row, logprobs[mine], sampled[mine], run)
            done = mine.stop

    def _call(self, work: dict[_Sequence, int], tokens: list[int], positions: list[int], rows: list[int]) -> torch.Tensor:
        ends = [s.computed + count for s, count in work.items()]
        roles = [s.arrived_len if self.policy.by_arrival else s.prompt_len for s in work]
        layout = BatchLayout(list(work.values()), ends, [s.pages for s in work], self.page_size, roles)
        device = self.model.device
        ids, places, wanted = (torch.tensor(values, dtype=torch.int64, device=device) for values in (tokens, positions, rows))
        return self.model(ids, places, self.model.plan(layout), self.caches, wanted)

    def _accept(self, sequence: _Sequence, end: int, first_row: int, logprobs: torch.Tensor, sampled: list[int], run: Run) -> None:
        """Takes over what a step has computed of a sequence up to `end`; logprobs and samples are those from position first_row on."""
        drafts, sequence.drafts = sequence.drafts[: end - len(sequence.tokens)], []
        last = min(end, len(sequence.tokens)) - 1
        if last == len(sequence.tokens) - 1:
            sequence.tokens.append(sampled[last - first_row])
            for draft in drafts:
                if draft != sequence.tokens[-1]:
                    break
                last += 1
                sequence.tokens.append(sampled[last - first_row])
                run.events["accepted drafts"] += 1
            run.events["rejected drafts"] += end - 1 - last
        sequence.computed = last + 1
        if last >= first_row:
            run.rows.setdefault(sequence.request.name, []).append((first_row, logprobs[: last + 1 - first_row]))
        if self.policy.prefix_cache != "off":
            self._publish(sequence)
        if len(sequence.tokens) == sequence.total:
            run.tokens[sequence.request.name] = sequence.tokens
            self.running.remove(sequence)
            self._release(sequence)
