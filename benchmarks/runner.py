"""Measures one workload: prepare, check against float64, capture, time in turn, check the replayed output again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from benchmarks.correctness import TOLERANCE, relative_error
from benchmarks.implementation import Call, Implementation, Workload
from benchmarks.peers import Peers, Unavailable
from benchmarks.timing import Replay, Timing, interleaved


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
    """CUDA graphs between events: `repeats` turns, a call that takes longer than `seconds` in fewer; L2 flushed by "write" or "read"."""

    repeats: int
    flush: str = "write"
    seconds: float = 0.15

    def capture(self, call: Call) -> Run:
        return Replay(call)

    def time(self, runs: Mapping[str, Run]) -> dict[str, Timing]:
        return interleaved(runs, self.repeats, flush=self.flush, seconds=self.seconds) if runs else {}


@dataclass
class Measured:
    """Results of one workload by implementation: timings and relative errors; why it was not run; and why it failed, or how wrong it was."""

    workload: Workload
    timings: dict[str, Timing] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def rows(self) -> list[dict[str, Any]]:
        """The result rows, one for each implementation; `us_median` is None where there is a reason instead."""
        rows = []
        base = {**self.workload.row, "workload": self.workload.name}
        for impl, t in self.timings.items():
            row = {**base, "impl": impl, "us_median": round(t.median, 3), "us_spread": round(t.spread, 3)}
            if impl in self.errors:
                row["relative_error"] = float(f"{self.errors[impl]:.3g}")
            if impl == "floor":
                row |= {"bytes": self.workload.bytes, "flops": self.workload.flops}
            rows.append(row)
        for kind, reasons in (("left_out", self.left_out), ("failed", self.failed)):
            rows += [{**base, "impl": impl, "us_median": None, "us_spread": None, kind: text} for impl, text in reasons.items()]
        return rows


def floor(workload: Workload, ceilings: Mapping[str, float]) -> Timing:
    """The roofline: the longer of its bytes at the measured bandwidth and its products at the measured rate."""
    seconds = max(workload.bytes / ceilings["hbm_bytes_per_s"], workload.flops / ceilings["bf16_flops_per_s"])
    return Timing(seconds * 1e6, seconds * 1e6, seconds * 1e6)


def reason(error: Exception) -> str:
    """One line that says why an implementation gave no result."""
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, Unavailable) else f"{type(error).__name__}: {text}"


def measure(
    workload: Workload,
    implementations: Iterable[Implementation],
    *,
    peers: Peers,
    clock: Clock,
    ceilings: Mapping[str, float],
    device: torch.device,
) -> Measured:
    """Time the implementations on one workload; one that does not serve it, fails or is wrong has its reason in the result.

    Raises:
        RuntimeError: an implementation left the device unusable, after which nothing can be measured.
    """
    result = Measured(workload)
    inputs = workload.make_inputs(device)
    rows, want = inputs.expected()
    runs: dict[str, Run] = {}

    def accept(name: str, out: torch.Tensor) -> None:
        error = relative_error(out, rows, want)
        if not error < TOLERANCE[workload.dtype]:
            raise ArithmeticError(f"wrong result: relative error {error:.2e}, allowed {TOLERANCE[workload.dtype]:.0e}")
        result.errors[name] = error

    def guarded(name: str, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception as error:
            reasons = result.left_out if isinstance(error, Unavailable) else result.failed
            reasons[name] = reason(error)
            runs.pop(name, None)
            result.timings.pop(name, None)
            if device.type == "cuda":
                try:
                    torch.cuda.synchronize()
                except RuntimeError as broken:
                    raise RuntimeError(f"{workload.name}: {name} left the device unusable: {reasons[name]}") from broken

    def prepare(implementation: Implementation) -> None:
        call = implementation.prepare(inputs, peers)
        accept(implementation.name, call())
        runs[implementation.name] = clock.capture(call)

    for implementation in implementations:
        guarded(implementation.name, lambda i=implementation: prepare(i))  # type: ignore[misc]
    result.timings.update(clock.time(runs))
    for name, run in list(runs.items()):
        guarded(name, lambda name=name, run=run: accept(name, run.out))  # type: ignore[misc]
    result.timings["floor"] = floor(workload, ceilings)
    return result
