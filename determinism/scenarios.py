"""What may happen to a request without changing a bit of its log-probabilities, by name."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from determinism.compare import Comparison, compare, compare_rows
from determinism.engine import Engine, Policy, Request, Run
from determinism.models import Build, Model
from triton_mla.batch import BatchLayout
from triton_mla.module import MLAAttention
from triton_mla.paths import ABSORBED, MHA, PathRule

FORMS = {ABSORBED: PathRule(ABSORBED), MHA: PathRule(MHA)}


@dataclass(frozen=True)
class Sizes:
    """How much a run does. Lengths are in tokens.

    Attributes:
        page_size: tokens of a page. lengths: of the prompts; every third one begins with the tokens of the one before it. new_tokens: of each request.
        needle: index of the request that is watched among strangers. turns: indices of requests that a second turn follows, with its reply.
        batches: requests of a step, the largest last. budgets: tokens of a step. companies: crowds of strangers.
        tp_heads: heads that are split over ranks.
    """

    name: str
    page_size: int
    lengths: tuple[int, ...]
    new_tokens: int
    needle: int
    turns: tuple[int, ...]
    batches: tuple[int, ...]
    budgets: tuple[tuple[int, ...], ...]
    companies: int
    tp_heads: int


def _lengths(count: int, longest: int, needle: int) -> tuple[int, ...]:
    chance = random.Random(0)
    return (needle, *(chance.randint(1, longest) for _ in range(count - 1)))


SIZES = {
    ("cpu", True): Sizes("interpreter, quick", 16, (14, 2, 17), 3, 2, (0,), (3,), ((7,),), 1, 8),
    ("cpu", False): Sizes("interpreter", 16, (37, 5, 36, 18, 1, 30, 33, 64), 8, 0, (0, 5), (3, 10), ((1, 7), (7, 16, 23)), 3, 8),
    ("cuda", True): Sizes("gpu, quick", 64, _lengths(64, 160, 1100), 24, 0, tuple(range(8)), (64,), ((64, 100, 257),), 2, 16),
    ("cuda", False): Sizes("gpu", 64, _lengths(128, 600, 2300), 48, 0, tuple(range(16)), (5, 128), ((64, 100, 257), (1000,)), 4, 16),
}


def make_requests(sizes: Sizes, vocab_size: int, *, seed: int = 0, name: str = "request") -> list[Request]:
    """Random prompts of these sizes, and second turns that come behind the whole sequence of a first one."""
    chance = random.Random(seed)
    prompts: list[tuple[int, ...]] = []
    for index, length in enumerate(sizes.lengths):
        shared = prompts[-1][:length] if index % 3 == 2 else ()
        prompts.append(shared[: length - 1] + tuple(chance.randrange(vocab_size) for _ in range(length - len(shared[: length - 1]))))
    requests = [Request(f"{name} {index}", prompt, sizes.new_tokens) for index, prompt in enumerate(prompts)]
    for index in sizes.turns:
        more = tuple(chance.randrange(vocab_size) for _ in range(1 + index % sizes.page_size))
        requests.append(Request(f"{name} {index}, second turn", more, sizes.new_tokens, parent=f"{name} {index}"))
    return requests


class Bench:
    """Requests, a model whose prompts take one form, and the reference: each request alone (bs1)."""

    def __init__(self, build: Build, form: str, sizes: Sizes) -> None:
        self.build, self.form, self.sizes = build, form, sizes

    @cached_property
    def model(self) -> Model:
        """The model under test."""
        return self.build(FORMS[self.form])

    @cached_property
    def requests(self) -> list[Request]:
        """Of the reference."""
        return make_requests(self.sizes, self.model.vocab_size)

    @property
    def first_turns(self) -> list[Request]:
        """Those that need no other one."""
        return [request for request in self.requests if request.parent is None]

    @cached_property
    def reference(self) -> Run:
        """One request at a time, its prompt whole, then token by token."""
        return self.engine(Policy()).run(self.requests)

    @property
    def longest(self) -> int:
        """A bound of a sequence's tokens: a second turn has all of a first one, and a stranger is twice as long as any prompt."""
        return 2 * (max(self.sizes.lengths) + self.sizes.new_tokens + self.sizes.page_size)

    def engine(self, policy: Policy, model: Model | None = None) -> Engine:
        """A new engine for sequences of these sizes."""
        return Engine(model or self.model, policy, page_size=self.sizes.page_size, max_len=self.longest)

    def compare(self, policy: Policy, requests: Sequence[Request] | None = None) -> Comparison:
        """A run of some requests, by default all but the second turns, under a policy, against the reference."""
        return compare(self.engine(policy).run(self.first_turns if requests is None else requests), self.reference)


