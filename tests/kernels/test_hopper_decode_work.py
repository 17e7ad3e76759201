"""The list of work of the Hopper decode: every split of every row tile once, the longest first, and the rows that it leaves to the kernel that makes it."""

import pytest
import torch

from triton_mla.kernels.hopper.decode_work import hopper_decode_work_kernel

NAN = float("nan")
SPLIT = 128


def run(device, q_lens, lens, *, heads=16, num_heads=None, padding=0, limit=10**6, programs=8, slices=1, slot_tiles=7, num_splits=16, starts=None, grid=3,
        with_lse=True):
    """(items [n, 7], partials of each row tile with room [slot_tiles, 64], their (token, head) pairs, out, lse); q_lens None: a decode."""
    num_heads = heads if num_heads is None else num_heads
    tokens = 64 // heads
    decode = q_lens is None
    num_tokens = (len(lens) if decode else sum(q_lens)) + padding
    blocks = -(-num_heads // 64)
    tiles = (len(lens) if decode else num_tokens // tokens + len(lens) + 1) * blocks
    room = tiles + slot_tiles * num_splits
    ints = {"dtype": torch.int32, "device": device}
    partials = torch.full((slot_tiles * 64 * (num_splits * 515 + 2) + 8 * (room + 9),), NAN, device=device)
    out = torch.full((num_tokens, num_heads, 512), 7.0, dtype=torch.float16, device=device)
    lse = torch.full((num_tokens, num_heads), 7.0, device=device)
    if starts is None:
        starts = [0, *torch.tensor(q_lens or [], dtype=torch.int64).cumsum(0).tolist()]
    work_at = slot_tiles * (num_splits * 515 + 2)
    hopper_decode_work_kernel[(grid,)](
        torch.tensor(starts, **ints), torch.tensor(lens, **ints), out, lse, partials, *out.stride()[:2], num_tokens, len(lens), num_heads, limit, SPLIT,
        num_splits, slot_tiles, programs, slices, room, work_at, HEADS=heads, BATCH=256, DECODE=decode, WITH_LSE=with_lse, PDL=False, enable_fp_fusion=False)
    work = partials[64 * work_at :].view(torch.int32)
    rows = partials[slot_tiles * 64 * num_splits * 515 :].view(torch.int32)[: 2 * 64 * slot_tiles].view(2, slot_tiles, 64)
    count = int(work[0])
    assert count <= room
    return work[8 : 8 + 8 * count].view(count, 8)[:, :7].tolist(), rows[0].tolist(), rows[1].tolist(), out, lse


def check(device, q_lens, lens, **options):
    items, counts, pairs, out, lse = run(device, q_lens, lens, **options)
    heads, slots, num_splits = options.get("heads", 16), options.get("slot_tiles", 7), options.get("num_splits", 16)
    num_heads = options.get("num_heads") or heads
    tokens, blocks = 64 // heads, -(-(num_heads) // 64)
    q_lens = [1] * len(lens) if q_lens is None else q_lens
    starts = [0, *torch.tensor(q_lens, dtype=torch.int64).cumsum(0).tolist()]
    limit = options.get("limit", 10**6)
    served = [n if 0 < n <= limit else 0 for n in lens]
    load = sum(-(-m // tokens) * blocks * n for m, n in zip(q_lens, served, strict=True)) * options.get("slices", 1) / options.get("programs", 8)
    want, used, room = set(), 0, True
    rows = {}
    for i, (m, n) in enumerate(zip(q_lens, served, strict=True)):
        tiles = -(-m // tokens)
        long = n > SPLIT and 8 * n > 9 * load
        room = room and not (long and used + tiles * blocks > slots)
        spread = long and used + tiles * blocks <= slots
        for j in range(tiles if n else 0):
            size = min(tokens, m - j * tokens)
            seen = n - m + j * tokens + 1
            visible = max(seen + size - 1, 0)
            for block in range(blocks):
                about = (seen, starts[i] + j * tokens, block + 256 * size, i)
                if not spread:
                    want.add((0, visible, *about, -1))
                    continue
                slot = used + j * blocks + block
                for s in range(-(-n // SPLIT)):
                    want.add((min(s * SPLIT, visible), min((s + 1) * SPLIT, visible), *about, (s * slots + slot) * 64))
                for r in range(64):
                    token, head = r // heads, block * 64 + r % heads
                    if token < size and head < num_heads:
                        rows[slot, r] = (max(-(-(seen + token) // SPLIT), 1), (starts[i] + j * tokens + token) * num_heads + head)
        used += tiles * blocks if long else 0
    assert len(items) == len(want) and {tuple(item) for item in items} == want
    lengths = [end - first for first, end, *_ in items]
    if all(m <= tokens for m in q_lens):  # else the tiles of a request are taken for as long as its last one
        assert lengths == sorted(lengths, reverse=True)
    if blocks == 2:
        assert all(a[:4] == b[:4] and a[4] + 1 == b[4] for a, b in zip(items[::2], items[1::2], strict=True))
    for slot in range(slots):
        for r in range(64):
            count, pair = rows.get((slot, r), (0, None))
            assert counts[slot][r] == count and (pair is None or pairs[slot][r] == pair), (slot, r)
    assert num_splits * SPLIT >= max([n for n in served if n > SPLIT], default=0)
    for i, (m, n) in enumerate(zip(q_lens, lens, strict=True)):
        rows_of = slice(starts[i], starts[i] + m)
        if served[i]:
            assert bool((out[rows_of] == 7).all() and (lse[rows_of] == 7).all())
        elif n > limit:
            assert bool(out[rows_of].isnan().all() and lse[rows_of].isnan().all())
        else:
            assert bool((out[rows_of] == 0).all() and (lse[rows_of] == -torch.inf).all())
    assert bool((out[starts[-1] :] == 0).all() and (lse[starts[-1] :] == -torch.inf).all())
    return items


@pytest.mark.parametrize("heads, num_heads", [(16, 16), (64, 128), (64, 100), (16, 9), (8, 8)])
def test_decode(device, heads, num_heads):
    check(device, None, [1, 0, 2000, 128, 129, 256, 700], heads=heads, num_heads=num_heads)


@pytest.mark.parametrize("heads, num_heads", [(16, 16), (64, 128), (32, 20)])
def test_extend(device, heads, num_heads):
    check(device, [3, 1, 9, 0, 20, 2, 7], [1500, 0, 140, 50, 20, 127, 3], heads=heads, num_heads=num_heads, padding=9, slot_tiles=20)


def test_a_full_machine_folds(device):
    items = check(device, None, [600, 500, 3, 610, 590, 100] * 3, heads=64, num_heads=128)
    assert all(item[6] == -1 for item in items)


def test_value_slices_are_load(device):
    """Each slice of a request is as long as the request: with more of them, only longer ones are spread."""
    spread = [[item[6] >= 0 for item in check(device, None, [900, 300, 200, 1], slices=slices)] for slices in (1, 2, 4)]
    assert [sum(items) for items in spread] == [8 + 3 + 2, 8, 8]


def test_no_room_for_partials(device):
    items = check(device, None, [2000, 1900, 1800, 1], heads=64, num_heads=128, slot_tiles=2, programs=64)
    assert sum(item[6] >= 0 for item in items) == 32 and sum(item[:2] == [0, 1900] for item in items) == 2


def test_a_length_past_the_limit(device):
    check(device, [2, 5, 1], [500, 1001, 1000], limit=1000)


def test_nothing(device):
    assert check(device, None, [0, 0]) == []
    assert check(device, [], [], padding=3) == []


@pytest.mark.parametrize("starts", [[5, 3, 9], [-4, 2, 100], [2**31 - 1, 0, 0], [0, -(2**31), 2**31 - 1]])
def test_starts_that_cannot_be(device, starts):
    """Only the device sees them: nothing is written or named outside the tensors."""
    items, _, _, _, _ = run(device, [3, 4], [300, 200], starts=starts)
    for first, end, _, token, packed, request, _ in items:
        assert 0 <= first <= end <= 300 and token >= 0 and token + packed // 256 <= 7 and request < 2
