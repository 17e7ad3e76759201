"""`python -m benchmarks.search_split`: which split size, or which schedule, over a grid of workloads.

Split sizes change bits, so one is chosen for all workloads: the one whose worst regret (its time over the best split's
time of the same workload) is smallest. Schedules change no bit, which is checked here: under one order every schedule
must give the bytes of the first. Of each split the plan's own schedule is timed beside all others of the architecture's
table; `--schedules` adds a grid of portable ones that it does not have.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import logging
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.absorbed import empty_out, empty_workspace, plan_for, planned_call
from benchmarks.correctness import TOLERANCE, relative_error
from benchmarks.peers import Peers, Unavailable
from benchmarks.precompile import Job, precompile
from benchmarks.registry import REGISTRY
from benchmarks.runner import Clock, GraphClock, Run, floor, reason
from benchmarks.timing import Timing, measure_ceilings
from benchmarks.workloads import Workload, grid, parse
from triton_mla.plan import AttentionPlan
from triton_mla.testing import bitwise_equal
from triton_mla.tuning import ARCHITECTURES, ReductionOrder, Schedule

log = logging.getLogger(__name__)

SPLITS = (512, 1024, 2048, 4096)
PEERS = ("flashmla", "fa3_mla_auto")


@dataclasses.dataclass
class Variant:
    """This package's op under one split size and schedule: its time, or why it has none."""

    kv_split: int
    schedule: Schedule
    timing: Timing | None = None
    reason: str = ""

    @property
    def name(self) -> str:
        return f"{self.kv_split} {describe(self.schedule)}"


@dataclasses.dataclass
class Cell:
    """One workload with all its variants, the peers' times and the floor."""

    workload: Workload
    variants: list[Variant]
    peers: dict[str, Timing]
    floor: Timing

    def best(self, kv_split: int) -> Variant | None:
        """The fastest variant of a split size; None where none ran."""
        timed = [v for v in self.variants if v.kv_split == kv_split and v.timing]
        return min(timed, key=lambda v: v.timing.median, default=None)  # type: ignore[union-attr]

    def as_dict(self) -> dict[str, Any]:
        w = self.workload
        return {
            **w.row,
            "label": w.label,
            "floor_us": round(self.floor.median, 2),
            "peers_us": {name: round(t.median, 2) for name, t in self.peers.items()},
            "variants": [
                {
                    "kv_split": v.kv_split,
                    "schedule": dataclasses.asdict(v.schedule),
                    **({"us_median": round(v.timing.median, 2), "us_spread": round(v.timing.spread, 2)} if v.timing else {}),
                    **({"left_out": v.reason} if v.reason else {}),
                }
                for v in self.variants
            ],
        }


def describe(schedule: Schedule) -> str:
    """A schedule in one word: its fields, joined."""
    return "/".join(str(value) for value in dataclasses.asdict(schedule).values())


def schedules(base: Schedule) -> list[Schedule]:
    """One-pass schedules, and two-phase ones with the values kernel or the scores kernel varied."""
    common = {"block_rows": (16, 64), "pdl": (base.pdl,), "form": ("two_phase",)}
    grids: list[dict[str, tuple[Any, ...]]] = [
        {"block_rows": (16, 32, 64), "num_warps": (4, 8), "num_stages": (1, 2, 3), "pdl": (base.pdl,)},
        {**common, "num_warps": (4, 8), "num_stages": (3, 5), "block_v": (32, 64, 128), "score_warps": (8,)},
        {**common, "num_warps": (8,), "num_stages": (5,), "block_k": (128, 512), "score_warps": (4, 8)},
    ]
    found = [dataclasses.replace(base, pdl=not base.pdl)]
    for axes in grids:
        found += [Schedule(**dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())]
    return found