Body = Callable[[Bench], Iterator[Comparison]]


@dataclass(frozen=True)
class Scenario:
    """forms: for which it holds. needs: events that must have happened, else it has shown nothing. alone: not for a model that is split over ranks."""

    name: str
    body: Body
    forms: tuple[str, ...] = (ABSORBED, MHA)
    needs: tuple[str, ...] = ()
    alone: bool = False


def bs1(bench: Bench) -> Iterator[Comparison]:
    """The reference against itself: that each row was computed, and none is NaN."""
    yield compare(bench.reference, bench.reference)


def bs_n(bench: Bench) -> Iterator[Comparison]:
    """All requests at once, in batches of several sizes."""
    for size in bench.sizes.batches:
        yield bench.compare(Policy(max_batch=size, seed=1))


def shuffled_arrival(bench: Bench) -> Iterator[Comparison]:
    """Requests arrive in any order and at any time; log-probabilities of sampled tokens only are asked for."""
    yield bench.compare(Policy(max_batch=bench.sizes.batches[-1], shuffled=True, every_row=False, seed=2))


def chunk_budgets(bench: Bench) -> Iterator[Comparison]:
    """Prompts are cut where the step's budget ends, in other places with other neighbours."""
    for budgets in bench.sizes.budgets:
        yield bench.compare(Policy(max_batch=bench.sizes.batches[-1], budgets=budgets, shuffled=True, seed=3))


def _cold_and_warm(bench: Bench, kept: Literal["prompts", "all"]) -> Iterator[Comparison]:
    engine = bench.engine(Policy(max_batch=bench.sizes.batches[-1], prefix_cache=kept, num_pages=_pages(bench, 2), shuffled=True, seed=4))
    for _ in range(2):
        yield compare(engine.run(bench.requests), bench.reference)


def prefix_cache(bench: Bench) -> Iterator[Comparison]:
    """A prefix cache that is empty, then full; it holds generated tokens too, which second turns find."""
    yield from _cold_and_warm(bench, "all")


def prompt_cache(bench: Bench) -> Iterator[Comparison]:
    """The same with a cache that holds and serves nothing but whole blocks of prompts."""
    yield from _cold_and_warm(bench, "prompts")


def _pages(bench: Bench, copies: float) -> int:
    """Pages for `copies` times the tokens of all requests."""
    tokens = sum(len(tokens) + bench.sizes.page_size for tokens in bench.reference.tokens.values())
    return max(int(copies * tokens), bench.longest) // bench.sizes.page_size + 1


def preempt_and_resume(bench: Bench) -> Iterator[Comparison]:
    """Requests lose their pages at any time, by chance and for want of memory, and compute everything again in larger chunks."""
    yield bench.compare(
        Policy(max_batch=bench.sizes.batches[-1], preempt=0.15, num_pages=_pages(bench, 0.7), budgets=bench.sizes.budgets[-1], shuffled=True, seed=5)
    )


def verify(bench: Bench) -> Iterator[Comparison]:
    """Rows of speculative decoding: some drafts are right, and what wrong ones wrote is written over."""
    yield bench.compare(Policy(max_batch=bench.sizes.batches[-1], drafts=3, oracle=bench.reference.tokens, shuffled=True, seed=6))


