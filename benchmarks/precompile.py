"""Fills Triton's cache from several processes, so that a run spends its time on measuring."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.absorbed import adaptive_orders, empty_out, empty_workspace, plan_for, planned_call
from benchmarks.implementation import Workload
from benchmarks.peers import Peers, Unavailable
from benchmarks.prefill import Prompt
from benchmarks.registry import REGISTRY
from benchmarks.workloads import Workload as Absorbed
from triton_mla.plan import hopper_tile
from triton_mla.tuning import DEFAULT_ORDER, ReductionOrder, Schedule


@dataclass(frozen=True)
class Job:
    """Kernels to compile for one workload: an implementation's, or this package's absorbed form under an order and a schedule."""

    workload: Workload
    implementation: str = "triton_mla"
    order: ReductionOrder = DEFAULT_ORDER
    schedule: Schedule | None = None

    @property
    def planned(self) -> bool:
        """Whether it is for this package's absorbed form."""
        return self.implementation == "triton_mla" and isinstance(self.workload, Absorbed)

    def key(self, device: str) -> tuple[Any, ...]:
        """Jobs of one key need the same kernels."""
        w = self.workload
        if isinstance(w, Absorbed) and self.planned:
            plan = plan_for(w, device, self.order, self.schedule)
            # The Hopper kernels are made for a number of heads, and take split sizes as numbers; the others the other way round.
            own = hopper_tile(w.heads) if plan.schedule.form.startswith("hopper") else plan.order
            return plan.schedule, own, plan.decode, plan.num_splits > 1, w.dtype, w.page_size
        if isinstance(w, Absorbed):
            return self.implementation, w.op, w.heads, w.seq_len, w.q_len
        if isinstance(w, Prompt):
            return self.implementation, w.heads, w.dtype, w.batch > 1, w.length > w.new
        return self.implementation, w


def jobs_for(workloads: Iterable[Workload], names: Collection[str]) -> list[Job]:
    """What the implementations of these names will compile for the workloads."""
    jobs = []
    for w in workloads:
        for name, implementation in REGISTRY[w.op].items():
            if name not in names or not implementation.compiles:
                continue
            if name == "triton_mla_adaptive" and isinstance(w, Absorbed):
                jobs += [Job(w, order=order) for order in adaptive_orders(w)]
            else:
                jobs.append(Job(w, name))
    return jobs


def _compile(job: Job, folder: Path | None) -> bool:
    """Run the job's kernels on small inputs; False where they fail, which the measuring process will report."""
    try:
        inputs = job.workload.make_inputs("cuda", small=True)
        if job.planned:
            plan = plan_for(inputs.workload, "cuda", job.order, job.schedule)
            call = planned_call(inputs, plan, empty_workspace(plan.workspace_bytes, inputs.q.device), empty_out(inputs))
        else:
            call = REGISTRY[job.workload.op][job.implementation].prepare(inputs, Peers(folder))
        call()
        torch.cuda.synchronize()
    except Unavailable:
        return True
    except Exception:
        return False
    finally:
        torch.cuda.empty_cache()
    return True


def precompile(jobs: Sequence[Job], folder: Path | None) -> str:
    """Compile all jobs, one process a core (at most 16, since each holds a device context of its own); returns what was done."""
    different = list({job.key("cuda"): job for job in reversed(jobs)}.values())
    if not different:
        return "nothing to compile"
    workers = min(len(different), os.cpu_count() or 1, 16)
    done = 0
    try:
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            for compiled in pool.map(_compile, different, [folder] * len(different)):
                done += compiled
    except BrokenProcessPool as error:
        return f"compiled for {done} of {len(different)} jobs: a process ended early: {error}"
    return f"compiled for {done} of {len(different)} jobs with {workers} processes"
