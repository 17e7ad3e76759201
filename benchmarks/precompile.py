"""Fills Triton's cache from several processes, so that a run spends its time on measuring."""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.implementations import REGISTRY, empty_out, empty_workspace, plan_for, planned_call
from benchmarks.peers import Peers
from benchmarks.workloads import Workload, make_inputs
from triton_mla.tuning import DEFAULT_ORDER, ReductionOrder, Schedule

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """Kernels to compile for one workload: an implementation's, or this package's under an order and a schedule."""

    workload: Workload
    implementation: str = "triton_mla"
    order: ReductionOrder = DEFAULT_ORDER
    schedule: Schedule | None = None


def _compile(job: Job, folder: Path | None) -> bool:
    """Run the job's kernels on one page of cache; False where they fail, which the measuring process will report."""
    try:
        inputs = make_inputs(job.workload, "cuda", one_page=True)
        if job.implementation == "triton_mla":
            plan = plan_for(inputs, job.order, job.schedule)
            call = planned_call(inputs, plan, empty_workspace(plan.workspace_bytes, inputs.q.device), empty_out(inputs))
        else:
            call = REGISTRY[job.implementation](inputs, Peers(folder))
        call()
        torch.cuda.synchronize()
    except Exception:
        return False
    finally:
        torch.cuda.empty_cache()
    return True


def precompile(jobs: Sequence[Job], folder: Path | None) -> None:
    """Compile all jobs, one process a core (at most 16, since each holds a device context of its own)."""
    jobs = list(dict.fromkeys(jobs))
    start = time.monotonic()
    workers = min(len(jobs), os.cpu_count() or 1, 16)
    done = 0
    try:
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            for compiled in pool.map(_compile, jobs, [folder] * len(jobs)):
                done += compiled
    except BrokenProcessPool as error:
        log.warning("a compiling process ended early: %s", error)
    log.info(
        "compiled for %d of %d jobs in %.0f s with %d processes", done, len(jobs), time.monotonic() - start, workers
    )
