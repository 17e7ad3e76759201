"""A call replayed for seconds on end, under the clock that the power limit leaves: `python -m benchmarks.sustained [--peers DIR] [--json FILE]`.

The suites time calls between pauses, at nearly full clock. Here each implementation runs alone after a pause of its own, its KV larger than L2;
"cold" is the median of the calls of its first 50 ms, "sustained" that of the second half.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers import Peers, Unavailable
from benchmarks.registry import REGISTRY
from benchmarks.report import origin
from benchmarks.timing import Replay
from benchmarks.workloads import parse
from triton_mla.cli.text import columns

WORKLOADS = ("128,128,8192", "64,128,8192", "16,128,8192")
IMPLEMENTATIONS = ("triton_mla", "flashmla", "fa3_mla_auto")
COLD = 50e3  # us


class Sensors:
    """Power (W) and clock (MHz) of a device every 50 ms while it is open, by nvidia-smi; nothing where there is none."""

    def __init__(self, device: str) -> None:
        query = ["nvidia-smi", "-i", device, "--query-gpu=power.draw.instant,clocks.sm,power.limit", "--format=csv,noheader,nounits", "-lms", "50"]
        try:
            self._process: subprocess.Popen[str] | None = subprocess.Popen(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        except OSError:
            self._process = None

    def close(self) -> dict[str, float]:
        """Medians of the second half of what was read."""
        if self._process is None:
            return {}
        self._process.terminate()
        return summary(self._process.communicate()[0])


def summary(text: str) -> dict[str, float]:
    """Of lines "power, clock, limit"; the last one may be cut off, and any may have no number where the device tells none."""
    rows = []
    for line in text.splitlines():
        try:
            power, clock, limit = map(float, line.split(","))
        except ValueError:
            continue
        rows.append((power, clock, limit))
    half = rows[len(rows) // 2 :]
    return dict(zip(("watts", "mhz", "watts_limit"), map(statistics.median, zip(*half, strict=True)), strict=True)) if half else {}


def split(times: Sequence[float]) -> tuple[float, float]:
    """(cold, sustained) medians of the times of calls in order, in microseconds."""
    count, passed = 0, 0.0
    while count < len(times) and passed < COLD:
        passed += times[count]
        count += 1
    return statistics.median(times[:count]), statistics.median(times[len(times) // 2 :])


def replay(call: Callable[[], object], seconds: float) -> list[float]:
    """Microseconds of each call, without a gap between them."""
    times: list[float] = []
    before = torch.cuda.Event(enable_timing=True)
    before.record()
    pending: list[torch.cuda.Event] = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline or pending:
        while len(pending) < 256 and time.monotonic() < deadline:  # enough to keep the device busy while the oldest are read
            call()
            pending.append(torch.cuda.Event(enable_timing=True))
            pending[-1].record()
        for after in pending[:128]:
            after.synchronize()
            times.append(before.elapsed_time(after) * 1e3)
            before = after
        del pending[:128]
    return times


def measure(text: str, names: Sequence[str], peers: Peers, seconds: float) -> list[dict[str, Any]]:
    """A row of each implementation that serves the workload ``text`` (H,B,L or H,B,L,Q)."""
    workload = parse(text)
    inputs = workload.make_inputs("cuda")
    rows = []
    for name in names:
        try:
            run = Replay(REGISTRY[workload.op][name].prepare(inputs, peers))
        except Unavailable as error:
            print(f"{workload.name}: {name} is left out: {error}", flush=True)
            continue
        torch.cuda.synchronize()
        time.sleep(1.0)
        sensors = Sensors(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
        cold, sustained = split(replay(run, seconds))
        rows.append({"workload": workload.name, "impl": name, "us_cold": round(cold, 2), "us_sustained": round(sustained, 2),
                     "tflops_sustained": round(workload.flops / sustained / 1e6, 1), "tb_per_s_sustained": round(workload.bytes / sustained / 1e6, 2),
                     **sensors.close()})
        print(rows[-1], flush=True)
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sustained", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--peers", type=Path, metavar="DIR", help="the peers' files, as in `triton-mla bench`")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), metavar="H,B,L", help=f"default: {' '.join(WORKLOADS)}")
    parser.add_argument("--seconds", type=float, default=4.0, help="of one implementation on one workload (default: 4)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    args = parser.parse_args(argv)
    if not 0.2 <= args.seconds <= 600:
        parser.error(f"--seconds={args.seconds} must be from 0.2 to 600")
    try:
        for text in args.workloads:
            parse(text)
    except ValueError as error:
        parser.error(f"--workloads: {error}")
    if not torch.cuda.is_available():
        parser.error("it needs a CUDA device, and torch sees none")
    peers = Peers(args.peers)
    ops = REGISTRY["decode"]
    names = [name for name in IMPLEMENTATIONS if not ops[name].available(peers)]
    rows = [row for text in args.workloads for row in measure(text, names, peers, args.seconds)]
    heads = ["workload", "impl", "us_cold", "us_sustained", "tflops_sustained", "tb_per_s_sustained", "watts", "mhz"]
    print(columns([heads, *[[str(row.get(head, "")) for head in heads] for row in rows]]))
    if args.json is not None:
        header = {**origin(), "seconds": args.seconds, "peer_files": peers.digests()}
        args.json.write_text(json.dumps({"header": header, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
