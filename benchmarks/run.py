"""`python -m benchmarks.run`: the result rows, the host's costs and the targets, written to one JSON file."""

from __future__ import annotations

import argparse
import functools
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.host import count_variants, measure_host_times
from benchmarks.implementations import COMPILED, REGISTRY
from benchmarks.peers import Peers
from benchmarks.precompile import Job, precompile
from benchmarks.runner import GraphClock, Measured, measure
from benchmarks.targets import Verdict, verdicts
from benchmarks.timing import measure_ceilings
from benchmarks.workloads import ROWS, Workload, parse

log = logging.getLogger(__name__)

SECTIONS = (*ROWS, "host", "variants")
DEFAULT_SECTIONS = ("host", "decode", "extend", "variants")


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The parsed command line; `workloads` holds the chosen rows, repetitions removed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument(
        "--rows", nargs="+", choices=SECTIONS, default=DEFAULT_SECTIONS, help="what to measure (default: %(default)s)"
    )
    parser.add_argument("--workloads", nargs="+", default=[], metavar="H,B,L[,Q]", help="measure these shapes as well")
    parser.add_argument(
        "--impls", nargs="+", choices=[*REGISTRY, "floor"], default=[*REGISTRY, "floor"], help="implementations"
    )
    parser.add_argument("--peers", type=Path, help="folder that holds the peers' files (see benchmarks/peers.py)")
    parser.add_argument("--repeats", type=int, default=21, help="timed turns a workload (default: %(default)s)")
    parser.add_argument(
        "--flush", choices=("write", "read"), default="write", help="how L2 is emptied (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=540, help="start no workload later than this (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, help="JSON file (default: benchmarks/results/<gpu>.json)")
    args = parser.parse_args(argv)
    if args.repeats < 1:
        parser.error(f"--repeats {args.repeats}: allowed is a positive integer")
    try:
        extra = [parse(text) for text in args.workloads]
    except ValueError as error:
        parser.error(str(error))
    args.workloads = list(dict.fromkeys([w for name in args.rows for w in ROWS.get(name, [])] + extra))
    return args


def default_path(gpu: str) -> Path:
    """benchmarks/results/<gpu>.json, the GPU's name in lower case letters and digits."""
    return Path(__file__).parent / "results" / f"{re.sub('[^a-z0-9]+', '_', gpu.lower()).strip('_')}.json"


def document(
    head: dict[str, Any], measured: Sequence[Measured], host: dict[str, Any], variants: dict[int, dict[str, int]]
) -> dict[str, Any]:
    """The result file's content."""
    rows = [row for m in measured for row in m.rows()]
    host_medians = {name: entry["us_median"] for name, entry in host.items()}
    return {
        "header": head,
        "rows": rows,
        "host_time": host,
        "compiled_kernels": {f"H={heads}": counts for heads, counts in variants.items()},
        "targets": [v.as_dict() for v in verdicts(rows, host_medians, variants)],
        "relative_errors": [
            {"workload": m.workload.name, **{k: float(f"{e:.3g}") for k, e in m.errors.items()}} for m in measured
        ],
        "left_out": [
            {"workload": m.workload.name, "impl": k, "reason": text} for m in measured for k, text in m.left_out.items()
        ],
    }


def measure_in_time(
    workloads: Sequence[Workload], deadline: float, one: Callable[[Workload], Measured]
) -> Iterator[Measured]:
    """`one(workload)` for each workload in order; none starts after `deadline` (time.monotonic seconds)."""
    for index, workload in enumerate(workloads):
        if time.monotonic() > deadline:
            log.warning("out of time: %d workloads not measured", len(workloads) - index)
            return
        yield one(workload)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; exit status 0 when this package's op was right on every workload, else 1."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    args = arguments(argv)
    if not torch.cuda.is_available():
        log.error("the benchmarks need a CUDA device")
        return 2
    start = time.monotonic()
    peers = Peers(args.peers)
    jobs = [
        Job(w, name)
        for w in args.workloads
        for name in COMPILED
        if name in args.impls and (name == "triton_mla" or args.peers)
    ]
    if jobs:
        precompile(jobs, args.peers)
    ceilings = measure_ceilings(args.repeats)
    head = report.header(peers, ceilings, args.repeats, args.flush)
    log.info(
        "%s: %.2f TB/s, %.0f TFLOP/s (bf16)",
        head["gpu"],
        ceilings["hbm_bytes_per_s"] / 1e12,
        ceilings["bf16_flops_per_s"] / 1e12,
    )
    host: dict[str, Any] = {}
    if "host" in args.rows:
        times = measure_host_times(peers)
        host = {name: {"us_median": round(t.median, 2), "us_spread": round(t.spread, 2)} for name, t in times.items()}
    variants = count_variants((16, 128)) if "variants" in args.rows else {}
    path = args.out or default_path(head["gpu"])
    one = functools.partial(
        measure,
        implementations=args.impls,
        peers=peers,
        clock=GraphClock(args.repeats, args.flush),
        ceilings=ceilings,
        device=torch.device("cuda"),
    )
    measured: list[Measured] = []
    content = document(head, measured, host, variants)
    for m in measure_in_time(args.workloads, start + args.seconds, one):
        measured.append(m)
        log.info("%s", report.line(m))
        content = document(head, measured, host, variants)
        report.write(path, content)
    report.write(path, content)
    log.info("%s", report.ratio_table(content["rows"], args.impls))
    for m in measured:
        if text := report.share_of_ceiling(m, ceilings):
            log.info("%s", text)
    log.info("host time of one decode call (us): %s", {name: entry["us_median"] for name, entry in host.items()})
    log.info("compiled kernels: %s", content["compiled_kernels"])
    for target in content["targets"]:
        log.info("%s", Verdict(**target))
    log.info("wrote %s in %.0f s", path, time.monotonic() - start)
    return int(any("triton_mla" in m.left_out for m in measured))


if __name__ == "__main__":
    sys.exit(main())
