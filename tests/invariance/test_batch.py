"""A request's bits are the same alone and in any batch: size, order, place, neighbours, padding, table width."""

import random
from dataclasses import replace

import pytest
import torch

from triton_mla.testing import Request

VICTIM_KEY = 7


@pytest.fixture(scope="module")
def sizes(mla):
    """Length of the victim, of the longest neighbour, and batch sizes."""
    if mla.device.type == "cuda":
        return 19_802, 4096, (1, 2, 3, 15, 16, 17, 64, 257)
    return 4 * mla.order.kv_split + 37, 80, (1, 2, 3, 6)


@pytest.fixture(scope="module")
def crowd(mla, sizes):
    """The victim as request 0 and its neighbours; every smaller batch is picked from it."""
    victim, longest, counts = sizes
    chance = random.Random(0)
    neighbours = [Request(chance.randint(1, longest), key=100 + i) for i in range(max(counts) - 1)]
    return mla.batch([Request(victim, key=VICTIM_KEY), *neighbours])


@pytest.fixture(scope="module")
def alone(mla, sizes):
    batch = mla.batch([Request(sizes[0], key=VICTIM_KEY)], page_order="sequential", extra_pages=0)
    rows = mla.decode(batch)
    mla.check(rows, batch)
    return rows


def test_batch_size_and_place(mla, sizes, crowd, alone):
    for count in sizes[2]:
        for place in sorted({0, count // 2, count - 1}):
            others = list(range(1, count))
            rows = mla.decode(mla.pick(crowd, others[:place] + [0] + others[place:]))
            rows[place : place + 1].assert_same(alone, f"B={count}, row {place}:")


def test_order_of_the_batch(mla, crowd):
    whole = mla.decode(crowd)
    for seed in range(3 if mla.device.type == "cuda" else 1):
        order = list(range(len(whole)))
        random.Random(seed).shuffle(order)
        rows = mla.decode(mla.pick(crowd, order))
        rows.assert_same(whole[order])
        rows.assert_differs(whole)


def test_copies_of_one_request(mla, crowd, alone):
    count = 64 if mla.device.type == "cuda" else 5
    rows = mla.decode(mla.pick(crowd, [0] * count))
    for row in range(count):
        rows[row : row + 1].assert_same(alone, f"copy {row}:")


def test_contents_of_neighbours(mla, sizes, crowd, alone):
    """Neighbours whose pages hold NaN and Inf, and whose queries do."""
    cache, q = crowd.kv_cache.clone(), crowd.q.clone()
    own = torch.zeros(len(cache), dtype=torch.bool, device=mla.device)
    own[crowd.block_table[0, : -(-sizes[0] // mla.page_size)].long()] = True
    cache[~own] = float("nan")
    q[1::2], q[2::2] = float("nan"), float("inf")
    mla.decode(mla.pick(replace(crowd, kv_cache=cache, q=q), [1, 2, 0, 3]))[2:3].assert_same(alone)


def test_padded_rows(mla, sizes, crowd, alone):
    padded = mla.batch([*[Request(0, key=i) for i in range(3)], crowd.requests[0], Request(0, key=9)])
    rows = mla.decode(padded)
    rows[3:4].assert_same(alone)
    rows[:3].assert_empty()


@pytest.mark.parametrize("width", [0, 1, 63, 1000])
def test_width_of_the_table(mla, sizes, alone, width):
    mla.decode(mla.batch([Request(sizes[0], key=VICTIM_KEY)], extra_width=width)).assert_same(alone)


def test_repeats(mla, crowd):
    rows = mla.decode(crowd)
    for _ in range(20 if mla.device.type == "cuda" else 1):
        mla.decode(crowd).assert_same(rows)


def test_each_dtype(mla_each):
    victim = Request(2 * mla_each.order.kv_split + 37, key=VICTIM_KEY)
    alone = mla_each.decode(mla_each.batch([victim]))
    many = [Request(5, key=1), victim, Request(77, key=2), Request(0, key=3), victim, Request(200, key=4)]
    rows = mla_each.decode(mla_each.batch(many))
    rows[1:2].assert_same(alone)
    rows[4:5].assert_same(alone)


def test_extend_in_a_batch(mla):
    split = mla.order.kv_split
    requests = [Request(split + 30, 9, key=1), Request(9, 9, key=2), Request(4 * split + 1, 1, key=3), Request(70, 13)]
    batch = mla.batch(requests)
    together = mla.extend(batch)
    mla.check(together, batch)
    for i, request in enumerate(requests):
        together[batch.rows(i)].assert_same(mla.extend(mla.batch([request])), f"request {i}:")
    backwards = mla.batch(requests[::-1])
    rows = mla.extend(backwards)
    for i in range(len(requests)):
        rows[backwards.rows(len(requests) - 1 - i)].assert_same(together[batch.rows(i)])
    mla.recut().extend(batch).assert_differs(together)


def test_control_other_splits_differ(mla, crowd, alone):
    mla.recut().decode(mla.pick(crowd, [0])).assert_differs(alone)


def test_control_one_bit_of_a_token_is_seen(mla, crowd, alone):
    """The last bit of each value of one page, of the victim's many."""
    cache = crowd.kv_cache.clone()
    bits = torch.int16 if mla.dtype.itemsize == 2 else torch.int32
    cache.view(bits)[crowd.block_table[0, 1].long()] ^= 1
    mla.decode(mla.pick(replace(crowd, kv_cache=cache), [0])).assert_differs(alone)


def test_control_the_key_decides(mla, sizes, alone):
    mla.decode(mla.batch([Request(sizes[0], key=VICTIM_KEY + 1)])).assert_differs(alone)
