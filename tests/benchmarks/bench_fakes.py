"""A clock that needs no device: it captures by calling once, and its times are made up."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from benchmarks import runner
from benchmarks.implementation import Implementation, Workload
from benchmarks.peers import Peers
from benchmarks.registry import REGISTRY
from benchmarks.timing import Timing

CEILINGS = {"hbm_bytes_per_s": 4.0e12, "bf16_flops_per_s": 8.0e14}


class FakeRun:
    def __init__(self, call: Callable[[], torch.Tensor]):
        self.out = call()

    def __call__(self) -> None:
        raise AssertionError("the fake clock replays nothing")


class FakeClock:
    """Times 10, 11, ... µs in the order of the calls."""

    def capture(self, call: Callable[[], torch.Tensor]) -> FakeRun:
        return FakeRun(call)

    def time(self, runs: Mapping[str, object]) -> dict[str, Timing]:
        return {name: Timing(10.0 + i, 9.5, 12.0) for i, name in enumerate(runs)}


def measure(workload: Workload, *implementations: str | Implementation) -> runner.Measured:
    """The runner on the CPU, with implementations of the registry by name or others."""
    chosen = [REGISTRY[workload.op][i] if isinstance(i, str) else i for i in implementations]
    return runner.measure(workload, chosen, peers=Peers(None), clock=FakeClock(), ceilings=CEILINGS, device=torch.device("cpu"))