def plans(workload: Workload, device: torch.device | str, splits: Sequence[int], every_schedule: bool) -> list[tuple[Variant, AttentionPlan]]:
    """The variants of one workload with their plans; a schedule that the planner refuses is left out."""
    found = []
    for split in splits:
        order = ReductionOrder(kv_split=split)
        default = plan_for(workload, device, order)
        candidates = [default.schedule, *ARCHITECTURES[default.arch].schedules(), *(schedules(default.schedule) if every_schedule else [])]
        for schedule in dict.fromkeys(candidates):
            try:
                found.append((Variant(split, schedule), plan_for(workload, device, order, schedule)))
            except ValueError as error:
                log.debug("%s refused: %s", describe(schedule), error)
    return found


def measure_cell(
    workload: Workload,
    splits: Sequence[int],
    *,
    every_schedule: bool,
    peers: Peers,
    clock: Clock,
    ceilings: Mapping[str, float],
    device: torch.device,
) -> Cell:
    """Check and time every variant of one workload, and the peers that are there, all in turn."""
    inputs = workload.make_inputs(device)
    rows, want = inputs.expected()
    planned = plans(workload, device, splits, every_schedule)
    workspace = empty_workspace(max((plan.workspace_bytes for _, plan in planned), default=0), device)
    out = empty_out(inputs)
    first: dict[int, torch.Tensor] = {}
    runs: dict[str, Run] = {}
    for variant, plan in planned:
        workspace.fill_(0xFF)
        out.fill_(float("nan"))
        call = planned_call(inputs, plan, workspace, out)
        try:
            call()
            if not relative_error(out, rows, want) < TOLERANCE[workload.dtype]:
                raise Unavailable("wrong result")
            if not bitwise_equal(out, first.setdefault(variant.kv_split, out.clone())):
                raise Unavailable("bits differ from the first schedule's")
            runs[variant.name] = clock.capture(call)
        except Exception as error:
            variant.reason = reason(error)
            log.warning("%s: %s left out: %s", workload.name, variant.name, variant.reason)
    for name in PEERS:
        try:
            call = REGISTRY[workload.op][name].prepare(inputs, peers)
            call()
            runs[name] = clock.capture(call)
        except Exception as error:
            log.debug("%s: %s left out: %s", workload.name, name, reason(error))
    times = clock.time(runs)
    variants = [variant for variant, _ in planned]
    for variant in variants:
        variant.timing = times.get(variant.name)
    return Cell(workload, variants, {name: times[name] for name in PEERS if name in times}, floor(workload, ceilings))


def regrets(cells: Iterable[Cell], splits: Sequence[int]) -> dict[int, dict[str, Any]]:
    """For each split size over the cells where all ran: the worst and the mean (geometric) ratio to the best split, the
    worst ratio to the best peer, and the workloads of the two worsts."""
    table: dict[int, list[tuple[float, float | None, str]]] = {split: [] for split in splits}
    for cell in cells:
        best = {split: v.timing.median for split in splits if (v := cell.best(split)) and v.timing}
        if len(best) < len(splits):
            continue
        peer = min((t.median for t in cell.peers.values()), default=None)
        for split, us in best.items():
            table[split].append((us / min(best.values()), us / peer if peer else None, cell.workload.name))
    result = {}
    for split, entries in table.items():
        if not entries:
            continue
        worst = max(entries, key=lambda entry: entry[0])
        against = max(
            (entry for entry in entries if entry[1] is not None), key=lambda entry: entry[1] or 0.0, default=None
        )
        result[split] = {
            "cells": len(entries),
            "worst_regret": round(worst[0], 3),
            "worst_cell": worst[2],
            "mean_regret": round(math.exp(sum(math.log(entry[0]) for entry in entries) / len(entries)), 3),
            "worst_to_best_peer": round(against[1], 3) if against and against[1] else None,
            "worst_to_best_peer_cell": against[2] if against else None,
        }
    return result


