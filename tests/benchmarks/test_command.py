"""`triton-mla bench` with everything replaced that touches a device."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_fakes import CEILINGS, FakeClock

from benchmarks import command, plot, report, runner
from benchmarks.registry import SUITES
from benchmarks.runner import Measured
from benchmarks.timing import Timing
from triton_mla import cli

RESULTS = [path for path in sorted((Path(report.__file__).parent / "results").glob("*.json")) if not path.stem.endswith(("_products", "_sustained"))]
"""Of the command; benchmarks.products and benchmarks.sustained write files of their own."""
Bench = Callable[..., tuple[int, dict[str, Any]]]


def pretended(workload: Any, implementations: list[Any], **options: object) -> Measured:
    if workload.name.startswith("decode H=7 "):
        raise RuntimeError("the device is unusable")
    m = Measured(workload, {"triton_mla": Timing(100.0, 99.0, 101.0), "floor": Timing(90.0, 90.0, 90.0)}, {"triton_mla": 1e-3})
    if workload.name.startswith("decode H=64 "):
        m.failed["torch"] = "wrong result"
    return m


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Runs the command; returns its exit code and the result file."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(report, "header", lambda *args: {"gpu": "Some GPU", "ceilings": CEILINGS})
    monkeypatch.setattr(command, "precompile", lambda jobs, folder: f"compiled for {len(jobs)} jobs")
    monkeypatch.setattr(command, "jobs_for", lambda *args: [])
    monkeypatch.setattr(command, "measure_ceilings", lambda repeats: CEILINGS)
    monkeypatch.setattr(command, "measure_host_times", lambda peers: ({"triton_mla": Timing(19.0, 18.0, 20.0)}, {}))
    monkeypatch.setattr(command, "measure_prefill_host_times", lambda: {"known sizes": Timing(45.0, 44.0, 46.0)})
    monkeypatch.setattr(command, "count_variants", lambda heads: {h: {"kernel": 5} for h in heads})
    monkeypatch.setattr(command, "measure", pretended)
    path = tmp_path / "r.json"

    def run(*options: str) -> tuple[int, dict[str, Any]]:
        return cli.main(["bench", "--json", str(path), *options]), json.loads(path.read_text())

    return run


def test_the_prefill_suite_has_the_time_of_the_host(bench: Bench, capsys: pytest.CaptureFixture[str]):
    _, read = bench("--suite", "prefill")
    assert read["prefill_host_time"] == {"known sizes": {"us_median": 45.0, "us_spread": 2.0}}
    assert "host time of one paged prefill, known sizes: 45.0 us" in capsys.readouterr().out


def test_the_decode_suite(bench: Bench, capsys: pytest.CaptureFixture[str]):
    code, read = bench("--suite", "decode")
    assert code == 1, "torch was wrong at H=64"
    workloads = {row["workload"] for row in read["rows"]}
    assert len(workloads) == len(SUITES["decode"])
    assert read["host_time"] == {"triton_mla": {"us_median": 19.0, "us_spread": 2.0}}
    assert read["compiled_kernels"] == {"H=16": {"kernel": 5}, "H=128": {"kernel": 5}}
    assert read["absent"]["flashmla"] == "no --peers folder"
    out = capsys.readouterr().out
    assert "flashmla is left out: no --peers folder" in out and "FAILED decode H=64 B=1 L=8192: torch: wrong result" in out
    assert "met  decode H=16 B=128 L=8192: triton_mla / floor <= 1.15  1.11" in out and "MISSED" in out and "not measured" in out


def test_the_default_is_quick(bench: Bench):
    code, read = bench()
    assert code == 0 and {row["workload"] for row in read["rows"]} == {w.name for w in SUITES["quick"]}
    assert "not_measured" not in read


def test_the_whole_way_on_a_cpu(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    on_cpu = {"device": torch.device("cpu"), "clock": FakeClock()}
    monkeypatch.setattr(command, "measure", lambda *args, **options: runner.measure(*args, **{**options, **on_cpu}))
    code, read = bench("--workloads", "16,2,70", "--impls", "triton_mla", "torch", "flashmla")
    assert code == 0 and [row["impl"] for row in read["rows"]] == ["triton_mla", "torch", "floor"]
    assert read["absent"] == {"flashmla": "no --peers folder"} and read["rows"][0]["relative_error"] < 1e-2


def test_chosen_workloads(bench: Bench):
    code, read = bench("--workloads", "16,1,10", "16,2,10,4", "--impls", "triton_mla", "torch")
    assert code == 0 and {row["workload"] for row in read["rows"]} == {"decode H=16 B=1 L=10", "verify H=16 B=2 L=10 q=4"}


def test_a_lost_device_stops_the_run_and_keeps_what_was_measured(bench: Bench, capsys: pytest.CaptureFixture[str]):
    code, read = bench("--workloads", "16,1,10", "7,1,10", "16,1,20")
    assert code == 1 and {row["workload"] for row in read["rows"]} == {"decode H=16 B=1 L=10"}
    assert read["stopped"] == "the device is unusable" and "STOPPED: the device is unusable" in capsys.readouterr().out


def test_out_of_time(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    clock = iter(range(0, 10**6, 400))
    monkeypatch.setattr(command.time, "monotonic", lambda: next(clock))
    code, read = bench("--workloads", "16,1,10", "16,1,20")
    assert code == 0 and read["rows"] == [] and len(read["not_measured"]) == 2


@pytest.mark.parametrize(
    ("options", "word"),
    [(["--impls", "guess"], "impls=guess"), (["--workloads", "1,2"], "H,B,L"), (["--from", "/no/such/file"], "cannot be read")],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_wrong_values_are_2(options: list[str], word: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["bench", *options]) == 2
    assert word in capsys.readouterr().err


def test_it_says_that_it_needs_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["bench"]) == 2
    assert "CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_are_drawn(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "x.png"
    assert cli.main(["bench", "--from", str(path), "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG") and "targets" in capsys.readouterr().out or not report.read(path)["targets"]


def test_panels():
    shape = {"op": "decode", "heads": 16}
    times = {("b", "triton_mla"): 30.0, ("b", "floor"): 10.0, ("a", "floor"): 5.0, ("a", "triton_mla"): 10.0, ("c", "triton_mla"): 1.0}
    rows = [{**shape, "workload": w, "impl": impl, "us_median": us} for (w, impl), us in times.items()]
    rows.append({**shape, "workload": "a", "impl": "torch", "us_median": None})
    assert plot.panels(rows) == {"decode, 16 heads": {"a": {"floor": 1.0, "triton_mla": 2.0}, "b": {"triton_mla": 3.0, "floor": 1.0}}}


def test_nothing_to_draw(tmp_path: Path):
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="no workload with a floor"):
        plot.draw({"rows": []}, tmp_path / "x.png")


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(["bench", "--from", str(RESULTS[0]), "--plot", "x.png"]) == 2
    assert "triton_mla[plot]" in capsys.readouterr().err
