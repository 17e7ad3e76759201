"""Proves on this machine that a model's log-probabilities do not depend on what a serving engine does to its requests.

Each request runs alone first: that is the reference. Then the same requests run in every way that the scenarios name, and each row of
log-probabilities is compared with the reference's, bit by bit. Controls do what real engines do wrong; one that changes no bit fails the
run, since such a run would prove nothing. Without a GPU the kernels run under Triton's interpreter, which the command turns on by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import multiprocessing
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch
from triton import knobs

from determinism.models import config_for
from determinism.ranks import ranked_rows
from determinism.report import Report, Row
from determinism.rows import Plan, lost_row, run_row
from determinism.tensor_parallel import DEGREES
from triton_mla.cli.text import ProgressLine
from triton_mla.fingerprint import MODEL, numerics_fingerprint, own_arch, source_digest, source_files
from triton_mla.verification.environment import describe
from triton_mla.verification.runner import default_device

ROOT = Path(__file__).resolve().parent.parent
EPILOG = """\
exit codes: 0 no bit differs and every control does; 1 a scenario or a control failed; 2 wrong usage

examples:
  python -m determinism.run --quick
  python -m determinism.run --scenarios bsN needle --json evidence.json
  python -m determinism.run --model deepseek_v3     transformers' own model class, with random weights
  python -m determinism.run --quick --tensor-parallel 2
"""
_WITH_INTERPRETER = """\
import os, sys
os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, sys.argv.pop(1))
from determinism.run import main
sys.exit(main())
"""


def _device(text: str) -> str:
    if re.fullmatch("auto|cpu|cuda(:[0-9]{1,9})?", text):
        return text
    raise argparse.ArgumentTypeError(f"{text!r}: allowed are auto, cpu, cuda and cuda:N")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    args = _parser().parse_args(argv)
    try:
        return _run(args, argv)
    except ValueError as error:
        print(f"python -m determinism.run: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m determinism.run", description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer and shorter requests")
    parser.add_argument("--model", default="small", help="small (default) or deepseek_v3")
    parser.add_argument("--scenarios", nargs="+", metavar="NAME", help="scenarios to run (default: all); controls too, if some are named, else all of them")
    parser.add_argument("--device", type=_device, default="auto", help="auto (default), cpu, cuda or cuda:N")
    parser.add_argument("--tensor-parallel", type=int, choices=DEGREES, default=1, metavar="N",
                        help="split the small model over N = 2, 4 or 8 processes: by NCCL where there are N GPUs, else by gloo on the CPU")
    parser.add_argument("--jobs", type=int, choices=(1, 2), default=2, help="processes: 2 (default) gives each form of prompts its own")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the evidence to FILE")
    return parser


def _run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    device = _chosen(args.device, args.tensor_parallel)
    if args.json is not None and (args.json.is_dir() or not args.json.absolute().parent.is_dir()):
        raise ValueError(f"json={args.json}: it must be a file in a folder that exists")
    if device.type == "cpu" and not knobs.runtime.interpret:
        command = [sys.executable, "-c", _WITH_INTERPRETER, str(ROOT), *argv, "--device", "cpu"]
        return subprocess.run(command, check=False).returncode
    progress = ProgressLine()
    try:
        report = run(device, model=args.model, quick=args.quick, names=args.scenarios, jobs=args.jobs, ranks=args.tensor_parallel, progress=progress)
    finally:
        progress.clear()
    print(report.render())
    if args.json is not None:
        args.json.write_text(json.dumps(report.to_json(), indent=1) + "\n", encoding="utf-8")
    return 0 if report.passed else 1


def _chosen(text: str, ranks: int) -> torch.device:
    """The device of an argument; of several ranks that of the first one."""
    kind, _, index = text.partition(":")
    count = torch.cuda.device_count()
    if ranks > 1 and index:
        raise ValueError(f"device={text}: each of {ranks} ranks has a GPU of its own; allowed are auto, cpu and cuda")
    if kind == "cuda" and max(int(index or 0) + 1, ranks) > count:
        raise ValueError(f"device={text}: this machine has {count} GPUs that torch can use")
    if kind == "auto":
        return torch.device("cpu") if ranks > max(count, 1) else default_device()
    return torch.device(text)


def run(
    device: torch.device, *, model: str = "small", quick: bool = False, names: Sequence[str] | None = None, jobs: int = 1, ranks: int = 1,
    progress: Callable[[int, int, str], None] | None = None,
) -> Report:
    """Runs scenarios and controls and returns the report.

    Args:
        device: a GPU, or the CPU in a process where Triton's interpreter is on.
        model: of `MODELS`. quick: fewer and shorter requests. names: of scenarios and controls; None takes all.
        jobs: 1 runs everything in this process, more run each form's rows in a process of its own.
        ranks: processes that the model is split over; more than 1 leave no choice of jobs.
        progress: called with (rows done, rows in all, name of the row that has just been done, or "").

    Raises:
        ValueError: a name is not known, or a model is not installed or not split over so many ranks.
    """
    plan = Plan(model, device, quick, ranks)
    items = plan.items(names)
    config = config_for(device)
    start = time.perf_counter()
    report = Report(
        model=model, sizes=plan.sizes.name, environment=describe(device),
        config={name: str(getattr(config, name)) for name in ("hidden", "layers", "intermediate", "experts", "top_k", "vocab_size", "dtype")}
        | ({"ranks": f"{ranks} by {plan.backend}"} if ranks > 1 else {}),
        fingerprint=numerics_fingerprint(
            order=config.order, dtype=config.dtype, arch=own_arch(device), kv_lora_rank=config.dims.kv_lora_rank,
            qk_rope_head_dim=config.dims.qk_rope_head_dim, prefill_order=config.prefill_order,
        ),
        source_digest=source_digest(MODEL), sources=source_files(MODEL),
        created=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )
    rows: dict[int, Row] = {}
    if progress is not None:
        progress(0, len(items), "")
    for index, row in _rows(plan, items, jobs):
        rows[index] = row
        if progress is not None:
            progress(len(rows), len(items), f"{row.name}, {row.form}")
    report.rows = [row for _, row in sorted(rows.items())]
    report.seconds = round(time.perf_counter() - start, 2)
    return report


def _rows(plan: Plan, items: Sequence[tuple[str, str]], jobs: int) -> Iterator[tuple[int, Row]]:
    """(index, row) of every item, as they are done."""
    if plan.ranks > 1:
        yield from ranked_rows(plan, items)
        return
    if jobs == 1:
        for index, item in enumerate(items):
            yield index, run_row(plan, *item)
        return
    context = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stack:
        pools = {form: stack.enter_context(ProcessPoolExecutor(1, mp_context=context)) for form in dict.fromkeys(form for _, form in items)}
        futures = {pools[item[1]].submit(run_row, plan, *item): index for index, item in enumerate(items)}
        for future in as_completed(futures):
            index, error = futures[future], future.exception()
            yield index, future.result() if error is None else lost_row(plan, *items[index], error)


if __name__ == "__main__":
    sys.exit(main())
