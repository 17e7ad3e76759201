"""What an engine compares and measures, on a stand-in for vLLM whose outputs follow from the prompt, the batch if asked, and the cache if asked."""

import json
import os
import sys
import threading
import time
from multiprocessing import Pipe
from types import ModuleType, SimpleNamespace

import pytest
import torch

from determinism import vllm_throughput
from determinism.vllm_engine import ENGINES, Engine, Run


class Llm:
    """`depends`: "nothing", "batch" or "cache"."""

    depends = "nothing"
    CACHE = 200 * 64  # tokens of the engines of `preemption`

    def __init__(self, **options):
        self.options, self.cached, self.running = options, [], []
        cache, model = SimpleNamespace(block_size=64, enable_prefix_caching=True), SimpleNamespace(get_vocab_size=lambda: 8192)
        compilation = SimpleNamespace(static_forward_context={"layer": SimpleNamespace(attn_backend=Llm)}, cudagraph_mode="FULL")
        self.scheduler = SimpleNamespace(_preempt_request=lambda request: None, make_spec_decoding_stats=lambda stats, **counts: None)
        self.llm_engine = self
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=self.scheduler), shutdown=lambda: None)
        self.vllm_config = SimpleNamespace(compilation_config=compilation, cache_config=cache, model_config=model)

    def reset_prefix_cache(self):
        self.cached = []

    def generate(self, prompts, sampling, use_tqdm):
        outputs = []
        lengths = [len(item["prompt_token_ids"]) for item in prompts]
        if sum(lengths) <= self.CACHE < sum(lengths) + len(prompts) * sampling.max_tokens:  # all are admitted, and all outgrow it
            self.scheduler._preempt_request("the first")
        for prompt in (item["prompt_token_ids"] for item in prompts):
            hits = max((len(known) for known in self.cached if prompt[: len(known)] == known), default=0)
            draw = sum(prompt) + (len(prompts) if self.depends == "batch" else 0) + (hits if self.depends == "cache" else 0)
            tokens = [(draw + i) % 8192 for i in range(sampling.max_tokens)]
            steps = [{token: SimpleNamespace(logprob=-1 / (1 + token + draw))} for token in tokens]
            outputs.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, logprobs=steps)], num_cached_tokens=hits))
            self.scheduler.make_spec_decoding_stats(None, num_draft_tokens=3, num_accepted_tokens=1)
            whole = prompt + tokens
            self.cached += [whole[:size] for size in range(64, len(whole) + 1, 64)]
        return outputs

    def add_request(self, name, prompt, sampling):
        self.running.append(name)

    BESIDE = 32  # requests of a step

    def step(self):
        self.running = [*self.running[1:], *self.running[:1]]
        return [SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=[1])]) for name in self.running[: self.BESIDE]]

    def abort_request(self, names):
        self.running = []

    def has_unfinished_requests(self):
        return bool(self.running)


@pytest.fixture
def start(monkeypatch, tmp_path):
    fake, parameters = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    fake.LLM, fake.SamplingParams, fake.__version__ = Llm, lambda **options: SimpleNamespace(**options), "0.23.0"
    parameters.RequestOutputKind = SimpleNamespace(DELTA="delta")
    monkeypatch.setitem(sys.modules, "vllm", fake)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", parameters)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def make(engine, depends="nothing"):
        monkeypatch.setattr(Llm, "depends", depends)
        return Run(engine, tmp_path, "model", 1, False)

    return make


def phases(run):
    for phase in run.engine.phases:
        getattr(run, phase)()
    return {row["row"]: row for row in run.data["rows"]}


EVERYTHING = Engine("all", "CUSTOM", ("short", "schedule", "prefix", "turns", "preemption", "drafts"))


def test_every_phase_of_every_engine_exists():
    assert all(callable(getattr(Run, phase)) for engine in ENGINES for phase in engine.phases)


def test_an_invariant_engine_has_no_mismatch_and_its_counts_are_there(start, tmp_path):
    rows = phases(start(EVERYTHING))
    assert len(rows) == 10 and not any(row["mismatches"] for row in rows.values())
    assert all(row["pairs"] for row in rows.values()) and all(all(row["needs"].values()) for row in rows.values())
    assert {name for row in rows.values() for name in row["needs"]} == {"cached", "cached_generated", "preemptions", "drafted", "accepted"}
    assert json.loads((tmp_path / "all.json").read_text())["state"] == "partial"


def test_an_engine_that_follows_the_batch_is_seen(start):
    rows = phases(start(Engine("batch", "CUSTOM", ("short", "schedule", "preemption", "drafts")), "batch"))
    seen = {name: bool(row["mismatches"]) for name, row in rows.items()}
    assert seen.pop("the same in reversed order") is False  # it depends on how many there are
    assert all(seen.values()), seen


def test_an_engine_that_follows_the_cache_is_seen(start):
    rows = phases(start(Engine("cache", "CUSTOM", ("prefix", "turns", "cache_off"), own_process=True), "cache"))
    assert all(row["mismatches"] for row in rows.values()), rows


def windows_of(run, rounds, monkeypatch):
    """What `measure` finds of a run, served by a thread."""
    monkeypatch.setattr(vllm_throughput, "CELLS", {(4096, 1): rounds, (4096, 32): rounds})
    ours, theirs = Pipe()
    thread = threading.Thread(target=vllm_throughput.serve, args=(vllm_throughput.Requests(run.llm, run.vocabulary), theirs))
    thread.start()
    assert ours.recv() == "ready"
    found = vllm_throughput.measure({"fast": ours}, time.monotonic() + 60)
    ours.send(None)
    thread.join(10)
    assert not thread.is_alive()
    return found


def test_throughput(start, monkeypatch):
    run = start(Engine("fast", "CUSTOM", (), throughput=True))
    cores = os.sched_getaffinity(0)
    cells = windows_of(run, 3, monkeypatch)["fast"]
    assert os.sched_getaffinity(0) == cores and not run.llm.running
    assert set(cells) == {"4096 x 1", "4096 x 32"}
    for cell in cells.values():
        assert len(cell["windows_ms_per_step"]) == 3 * vllm_throughput.SITTINGS and len(cell["prefills"]) == vllm_throughput.SITTINGS
        assert cell["tokens_per_second"] > 0 and cell["prefill_seconds"] == min(cell["prefills"])
    assert run.llm.options["kv_cache_memory_bytes"] == 8 << 30 and run.llm.options["attention_config"] == {"backend": "CUSTOM"}


def test_windows_in_which_some_requests_wait_are_not_counted(start, monkeypatch, capsys):
    monkeypatch.setattr(Llm, "BESIDE", 31)
    assert set(windows_of(start(Engine("fast", "CUSTOM", (), throughput=True)), 2, monkeypatch)["fast"]) == {"4096 x 1"}
    assert "fast, 4096 x 32: not measured" in capsys.readouterr().out
