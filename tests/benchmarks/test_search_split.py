"""The search for split sizes and schedules without a GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench_fakes import CEILINGS, FakeClock

from benchmarks import report, search_split
from benchmarks.absorbed import plan_for
from benchmarks.peers import Peers
from benchmarks.timing import Timing
from benchmarks.workloads import Workload
from triton_mla.tuning import Schedule

SMALL = Workload("decode", 16, (70, 3), dtype="float32")


def cell_of(splits: list[int], every_schedule: bool) -> search_split.Cell:
    return search_split.measure_cell(
        SMALL, splits, every_schedule=every_schedule, peers=Peers(None), clock=FakeClock(), ceilings=CEILINGS, device=torch.device("cpu")
    )


def test_split_search(tmp_path: Path):
    splits = [64, 128]
    cell = cell_of(splits, every_schedule=False)
    assert [v.reason for v in cell.variants] == ["", ""]
    table = search_split.regrets([cell], splits)
    assert table[64]["worst_regret"] == 1.0 and table[128]["worst_regret"] == pytest.approx(1.1)
    assert table[128]["worst_to_best_peer"] is None
    assert "64 10.0 | 128 11.0" in search_split.cell_lines(cell, splits)[0]
    report.write(tmp_path / "split.json", {"regret": table, "cells": [cell.as_dict()]})
    assert len(json.loads((tmp_path / "split.json").read_text())["cells"][0]["variants"]) == 2


def test_schedules():
    base = Schedule(pdl=True)
    found = search_split.schedules(base)
    assert len(set(map(search_split.describe, found))) > 40
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
    cell = cell_of([128], every_schedule=True)
    assert [v.reason for v in cell.variants] == ["", "", "bits differ from the first schedule's"]
    assert [v.timing is None for v in cell.variants] == [False, False, True]


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def pretended(workload: Workload, splits: list[int], **options: object) -> search_split.Cell:
        schedule = plan_for(SMALL, "cpu").schedule
        variants = [search_split.Variant(n, schedule, Timing(float(n), n - 1.0, n + 1.0)) for n in splits]
        return search_split.Cell(workload, variants, {"flashmla": Timing(1000.0, 1.0, 1.0)}, Timing(1.0, 1.0, 1.0))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(report, "header", lambda *args, **kwargs: {"gpu": "Some GPU"})
    monkeypatch.setattr(search_split, "precompile", lambda jobs, folder: "nothing")
    monkeypatch.setattr(search_split, "compile_jobs", lambda *args: [])
    monkeypatch.setattr(search_split, "measure_ceilings", lambda repeats: CEILINGS)
    monkeypatch.setattr(search_split, "measure_cell", pretended)
    path = tmp_path / "s.json"
    assert search_split.main(["--heads", "16", "--splits", "512", "1024", "--out", str(path)]) == 0
    read = json.loads(path.read_text())
    assert len(read["cells"]) == 32
    assert read["regret"]["1024"]["worst_regret"] == 2.0 and read["regret"]["1024"]["worst_to_best_peer"] == 1.024


def test_jobs_of_the_search(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(search_split, "plan_for", lambda workload, device, *rest: plan_for(workload, "cpu", *rest))
    jobs = search_split.compile_jobs([SMALL], [64, 128], every_schedule=False)
    assert [job.order.kv_split for job in jobs] == [64, 128]


def test_wrong_usage():
    for argv in (["--splits", "100"], ["--repeats", "0"], ["--workloads", "1,2"]):
        with pytest.raises(SystemExit):
            search_split.arguments(argv)


def test_it_says_that_it_needs_a_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert search_split.main([]) == 2
