"""The rows of prefill and of whole sequences see what they are for: each kind of broken kernel, and of broken engine."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from triton import knobs
from triton.runtime.errors import OutOfResources

from triton_mla import absorb, attention, module, prefill, step, verification
from triton_mla.paths import split_batch
from triton_mla.tuning import PrefillOrder
from triton_mla.verification import accuracy, prefill_controls, profiles, sequences, suite
from triton_mla.verification.mha import Mha
from triton_mla.verification.report import Report
from triton_mla.verification.trial import Trial, where_it_fits

pytestmark = pytest.mark.skipif(not knobs.runtime.interpret, reason="runs under Triton's interpreter")

SMALL = dataclasses.replace(
    profiles.profile_for(torch.device("cpu"), quick=True),
    prefill_order=PrefillOrder(block_n=16),
    prompts=((33, (1, 20)),),
    cached=(16,),
    head_slices=((0, 1),),
    prefix=32,
    sequence=(18, 22),
)


@pytest.fixture(autouse=True)
def no_shared_runs() -> Any:
    yield
    sequences.plain.cache_clear()


def run(names: set[str]) -> Report:
    """These rows and controls of the suite, and one control so that a report can pass."""
    checks = [check for check in suite.CHECKS if check.name in names]
    controls = [control for control in suite.CONTROLS if control.name in names] or suite.CONTROLS[3:4]
    assert len(checks) + len([control for control in controls if control.name in names]) == len(names)
    return verification.run("cpu", profile=SMALL, checks=checks, controls=controls)


def failed(report: Report) -> set[str]:
    return {row.name for row in [*report.checks, *report.controls] if row.status == "failed"}


NEW = [check.name for check in suite.CHECKS if check.name.startswith(("mha", "sequences", "products", "parts", "softmax"))]


@pytest.mark.parametrize("name", NEW)
def test_sound_kernels_pass(name: str) -> None:
    report = run({name})
    (row,) = report.checks[:1]
    assert report.passed or row.detail == "needs a GPU"
    assert row.comparisons > 0 or row.detail == "needs a GPU"


Op = Callable[..., Any]


def shifted(result: Any, amount: float) -> Any:
    """A state or rows whose sums are off by a little."""
    if isinstance(result, tuple):
        result[1].add_(amount * 1e-6)
    else:
        result.total.mul_(1 + amount * 1e-6)
    return result


def batch_dependent(op: Op, *args: Any, **options: Any) -> Any:
    return shifted(op(*args, **options), len(args[4]))


def chunk_dependent(op: Op, q: Any, *args: Any, **options: Any) -> Any:
    return shifted(op(q, *args, **options), len(q))


def state_dependent(op: Op, *args: Any, **options: Any) -> Any:
    return shifted(op(*args, **options), float(options.get("return_state", False)))


def chunk_tokens_dependent(op: Op, *args: Any, **options: Any) -> Any:
    return shifted(op(*args, **options), options["chunk_tokens"])


def page_dependent(op: Op, q: Any, cache: Any, *args: Any, **options: Any) -> Any:
    return shifted(op(q, cache, *args, **options), cache.shape[1] - 16)


def stale_read(op: Op, q: Any, cache: Any, *args: Any, **options: Any) -> Any:
    return shifted(op(q, cache, *args, **options), float(cache[..., 0].abs().sum()) * 1e-2)


def width_dependent(op: Op, q: Any, cache: Any, weight: Any, table: Any, *args: Any, **options: Any) -> Any:
    return shifted(op(q, cache, weight, table, *args, **options), table.shape[1])


def heads_dependent(op: Op, q: Any, *args: Any, **options: Any) -> Any:
    return shifted(op(q, *args, **options), q.shape[1])


def stride_dependent(op: Op, q: Any, *args: Any, **options: Any) -> Any:
    return shifted(op(q, *args, **options), float(not q.is_contiguous()))


def padding_left_alone(op: Op, q: Any, *args: Any, **options: Any) -> Any:
    out, lse = op(q, *args, **options)
    lse[int(args[3][-1]) :] = 0.0
    return out, lse


def forgetful() -> Op:
    """Differs from call to call."""
    calls = iter(range(10**6))
    return lambda op, *args, **options: shifted(op(*args, **options), next(calls))


def inaccurate(op: Op, *args: Any, **options: Any) -> Any:
    out, lse = op(*args, **options)
    return out.mul_(1.05), lse


def inaccurate_lse(op: Op, *args: Any, **options: Any) -> Any:
    return shifted(op(*args, **options), 1000)


def one_scale(op: Op, *args: Any, **options: Any) -> Any:
    return op(*args, **{**options, "softmax_scale": 192**-0.5})


@pytest.mark.parametrize(
    ("name", "broken", "rows"),
    [
        ("mla_prefill", batch_dependent, {"mha: a prompt in any batch", "mha: neighbours, padding and tails of NaN"}),
        ("mla_prefill", chunk_dependent, {"mha: prompts cut into chunks"}),
        ("mla_prefill", state_dependent, {"mha: keys streamed through the state"}),
        ("mla_prefill", heads_dependent, {"mha: heads that share a call"}),
        ("mla_prefill", stride_dependent, {"mha: stale tokens and views"}),
        ("mla_prefill", padding_left_alone, {"mha: neighbours, padding and tails of NaN"}),
        ("mla_prefill", inaccurate, {"mha: float64 reference", "parts of a context merged by lse"}),
        ("mla_prefill", inaccurate_lse, {"mha: float64 reference", "parts of a context merged by lse"}),
        ("mla_prefill", one_scale, {"softmax scales, and a query 50 times as large"}),
        ("mla_prefill", forgetful(), {"mha: the same call again"}),
        ("mla_prefill_paged", batch_dependent, {"mha: a prompt in any batch", "mha: neighbours, padding and tails of NaN"}),
        ("mla_prefill_paged", chunk_dependent, {"mha: prompts cut into chunks", "mha: lengths of a cached prefix"}),
        ("mla_prefill_paged", chunk_tokens_dependent, {"mha: chunks of the up-projection"}),
        ("mla_prefill_paged", page_dependent, {"mha: pages, their size and order"}),
        ("mla_prefill_paged", width_dependent, {"mha: pages, their size and order"}),
        ("mla_prefill_paged", stale_read, {"mha: stale tokens and views"}),
        ("mla_prefill_paged", inaccurate, {"mha: float64 reference"}),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", "rows"),
)
def test_a_broken_prefill_fails(monkeypatch: pytest.MonkeyPatch, name: str, broken: Op, rows: set[str]) -> None:
    monkeypatch.setattr(prefill, name, functools.partial(broken, getattr(prefill, name)))
    report = run(rows)
    assert failed(report) >= rows and not report.passed


@pytest.mark.parametrize("where", [(absorb, "absorb_query"), (absorb, "project_values"), (prefill, "project_kv")], ids=str)
def test_products_that_know_the_number_of_rows_fail(monkeypatch: pytest.MonkeyPatch, where: tuple[Any, str]) -> None:
    op = getattr(*where)
    monkeypatch.setattr(*where, lambda x, w: op(x, w) * (1 + len(x) * 1e-5))
    assert failed(run({"products of a row in any number of rows"}))


def log2_merge(op: Op, out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> Any:
    out, lse = op(out_a, lse_a * 1.4427, out_b, lse_b * 1.4427)
    return out, lse / 1.4427


def reads_empty_parts(op: Op, out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> Any:
    out, lse = op(out_a, lse_a, out_b, lse_b)
    return out + 0 * out_a, lse


@pytest.mark.parametrize("broken", [log2_merge, reads_empty_parts])
def test_a_broken_merge_fails(monkeypatch: pytest.MonkeyPatch, broken: Op) -> None:
    monkeypatch.setattr(attention, "merge_attn_states", functools.partial(broken, attention.merge_attn_states))
    assert failed(run({"parts of a context merged by lse"}))


def by_arrival(query_lens: Any, seq_lens: Any, _prompt_lens: Any, rule: Any) -> Any:
    """The form of a token from how it arrives."""
    roles = [end if count > 1 else end - 1 for count, end in zip(query_lens, seq_lens, strict=True)]
    return split_batch(query_lens, seq_lens, roles, rule)


PREEMPTION = "sequences: preemption and recomputation"


def test_forms_by_arrival_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "split_batch", by_arrival)
    assert failed(run({PREEMPTION})) == {PREEMPTION}


def verify_dependent(op: Op, q: Any, *args: Any, **options: Any) -> Any:
    options["out"].copy_(op(q, *args, **options) * (1 + 1e-3 * (len(q[0]) == 2)))


def test_verify_rows_of_their_own_bits_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "mla_extend", functools.partial(verify_dependent, module.mla_extend))
    assert failed(run({"sequences: verify rows are those of the plain run"}))


def cold_dependent(op: Op, q: Any, *args: Any, **options: Any) -> Any:
    options["out"].copy_(op(q, *args, **options) * (1 + 1e-3 * (len(q[0]) > 20)))


def test_a_cache_that_is_not_the_cold_run_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "mla_extend", functools.partial(cold_dependent, module.mla_extend))
    assert failed(run({"sequences: pages of an earlier turn, absorbed form"}))


def test_schedules_that_do_not_fit_are_left_out_and_no_other_error() -> None:
    def refused(cause: Exception) -> None:
        with where_it_fits():
            raise ValueError("schedule must fit the device") from cause

    too_large = OutOfResources(2, 1, "shared memory")
    refused(too_large)
    with where_it_fits():
        raise too_large
    with pytest.raises(ValueError):
        refused(RuntimeError())


NAMES = [control.name for control in prefill_controls.CONTROLS]


@pytest.mark.parametrize("name", NAMES)
def test_controls_differ(name: str) -> None:
    (row,) = run({name}).controls
    assert row.status == "passed" and row.differing == row.comparisons > 0


@pytest.mark.parametrize("name", NAMES[:2])
def test_controls_see_the_batch_size_and_nothing_else(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(prefill_controls, "prefix_chunk", lambda capacity, batch_size, page_size: capacity)
    assert failed(run({name})) == {name}


def test_the_control_of_arrival_sees_the_form_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_controls, "alone", lambda model, events, by_arrival: sequences.alone(model, events))
    assert failed(run({NAMES[2]})) == {NAMES[2]}


def test_the_bounds_of_unit_scale_do_not_follow_the_largest_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the documentation states, also where a value is above 4; inputs four times as large have larger ones."""
    for name in ("prefill", "paged"):
        monkeypatch.setattr(Mha, name, lambda *args: None)
    monkeypatch.setattr(accuracy, "near", lambda what, rows, expected, size: iter([(what, size)]))
    trial = Trial(torch.device("cpu"), dataclasses.replace(SMALL, prefill_heads=16), torch.bfloat16, 2)
    sizes = dict(accuracy.mha_accuracy(trial))
    assert sizes["gain 0.5"] == sizes["paged, gain 0.5"] == 1.0
    assert sizes["gain 2.0"] == sizes["paged, gain 2.0"] > 4  # so that a quarter of it is above 1 too
