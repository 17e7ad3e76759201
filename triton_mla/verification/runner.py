"""Runs checks and negative controls and collects the report."""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from triton_mla.fingerprint import numerics_fingerprint, source_files
from triton_mla.tuning import arch_of
from triton_mla.verification import golden
from triton_mla.verification.accuracy import ACCURACY
from triton_mla.verification.checks import CHECKS
from triton_mla.verification.controls import CONTROLS, Control
from triton_mla.verification.environment import describe
from triton_mla.verification.interpreter import ascending_dot
from triton_mla.verification.profiles import Profile, profile_for
from triton_mla.verification.report import CheckResult, ControlResult, Report, Status
from triton_mla.verification.trial import Check, NotHereError, Trial

Progress = Callable[[int, int, str], None]
"""Called with (rows done, rows in all, name of the next row)."""

DETAILS = 3
"""How many failed comparisons a row names."""


def default_device() -> torch.device:
    """The current CUDA (or HIP) device, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


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

    return _check_result(check.name, check.contract_line, comparisons(), measures=check.measures)


def _check_result(
    name: str, line: str, comparisons: Iterable[tuple[str, bool]], *, measures: bool = False
) -> CheckResult:
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


def run(
    device: torch.device | str | None = None,
    *,
    quick: bool = False,
    profile: Profile | None = None,
    checks: Sequence[Check] | None = None,
    controls: Sequence[Control] | None = None,
    records: Path = golden.RECORDS,
    progress: Progress | None = None,
) -> Report:
    """Proves the contract on a device and returns the evidence.

    Args:
        device: where to run; None takes the current GPU, else the CPU under Triton's interpreter.
        quick: fewer sizes.
        profile: sizes, instead of those of the device.
        checks, controls: what to run; None takes everything.
        records: folder with the golden digests (`golden_<arch>.json`).
        progress: called before each row.

    Raises:
        ValueError: device is a CPU and Triton's interpreter is off.
    """
    device = default_device() if device is None else torch.device(device)
    arch = arch_of(device)
    if device.type == "cpu" and arch != "interpreter":
        raise ValueError("device=cpu: CPU tensors need TRITON_INTERPRET=1, set before triton is imported")
    profile = profile or profile_for(device, quick=quick)
    checks = [*CHECKS, ACCURACY] if checks is None else checks
    controls = CONTROLS if controls is None else controls
    start = time.perf_counter()
    report = Report(
        profile=profile.name,
        environment=describe(device),
        sources=source_files(),
        fingerprint=numerics_fingerprint(
            order=profile.order,
            dtype=profile.cases[0][0],
            arch=arch,
            kv_lora_rank=profile.kv_lora_rank,
            qk_rope_head_dim=profile.qk_rope_head_dim,
        ),
        created=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )
    trials = [Trial(device, profile, dtype, heads) for dtype, heads in profile.cases]
    total = len(checks) + len(controls) + 1

    def announce(name: str) -> None:
        if progress is not None:
            progress(len(report.checks) + len(report.controls), total, name)

    def golden_comparisons() -> Iterator[tuple[str, bool]]:
        if device.type == "cpu":
            raise NotHereError("needs a GPU")
        report.golden = golden.measure(profile, device)
        yield from golden.compare(report.golden, golden.load(arch, records))

    guard: Any = ascending_dot() if arch == "interpreter" else contextlib.nullcontext()
    with guard:
        for check in checks:
            announce(check.name)
            report.checks.append(run_check(check, trials))
        announce("golden digests")
        report.checks.append(_check_result("golden digests", "release", golden_comparisons()))
        for control in controls:
            announce(control.name)
            report.controls.append(run_control(control, trials[0]))
    report.seconds = round(time.perf_counter() - start, 2)
    return report
