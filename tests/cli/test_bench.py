"""`triton-mla bench` as a command: its options, and how it finds the benchmarks of a checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import triton_mla
from triton_mla import cli
from triton_mla.cli import bench

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import os, sys
from triton_mla.cli import main
for folder in sys.argv[1:]:
    os.chdir(folder)
    print(main(["bench", "--from", "/no/such/file"]), file=sys.stderr)
"""


def test_the_suites_of_the_command_are_those_there_are():
    from benchmarks.registry import SUITES

    assert set(bench.SUITES) == set(SUITES)


@pytest.mark.parametrize("argv", [["--suite", "guess"], ["--repeats", "0"], ["--peers", "/no/such/folder"], ["--flush", "x"]], ids=str)
def test_wrong_usage_is_2(argv: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", *argv])
    assert stopped.value.code == 2 and "usage:" in capsys.readouterr().err


def installed(tmp_path: Path) -> Path:
    """A folder with the package alone, as an installation has it."""
    shutil.copytree(Path(triton_mla.__file__).parent, tmp_path / "triton_mla", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@pytest.mark.skipif(sys.version_info < (3, 11), reason="python -P")
def test_an_installed_package_finds_the_checkout_it_is_run_in(tmp_path: Path):
    site = installed(tmp_path)
    command = [sys.executable, "-P", "-c", CODE, str(tmp_path), str(ROOT)]
    told = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(site)}, capture_output=True, text=True, check=True).stderr
    missing, found, rest = told.split("2\n")
    assert "run this in a checkout of the repository" in missing and "/no/such/file cannot be read" in found and not rest