def needle(bench: Bench) -> Iterator[Comparison]:
    """One request among strangers of any length."""
    sizes = bench.sizes
    watched = bench.requests[sizes.needle]
    for crowd in range(sizes.companies):
        chance = random.Random(100 + crowd)
        lengths = tuple(chance.sample(sizes.lengths, k=min(len(sizes.lengths), 2 + chance.randrange(len(sizes.lengths)))))
        others = make_requests(dataclasses.replace(sizes, lengths=lengths, turns=()), bench.model.vocab_size, seed=100 + crowd, name=f"stranger {crowd}.")
        others.insert(chance.randrange(len(others) + 1), watched)
        yield bench.compare(Policy(max_batch=sizes.batches[-1], shuffled=True, seed=100 + crowd), others)


def padded_replays(bench: Bench) -> Iterator[Comparison]:
    """Decode steps in padded batches; on a GPU as replays of CUDA graphs."""
    yield bench.compare(Policy(max_batch=bench.sizes.batches[-1], padded=True, seed=7))


def prefill_as_decode(bench: Bench) -> Iterator[Comparison]:
    """The whole sequence as a prompt: generated tokens get the log-probabilities that they had when they were generated."""
    finished = [Request(name, tuple(tokens[:-1]), 1) for name, tokens in bench.reference.tokens.items()]
    yield bench.compare(Policy(max_batch=bench.sizes.batches[-1], seed=8), finished)


def split_heads(bench: Bench) -> Iterator[Comparison]:
    """Attention of one layer with its heads on 1, 2, 4 or 8 ranks against the call with all of them; rows are (token, rank)."""
    whole = bench.model.attention[0]
    heads, page = bench.sizes.tp_heads, bench.sizes.page_size
    dims = dataclasses.replace(whole.dims, num_heads=heads)
    device, dtype = whole.w_kv_b.device, whole.w_kv_b.dtype
    chance = torch.Generator().manual_seed(9)

    def values(*shape: int) -> torch.Tensor:
        return (0.5 * torch.randn(*shape, generator=chance)).to(device, dtype)

    layout = BatchLayout([1, 3, 6], [page + 9, 3, page + 6], [[4, 0], [2], [3, 1]], page, [page, 3, page + 6])
    q, kv_c, k_pe = (values(layout.num_tokens, *shape) for shape in ((heads, dims.qk_head_dim), (dims.kv_lora_rank,), (dims.qk_rope_head_dim,)))
    weight, cache = values(heads, dims.qk_nope_head_dim + dims.v_head_dim, dims.kv_lora_rank), values(5, page, dims.latent_dim)

    def attend(first: int, count: int) -> torch.Tensor:
        own = MLAAttention(dataclasses.replace(dims, num_heads=count), weight[first : first + count].flatten(0, 1), paths=whole.paths, order=whole.order,
                           prefill_order=whole.prefill_order, chunk_tokens=whole.chunk_tokens)
        return own(q[:, first : first + count], kv_c, k_pe, cache.clone(), own.plan(layout))

    unsplit = attend(0, heads).float()
    positions = torch.arange(layout.num_tokens, device=device)
    for ranks in (1, 2, 4, 8):
        share = heads // ranks
        for rank in range(ranks):
            columns = slice(rank * share * dims.v_head_dim, (rank + 1) * share * dims.v_head_dim)
            out = attend(rank * share, share).float()
            yield compare_rows(f"rank {rank} of {ranks}", positions, out, unsplit[:, columns].contiguous(), layout.num_tokens)


SCENARIOS = (
    Scenario("bs1", bs1),
    Scenario("bsN", bs_n),
    Scenario("shuffled arrival", shuffled_arrival),
    Scenario("chunk budgets", chunk_budgets, needs=("chunks",)),
    Scenario("prefix cold and warm", prefix_cache, forms=(ABSORBED,), needs=("cached", "cached generated")),
    Scenario("prefix of prompts cold and warm", prompt_cache, forms=(MHA,), needs=("cached",)),
    Scenario("preempt and resume", preempt_and_resume, needs=("preempted", "generated tokens lost")),
    Scenario("verify", verify, needs=("accepted drafts", "rejected drafts")),
    Scenario("needle", needle),
    Scenario("padded replays", padded_replays, needs=("padded steps",)),
    Scenario("prefill as decode", prefill_as_decode, forms=(ABSORBED,)),
    Scenario("tp", split_heads, alone=True),
)
