"""`triton-mla verify`: proves the contract on this machine."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from triton_mla.cli.text import ProgressLine, columns, folder, positive

DESCRIPTION = """\
Proves the contract on this machine. Each row is one line of the contract: how many comparisons were
made, byte for byte, whether they passed, and how long they took. Negative controls break a rule on
purpose; one that shows no difference fails the run, since such a run would prove nothing.

Without a GPU the kernels run under Triton's interpreter, which the command turns on by itself. That
proves the order of the program; what depends on a GPU's tensor cores is shown as "needs a GPU".
"""

EPILOG = """\
examples:
  triton-mla verify                          on the GPU if there is one, else under the interpreter
  triton-mla verify --quick                  fewer sizes
  triton-mla verify --record evidence.json   writes device, versions, digests, checks and controls
"""

_WITH_INTERPRETER = """\
import os, sys
os.environ["TRITON_INTERPRET"] = "1"
from triton_mla.cli import main
sys.exit(main())
"""


def _device(text: str) -> str:
    if re.fullmatch("auto|cpu|cuda(:[0-9]{1,9})?", text):
        return text
    raise argparse.ArgumentTypeError(f"{text!r}: allowed are auto, cpu, cuda and cuda:N")


def add_parser(subparsers: Any) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "verify",
        help="prove the contract on this machine",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", type=_device, default="auto", help="auto (default), cpu, cuda or cuda:N")
    parser.add_argument("--quick", action="store_true", help="fewer sizes, for a first look")
    parser.add_argument(
        "--jobs", type=positive, metavar="N", default=min(4, os.cpu_count() or 1), help="processes (default: up to 4)"
    )
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the evidence to FILE as JSON")
    parser.add_argument("--golden", type=folder, metavar="DIR", help="folder with golden_<arch>.json files (default: the package's)")
    parser.add_argument("--json", action="store_true", help="print the evidence as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the suite; 0 when every check passed and every control differed."""
    import torch
    from triton import knobs

    from triton_mla import verification
    from triton_mla.errors import UnsupportedError
    from triton_mla.tuning import ARCHITECTURES, arch_of
    from triton_mla.verification import golden
    from triton_mla.verification.runner import default_device

    kind, _, index = args.device.partition(":")
    # Before torch sees it, which takes an index modulo 256.
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device={args.device}: this machine has {torch.cuda.device_count()} GPUs that torch can use")
    device = default_device() if args.device == "auto" else torch.device(args.device)
    if args.record is not None:
        _check_writable(args.record)
    if device.type == "cpu" and not knobs.runtime.interpret:
        return _run_with_interpreter(args)
    if device.type == "cuda" and arch_of(device) not in ARCHITECTURES:
        known = ", ".join(name for name in ARCHITECTURES if name != "interpreter")
        raise UnsupportedError(f"device={device}, a GPU of {arch_of(device)}; kernels have schedules for {known}", {})
    progress = ProgressLine()
    try:
        records = args.golden or golden.FOLDER
        report = verification.run(device, quick=args.quick, jobs=args.jobs, records=records, progress=progress)
    finally:
        progress.clear()
    evidence = report.to_json()
    if args.record is not None:
        args.record.write_text(json.dumps(evidence, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(evidence, indent=1) if args.json else render(report))
    return 0 if report.passed else 1


def _check_writable(file: Path) -> None:
    """Raises ValueError now, and not after the minutes that a run takes."""
    there = file.exists()
    try:
        file.open("a").close()
    except OSError as error:
        raise ValueError(f"record={file}: it cannot be written: {error.strerror}") from None
    if not there:
        file.unlink()


def _run_with_interpreter(args: argparse.Namespace) -> int:
    """The same command in a process where the interpreter is on before triton is imported."""
    options = ["verify", "--device", "cpu", "--jobs", str(args.jobs)]
    options += [f"--{name}" for name in ("quick", "json") if getattr(args, name)]
    for name in ("record", "golden"):
        if getattr(args, name) is not None:
            options += [f"--{name}", str(getattr(args, name))]
    return subprocess.run([sys.executable, "-c", _WITH_INTERPRETER, *options], check=False).returncode


def render(report: Any) -> str:
    """The report as text."""
    environment = report.environment
    head = [
        ("device", f"{environment['device']['name']} ({report.profile})"),
        ("versions", ", ".join(f"{name} {environment[name]}" for name in ("python", "torch", "triton", "numpy"))),
        ("fingerprint", report.fingerprint["digest"][:16]),
    ]
    checks = [
        (c.contract_line, c.name, str(c.comparisons), c.status, f"{c.seconds:.1f} s", _detail(c)) for c in report.checks
    ]
    controls = [
        ("must differ", c.name, f"{c.differing}/{c.comparisons}", c.status, f"{c.seconds:.1f} s", _detail(c))
        for c in report.controls
    ]
    rows = [("contract", "row", "compared", "result", "time", ""), *checks, *controls]
    failed = sum(r.status == "failed" for r in [*report.checks, *report.controls])
    compared = sum(c.comparisons for c in report.checks)
    verdict = f"{compared} comparisons, {failed} failed rows, {report.seconds:.1f} s: "
    verdict += "the contract holds here" if report.passed else "THE CONTRACT IS NOT PROVEN HERE"
    if report.passed and report.profile == "interpreter":
        verdict += " as far as the interpreter can show"
    return "\n".join([columns(head), "", columns(rows, right=(2, 4)), "", verdict])


def _detail(result: Any) -> str:
    return "" if result.status == "passed" else result.detail
