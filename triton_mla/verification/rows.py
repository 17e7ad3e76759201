"""Runs one check or one negative control, and says how it went."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import torch

from triton_mla.verification.controls import Control
from triton_mla.verification.interpreter import patched_once, tensor_core_dot
from triton_mla.verification.profiles import Profile
from triton_mla.verification.report import CheckResult, ControlResult, Status
from triton_mla.verification.trial import Check, NotHereError, Trial

DETAILS = 3
"""How many failed comparisons a row names."""


def _collect(comparisons: Iterable[tuple[str, bool]]) -> tuple[list[str], list[str], str, Exception | None]:
    """(names that were true, names that were false, reason of a skip, exception)."""
    good: list[str] = []
    bad: list[str] = []
    try:
        for name, value in comparisons:
            (good if value else bad).append(name)
    except NotHereError as reason:
        return good, bad, str(reason), None
    except Exception as error:  # a check that raises is a failed row, and the others still run
        return good, bad, "", error
    return good, bad, "", None


def run_check(check: Check, trials: Sequence[Trial]) -> CheckResult:
    """One row: the check over its cases. It fails if a comparison fails, if it raises, or if it compared nothing."""

    def comparisons() -> Iterator[tuple[str, bool]]:
        for trial in trials if check.every_case else trials[:1]:
            label = f"{str(trial.dtype).removeprefix('torch.')}, {trial.num_heads} heads"
            for name, equal in check.body(trial):
                yield f"{label}: {name}", equal

    return check_result(check.name, check.contract_line, comparisons(), measures=check.measures)


def check_result(
    name: str, line: str, comparisons: Iterable[tuple[str, bool]], *, measures: bool = False
) -> CheckResult:
    """One row from (what was compared, whether it was equal)."""
    start = time.perf_counter()
    good, bad, skip, error = _collect(comparisons)
    seconds = round(time.perf_counter() - start, 3)
    details = [*bad[:DETAILS], *([f"... and {len(bad) - DETAILS} more"] if len(bad) > DETAILS else [])]
    if error is not None:
        details.append(f"{type(error).__name__}: {error}")
    status: Status = "passed" if good and not bad and error is None else "failed"
    if skip and status == "failed" and not bad:
        status = "skipped"
        details = [skip]
    elif status == "failed" and not details:
        details = ["compared nothing"]
    elif measures:
        details += good
    failures = len(bad) + (error is not None)
    return CheckResult(name, line, status, len(good) + len(bad), failures, seconds, "; ".join(details))


def run_control(control: Control, trial: Trial) -> ControlResult:
    """One negative control. It fails if nothing differs or if it raises."""
    start = time.perf_counter()
    differing, equal, skip, error = _collect(control.body(trial))
    seconds = round(time.perf_counter() - start, 3)
    status: Status = "passed" if differing and error is None else "failed"
    detail = f"equal: {'; '.join(equal[:DETAILS])}" if equal else ""
    if skip and not equal and not differing:
        status, detail = "skipped", skip
    if error is not None:
        detail = f"{type(error).__name__}: {error}"
    return ControlResult(control.name, status, len(differing) + len(equal), len(differing), seconds, detail)


@lru_cache(maxsize=1)
def trials_of(device: torch.device, profile: Profile) -> tuple[Trial, ...]:
    """The cases of a profile. They keep their largest inputs, which all rows of a process share."""
    return tuple(Trial(device, profile, dtype, heads) for dtype, heads in profile.cases)


def run_row(item: Check | Control, device: torch.device, profile: Profile) -> CheckResult | ControlResult:
    """Runs a check or a control, under the interpreter with a product whose rows do not depend on their place."""
    with contextlib.ExitStack() as guards:
        if device.type == "cpu":
            guards.enter_context(tensor_core_dot())
            guards.enter_context(patched_once())
        guards.enter_context(warnings.catch_warnings())
        # of triton's interpreter, at the maximum of a neighbour's row that is full of NaN
        warnings.filterwarnings("ignore", "All-NaN slice encountered", RuntimeWarning)
        trials = trials_of(device, profile)
        return run_check(item, trials) if isinstance(item, Check) else run_control(item, trials[0])


def lost_row(item: Check | Control, error: Exception) -> CheckResult | ControlResult:
    """The failed row of a check or a control whose process died."""
    detail = f"{type(error).__name__}: {error}"
    if isinstance(item, Check):
        return CheckResult(item.name, item.contract_line, "failed", 0, 1, 0.0, detail)
    return ControlResult(item.name, "failed", 0, 0, 0.0, detail)