def cell_lines(cell: Cell, splits: Sequence[int]) -> list[str]:
    """The cell in print: the best time of each split size, then the three best schedules of each beside the plan's own."""
    best = [f"{split} {v.timing.median:.1f}" for split in splits if (v := cell.best(split)) and v.timing]
    others = [f"{name} {t.median:.1f}" for name, t in cell.peers.items()]
    lines = [f"{cell.workload.name}: " + " | ".join([*best, *others, f"floor {cell.floor.median:.1f}"])]
    for split in splits:
        timed = [v for v in cell.variants if v.kv_split == split and v.timing]
        default = timed[0].timing if timed else None
        timed.sort(key=lambda v: v.timing.median)  # type: ignore[union-attr]
        text = ", ".join(f"{describe(v.schedule)} {v.timing.median:.1f}" for v in timed[:3] if v.timing)
        lines.append(f"    {split}: {text}" + (f"; the plan's {default.median:.1f}" if default else ""))
    return lines


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.search_split", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--splits", nargs="+", type=int, default=list(SPLITS), help="kv_split values (default: %(default)s)"
    )
    parser.add_argument(
        "--heads", nargs="+", type=int, default=[16, 64, 128], help="head counts of the grid (default: %(default)s)"
    )
    parser.add_argument("--workloads", nargs="+", metavar="H,B,L[,Q]", help="these shapes instead of the grid")
    parser.add_argument("--schedules", action="store_true", help="time portable schedules besides those of the table")
    parser.add_argument("--peers", type=Path, help="folder that holds the peers' files (see benchmarks/peers.py)")
    parser.add_argument("--repeats", type=int, default=11, help="timed turns a workload (default: %(default)s)")
    parser.add_argument(
        "--flush", choices=("write", "read"), default="write", help="how L2 is emptied (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=240, help="start no workload later than this (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=Path("search_split.json"), help="JSON file (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.repeats < 1:
        parser.error(f"--repeats {args.repeats}: allowed is a positive integer")
    try:
        for split in args.splits:
            ReductionOrder(kv_split=split)
        args.workloads = [parse(text) for text in args.workloads] if args.workloads else grid(tuple(args.heads))
    except ValueError as error:
        parser.error(str(error))
    return args


def compile_jobs(workloads: Sequence[Workload], splits: Sequence[int], every_schedule: bool) -> list[Job]:
    """What the search will launch, to be compiled in parallel."""
    return [
        Job(workload, order=plan.order, schedule=variant.schedule)
        for workload in workloads
        for variant, plan in plans(workload, "cuda", splits, every_schedule)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the search; exit status 0 when no variant was wrong or differed in bits."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    args = arguments(argv)
    if not torch.cuda.is_available():
        log.error("the search needs a CUDA device")
        return 2
    start = time.monotonic()
    log.info("a schedule is written %s", "/".join(field.name for field in dataclasses.fields(Schedule)))
    log.info("%s", precompile(compile_jobs(args.workloads, args.splits, args.schedules), args.peers))
    peers, ceilings = Peers(args.peers), measure_ceilings(args.repeats)
    head = report.header(peers, ceilings, args.repeats, args.flush)
    cells: list[Cell] = []
    for workload in args.workloads:
        if time.monotonic() > start + args.seconds:
            log.warning("out of time: %d workloads not measured", len(args.workloads) - len(cells))
            break
        cells.append(
            measure_cell(
                workload,
                args.splits,
                every_schedule=args.schedules,
                peers=peers,
                clock=GraphClock(args.repeats, args.flush),
                ceilings=ceilings,
                device=torch.device("cuda"),
            )
        )
        torch.cuda.empty_cache()
        for text in cell_lines(cells[-1], args.splits):
            log.info("%s", text)
        found = {"header": head, "regret": regrets(cells, args.splits), "cells": [cell.as_dict() for cell in cells]}
        report.write(args.out, found)
    for split, entry in regrets(cells, args.splits).items():
        log.info("split %d: %s", split, entry)
    log.info(
        "wrote %s: %d of %d workloads in %.0f s", args.out, len(cells), len(args.workloads), time.monotonic() - start
    )
    return int(any(v.reason.startswith(("wrong", "bits")) for cell in cells for v in cell.variants))


if __name__ == "__main__":
    sys.exit(main())
