"""The list of query tiles that the Hopper prefill works through, and the rows that it leaves to the kernel that makes the list."""

import pytest
import torch

from triton_mla.hopper_prefill import groups
from triton_mla.kernels.hopper.work import hopper_work_kernel

TILE = 128
HEADS = 2
NAN = float("nan")


def starts(lens):
    return [0, *torch.tensor(lens, dtype=torch.int64).cumsum(0).tolist()] if lens else [0]


def requests_of(q_lens, kv_lens, *, causal=True, positions=None, limit=10**6, chunk=None, group=None):
    """(first query token, query tokens, first key row, keys, position of the first query token) of each request, keys past the limit taken away."""
    q, k = starts(q_lens), starts(kv_lens)
    out = []
    for i, (m, n) in enumerate(zip(q_lens, kv_lens, strict=True)):
        begin, position, broken = k[i], n - m if positions is None else positions[i], k[i + 1] > limit
        if chunk is not None:
            first, tokens = chunk
            broken = n > limit
            begin, position = (i - group[0]) * tokens, n - m - first
            n = min(max(n - first, 0), tokens) if group[0] <= i < group[1] else 0
        if not causal:
            position = -(-n // TILE) * TILE
        out.append((q[i], m, begin, 0 if broken else n, position))
    return out


ALL = 1 << 30  # keys of a group of requests


def expected(requests, *, keep=False, chunk=None, group_keys=ALL):
    """Rows of the list, and the query tokens that no tile has."""
    rows, seen = [], set()
    for first, m, begin, n, position in requests:
        if n and m and position + m > 0:
            for j in range(max(position, 0) // TILE, (position + m - 1) // TILE + 1):
                finished = min(j * TILE + TILE, position + m) <= chunk[1] if chunk else not keep
                rows.append((begin, n, j * TILE, first - position, max(position, 0), position + m, min(j + 1, -(-n // TILE)), int(finished)))
            seen |= set(range(first + max(-position, 0), first + m))
    return sorted(rows, key=lambda row: (row[0] // group_keys, -row[6])), seen  # stable: requests, then tiles, in their order


def run(device, q_lens, kv_lens, *, num_tokens, causal=True, positions=None, limit=10**6, chunk=None, group=(0, 0), state=None, keep=False,
        group_keys=ALL):
    ints = {"dtype": torch.int32, "device": device}
    tiles = num_tokens // TILE + 2 * len(q_lens)
    work = torch.full((tiles + 1, 8), -1, **ints)
    count = torch.full((2,), -1, **ints)
    out = torch.full((num_tokens, HEADS, 128), NAN, dtype=torch.float16, device=device)
    lse = torch.full((num_tokens, HEADS), 7.0, device=device)
    lengths = torch.tensor(kv_lens if chunk else starts(kv_lens), **ints)
    q_starts = torch.tensor(starts(q_lens), **ints)
    at = q_starts if positions is None else torch.tensor(positions, **ints)
    hopper_work_kernel[(len(q_lens) + 1, 3)](
        work, count, out, lse, *(state or (lse, lse, lse)), q_starts, lengths, at, *out.stride()[:2], HEADS, num_tokens, len(q_lens), HEADS, limit, *group,
        *(chunk or (0, 0)), group_keys, CAUSAL=causal, HAS_POSITIONS=positions is not None, CHUNKED=chunk is not None,
        RESUME=state is not None and not keep, KEEP=keep, WITH_LSE=True, PDL=False, enable_fp_fusion=False)
    rows, taken = count.tolist()
    assert taken == 0
    return [tuple(row) for row in work[:rows].tolist()], work[rows:], out, lse


BATCHES = [
    ([130, 1, 0, 300, 128], [130, 1, 0, 300, 128]),
    ([100, 1, 130, 64, 0, 129], [433, 334, 135, 192, 640, 192]),
    ([130, 20, 5], [50, 20, 0]),
    ([0], [0]),
    ([], []),
]


@pytest.mark.parametrize("q_lens, kv_lens", BATCHES)
@pytest.mark.parametrize("causal", [True, False])
def test_longest_tiles_first(device, q_lens, kv_lens, causal):
    rows, rest, out, lse = run(device, q_lens, kv_lens, num_tokens=sum(q_lens) + 3, causal=causal)
    want, seen = expected(requests_of(q_lens, kv_lens, causal=causal))
    assert rows == want
    assert bool((rest == -1).all())
    for token in range(sum(q_lens) + 3):
        assert bool(torch.isnan(out[token]).all() if token in seen else (out[token] == 0).all()), token
        assert bool((lse[token] == (7.0 if token in seen else -torch.inf)).all()), token


@pytest.mark.parametrize("group_keys", [ALL, 5000, 1])
def test_many_requests(device, group_keys):
    q_lens, kv_lens = [1 + i % 200 for i in range(130)], [1 + i % 200 + i * 37 % 700 for i in range(130)]
    rows, _, _, _ = run(device, q_lens, kv_lens, num_tokens=sum(q_lens), group_keys=group_keys)
    assert rows == expected(requests_of(q_lens, kv_lens), group_keys=group_keys)[0]


@pytest.mark.parametrize("positions", [[0, 0], [-5, 200], [-130, 1000], [77, -400]])
def test_positions(device, positions):
    rows, _, out, _ = run(device, [200, 300], [500, 129], num_tokens=500, positions=positions)
    want, seen = expected(requests_of([200, 300], [500, 129], positions=positions))
    assert rows == want
    assert [token for token in range(500) if not bool((out[token] == 0).all())] == sorted(seen)


def test_keys_past_the_limit_give_nan(device):
    rows, _, out, lse = run(device, [130, 20], [130, 21], num_tokens=150, limit=150)
    assert rows == expected(requests_of([130, 20], [130, 21], limit=150))[0]
    assert bool(torch.isnan(out[130:]).all()) and bool(torch.isnan(lse[130:]).all()) and bool((lse[:130] == 7.0).all())


@pytest.mark.parametrize("first", [0, 256, 512])
@pytest.mark.parametrize("group", [(0, 2), (2, 4)])
def test_chunks_of_a_cache(device, first, group):
    """A tile is finished by the chunk that its last row ends in, and rows without keys by the first; the padding belongs to the last group."""
    q_lens, lens, chunk = [300, 5, 0, 40], [400, 700, 3, 20], (first, 256)
    rows, _, out, _ = run(device, q_lens, lens, num_tokens=350, chunk=chunk, group=(group[0], group[1] + group[1] // 4), limit=699)
    want, seen = expected(requests_of(q_lens, lens, chunk=chunk, group=group, limit=699), chunk=chunk)
    assert rows == want
    mine = range(305) if group[0] == 0 else range(305, 350)
    for token in range(350):
        written = first == 0 and token in mine and token not in seen
        assert bool(torch.isnan(out[token]).all()) == (not written or 300 <= token < 305), token


def test_a_state(device):
    """Rows without keys keep it as it is, or are finished from it; without one they begin it."""
    state = (torch.full((20, HEADS), 8.0, device=device), torch.ones(20, HEADS, 8, device=device), torch.full((20, HEADS, 128), 4.0, device=device))
    _, _, out, lse = run(device, [20], [0], num_tokens=20, state=state)
    assert bool((out == 0.5).all())
    torch.testing.assert_close(lse, torch.full_like(lse, 11 * 0.6931471805599453))
    run(device, [20], [0], num_tokens=20, state=state, keep=True)
    assert bool((state[0] == -torch.inf).all()) and not state[1].any() and not state[2].any()


@pytest.mark.parametrize("keys, num_heads, megabytes, heads, group_keys", [
    (8192, 128, 32, 8, 8192), (32768, 16, 64, 4, 32768), (10240, 128, 64, 12, 10240), (4096, 16, 64, 16, 4096), (200_000, 16, 64, 1, 100_000), (5, 3, 0, 1, 1),
])
def test_keys_and_values_that_stay_in_l2(keys, num_heads, megabytes, heads, group_keys):
    """All keys of some heads, or of one head as many as fit, in groups of like size."""
    assert groups(keys, num_heads, max(1, megabytes << 20), 2) == (heads, group_keys)
