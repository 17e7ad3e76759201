"""Runs checks and negative controls and collects the report."""

from __future__ import annotations

import concurrent.futures
import datetime
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from triton_mla.checks import runnable
from triton_mla.fingerprint import numerics_fingerprint, own_arch, source_files
from triton_mla.verification import golden
from triton_mla.verification.controls import Control
from triton_mla.verification.environment import describe
from triton_mla.verification.profiles import Profile, profile_for
from triton_mla.verification.report import CheckResult, ControlResult, Report
from triton_mla.verification.rows import check_result, lost_row, run_row, trials_of
from triton_mla.verification.suite import CHECKS, CONTROLS
from triton_mla.verification.trial import Check, NotHereError

Progress = Callable[[int, int, str], None]
"""Called with (rows done, rows in all, name of the row that has just been done, or "")."""

Item = Check | Control
Result = CheckResult | ControlResult


def default_device() -> torch.device:
    """The current CUDA (or HIP) device, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def run(
    device: torch.device | str | None = None,
    *,
    quick: bool = False,
    jobs: int = 1,
    profile: Profile | None = None,
    checks: Sequence[Check] | None = None,
    controls: Sequence[Control] | None = None,
    records: Path = golden.FOLDER,
    progress: Progress | None = None,
) -> Report:
    """Proves the contract on a device and returns the evidence.

    Args:
        device: where to run; None takes the current GPU, else the CPU under Triton's interpreter.
        quick: fewer sizes.
        jobs: processes that share the rows; 1 runs them in this one. Compiling takes most of the time.
        profile: sizes, instead of those of the device.
        checks, controls: what to run; None takes everything.
        records: folder with the golden digests (`golden_<arch>.json`).
        progress: called at the start and after each row.

    Raises:
        ValueError: jobs is not positive, or kernels do not run on the device.
    """
    if jobs < 1:
        raise ValueError(f"jobs={jobs}: allowed are positive integers")
    device = default_device() if device is None else torch.device(device)
    runnable(device)
    arch = own_arch(device)
    profile = profile or profile_for(device, quick=quick)
    items: list[Item] = [*(CHECKS if checks is None else checks), *(CONTROLS if controls is None else controls)]
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
            prefill_order=profile.prefill_order,
        ),
        created=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )

    def golden_comparisons() -> Iterator[tuple[str, bool]]:
        if device.type == "cpu":
            raise NotHereError("needs a GPU")
        report.golden = golden.measure(profile, device)
        yield from golden.compare(report.golden, golden.load(arch, records))

    def done(name: str) -> None:
        if progress is not None:
            progress(len(results), len(items) + 1, name)

    results: dict[int, Result] = {}
    done("")
    for index, result in _results(items, device, profile, jobs):
        results[index] = result
        done(items[index].name)
    report.checks = [r for _, r in sorted(results.items()) if isinstance(r, CheckResult)]
    report.controls = [r for _, r in sorted(results.items()) if isinstance(r, ControlResult)]
    report.checks.append(check_result("golden digests", "release", golden_comparisons()))
    report.seconds = round(time.perf_counter() - start, 2)
    return report


def _results(items: Sequence[Item], device: torch.device, profile: Profile, jobs: int) -> Iterator[tuple[int, Result]]:
    """(index, result) of every item, as they are done."""
    if jobs == 1:
        trials_of.cache_clear()
        for index, item in enumerate(items):
            yield index, run_row(item, device, profile)
        trials_of.cache_clear()
        return
    context = multiprocessing.get_context("spawn")
    order = sorted(range(len(items)), key=lambda index: not getattr(items[index], "first", False))
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        futures = {pool.submit(run_row, items[index], device, profile): index for index in order}
        for future in concurrent.futures.as_completed(futures):
            index, error = futures[future], future.exception()
            yield index, lost_row(items[index], error) if isinstance(error, Exception) else future.result()
