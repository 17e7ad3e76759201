"""Measures one workload: prepare, check against float64, capture, time in turn, check the replayed output again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from benchmarks.correctness import TOLERANCE, expected, relative_error
from benchmarks.implementations import REGISTRY, Call
from benchmarks.peers import Peers, Unavailable
from benchmarks.timing import Replay, Timing, interleaved
from benchmarks.workloads import Workload, make_inputs

log = logging.getLogger(__name__)


class Run(Protocol):
    """A captured call: calling it repeats the call, and `out` is what it writes."""

    out: torch.Tensor

    def __call__(self) -> None: ...


class Clock(Protocol):
    """How calls are captured and timed."""

    def capture(self, call: Call) -> Run: ...

    def time(self, runs: Mapping[str, Run]) -> dict[str, Timing]: ...


@dataclass(frozen=True)
class GraphClock:
    """CUDA graphs between events, `repeats` turns, L2 flushed by "write" or "read" (see `timing.interleaved`)."""

    repeats: int
    flush: str = "write"

    def capture(self, call: Call) -> Run:
        return Replay(call)

    def time(self, runs: Mapping[str, Run]) -> dict[str, Timing]:
        return interleaved(runs, self.repeats, flush=self.flush) if runs else {}


@dataclass
class Measured:
    """Results of one workload: timing and relative error by implementation, and why others are left out."""

    workload: Workload
    timings: dict[str, Timing] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def rows(self) -> list[dict[str, Any]]:
        """The result rows: one for each timed implementation."""
        return [
            {**self.workload.row, "impl": impl, "us_median": round(t.median, 3), "us_spread": round(t.spread, 3)}
            for impl, t in self.timings.items()
        ]


def floor(workload: Workload, ceilings: Mapping[str, float]) -> Timing:
    """The roofline: the longer of its bytes at the measured bandwidth and its products at the measured rate."""
    seconds = max(workload.bytes / ceilings["hbm_bytes_per_s"], workload.flops / ceilings["bf16_flops_per_s"])
    return Timing(seconds * 1e6, seconds * 1e6, seconds * 1e6)


def reason(error: Exception) -> str:
    """One line that says why an implementation is left out."""
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, Unavailable) else f"{type(error).__name__}: {text}"


def measure(
    workload: Workload,
    implementations: Iterable[str],
    *,
    peers: Peers,
    clock: Clock,
    ceilings: Mapping[str, float],
    device: torch.device,
) -> Measured:
    """Time the implementations on one workload; one that fails or is wrong is left out with its reason."""
    result = Measured(workload)
    inputs = make_inputs(workload, device)
    rows, want = expected(inputs)
    runs: dict[str, Run] = {}

    def accept(name: str, out: torch.Tensor) -> None:
        error = relative_error(out, rows, want)
        if not error < TOLERANCE[workload.dtype]:
            raise Unavailable(f"wrong result: relative error {error:.2e}, allowed {TOLERANCE[workload.dtype]:.0e}")
        result.errors[name] = error

    def guarded(name: str, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception as error:
            result.left_out[name] = reason(error)
            runs.pop(name, None)
            result.timings.pop(name, None)
            log.warning("%s: %s left out: %s", workload.name, name, result.left_out[name])

    def prepare(name: str) -> None:
        call = REGISTRY[name](inputs, peers)
        accept(name, call())
        runs[name] = clock.capture(call)

    for name in implementations:
        if name != "floor":
            guarded(name, lambda name=name: prepare(name))  # type: ignore[misc]
    result.timings.update(clock.time(runs))
    for name, run in list(runs.items()):
        guarded(name, lambda name=name, run=run: accept(name, run.out))  # type: ignore[misc]
    if "floor" in implementations:
        result.timings["floor"] = floor(workload, ceilings)
    return result
