"""`triton-mla bench`: times this package beside other implementations, with the benchmarks of a checkout."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from triton_mla.cli.text import folder, positive

DESCRIPTION = """\
Times this package's operations beside others on a CUDA device: FlashMLA, FlashAttention-3 and vLLM's
Triton kernels where --peers has their files, SGLang and FlashInfer where they are installed, cuDNN and
plain torch. Each is checked against float64 first; one that is not there, fails or is wrong is told with
its reason, and the others go on. Prints ratios to this package's times and which targets are met, and
writes all of it as JSON. Missed targets do not fail the command; wrong results do.

The benchmarks are not installed with the package: run it in a checkout of the repository.
"""

EPILOG = """\
examples:
  triton-mla bench                                         a few workloads of each kind
  triton-mla bench --suite decode --peers FOLDER
  triton-mla bench --workloads 16,1,8192 128,64,8192,4     H,B,L and H,B,L,Q (Q new tokens each)
  triton-mla bench --from results.json --plot decode.png   draws a result file; needs no GPU
"""

SUITES = ("decode", "verify", "extend", "prefill", "gemm", "quick")


def add_parser(subparsers: Any) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "bench",
        help="time the operations beside other implementations",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--suite", nargs="+", choices=SUITES, help="named workloads (default: quick)")
    add("--workloads", nargs="+", default=[], metavar="H,B,L[,Q]", help="these shapes, instead of a suite or besides")
    add("--impls", nargs="+", metavar="NAME", help="these implementations alone")
    add("--peers", type=folder, metavar="FOLDER", help="folder with files of a vLLM wheel (benchmarks/README.md)")
    add("--repeats", type=positive, default=21, metavar="N", help="timed turns of a workload (default: 21)")
    add("--flush", choices=("write", "read"), default="write", help="how L2 is emptied (default: write)")
    add("--seconds", type=positive, default=540, metavar="N", help="start no workload later than this (default: 540)")
    add("--json", type=Path, metavar="FILE", help="result file (default: benchmarks/results/<gpu>_<suite>.json)")
    add("--from", dest="source", type=Path, metavar="FILE", help="measure nothing: take a result file")
    add("--plot", type=Path, metavar="FILE", help="draw times over the floor as PNG (needs matplotlib)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the benchmarks; 1 when an implementation failed or was wrong."""
    return int(_benchmarks().run(args))


def _benchmarks() -> ModuleType:
    """`benchmarks.command` of the checkout that this package, or the current folder, is in.

    Raises ValueError: there is none.
    """
    roots = (Path(__file__).resolve().parents[2], Path.cwd())
    for root in roots:
        if (root / "benchmarks" / "command.py").is_file():
            if str(root) not in sys.path:
                sys.path.append(str(root))  # last: what is installed is what is measured
            return importlib.import_module("benchmarks.command")
    raise ValueError(f"benchmarks/ is in neither {roots[0]} nor {roots[1]}; it is not installed with the package: run this in a checkout of the repository")
