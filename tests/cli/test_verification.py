"""The verification suite sees what it is for: each kind of broken kernel, and controls that show no difference."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from triton_mla import attention, verification
from triton_mla.verification import accuracy, checks, controls, profiles, suite
from triton_mla.verification.checks import CHECKS
from triton_mla.verification.controls import CONTROLS, Control
from triton_mla.verification.interpreter import tensor_core_dot
from triton_mla.verification.report import CheckResult, Report
from triton_mla.verification.trial import Check, Trial

pytestmark = pytest.mark.usefixtures("stand_in")

SMALL = dataclasses.replace(profiles.profile_for(torch.device("cpu"), quick=True), victim=150, neighbour=90)


ABSORBED = [*checks.CHECKS, accuracy.CHECKS[0]]
"""The rows whose kernels have a stand-in."""


def run(**options: Any) -> Report:
    return verification.run("cpu", profile=SMALL, **{"checks": ABSORBED, "controls": CONTROLS, **options})


def test_everything_is_in_the_suite() -> None:
    assert {check.name for check in ABSORBED} < {check.name for check in suite.CHECKS}
    assert {control.name for control in CONTROLS} < {control.name for control in suite.CONTROLS}
    assert len({row.name for row in [*suite.CHECKS, *suite.CONTROLS]}) == len(suite.CHECKS) + len(suite.CONTROLS)


def failed(report: Report) -> set[str]:
    return {row.name for row in report.checks if row.status == "failed"}


def test_a_sound_kernel_passes() -> None:
    seen: list[tuple[int, int, str]] = []
    report = run(progress=lambda *step: seen.append(step))
    assert failed(report) == set() and report.passed
    assert {row.contract_line for row in report.checks} >= {"batch", "memory", "schedule", "tile shape", "accuracy"}
    for row in report.checks:
        assert row.status == "passed" and row.comparisons > 0 or row.detail == "needs a GPU"
    assert all(row.differing > 0 for row in report.controls if row.status == "passed")
    assert [done for done, _, _ in seen] == list(range(len(seen))) and seen[-1][1] == len(seen)


def longest_splits(decode: Any, q: Any, cache: Any, table: Any, lens: Any, *, order: Any, **options: Any) -> Any:
    order = dataclasses.replace(order, kv_split=-(-int(lens.max()) // 128) * 64)
    return decode(q, cache, table, lens, order=order, **options)


def row_dependent(decode: Any, *args: Any, **options: Any) -> Any:
    out, lse = decode(*args, **options)
    lse += torch.arange(len(lse))[:, None] * 1e-6
    return out, lse


def padding_left_alone(decode: Any, q: Any, cache: Any, table: Any, lens: Any, **options: Any) -> Any:
    before = options["lse"].clone()
    out, lse = decode(q, cache, table, lens, **options)
    lse[lens == 0] = before[lens == 0]
    return out, lse


def leaky_tail(decode: Any, q: Any, cache: Any, table: Any, lens: Any, **options: Any) -> Any:
    more = torch.where(lens % cache.shape[1] != 0, lens + 1, lens)
    return decode(q, cache, table, more, **options)


def masked_by_product(decode: Any, q: Any, cache: Any, table: Any, lens: Any, **options: Any) -> Any:
    out, lse = decode(q, cache, table, lens, **options)
    last = table[torch.arange(len(lens)), ((lens - 1).clamp(min=0) // cache.shape[1]).long()].long()
    dirt = (cache[last.clamp(max=len(cache) - 1), -1].float() * 0.0).sum(dim=-1)
    lse += dirt[:, None] * (lens > 0)[:, None]
    return out, lse


def page_dependent(decode: Any, q: Any, cache: Any, table: Any, lens: Any, **options: Any) -> Any:
    out, lse = decode(q, cache, table, lens, **options)
    lse += cache.shape[1] * 1e-8
    lse += table[:, :1] * 1e-6
    return out, lse


def assumes_contiguous_table(decode: Any, q: Any, cache: Any, table: Any, lens: Any, **options: Any) -> Any:
    whole = torch.as_strided(table, table.shape, (table.shape[1], 1), table.storage_offset())
    return decode(q, cache, whole.clamp(0, len(cache) - 1), lens, **options)


def width_dependent(decode: Any, q: Any, cache: Any, table: Any, lens: Any, **options: Any) -> Any:
    out, lse = decode(q, cache, table, lens, **options)
    lse += table.shape[1] * 1e-6
    return out, lse


def heads_dependent(decode: Any, q: Any, *args: Any, **options: Any) -> Any:
    out, lse = decode(q, *args, **options)
    lse += lse.shape[1] * 1e-6
    return out, lse


def inaccurate(decode: Any, *args: Any, **options: Any) -> Any:
    out, lse = decode(*args, **options)
    out *= 1.02
    return out, lse


def raises(decode: Any, *args: Any, **options: Any) -> Any:
    raise RuntimeError("no kernel")


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        (longest_splits, {"neighbours' lengths and contents"}),
        (row_dependent, {"batch size and place in the batch", "order of the batch", "copies of one request"}),
        (padding_left_alone, {"padded rows"}),
        (leaky_tail, {"stale tokens, NaN and Inf included", "float64 reference"}),
        (masked_by_product, {"stale tokens, NaN and Inf included"}),
        (page_dependent, {"page ids and their order", "page size"}),
        (assumes_contiguous_table, {"strides of views"}),
        (width_dependent, {"width of the block table"}),
        (heads_dependent, {"heads that share a call"}),
        (inaccurate, {"float64 reference"}),
        (raises, {"the same call again"}),
    ],
    ids=lambda value: getattr(value, "__name__", "rows"),
)
def test_a_broken_decode_fails(monkeypatch: pytest.MonkeyPatch, broken: Callable[..., Any], expected: set[str]) -> None:
    monkeypatch.setattr(attention, "mla_decode", functools.partial(broken, attention.mla_decode))
    report = run()
    assert failed(report) >= expected
    assert not report.passed


def chunk_dependent(extend: Any, q: Any, cache: Any, table: Any, starts: Any, lens: Any, **options: Any) -> Any:
    out, lse = extend(q, cache, table, starts, lens, **options)
    lse += int(starts[1] - starts[0]) * 1e-6
    return out, lse


def test_an_extend_that_knows_its_chunk_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "mla_extend", functools.partial(chunk_dependent, attention.mla_extend))
    rows = {"token by token", "prompts cut into chunks", "verify rows are decode rows", "extend in a ragged batch"}
    assert failed(run()) >= rows


def test_nan_results_never_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mla_decode", "mla_extend"):
        monkeypatch.setattr(attention, name, lambda *args, **options: (options["out"], options["lse"]))
    report = run()
    gpu_only = {row.name for row in report.checks if row.status == "skipped"}
    assert failed(report) == {row.name for row in report.checks} - gpu_only


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.name)
def test_a_control_without_a_difference_fails_the_run(control: Control) -> None:
    def nothing_differs(trial: Trial) -> Any:
        yield "nothing", False

    kept = [dataclasses.replace(c, body=nothing_differs) if c is control else c for c in CONTROLS]
    report = run(checks=CHECKS[:1], controls=kept)
    assert [row.name for row in report.controls if row.status == "failed"] == [control.name]
    assert failed(report) == set() and not report.passed


def test_controls_see_their_own_rule_and_not_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controls, "split_of_longest", lambda batch, block_n, pieces=4: 64)
    report = run(checks=CHECKS[:1])
    assert [row.status for row in report.controls] == ["failed", "skipped", "passed", "passed"]


def test_rows_that_raise_or_compare_nothing_fail() -> None:
    def broken(trial: Trial) -> Any:
        yield "first", True
        raise ZeroDivisionError("oops")

    silent: Callable[[Trial], Any] = lambda trial: iter(())  # noqa: E731
    checks = [Check("broken", "batch", False, broken), Check("silent", "batch", False, silent)]
    report = run(checks=checks, controls=[Control("broken", broken)])
    details = [(row.status, row.detail) for row in report.checks[:2]]
    assert details == [("failed", "ZeroDivisionError: oops"), ("failed", "compared nothing")]
    assert report.controls[0].status == "failed"


def test_a_run_without_checks_or_controls_proves_nothing() -> None:
    assert not run(checks=[], controls=[]).passed
    assert not run(checks=CHECKS[:1], controls=[]).passed


def fine(trial: Trial) -> Any:
    yield str(os.getpid() != int(trial.profile.name)), os.getpid() != int(trial.profile.name)


def dies(trial: Trial) -> Any:
    yield "before", True
    os._exit(3)


def test_rows_in_processes_of_their_own_keep_their_order() -> None:
    profile = dataclasses.replace(SMALL, name=str(os.getpid()))
    checks = [Check(name, "batch", False, fine) for name in "abc"]
    report = verification.run("cpu", profile=profile, checks=checks, controls=[Control("d", fine)], jobs=2)
    assert [row.name for row in report.checks[:3]] == ["a", "b", "c"] and report.passed


def test_a_process_that_dies_is_a_failed_row() -> None:
    report = run(checks=[Check("dies", "batch", False, dies)], controls=[Control("dies too", dies)], jobs=2)
    assert report.checks[0].status == report.controls[0].status == "failed"
    assert "BrokenProcessPool" in report.checks[0].detail


def test_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton_mla import checks

    monkeypatch.setattr(checks, "INTERPRETED", False)
    with pytest.raises(ValueError, match="TRITON_INTERPRET"):
        verification.run("cpu")


def test_many_failures_are_counted_and_three_named() -> None:
    def all_wrong(trial: Trial) -> Any:
        for i in range(9):
            yield f"case {i}", False

    (row, *_) = run(checks=[Check("wrong", "batch", False, all_wrong)], controls=[]).checks
    assert isinstance(row, CheckResult)
    assert (row.comparisons, row.failures) == (9, 9)
    assert row.detail.count("case") == 3 and row.detail.endswith("and 6 more")


def test_tensor_core_dot_does_not_depend_on_the_place_of_a_row() -> None:
    from triton.runtime import interpreter

    class Handle:
        def __init__(self, data: Any) -> None:
            self.data, self.dtype = data, torch.float32

    import numpy as np
    import triton.language as tl

    a = np.random.default_rng(0).standard_normal((64, 96)).astype(np.float32)
    b = np.random.default_rng(1).standard_normal((96, 32)).astype(np.float32)
    builder = interpreter.InterpreterBuilder
    before = builder.create_dot

    def product(left: Any) -> Any:
        handles = [interpreter.TensorHandle(x, tl.float32) for x in (left, b, np.zeros((len(left), 32), np.float32))]
        return builder.create_dot(None, *handles, None, None).data

    with tensor_core_dot():
        whole = product(a)
        for i in (0, 5, 63):
            assert np.array_equal(product(a[i : i + 1])[0], whole[i])
    assert builder.create_dot is before
    np.testing.assert_allclose(whole, a @ b, atol=1e-4)
