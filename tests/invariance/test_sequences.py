"""Whole sequences through a model of two layers: what an engine's scheduler does to a request changes none of its bits.

The second layer's keys and values come from the first one's output. So a token that took another form, even once, is seen by all later ones.
"""

import itertools
import random

import pytest
import torch

from triton_mla import BatchLayout, MLADims
from triton_mla.absorb import project_values
from triton_mla.module import MLAAttention
from triton_mla.paths import ABSORBED, MHA, REFUSED, PathRule
from triton_mla.testing import assert_bitwise_equal, bitwise_equal
from triton_mla.tuning import PrefillOrder

FORMS = {"mha": PathRule(MHA), "absorbed": PathRule(ABSORBED)}
PREEMPT = "preempt"


class Model:
    """Two layers without norms or rotations; every product's rows are independent of each other, as a batch-invariant model's are."""

    def __init__(self, mla, paths):
        if mla.device.type == "cuda":
            self.dims, self.width, order, chunk = MLADims(16), 256, PrefillOrder(), 512
        else:
            self.dims, self.width = MLADims(2, mla.kv_lora_rank, mla.qk_rope_head_dim, 32, 32), 32
            order, chunk = PrefillOrder(block_n=16), 32
        self.device, self.dtype, self.page_size = mla.device, mla.dtype, mla.page_size
        dims, chance = self.dims, torch.Generator().manual_seed(0)

        def weight(rows, columns):
            return (torch.randn(rows, columns, generator=chance) * rows**-0.5).to(self.device, self.dtype)

        def layer():
            kv_b = weight(dims.kv_lora_rank, dims.num_heads * (dims.qk_nope_head_dim + dims.v_head_dim)).T.contiguous()
            attention = MLAAttention(dims, kv_b, paths=paths, order=mla.order, prefill_order=order, chunk_tokens=chunk)
            q = weight(self.width, dims.num_heads * dims.qk_head_dim) * 2
            return attention, q, weight(self.width, dims.latent_dim), weight(dims.num_heads * dims.v_head_dim, self.width)

        self.layers = [layer() for _ in range(2)]

    def __call__(self, x, caches, layout):
        """[T, width] -> [T, width]"""
        plan = self.layers[0][0].plan(layout)
        for (attention, w_q, w_kv, w_out), cache in zip(self.layers, caches, strict=True):
            kv = rows_times(x, w_kv)
            q = rows_times(x, w_q).unflatten(1, (self.dims.num_heads, -1))
            x = x + rows_times(attention(q, kv[:, : self.dims.kv_lora_rank], kv[:, self.dims.kv_lora_rank :], cache, plan), w_out)
        return x

    def tokens(self, key, count):
        """[count, width] embeddings of the sequence `key`, a prefix of one endless sequence."""
        rows = [torch.randn(self.width, generator=torch.Generator().manual_seed(1000 * key + i)) for i in range(count)]
        return torch.stack(rows).to(self.device, self.dtype)


def rows_times(x, weight):
    return project_values(x[:, None], weight[None])[:, 0]


class Sequence:
    """A request of an engine: its tokens, how many are prompt, how many are computed, its pages, and what came out for each position."""

    def __init__(self, tokens, prompt_len):
        self.tokens, self.prompt_len = tokens, prompt_len
        self.computed, self.pages, self.rows = 0, [], {}


class Engine:
    """Paged caches whose free pages hold NaN, and steps over any of the sequences."""

    def __init__(self, model, num_pages=256, seed=0, by_arrival=False):
        self.model, self.by_arrival = model, by_arrival
        shape = (num_pages, model.page_size, model.dims.latent_dim)
        self.caches = [torch.full(shape, float("nan"), dtype=model.dtype, device=model.device) for _ in model.layers]
        self.free = list(range(num_pages))
        random.Random(seed).shuffle(self.free)

    def step(self, *work):
        """Computes the next tokens of each (sequence, count). A token that was computed before must come out as before, unless
        `by_arrival`, the control: there tokens that come together pass for a prompt, and one alone for a generated one."""
        for sequence, count in work:
            while len(sequence.pages) * self.model.page_size < sequence.computed + count:
                sequence.pages.append(self.free.pop())
        ends = [sequence.computed + count for sequence, count in work]
        prompt_lens = [sequence.prompt_len for sequence, _ in work]
        if self.by_arrival:
            prompt_lens = [end if count > 1 else end - 1 for end, (_, count) in zip(ends, work, strict=True)]
        counts = [count for _, count in work]
        layout = BatchLayout(counts, ends, [s.pages for s, _ in work], self.model.page_size, prompt_lens)
        x = torch.cat([sequence.tokens[sequence.computed : end] for (sequence, _), end in zip(work, ends, strict=True)])
        out = iter(self.model(x, self.caches, layout))
        for (sequence, _), end in zip(work, ends, strict=True):
            for position in range(sequence.computed, end):
                row = next(out)
                assert not row.isnan().any()
                if not self.by_arrival and position in sequence.rows:
                    assert_bitwise_equal(row, sequence.rows[position], f"computed again, position {position}:")
                sequence.rows[position] = row
            sequence.computed = end

    def preempt(self, sequence):
        """Takes a sequence's pages away, and with them all that is computed."""
        for cache in self.caches:
            cache[sequence.pages] = float("nan")
        self.free = sequence.pages + self.free
        sequence.pages, sequence.computed = [], 0

    def run(self, sequence, events):
        for event in events:
            if event == PREEMPT:
                self.preempt(sequence)
            else:
                self.step((sequence, event))
        assert sequence.computed == len(sequence.tokens)


