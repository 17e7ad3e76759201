"""The benchmarks without a GPU: shapes, the registry, results, targets, and the flow with a clock that returns made-up times."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench_fakes import CEILINGS, measure

from benchmarks import absorbed, host, prefill, report, targets, timing
from benchmarks.gemm import Product
from benchmarks.implementation import Implementation
from benchmarks.peers import Peers
from benchmarks.precompile import Job, jobs_for
from benchmarks.prefill import Prompt
from benchmarks.registry import NAMES, REGISTRY, SUITES
from benchmarks.timing import summarize
from benchmarks.workloads import Workload, decode, extend, grid, parse, verify

SMALL = Workload("decode", 16, (70, 3), dtype="float32")
ROW_FIELDS = {"op", "heads", "batch", "seq_len", "q_len", "dtype", "page_size", "workload", "impl", "us_median", "us_spread"}


def test_workload_arithmetic():
    w = decode(16, 2, 100)
    assert w.flops == 2 * 16 * 1088 * 200
    assert w.bytes == 2 * (200 * 576 + 2 * 16 * 1088)
    # 3 new tokens over 5 see 6, 7 and 8 tokens
    assert extend(16, 3, 5).flops == 2 * 16 * 1088 * (6 + 7 + 8)
    assert extend(128, 512, 8192).seq_len == 8704
    assert Prompt(16, 2, 3, 8).pairs == 2 * (6 + 7 + 8)
    assert Product("x", 2, 3, 4).flops == 48 and Product("x", 2, 3, 4).bytes == 2 * (8 + 12 + 6)


def test_names_are_of_one_workload():
    workloads = {w for suite in SUITES.values() for w in suite}
    assert len({w.name for w in workloads}) == len(workloads)


def test_the_decode_suite_covers_the_ranges():
    suite = SUITES["decode"]
    assert {1, 4, 16, 64, 128, 256} == {w.batch for w in suite} and {16, 64, 128} == {w.heads for w in suite}
    assert {1024, 4096, 8192, 32768, 131072} <= {w.seq_len for w in suite}
    assert len({w.label for w in suite}) == 3
    # Fits beside the peers' own copies and what torch takes.
    assert max(w.bytes for w in suite) < 40 << 30


def test_targets_name_workloads_and_implementations():
    measured = {w.name: w for suite in SUITES.values() for w in suite}
    for target in targets.RATIOS:
        for workload, impl in ((target.workload, target.over[0]), (target.of or target.workload, target.under)):
            assert impl in {*REGISTRY[measured[workload].op], "floor"}, target.text


def test_registry():
    required = {"triton_mla", "flashmla", "fa3_mla_auto", "fa3_mla_1", "vllm_triton_auto", "vllm_triton_1", "sglang_det", "fa3", "fa3_cat", "cudnn", "torch"}
    assert required <= set(NAMES) and "floor" not in NAMES
    for implementations in REGISTRY.values():
        assert next(iter(implementations)) == "triton_mla"


def test_every_beginning_of_the_grid_is_spread():
    cells = grid()
    assert len(cells) == len(set(cells)) == 96
    assert {w.heads for w in cells[:8]} == {16, 64, 128}
    assert len({w.batch for w in cells[:16]}) >= 4 and len({w.seq_len for w in cells[:16]}) >= 5


@pytest.mark.parametrize("text", ["16,1", "16,1,0", "16,1,x", "16,1,5,6", "16,1,5,6,7", "", "-1,1,1"])
def test_bad_workload(text: str):
    with pytest.raises(ValueError, match="H,B,L"):
        parse(text)


def test_good_workload():
    assert parse("16,2,300") == parse("16,2,300,1") == decode(16, 2, 300)
    assert parse("16,1,8704,512") == extend(16, 512, 8192)
    assert parse("16,2,300,4") == verify(16, 2, 300, 4)


def test_summarize():
    timing = summarize([float(i) for i in range(11)])
    assert (timing.median, timing.p10, timing.p90, timing.spread) == (5.0, 1.0, 9.0, 8.0)


class FakeEvent:
    """Of a device on which call number n takes n milliseconds."""

    now = 0.0

    def __init__(self, enable_timing: bool):
        self.at = 0.0

    def record(self) -> None:
        self.at = FakeEvent.now

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.at - self.at


def test_slow_calls_leave_the_turns(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "zeros", lambda *args, **kwargs: torch.ones(1))
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    counts = {"fast": 0, "slow": 0}

    def call(name: str, ms: float):
        def run() -> None:
            counts[name] += 1
            FakeEvent.now += ms

        return run

    times = timing.interleaved({"fast": call("fast", 0.5), "slow": call("slow", 30.0)}, 20, seconds=0.1)
    assert counts == {"fast": 22, "slow": timing.WARM_UP + timing.LEAST_REPEATS}
    assert times["fast"].median == pytest.approx(500) and times["slow"].median == pytest.approx(30000)
    assert math.isclose(times["slow"].spread, 0, abs_tol=1e-6)


@pytest.mark.parametrize(
    "workload",
    [SMALL, Workload("verify", 4, (70, 9), q_len=3, dtype="float32"), Workload("extend", 2, (70,), q_len=20, dtype="float32")],
    ids=["decode", "verify", "extend"],
)
def test_flow(workload: Workload):
    m = measure(workload, "triton_mla", "flashmla", "torch")
    assert list(m.timings) == ["triton_mla", "torch", "floor"]
    assert m.left_out == {"flashmla": "no --peers folder"} and not m.failed
    rows = {row["impl"]: row for row in m.rows()}
    assert all(set(row) >= ROW_FIELDS for row in rows.values())
    assert rows["triton_mla"]["relative_error"] < 1e-5 and rows["torch"]["relative_error"] < 1e-5
    assert rows["flashmla"]["us_median"] is None and rows["flashmla"]["left_out"] == "no --peers folder"
    assert (rows["floor"]["flops"], rows["floor"]["bytes"]) == (workload.flops, workload.bytes)
    assert m.timings["floor"].median == pytest.approx(
        max(workload.bytes / CEILINGS["hbm_bytes_per_s"], workload.flops / CEILINGS["bf16_flops_per_s"]) * 1e6
    )


def test_adaptive_chooses_among_the_splits():
    assert [order.kv_split for order in absorbed.adaptive_orders(decode(16, 1, 2048))] == [512, 1024, 2048]
    assert [order.kv_split for order in absorbed.adaptive_orders(decode(16, 1, 131072))][-1] == 65536
    assert "triton_mla_adaptive" in measure(SMALL, "triton_mla_adaptive").timings


def test_prefill_flow(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prefill, "STREAM_CHUNK", 128)
    m = measure(Prompt(1, 1, 5, 140, dtype="float32"), "triton_mla", "triton_mla_streamed", "triton_mla_paged", "triton_mla_absorbed", "torch")
    assert not m.failed and not m.left_out, m
    assert max(m.errors.values()) < 1e-5
    assert measure(Prompt(2, 2, 20, 20, dtype="float32"), "triton_mla_streamed", "torch").left_out.keys() == {"triton_mla_streamed"}


def test_gemm_flow():
    m = measure(Product("tiny", 3, 48, 64, dtype="float32"), "triton_mla", "torch")
    assert not m.failed and max(m.errors.values()) < 1e-5


def test_a_failing_or_wrong_implementation_is_not_timed():
    def almost(inputs, peers):
        right = absorbed.torch_gather(inputs, peers)
        return lambda: right() * 1.001

    def unwritten(inputs, peers):
        return lambda: absorbed.empty_out(inputs)

    def broken(inputs, peers):
        raise IndexError("no such page")

    m = measure(SMALL, Implementation("almost", almost), Implementation("unwritten", unwritten), Implementation("broken", broken), "torch")
    assert list(m.timings) == ["torch", "floor"] and not m.left_out
    assert "wrong result" in m.failed["almost"] and "nan" in m.failed["unwritten"]
    assert m.failed["broken"] == "IndexError: no such page"
    assert "broken FAILED: IndexError" in report.line(m.rows())


def test_result_file(tmp_path: Path):
    m = measure(SMALL, "triton_mla", "flashmla", "torch")
    content = {"header": report.header(Peers(None), CEILINGS, repeats=3, flush="write"), "rows": m.rows(), "targets": []}
    path = tmp_path / "results" / "cpu.json"
    report.write(path, content)
    read = report.read(path)
    assert read == json.loads(json.dumps(content))
    assert {"gpu", "versions", "date", "ceilings", "kernel_sources", "repeats"} <= set(read["header"])
    assert "decode H=16 B=2 L=70  10.0   1.10" in report.ratio_table(read["rows"])
    assert "torch 11.0 (1.10x)" in report.line(read["rows"]) and "TB/s" in report.line(read["rows"])
    assert report.default_path("NVIDIA H200", "decode").name == "nvidia_h200_decode.json"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": [{"impl": "x"}]}'])
def test_no_result_file(tmp_path: Path, text: str):
    path = tmp_path / "x.json"
    with pytest.raises(ValueError, match="cannot be read"):
        report.read(path)
    path.write_text(text)
    with pytest.raises(ValueError, match="x.json"):
        report.read(path)


def row(impl: str, us: float | None, workload: str = "decode H=16 B=128 L=8192") -> dict:
    return {"workload": workload, "impl": impl, "us_median": us}


def test_verdicts():
    rows = [row("triton_mla", 310.0), row("flashmla", 300.0), row("fa3_mla_auto", 320.0), row("floor", 290.0), row("vllm_triton_1", None)]
    rows += [row("triton_mla", us, name) for name, us in (("decode H=16 B=16 L=8192", 50.0), ("verify H=16 B=16 L=8192 q=4", 60.0))]
    judged = targets.verdicts(rows, {"triton_mla": 21.0, "triton_mla reused": 19.0, "flashmla": 99.0}, {16: {"decode": 6, "combine": 3}})
    by_text = {v.text: v for v in judged}
    assert by_text["decode H=16 B=128 L=8192: flashmla or fa3_mla_auto / triton_mla >= 1"].reached is False
    assert by_text["decode H=16 B=128 L=8192: triton_mla / floor <= 1.15"].reached is True
    assert by_text["decode H=16 B=128 L=8192: vllm_triton_1 / triton_mla >= 3"].reached is None
    assert by_text["verify H=16 B=16 L=8192 q=4: triton_mla / triton_mla of decode H=16 B=16 L=8192 <= 1.25"].value == 1.2
    assert not any("H=128" in text for text in by_text), "workloads that were not run have no targets"
    assert by_text["host time of one eager decode call, triton_mla <= 20 us"].reached is False
    assert by_text["host time of one eager decode call, triton_mla reused <= 20 us"].reached is True
    assert by_text["compiled kernels at H=16 <= 8"].reached is False
    assert str(by_text["compiled kernels at H=16 <= 8"]).split()[0] == "MISSED"


def test_varying_batches_cover_what_is_promised():
    batches = host.varying_batches()
    assert {len(lengths) for lengths, _ in batches} >= set(range(1, 34))
    assert {width for _, width in batches} >= set(range(1, 66))
    longest = [max(lengths) for lengths, _ in batches]
    assert max(longest) == 5000 and min(longest) == 1
    assert all(max(lengths) <= width * host.PAGE for lengths, width in batches)


def test_kernel_functions_are_found():
    """In a process without the interpreter, where kernels are the functions whose compiled variants are counted."""
    code = "from benchmarks.host import kernel_functions; print(*kernel_functions())"
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(host.__file__).parents[1]
    found = subprocess.run([sys.executable, "-c", code], cwd=root, env=env, capture_output=True, text=True, check=True)
    assert "one_pass.one_pass_kernel" in found.stdout.split()


def test_small_inputs_have_the_same_shapes():
    w = Workload("extend", 16, (700, 90), q_len=9)
    real, small = w.make_inputs("cpu"), w.make_inputs("cpu", small=True)
    for name in ("q", "block_table", "seq_lens", "cu_seqlens_q"):
        assert getattr(real, name).shape == getattr(small, name).shape
    assert small.kv_cache.shape[0] == 1 and small.block_table.max() == 0
    assert sorted(real.block_table.flatten().tolist()) == list(range(real.kv_cache.shape[0]))
    short = Prompt(2, 1, 300, 9000).make_inputs("cpu", small=True).prompt
    assert (short.new, short.length) == (256, 256 + 8192)


def test_jobs_are_of_different_kernels():
    jobs = jobs_for([SMALL, Prompt(2, 1, 3, 3)], ["triton_mla", "triton_mla_adaptive", "triton_mla_paged", "torch"])
    assert [(job.implementation, job.planned) for job in jobs] == [("triton_mla", True)] * 2 + [("triton_mla", False), ("triton_mla_paged", False)]
    assert Job(SMALL).key("cpu") == Job(replace(SMALL, seq_lens=(60, 3))).key("cpu") != Job(replace(SMALL, seq_lens=(2000, 3))).key("cpu")
    assert Job(Prompt(2, 1, 3, 3)).key("cpu") == Job(Prompt(2, 1, 4, 4)).key("cpu") != Job(Prompt(2, 1, 3, 4)).key("cpu")
