"""Throughput of engines side by side: each in a process of its own, with the same requests at once, which take windows of steps in turn.

A step of a small model is the host's, and a host that others use too makes it longer or shorter for seconds. Windows of different engines that
follow one another on one core have that in common, so what is told of two engines is the median of the ratios of such pairs.
"""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

CELLS = {(4096, 1): 30, (4096, 32): 20, (32768, 1): 6, (32768, 32): 6}
"""Context and requests of each cell, and rounds of a sitting: in one, every engine has one window."""
SITTINGS = 2
"""How often each cell's prompts are read and its rounds made."""
WARM_STEPS, STEPS = 4, 32


def prompts(seed: int, count: int, low: int, high: int, vocabulary: int) -> list[list[int]]:
    draw = random.Random(seed * 1000 + count + high)
    return [[draw.randrange(2, vocabulary) for _ in range(draw.randint(low, high))] for _ in range(count)]


def key_of(context: int, size: int) -> str:
    return f"{context} x {size}"


# ---- in the process of an engine


class Requests:
    """The requests of one cell in an engine of this process."""

    def __init__(self, llm: Any, vocabulary: int) -> None:
        self.llm, self.engine, self.vocabulary = llm, llm.llm_engine, vocabulary
        self.names: list[str] = []
        self.cores = os.sched_getaffinity(0)
        self.threads: dict[str, set[int]] = {}

    def begin(self, context: int, size: int, core: int) -> float:
        """Seconds until all prompts have been read."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self.threads = _threads()
        os.sched_setaffinity(0, {core})
        self.llm.reset_prefix_cache()
        tokens = CELLS[context, size] * (WARM_STEPS + STEPS) + context * size // 1024 + 64  # the first one decodes while the others' prompts are read
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA)
        self.names = [f"{context}_{size}_{i}" for i in range(size)]
        for name, prompt in zip(self.names, prompts(50 + size, size, context, context, self.vocabulary), strict=True):
            self.engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        begun, decoding = time.perf_counter(), set[str]()
        while len(decoding) < size:
            decoding |= {output.request_id for output in self.engine.step() if output.outputs[0].token_ids}
        return time.perf_counter() - begun

    def window(self, core: int) -> float | None:
        """Seconds of STEPS steps, on that core; None if not all requests decoded in each."""
        import torch

        os.sched_setaffinity(0, {core})
        for _ in range(WARM_STEPS):
            self.engine.step()
        torch.cuda.synchronize()
        begun, count = time.perf_counter(), 0
        for _ in range(STEPS):
            count += sum(len(output.outputs[0].token_ids) for output in self.engine.step())
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
        return seconds if count == STEPS * len(self.names) else None

    def end(self) -> None:
        self.engine.abort_request(self.names)
        for _ in range(STEPS):
            if self.engine.has_unfinished_requests():
                self.engine.step()
        for thread in _threads():  # with those that the calling one has started meanwhile
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread), self.threads.get(thread, self.cores))


def _threads() -> dict[str, set[int]]:
    """The cores of each thread of this process."""
    found = {}
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):
            found[thread] = os.sched_getaffinity(int(thread))
    return found


def serve(requests: Requests, channel: Connection) -> None:
    """Does what `measure` asks, until it asks for nothing more."""
    channel.send("ready")
    while (command := channel.recv()) is not None:
        channel.send(getattr(requests, command[0])(*command[1:]))


# ---- in the process that asks them


def measure(channels: Mapping[str, Connection], deadline: float) -> dict[str, dict[str, dict[str, Any]]]:
    """What each engine did in each cell, by its name. One that ends, or does not answer before `deadline` (of `time.monotonic`), is left out from
    there on; a cell of which it has two windows stays."""
    alive, run = dict(channels), uuid.uuid4().hex
    measured: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in alive}

    def ask(name: str, *command: Any) -> Any:
        try:
            alive[name].send(command)
            if alive[name].poll(max(0.0, deadline - time.monotonic())):
                return alive[name].recv()
        except (EOFError, OSError):
            pass
        del alive[name]
        print(f"{name} did not answer, and is asked no more", flush=True)
        return None

    begun = time.monotonic()
    for sitting in range(SITTINGS):
        for (context, size), rounds in CELLS.items():
            print(f"[{time.monotonic() - begun:.0f} s] throughput, {key_of(context, size)}, sitting {sitting + 1}", flush=True)
            for name in list(alive):
                cell = measured[name].setdefault(key_of(context, size), {"size": size, "prefills": [], "windows": []})
                cell["prefills"].append(ask(name, "begin", context, size, fastest_core()))
            for round in range(rounds):
                core, turn = fastest_core(), round % max(1, len(alive))
                for name in [*alive][turn:] + [*alive][:turn]:
                    measured[name][key_of(context, size)]["windows"].append(ask(name, "window", core))
            for name in list(alive):
                ask(name, "end")
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name, cells in measured.items():
        for key, cell in cells.items():
            if sum(window is not None for window in cell["windows"]) < 2:
                print(f"{name}, {key}: not measured, since requests did not decode together", flush=True)
            else:
                found.setdefault(name, {})[key] = {"run": run, **_summary(**cell)}
    return found


def _summary(size: int, prefills: Sequence[float | None], windows: Sequence[float | None]) -> dict[str, Any]:
    """The median, with quartiles, of the windows in which all requests decoded, and the shortest of the prefills."""
    steps = [None if seconds is None else 1e3 * seconds / STEPS for seconds in windows]
    whole = [step for step in steps if step is not None]
    read = [seconds for seconds in prefills if seconds is not None]
    low, median, high = statistics.quantiles(whole, n=4)
    return {"tokens_per_second": round(1e3 * size / median, 1), "ms_per_step": round(median, 3), "ms_quartiles": [round(low, 3), round(high, 3)],
            "prefill_seconds": round(min(read), 3), "prefills": [round(seconds, 3) for seconds in read],
            "windows_ms_per_step": [None if step is None else round(step, 4) for step in steps]}


def speed(own: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """How fast a cell of one engine is, as the other's time over its own: the median over the rounds in which both have a window, an interval that
    holds it with 95 % or more (from six rounds on; by ranks, which ask nothing of the distribution, but that rounds do not follow each other),
    and how many these are. Empty where none is, or the engines were not measured together."""
    if own["run"] != other["run"]:
        return {}
    pairs = zip(own["windows_ms_per_step"], other["windows_ms_per_step"], strict=False)
    ratios = sorted(b / a for a, b in pairs if a is not None and b is not None)
    count = len(ratios)
    if not count:
        return {}
    cut = max(0, int((count - 1.96 * count**0.5) / 2) - 1)
    return {"median": round(statistics.median(ratios), 4), "interval": [round(ratios[cut], 4), round(ratios[count - 1 - cut], 4)], "rounds": count}


def fastest_core(loop: Callable[[], float] | None = None) -> int:
    """The core that takes the shortest for a fixed loop at the moment: a core of a host that others use too may be half as fast as its neighbours."""
    loop, cores, times = loop or _fixed_loop, os.sched_getaffinity(0), {}
    try:
        for core in sorted(cores):
            os.sched_setaffinity(0, {core})
            times[core] = min(loop() for _ in range(3))
    finally:
        os.sched_setaffinity(0, cores)
    return min(times, key=lambda core: times[core])


def _fixed_loop() -> float:
    begun, counts = time.perf_counter(), dict[int, int]()
    for i in range(5_000):
        counts[i & 255] = counts.get(i & 127, 0) + len(str(i))
    return time.perf_counter() - begun
