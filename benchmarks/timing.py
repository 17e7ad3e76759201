"""Times on a CUDA device: graph replays between events with a flushed L2, the implementations in turn."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter_ns

import torch

FLUSH_BYTES = 256 << 20
"""Several times the L2 of any GPU so far."""
WARM_UP = 2
"""Turns that are replayed and not counted."""
LEAST_REPEATS = 5
"""Timed turns of a call that uses up its time before."""


@dataclass(frozen=True)
class Timing:
    """Median and the 10th and 90th percentiles, in microseconds."""

    median: float
    p10: float
    p90: float

    @property
    def spread(self) -> float:
        """p90 - p10 in microseconds."""
        return self.p90 - self.p10


def summarize(samples: Sequence[float]) -> Timing:
    """The Timing of samples in microseconds (at least one)."""
    ordered = sorted(samples)
    last = len(ordered) - 1
    return Timing(statistics.median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)])


class Replay:
    """A call captured in a CUDA graph. `out` is the tensor that every replay writes."""

    def __init__(self, call: Callable[[], torch.Tensor]):
        self.call = call  # keeps alive the tensors that it made before the capture
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = call()

    def __call__(self) -> None:
        self.graph.replay()


def interleaved(
    calls: Mapping[str, Callable[[], object]], repeats: int, *, flush: str = "write", seconds: float = math.inf
) -> dict[str, Timing]:
    """Time each call `repeats` times, all calls in turn, so that clocks and neighbours drift for all alike.

    flush="write" overwrites 256 MiB before each call, which leaves dirty lines in L2, as kernels before it do;
    flush="read" reads them, which leaves clean lines. A call whose timed turns have taken `seconds` takes part no longer.
    """
    buffer = torch.zeros(FLUSH_BYTES // 4, dtype=torch.float32, device="cuda")
    evict = buffer.zero_ if flush == "write" else buffer.sum
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(WARM_UP + repeats):
        events = []
        for name, call in calls.items():
            if len(samples[name]) >= LEAST_REPEATS and sum(samples[name]) > seconds * 1e6:
                continue
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            evict()
            start.record()
            call()
            end.record()
            events.append((name, start, end))
        torch.cuda.synchronize()
        if turn >= WARM_UP:
            for name, start, end in events:
                samples[name].append(start.elapsed_time(end) * 1e3)
    return {name: summarize(times) for name, times in samples.items()}


def fastest(calls: Sequence[Callable[[], torch.Tensor]]) -> Callable[[], torch.Tensor]:
    """The call that takes the least time here; the first, where there is no CUDA device to tell."""
    if not torch.cuda.is_available():
        return calls[0]
    times = interleaved({str(i): Replay(call) for i, call in enumerate(calls)}, LEAST_REPEATS, seconds=0.05)
    return calls[int(min(times, key=lambda name: times[name].median))]


def host_time(call: Callable[[], object], calls: int = 400, burst: int = 20) -> Timing:
    """CPU time of one asynchronous call, the device drained after every `burst` calls so that its queue never fills."""
    samples = []
    for _ in range(calls // burst):
        torch.cuda.synchronize()
        for _ in range(burst):
            start = perf_counter_ns()
            call()
            samples.append((perf_counter_ns() - start) / 1e3)
    torch.cuda.synchronize()
    return summarize(samples[burst:])


def measure_ceilings(repeats: int) -> dict[str, float]:
    """What this device reaches: bytes/s of a large copy (both ways) and a large sum, FLOP/s of a bf16 product."""
    source = torch.randn(1 << 30, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    words = source.view(torch.float32)
    n = 8192
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    product = torch.empty_like(a)
    calls = {
        "copy": lambda: target.copy_(source),
        "read": lambda: words.sum(),
        "matmul": lambda: torch.mm(a, b, out=product),
    }
    times = {name: timing.median * 1e-6 for name, timing in interleaved(calls, repeats).items()}
    size = source.numel() * source.itemsize
    copy, read = 2 * size / times["copy"], size / times["read"]
    return {
        "copy_bytes_per_s": copy,
        "read_bytes_per_s": read,
        "hbm_bytes_per_s": max(copy, read),
        "bf16_flops_per_s": 2 * n**3 / times["matmul"],
    }