@pytest.fixture(scope="module")
def mla(mla):
    """One split on a CPU: several are for other tests, and the combine takes half of the interpreter's time."""
    return mla if mla.device.type == "cuda" else mla.with_order(block_n=16)


@pytest.fixture(scope="module")
def lengths(mla):
    """Tokens of the prompt and of the whole; the last full page has tokens behind the prompt."""
    return (1276, 1284) if mla.device.type == "cuda" else (29, 34)


@pytest.fixture(scope="module")
def models(mla):
    return {name: Model(mla, rule) for name, rule in FORMS.items()}


@pytest.fixture(scope="module")
def plain(models, lengths):
    """Form -> [total, width] of the plain run: the prompt at once, then token by token."""
    return {name: run(model, lengths, [lengths[0]] + [1] * (lengths[1] - lengths[0])) for name, model in models.items()}


def run(model, lengths, events, **options):
    """[total, width] of one sequence by itself."""
    prompt, total = lengths
    sequence = Sequence(model.tokens(1, total), prompt)
    Engine(model, **options).run(sequence, events)
    return stacked(sequence)


def stacked(sequence):
    return torch.stack([sequence.rows[i] for i in range(len(sequence.tokens))])


def schedules(prompt, total):
    generated = total - prompt
    ones = [1] * generated
    return {
        "even chunks": [prompt // 3] * 3 + [prompt % 3] * bool(prompt % 3) + ones,
        "odd chunks": [1, 18, 2, prompt - 21, *ones],
        "last token of the prompt alone": [prompt - 1, 1, *ones],
        "prompt and verification": [prompt, 3, generated - 3],
        "preempted in the prompt": [prompt - 17, PREEMPT, prompt - 3, 3, *ones],
        "recomputed at once": [prompt, 1, 1, 1, PREEMPT, prompt + 3, *ones[3:]],
        "recomputed with a cut in the prompt": [prompt, 1, 1, 1, PREEMPT, prompt - 5, 8, *ones[3:]],
        "recomputed with a cut at its end": [prompt, 1, 1, 1, PREEMPT, prompt, 3, *ones[3:]],
        "recomputed with a cut behind it": [prompt, 3, PREEMPT, prompt + 1, 2, PREEMPT, prompt + 3, generated - 3],
        "recomputed token by token in part": [prompt, 3, PREEMPT, prompt - 1, 1, 1, 1, 1, generated - 3],
    }


NAMES = list(schedules(29, 34))
# Under the interpreter: of those alike one. The absorbed form's rows are independent of the schedule by other tests too.
FEWER = {
    "mha": ("odd chunks", "last token of the prompt alone", "prompt and verification", "preempted in the prompt", "recomputed at once",
            "recomputed with a cut behind it", "recomputed token by token in part"),
    "absorbed": ("odd chunks", "prompt and verification", "recomputed at once"),
}


@pytest.mark.parametrize(
    ("form", "name"),
    [
        pytest.param(form, name, marks=() if name in FEWER[form] else pytest.mark.gpu)
        for form in FORMS
        for name in NAMES
    ],
)
def test_schedules(models, lengths, plain, form, name):
    assert_bitwise_equal(run(models[form], lengths, schedules(*lengths)[name], seed=1), plain[form], name)


def test_forms_differ(plain):
    """Else no test here would say anything about forms."""
    assert not bitwise_equal(plain["mha"], plain["absorbed"])


@pytest.mark.parametrize("form", FORMS)
def test_random_schedules_with_neighbours(models, lengths, plain, form):
    prompt, total = lengths
    for seed in range(8 if models[form].device.type == "cuda" else 1):
        chance = random.Random(seed)
        victim = Sequence(models[form].tokens(1, total), prompt)
        engine = Engine(models[form], seed=seed)
        others = []
        for key in itertools.count(2):
            if victim.computed == total:
                break
            if len(others) < 3:
                length = chance.randint(2, total)
                others.append(Sequence(models[form].tokens(key, length), chance.randint(1, length)))
            work = [(s, min(chance.choice([1, 1, 5, 20, total]), len(s.tokens) - s.computed)) for s in [victim, *others]]
            chance.shuffle(work)
            engine.step(*work)
            for sequence in [victim] * (chance.random() < 0.2) + others[:]:
                if sequence.computed == len(sequence.tokens) or chance.random() < 0.2:
                    if sequence is not victim or victim.computed < total:
                        engine.preempt(sequence)
                    if sequence is not victim:
                        others.remove(sequence)
        assert_bitwise_equal(stacked(victim), plain[form], f"seed {seed}")


def conversation(model, lengths, hit):
    """A second turn, whose prompt is the first turn with its answer and more; `hit` of its tokens are in the cache."""
    prompt, total = lengths
    engine = Engine(model)
    tokens = model.tokens(1, total + 21)
    first = Sequence(tokens[:total], prompt)
    engine.run(first, [prompt] + [1] * (total - prompt))
    second = Sequence(tokens, total + 20)
    second.computed, second.pages = hit, first.pages[: hit // model.page_size]
    engine.run(second, [total + 20 - hit, 1])
    return torch.stack([second.rows[i] for i in range(total, total + 21)])


@pytest.fixture(scope="module")
def hits(models, lengths):
    """Tokens of full pages of the first turn: of its prompt alone, and with generated ones."""
    page, (prompt, total) = models["mha"].page_size, lengths
    assert total // page * page > prompt
    return prompt // page * page, total // page * page


def test_a_kept_prefix_cache_with_the_absorbed_form(models, lengths, hits):
    cold = conversation(models["absorbed"], lengths, 0)
    for hit in hits:
        assert_bitwise_equal(conversation(models["absorbed"], lengths, hit), cold, f"{hit} tokens cached:")


@pytest.mark.parametrize("form", FORMS)
def test_mixed_steps(models, lengths, form):
    """Prompt, later chunk, recomputed chunk, verification and decode in one call, as in calls of their own."""
    prompt, total = lengths
    engine = Engine(models[form])
    done = (0, 20, 0, prompt, prompt + 1)
    counts = (prompt - 5, prompt - 20, prompt + 2, 3, 1)
    sequences = [Sequence(models[form].tokens(key, total), prompt) for key in range(5)]
    engine.step(*[(sequence, n) for sequence, n in zip(sequences, done, strict=True) if n])
    for sequence, count in zip(sequences, counts, strict=True):
        engine.step((sequence, count))
    for order in ((0, 1, 2, 3, 4), (4, 2, 0, 3, 1))[: 2 if models[form].device.type == "cuda" else 1]:
        for sequence, n in zip(sequences, done, strict=True):
            sequence.computed = n
        engine.step(*[(sequences[i], counts[i]) for i in order])  # which compares


@pytest.mark.parametrize("name", ["last token of the prompt alone", "prompt and verification", "recomputed at once"])
def test_control_forms_by_arrival_differ(models, lengths, plain, name):
    """Tokens that come together pass for a prompt: what engines do that know no roles."""
    by_arrival = run(models["mha"], lengths, schedules(*lengths)[name], by_arrival=True)
    assert not bitwise_equal(by_arrival, plain["mha"])


def test_control_a_kept_prefix_cache_with_the_mha_form_differs(models, lengths, hits):
    """The first turn's answer was generated in the absorbed form; in the second turn's prompt it takes the mha form, if it is computed at all."""
    of_prompt, with_answer = hits
    cold = conversation(models["mha"], lengths, 0)
    assert_bitwise_equal(conversation(models["mha"], lengths, of_prompt), cold, "of the prompt alone:")
    assert not bitwise_equal(conversation(models["mha"], lengths, with_answer), cold)


def test_control_the_fallback_without_chunked_prefix_follows_the_cuts(mla, lengths, plain):
    """Outside of batch-invariant mode: prompt tokens behind cached ones take the absorbed form."""
    prompt, total = lengths
    model = Model(mla, PathRule(MHA, ABSORBED))
    whole = [prompt] + [1] * (total - prompt)
    assert_bitwise_equal(run(model, lengths, whole), plain["mha"], "uncut:")
    assert not bitwise_equal(run(model, lengths, [prompt - 3, 3, *whole[1:]]), plain["mha"])


def test_whole_prompts_without_chunked_prefix(mla, lengths, plain):
    prompt, total = lengths
    model = Model(mla, PathRule(MHA, REFUSED))
    events = [prompt, 2, PREEMPT, prompt + 2, *[1] * (total - prompt - 2)]
    assert_bitwise_equal(run(model, lengths, events), plain["mha"])
    with pytest.raises(ValueError, match="must come whole"):
        run(model, lengths, [prompt - 1, 1])
