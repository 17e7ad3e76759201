"""The softmax weights between the two phases on Hopper: those of a walk over a split's tiles, and when the accumulator must be rescaled."""

import pytest
import torch

from triton_mla.kernels.hopper.two_phase_weights import hopper_weights_kernel

INF = float("inf")


def walk(scores, split_tiles):
    """(weights [tiles, rows, 64], reference after each tile [tiles, rows], flags [tiles]) of scores that are whole numbers, scale 1, step 8."""
    weights, refs, flags = [], [], []
    for i, s in enumerate(scores):
        if i % split_tiles == 0:
            ref = torch.full((scores.shape[1],), -INF, device=s.device)
        new = torch.maximum(ref, torch.floor(s.amax(1) / 8) * 8)
        flags.append(int(i % split_tiles and bool(((new != ref) & (new > -INF)).any())))
        ref = new
        weights.append(torch.exp2(s - torch.where(ref == -INF, 0.0, ref)[:, None]))
        refs.append(ref)
    return torch.stack(weights), torch.stack(refs), flags


@pytest.mark.parametrize("rows, num_heads, split_tiles, programs", [(16, 12, 3, 2), (16, 32, 40, 5), (32, 16, 1, 9), (64, 64, 2, 1)])
def test_weights_of_a_wave(device, rows, num_heads, split_tiles, programs):
    lens, limit, first_row_tile = [500, 0, 40 * 64 + 7, 64, 10**6, 129], 10**5, 1
    per_request = -(-num_heads // rows)
    row_tiles, num_tiles = len(lens) * per_request - first_row_tile, -(-41 // split_tiles) * split_tiles
    blocks = (row_tiles + 2) * num_tiles  # the wave could have more
    scratch = torch.full((blocks * (rows * 130 + 1),), float("nan"), device=device)
    half = scratch.view(torch.float16)[: 2 * blocks * rows * 64].view(2, blocks, rows, 64)
    scores = scratch[blocks * rows * 64 :][: blocks * rows * 64].view(blocks, rows, 64)
    refs = scratch[blocks * rows * 128 :][: 2 * blocks * rows].view(2, blocks, rows)
    flags = scratch[blocks * rows * 130 :].view(torch.int32)
    gen = torch.Generator().manual_seed(1)
    want = {}
    for t in range(row_tiles):
        n = lens[(first_row_tile + t) // per_request]
        tiles = -(-n // 64) if n <= limit else 0
        at = slice(t * num_tiles, t * num_tiles + tiles)
        s = torch.randint(-20, 9, (tiles, rows, 64), generator=gen).float()
        s += torch.randint(-3, 2, (tiles, rows, 1), generator=gen) * (torch.arange(tiles) % 4 == 3)[:, None, None] * 8
        s = s.permute(0, 2, 1).reshape(-1, rows)
        s[n:] = -INF
        s = s.view(-1, 64, rows).permute(0, 2, 1)
        s[:, -1] = -INF  # a row that sees nothing
        scores[at] = s.to(device)
        refs[0, at] = torch.floor(scores[at].amax(2) / 8) * 8
        if tiles:
            want[t] = walk(scores[at], split_tiles)
    assert {f for _, _, found in want.values() for f in found} == ({0} if split_tiles == 1 else {0, 1})
    ints = {"dtype": torch.int32, "device": device}
    lengths = torch.tensor(lens, **ints)
    hopper_weights_kernel[(row_tiles, programs)](
        torch.empty(16, dtype=torch.float16, device=device), lengths, lengths, scratch, 1.0, len(lens), len(lens), num_heads, limit, 64 * split_tiles,
        first_row_tile, blocks, num_tiles, ROWS=rows, STEP=8, DECODE=True, WITH_LSE=True, PDL=False, enable_fp_fusion=False)
    written = torch.zeros(blocks, dtype=torch.bool, device=device)
    for t, (weights, after, moved) in want.items():
        at = slice(t * num_tiles, t * num_tiles + len(moved))
        written[at] = True
        rounded = weights.half()
        assert torch.equal(half[0, at], rounded)
        assert torch.equal(half[1, at], (weights - rounded.float()).half())
        assert torch.equal(refs[1, at], after)
        assert flags[at].tolist() == moved
    assert bool(refs[1, ~written].isnan().all()) and flags[~written].unique().numel() == 1  # the rest of the memory is as it was
