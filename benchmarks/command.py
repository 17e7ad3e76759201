"""What `triton-mla bench` does: measure suites or read a result file, print ratios and targets, write JSON, draw."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks import plot, report
from benchmarks.host import count_variants, measure_host_times, measure_prefill_host_times
from benchmarks.implementation import Workload
from benchmarks.peers import Peers
from benchmarks.precompile import jobs_for, precompile
from benchmarks.registry import NAMES, REGISTRY, SUITES
from benchmarks.runner import GraphClock, Measured, measure
from benchmarks.targets import Verdict, verdicts
from benchmarks.timing import measure_ceilings
from benchmarks.workloads import parse
from triton_mla.cli.text import ProgressLine


def run(args: argparse.Namespace) -> int:
    """Run the command with the options of `triton_mla.cli.bench`.

    Returns:
        0; or 1 where an implementation failed or was wrong, or this package's was left out.

    Raises:
        ValueError: an option is wrong, or there is no CUDA device to measure on.
    """
    if args.plot is not None:
        plot.check()
    if args.source is not None:
        content = report.read(args.source)
        print(report.ratio_table(content["rows"]))
    else:
        content = measure_all(args)
    print_verdicts([Verdict(**target) for target in content["targets"]])
    if args.plot is not None:
        plot.draw(content, args.plot)
        print(f"drew {args.plot}")
    failed = [row for row in content["rows"] if "failed" in row or (row["impl"] == "triton_mla" and row["us_median"] is None)]
    for row in failed:
        print(f"FAILED {row['workload']}: {row['impl']}: {row.get('failed') or row.get('left_out')}")
    return 1 if failed or "stopped" in content else 0


def chosen(args: argparse.Namespace) -> tuple[list[Workload], list[str]]:
    """The workloads and the implementations' names that the options ask for.

    Raises:
        ValueError: a workload or a name is unknown.
    """
    extra = [parse(text) for text in args.workloads]
    suites = args.suite or ([] if extra else ["quick"])
    names = args.impls or list(NAMES)
    if unknown := set(names) - set(NAMES):
        raise ValueError(f"impls={', '.join(sorted(unknown))}: allowed are {', '.join(NAMES)}")
    return list(dict.fromkeys([w for suite in suites for w in SUITES[suite]] + extra)), names


def measure_all(args: argparse.Namespace) -> dict[str, Any]:
    """Measure what the options ask for, print each workload as it is done, and keep the result file up to date."""
    workloads, names = chosen(args)
    if not torch.cuda.is_available():
        raise ValueError("the benchmarks need a CUDA device, and torch sees none")
    start, peers, progress = time.monotonic(), Peers(args.peers), ProgressLine()
    absent = absent_implementations(workloads, names, peers)
    for name, why in absent.items():
        print(f"{name} is left out: {why}")
    names = [name for name in names if name not in absent]
    progress(0, len(workloads), "compiling")
    compiled = precompile(jobs_for(workloads, names), args.peers)
    progress.clear()
    print(f"{compiled} in {time.monotonic() - start:.0f} s")
    ceilings = measure_ceilings(args.repeats)
    head = report.header(peers, ceilings, args.repeats, args.flush)
    print(f"{head['gpu']}: {ceilings['hbm_bytes_per_s'] / 1e12:.2f} TB/s, {ceilings['bf16_flops_per_s'] / 1e12:.0f} TFLOP/s (bf16)")
    content: dict[str, Any] = {"header": head, "rows": [], "absent": absent, "targets": []}
    host: dict[str, Any] = {}
    variants: dict[int, dict[str, int]] = {}
    if "decode" in (args.suite or ()):
        times, content["host_time_failed"] = measure_host_times(peers)
        host = {name: {"us_median": round(t.median, 2), "us_spread": round(t.spread, 2)} for name, t in times.items()}
        variants = count_variants((16, 128))
    if "prefill" in (args.suite or ()):
        content["prefill_host_time"] = {
            name: {"us_median": round(t.median, 2), "us_spread": round(t.spread, 2)} for name, t in measure_prefill_host_times().items()}
    path = args.json or report.default_path(head["gpu"], "_".join(args.suite or ["quick"]))
    clock, device = GraphClock(args.repeats, args.flush), torch.device("cuda")
    try:
        for index, workload in enumerate(workloads):
            if time.monotonic() > start + args.seconds:
                content["not_measured"] = [w.name for w in workloads[index:]]
                print(f"out of time: {len(workloads) - index} workloads are not measured")
                break
            progress(index, len(workloads), workload.name)
            m = measure(workload, [i for name, i in REGISTRY[workload.op].items() if name in names], peers=peers, clock=clock, ceilings=ceilings, device=device)
            progress.clear()
            print(report.line(m.rows()), flush=True)
            add(content, m, host, variants)
            report.write(path, content)
            torch.cuda.empty_cache()
    except RuntimeError as error:  # the device is lost to this process: what was measured before is kept
        content["stopped"] = str(error)
    finally:
        progress.clear()
    report.write(path, content)
    print(f"\n{report.ratio_table(content['rows'])}\n")
    for name, entry in host.items():
        print(f"host time of one decode call, {name}: {entry['us_median']:.1f} us")
    for name, entry in content.get("prefill_host_time", {}).items():
        print(f"host time of one paged prefill, {name}: {entry['us_median']:.1f} us")
    if "stopped" in content:
        print(f"STOPPED: {content['stopped']}")
    print(f"wrote {path} in {time.monotonic() - start:.0f} s")
    return content


def add(content: dict[str, Any], m: Measured, host: Mapping[str, Any], variants: Mapping[int, Mapping[str, int]]) -> None:
    """Put one more workload into the result file's content."""
    content["rows"] += m.rows()
    content["host_time"] = host
    content["compiled_kernels"] = {f"H={heads}": counts for heads, counts in variants.items()}
    medians = {name: entry["us_median"] for name, entry in host.items()}
    content["targets"] = [v.as_dict() for v in verdicts(content["rows"], medians, variants)]


def absent_implementations(workloads: Sequence[Workload], names: Sequence[str], peers: Peers) -> dict[str, str]:
    """Why implementations of the workloads' ops cannot run on this machine, by name."""
    wanted = {name: i for op in dict.fromkeys(w.op for w in workloads) for name, i in REGISTRY[op].items() if name in names}
    return {name: why for name, i in wanted.items() if (why := i.available(peers))}


def print_verdicts(judged: Sequence[Verdict]) -> None:
    """Every target, the missed ones last, and how many are met."""
    for verdict in sorted(judged, key=lambda v: (True, None, False).index(v.reached)):
        print(verdict)
    counts = [sum(v.reached is reached for v in judged) for reached in (True, False, None)]
    if judged:
        print("targets: {} met, {} missed, {} not measured".format(*counts))
