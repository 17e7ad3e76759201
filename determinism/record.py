"""Writes and checks the records of GPU runs under determinism/records/, and golden digests under triton_mla/verification/digests/.

python -m determinism.record --check          exit 0 only when a passing record of each kind has the digest of the present sources
python -m determinism.record --write          runs `triton-mla verify` on the GPU and writes <gpu>_<date>.json
python -m determinism.record --write --tests  also runs the kernel and invariance tests there and adds their counts
python -m determinism.record --write --junit FILE  adds the counts of a run of the tests there that wrote FILE
python -m determinism.run --json determinism/records/model_<gpu>_<date>.json  is the record of a model
python -m determinism.run --tensor-parallel N --json determinism/records/model_<gpu>_tp<N>_<date>.json  is that of one split over N GPUs
python -m determinism.vllm                    is that of engines of vLLM, in the folder vllm of the records
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from triton_mla import verification
from triton_mla.cli.text import ProgressLine
from triton_mla.cli.verify import render
from triton_mla.fingerprint import ATTENTION, MODEL, VLLM, source_digest, source_files
from triton_mla.verification import golden

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "determinism" / "records"
JOBS = 4
SUITES = ("tests/kernels", "tests/invariance")
PROOFS = {"attention": ATTENTION, "model": MODEL, "split model": MODEL, "vLLM": VLLM}
"""What is proven, and the sources it is of."""


def proof_of(name: str) -> str:
    """What the record of this file name proves."""
    if name.startswith("vllm/"):
        return "vLLM"
    if not name.startswith("model_"):
        return "attention"
    return "split model" if re.search("_tp[0-9]+_", name) else "model"


def read_records(folder: Path) -> dict[str, dict[str, Any]]:
    """Every record of the folder, and of its folder vllm, by file name."""
    files = [*sorted(folder.glob("*.json")), *sorted(folder.glob("vllm/*.json"))]
    return {file.relative_to(folder).as_posix(): json.loads(file.read_text(encoding="utf-8")) for file in files}


def changed_files(record: dict[str, Any], patterns: tuple[str, ...]) -> list[str]:
    """Names of the source files that are not those of the record."""
    now, then = source_files(patterns), record["sources"]
    return sorted(name for name in now.keys() | then.keys() if now.get(name) != then.get(name))


def check(folder: Path) -> int:
    """Prints how each record stands to the present sources; 0 when one of attention matches and passed, and one of each other kind that there is."""
    records = read_records(folder)
    missing = dict.fromkeys(["attention", *map(proof_of, records)])
    for name, record in records.items():
        proof = proof_of(name)
        if record["source_digest"] != source_digest(PROOFS[proof]):
            print(f"{name}: OF OTHER SOURCES; changed since: {', '.join(changed_files(record, PROOFS[proof]))}")
        elif not record["passed"]:
            print(f"{name}: of these sources, and it FAILED")
        else:
            missing.pop(proof, None)
            print(f"{name}: of these sources, passed")
    commands = {"attention": "python -m determinism.record --write --tests", "model": "python -m determinism.run --json FILE",
                "split model": "python -m determinism.run --tensor-parallel 2 --json FILE", "vLLM": "python -m determinism.vllm"}
    for proof in missing:
        digest = source_digest(PROOFS[proof])[:16]
        print(f"\n*** NO GPU RECORD OF THE PRESENT SOURCES ({digest}) of {proof} among {len(records)} under {folder.name}/ ***")
        print(f"*** run `{commands[proof]}` on a GPU ***")
    return 1 if missing else 0


def run_tests(suites: Sequence[str] = SUITES) -> dict[str, Any]:
    """Runs test folders in a process of their own: {"passed", "failed", "skipped", "seconds", "failures": [names]}."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *suites]
        subprocess.run(command, cwd=ROOT, check=False)
        return count_tests(report)


def count_tests(report: Path) -> dict[str, Any]:
    """Counts of a junit report; a missing one counts as a failure."""
    counts: dict[str, Any] = {"passed": 0, "failed": 0, "skipped": 0, "seconds": 0.0, "failures": []}
    if not report.is_file():
        return {**counts, "failed": 1, "failures": ["pytest wrote no report"]}
    for case in ElementTree.parse(report).iter("testcase"):
        outcomes = {child.tag for child in case}
        outcome = "failed" if outcomes & {"failure", "error"} else "skipped" if "skipped" in outcomes else "passed"
        counts[outcome] += 1
        counts["seconds"] = round(counts["seconds"] + float(case.get("time", 0)), 2)
        if outcome == "failed":
            counts["failures"].append(f"{case.get('classname')}::{case.get('name')}")
    return counts


def write(folder: Path, digests: Path, *, tests: Callable[[], dict[str, Any]] | None = None) -> int:
    """Runs the suite on the current GPU and writes its record and, under `digests`, golden digests; 0 when everything passed.

    Golden digests of a new fingerprint are added. Those of a known one are never replaced: where they differ, the run
    fails and `NUMERICS_REVISION` has to be raised. `tests` gives the counts of the tests on this GPU.
    """
    progress = ProgressLine()
    report = verification.run("cuda", jobs=JOBS, records=digests, progress=progress)
    progress.clear()
    print(render(report))
    evidence = report.to_json()
    if tests is not None:
        evidence["tests"] = tests()
        evidence["passed"] = report.passed and evidence["tests"]["failed"] == 0 < evidence["tests"]["passed"]
        print(f"tests: {evidence['tests']}")
    gpu = report.environment["device"]["name"].lower().replace(" ", "_")
    _write_json(folder / f"{gpu}_{report.created[:10]}.json", evidence)
    if evidence["passed"]:
        arch = report.fingerprint["arch"]
        _write_json(golden.path_of(arch, digests), {**report.golden, **golden.load(arch, digests)})
    return 0 if evidence["passed"] else 1


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path.name}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m determinism.record", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true", help="compare the records with the present sources")
    action.add_argument("--write", action="store_true", help="run on the GPU and write a record")
    parser.add_argument("--tests", action="store_true", help="with --write: also run the kernel and invariance tests")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="with --write: a junit report of those tests")
    parser.add_argument("--folder", type=Path, default=RECORDS, help="folder of the records")
    parser.add_argument("--golden", type=Path, metavar="DIR", default=golden.FOLDER, help="with --write: folder of the golden digests")
    args = parser.parse_args(argv)
    if args.check:
        return check(args.folder)
    if not torch.cuda.is_available():
        parser.error("--write needs a CUDA device, and torch sees none")
    counted = None if args.junit is None else functools.partial(count_tests, args.junit)
    return write(args.folder, args.golden, tests=run_tests if args.tests else counted)


if __name__ == "__main__":
    sys.exit(main())
