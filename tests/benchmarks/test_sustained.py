"""The benchmark of calls without a pause, without a GPU: what it makes of its samples, and what it needs."""

import os
import subprocess
import sys

import pytest

from benchmarks.sustained import split, summary


def test_cold_is_the_first_50_ms_and_sustained_the_second_half():
    assert split([100.0] * 500 + [130.0] * 500 + [150.0] * 1000) == (100.0, 150.0)
    assert split([100.0, 120.0]) == (110.0, 120.0)
    assert split([60e3, 80e3]) == (60e3, 80e3)


def test_sensors_are_medians_of_the_second_half():
    lines = ["100.0, 1980, 700.00", "[N/A], 1980, 700.00", "690.5, 1500, 700.00", "699.0, 1395, 700.00", "701.0, 1410, 700.00", "70"]
    assert summary("\n".join(lines)) == {"watts": 700.0, "mhz": 1402.5, "watts_limit": 700.0}
    assert summary("[N/A], [N/A], [N/A]\n") == summary("") == {}


@pytest.mark.parametrize("arguments, said", [
    (["--workloads", "16,1"], "--workloads: "), (["--seconds", "0.1"], "--seconds=0.1 must be from 0.2 to 600"), ([], "it needs a CUDA device"),
])
def test_what_it_refuses(arguments, said):
    command = [sys.executable, "-m", "benchmarks.sustained", *arguments]
    found = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert found.returncode == 2 and said in found.stderr
