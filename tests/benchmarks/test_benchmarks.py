"""The benchmark scripts without a GPU: shapes, targets, files, and the flow with a clock that returns made-up times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import host, implementations, report, run, runner, search_split, targets
from benchmarks.peers import Peers, Unavailable
from benchmarks.timing import Timing, summarize
from benchmarks.workloads import ROWS, Workload, decode, extend, grid, make_inputs, parse
from triton_mla.tuning import Schedule

CEILINGS = {"hbm_bytes_per_s": 4.0e12, "bf16_flops_per_s": 8.0e14}
SMALL = Workload("decode", 16, (70, 3), dtype="float32")
ROW_FIELDS = {"op", "heads", "batch", "seq_len", "q_len", "dtype", "page_size", "impl", "us_median", "us_spread"}


class FakeRun:
    def __init__(self, call: Callable[[], torch.Tensor]):
        self.out = call()

    def __call__(self) -> None:
        raise AssertionError("the fake clock replays nothing")


class FakeClock:
    """Times 10, 11, ... µs in the order of the calls."""

    def capture(self, call: Callable[[], torch.Tensor]) -> FakeRun:
        return FakeRun(call)

    def time(self, runs: Mapping[str, object]) -> dict[str, Timing]:
        return {name: Timing(10.0 + i, 9.5, 12.0) for i, name in enumerate(runs)}


def measure(workload: Workload, names: tuple[str, ...], peers: Peers | None = None) -> runner.Measured:
    return runner.measure(
        workload,
        names,
        peers=peers or Peers(None),
        clock=FakeClock(),
        ceilings=CEILINGS,
        device=torch.device("cpu"),
    )


def test_workload_arithmetic():
    w = decode(16, 2, 100)
    assert w.flops == 2 * 16 * 1088 * 200
    assert w.bytes == 2 * (200 * 576 + 2 * 16 * 1088)
    # 3 new tokens over 5 see 6, 7 and 8 tokens
    assert extend(16, 3, 5).flops == 2 * 16 * 1088 * (6 + 7 + 8)
    assert extend(128, 512, 8192).seq_len == 8704


def test_targets_name_measured_rows():
    measured = {(w.op, w.heads, w.batch, w.seq_len) for w in ROWS["decode"] + ROWS["extend"]}
    assert {(t.op, t.heads, t.batch, t.seq_len) for t in targets.RATIOS} <= measured
    assert len(ROWS["decode"]) == 24


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
    assert parse("16,2,300") == decode(16, 2, 300)
    assert parse("16,1,8704,512") == extend(16, 512, 8192)


def test_bad_command_line():
    for argv in (["--rows", "nothing"], ["--impls", "nothing"], ["--repeats", "0"], ["--workloads", "1,2"]):
        with pytest.raises(SystemExit):
            run.arguments(argv)
    for argv in (["--splits", "100"], ["--repeats", "0"], ["--workloads", "1,2"]):
        with pytest.raises(SystemExit):
            search_split.arguments(argv)


def test_command_line():
    args = run.arguments(["--rows", "decode", "host", "--workloads", "16,1,8192", "64,1,100"])
    assert len(args.workloads) == 25, "a shape that is already in the rows is measured once"


def test_summarize():
    timing = summarize([float(i) for i in range(11)])
    assert (timing.median, timing.p10, timing.p90, timing.spread) == (5.0, 1.0, 9.0, 8.0)


@pytest.mark.parametrize(
    "workload", [SMALL, Workload("extend", 16, (70, 9), q_len=3, dtype="float32")], ids=["decode", "extend"]
)
def test_flow(workload: Workload):
    m = measure(workload, ("triton_mla", "flashmla", "torch", "floor"))
    assert list(m.timings) == ["triton_mla", "torch", "floor"]
    assert m.left_out == {"flashmla": "no --peers folder"}
    assert all(set(row) == ROW_FIELDS for row in m.rows())
    assert m.errors["triton_mla"] < 1e-5 and m.errors["torch"] < 1e-5
    assert m.timings["floor"].median == pytest.approx(
        max(workload.bytes / CEILINGS["hbm_bytes_per_s"], workload.flops / CEILINGS["bf16_flops_per_s"]) * 1e6
    )


def test_a_wrong_implementation_is_not_timed(monkeypatch: pytest.MonkeyPatch):
    def almost(inputs, peers):
        right = implementations.torch_gather(inputs, peers)
        return lambda: right() * 1.001

    def unwritten(inputs, peers):
        return lambda: implementations.empty_out(inputs)

    monkeypatch.setitem(runner.REGISTRY, "almost", almost)
    monkeypatch.setitem(runner.REGISTRY, "unwritten", unwritten)
    m = measure(SMALL, ("almost", "unwritten", "torch"))
    assert list(m.timings) == ["torch"]
    assert "wrong result" in m.left_out["almost"] and "nan" in m.left_out["unwritten"]


def test_result_file(tmp_path: Path):
    m = measure(SMALL, ("triton_mla", "torch", "floor"))
    head = report.header(Peers(None), CEILINGS, repeats=3, flush="write")
    content = run.document(head, [m], {"triton_mla": {"us_median": 39.0, "us_spread": 1.0}}, {16: {"a.decode": 3}})
    path = tmp_path / "results" / "cpu.json"
    report.write(path, content)
    read = json.loads(path.read_text())
    assert read == json.loads(json.dumps(content))
    assert {"gpu", "versions", "date", "ceilings", "kernel_sources", "repeats"} <= set(read["header"])
    assert all(set(row) == ROW_FIELDS for row in read["rows"])
    assert "decode H=16 B=2 L=70" in report.ratio_table(read["rows"], ["triton_mla", "torch", "floor"])
    assert "torch 11.0 (1.10x)" in report.line(m)


def test_share_of_ceiling():
    m = runner.Measured(extend(128, 512, 8192), timings={"triton_mla": Timing(2000.0, 1.0, 1.0)})
    text = report.share_of_ceiling(m, CEILINGS)
    rate = m.workload.flops / 2e-3
    assert text is not None and f"{rate / 1e12:.0f} TFLOP/s" in text and f"{rate / 8e14:.0%}" in text


def row(impl: str, us: float, heads: int = 16, batch: int = 128, seq_len: int = 8192) -> dict:
    return {"op": "decode", "heads": heads, "batch": batch, "seq_len": seq_len, "impl": impl, "us_median": us}


def test_verdicts():
    rows = [row("triton_mla", 310.0), row("flashmla", 300.0), row("floor", 290.0), row("vllm_triton_1", 5000.0)]
    judged = targets.verdicts(rows, {"triton_mla": 41.0, "triton_mla reused": 39.0}, {16: {"decode": 4, "combine": 3}})
    by_text = {v.text: v for v in judged}
    assert by_text["decode H=16 B=128 L=8192: flashmla / triton_mla >= 1"].reached is False
    assert by_text["decode H=16 B=128 L=8192: triton_mla / floor <= 1.15"].reached is True
    assert by_text["decode H=16 B=128 L=8192: vllm_triton_1 / triton_mla >= 3"].reached is True
    assert by_text["decode H=128 B=128 L=8192: flashmla / triton_mla >= 0.5"].reached is None
    assert by_text["host time of one eager decode call, triton_mla <= 40 us"].reached is False
    assert by_text["host time of one eager decode call, triton_mla reused <= 40 us"].reached is True
    assert by_text["compiled kernels at H=16 <= 6"].reached is False
    assert [str(v).split()[0] for v in judged[:2]] == ["MISS", "pass"]


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
    root = Path(run.__file__).parents[1]
    found = subprocess.run([sys.executable, "-c", code], cwd=root, env=env, capture_output=True, text=True, check=True)
    assert found.stdout.split()


def test_one_page_inputs_have_the_same_shapes():
    w = Workload("extend", 16, (700, 90), q_len=9)
    real, small = make_inputs(w, "cpu"), make_inputs(w, "cpu", one_page=True)
    for name in ("q", "block_table", "seq_lens", "cu_seqlens_q"):
        assert getattr(real, name).shape == getattr(small, name).shape
    assert small.kv_cache.shape[0] == 1 and small.block_table.max() == 0
    assert sorted(real.block_table.flatten().tolist()) == list(range(real.kv_cache.shape[0]))


def test_missing_peer_files(tmp_path: Path):
    peers = Peers(tmp_path)
    with pytest.raises(Unavailable, match="no _flashmla_C.abi3.so under"):
        peers.flashmla  # noqa: B018
    assert peers.digests() == {}


def test_a_peer_file_loads_without_its_package(tmp_path: Path):
    (tmp_path / "triton_decode_attention.py").write_text(
        "from vllm.platforms import current_platform\nfrom vllm.triton_utils import tl, triton\n"
        "is_hip = current_platform.is_rocm()\n"
    )
    before = sys.modules.get("vllm")
    module = Peers(tmp_path).vllm_triton
    assert module.is_hip is False and module.triton.__name__ == "triton"
    assert sys.modules.get("vllm") is before


def test_split_search(tmp_path: Path):
    splits = [64, 128]
    cell = search_split.measure_cell(
        SMALL,
        splits,
        every_schedule=False,
        peers=Peers(None),
        clock=FakeClock(),
        ceilings=CEILINGS,
        device=torch.device("cpu"),
    )
    assert [v.reason for v in cell.variants] == ["", ""]
    table = search_split.regrets([cell], splits)
    assert table[64]["worst_regret"] == 1.0 and table[128]["worst_regret"] == pytest.approx(1.1)
    assert table[128]["worst_to_best_peer"] is None
    assert "64 10.0 | 128 11.0" in search_split.cell_lines(cell, splits, every_schedule=True)[0]
    report.write(tmp_path / "split.json", {"regret": table, "cells": [cell.as_dict()]})
    assert len(json.loads((tmp_path / "split.json").read_text())["cells"][0]["variants"]) == 2


def test_schedules():
    base = Schedule(pdl=True)
    found = search_split.schedules(base)
    assert found[0] == base and len(found) == len(set(map(search_split.describe, found))) > 40
    assert {s.form for s in found} == {"one_pass", "two_phase"} and {s.block_rows for s in found} == {16, 32, 64}
    assert [s.pdl for s in found].count(False) == 1


def test_a_schedule_with_other_bits_is_not_timed(monkeypatch: pytest.MonkeyPatch):
    warps = (4, 8, 2)
    monkeypatch.setattr(search_split, "schedules", lambda base: [replace(base, num_warps=n) for n in warps])
    planned_call = search_split.planned_call

    def last_bit_wrong(inputs, plan, workspace, out):
        call = planned_call(inputs, plan, workspace, out)
        if plan.schedule.num_warps != 2:
            return call
        return lambda: call().view(torch.int32)[0, 0].bitwise_xor_(1)

    monkeypatch.setattr(search_split, "planned_call", last_bit_wrong)
    cell = search_split.measure_cell(
        SMALL,
        [128],
        every_schedule=True,
        peers=Peers(None),
        clock=FakeClock(),
        ceilings=CEILINGS,
        device=torch.device("cpu"),
    )
    assert [v.reason for v in cell.variants] == ["", "", "bits differ from the first schedule's"]
    assert [v.timing is None for v in cell.variants] == [False, False, True]


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch):
    """The commands with everything that touches a device replaced."""
    head = {"gpu": "Some GPU", "ceilings": CEILINGS}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(report, "header", lambda *args, **kwargs: head)
    for module in (run, search_split):
        monkeypatch.setattr(module, "precompile", lambda jobs, folder: None)
        monkeypatch.setattr(module, "measure_ceilings", lambda repeats: CEILINGS)
    monkeypatch.setattr(search_split, "compile_jobs", lambda *args: [])
    monkeypatch.setattr(run, "measure_host_times", lambda peers: {"triton_mla": Timing(39.0, 38.0, 40.0)})
    monkeypatch.setattr(run, "count_variants", lambda heads: {h: {"kernel": 5} for h in heads})


def test_the_run_command(pretended_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def pretended(workload: Workload, **options: object) -> runner.Measured:
        timings = {"triton_mla": Timing(100.0, 99.0, 101.0), "floor": Timing(90.0, 90.0, 90.0)}
        wrong = {"triton_mla": "wrong result"} if workload.heads == 64 else {}
        return runner.Measured(workload, timings, left_out=wrong)

    monkeypatch.setattr(run, "measure", pretended)
    path = tmp_path / "r.json"
    assert run.main(["--out", str(path)]) == 0
    read = json.loads(path.read_text())
    assert len(read["rows"]) == 2 * 26 and read["compiled_kernels"] == {"H=16": {"kernel": 5}, "H=128": {"kernel": 5}}
    assert read["host_time"] == {"triton_mla": {"us_median": 39.0, "us_spread": 2.0}}
    assert {t["reached"] for t in read["targets"]} == {True, None}
    assert run.main(["--rows", "extend", "--workloads", "64,1,10", "--out", str(path)]) == 1, (
        "a wrong result is a failure"
    )
    assert run.main(["--seconds", "-1", "--out", str(path)]) == 0
    assert json.loads(path.read_text())["rows"] == [], "nothing starts after the deadline"
    assert run.default_path("NVIDIA H200").name == "nvidia_h200.json"


def test_the_search_command(pretended_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def pretended(workload: Workload, splits: list[int], **options: object) -> search_split.Cell:
        schedule = implementations.plan_for(make_inputs(SMALL, "cpu")).schedule
        variants = [search_split.Variant(n, schedule, Timing(float(n), n - 1.0, n + 1.0)) for n in splits]
        return search_split.Cell(workload, variants, {"flashmla": Timing(1000.0, 1.0, 1.0)}, Timing(1.0, 1.0, 1.0))

    monkeypatch.setattr(search_split, "measure_cell", pretended)
    path = tmp_path / "s.json"
    assert search_split.main(["--heads", "16", "--splits", "512", "1024", "--out", str(path)]) == 0
    read = json.loads(path.read_text())
    assert len(read["cells"]) == 32
    assert read["regret"]["1024"]["worst_regret"] == 2.0 and read["regret"]["1024"]["worst_to_best_peer"] == 1.024


def test_commands_say_that_they_need_a_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run.main([]) == 2
    assert search_split.main([]) == 2
