"""The benchmark of companion products without a GPU: its calls compute the same, and it says what it needs."""

import subprocess
import sys

import pytest
import torch

from benchmarks.products import CELLS, LEAVES_L2, Cell

SMALL = [Cell("linear", 5, 64, 96), Cell("bmm", 7, 64, 32, 4), Cell("bmm", 7, 32, 64, 4), Cell("rms_norm", 9, 0, 128), Cell("softmax", 9, 0, 100),
         Cell("log_softmax", 9, 0, 100)]


@pytest.mark.parametrize("cell", SMALL, ids=lambda cell: cell.name)
def test_each_launch_has_inputs_of_its_own_and_the_result_of_torch(cell, device, interpreter):
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    calls = cell.calls(values, 3)
    results = [[call().float() for call in calls[name]] for name in ("triton_mla", "torch")]
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
    assert not torch.equal(results[0][0], results[0][1])


def test_the_values_are_enough_for_every_cell():
    room = max(cell.read for cell in CELLS) + LEAVES_L2
    assert all(cell.read * cell.launches + cell.heads * cell.M * cell.K <= room for cell in CELLS)
    assert len({cell.name for cell in CELLS}) == len(CELLS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure")
def test_without_a_gpu_it_says_so():
    done = subprocess.run([sys.executable, "-m", "benchmarks.products"], capture_output=True, text=True)
    assert done.returncode == 2 and "CUDA device" in done.stderr
