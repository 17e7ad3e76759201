"""Random models, pools and batches: every request as in a batch of its own, and near the reference."""

import random
from dataclasses import replace

import pytest

from triton_mla.testing import Request


def random_case(mla, chance):
    """The operations with another head count, page size and order, and the requests of a batch."""
    order = replace(mla.order, kv_split=chance.choice([64, 128, 192]))
    heads = chance.choice([1, 3, 8] if mla.device.type == "cpu" else [1, 3, 8, 16, 24, 64, 128])
    mla = replace(mla, order=order, num_heads=heads, page_size=chance.choice([1, 16, 32, 48, 64]))
    requests = []
    for key in range(chance.randint(1, 5)):
        seq_len = chance.choice([0, 1, chance.randint(2, 70), chance.randint(2, 70), chance.randint(70, 300)])
        requests.append(Request(seq_len, chance.choice([0, 1, min(seq_len, chance.randint(1, 40))]), key=key))
    return mla, [request for request in requests if request.q_len <= max(request.seq_len, 1)]


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.gpu) for seed in range(3, 20))])
def test_extend(mla_each, seed):
    chance = random.Random(seed)
    mla, requests = random_case(mla_each, chance)
    batch = mla.batch(requests, page_order=chance.choice(["random", "reversed"]), extra_width=chance.randint(0, 9))
    rows = mla.extend(batch)
    mla.check(rows, batch)
    for i, request in enumerate(requests):
        alone = replace(mla, page_size=64).extend(mla.batch([request]))
        rows[batch.rows(i)].assert_same(alone, f"request {i}, {request}:")
        for row in range(0, request.q_len if request.seq_len else 0, 7):
            step = Request(request.seq_len - request.q_len + row + 1, key=request.key)
            alone[row : row + 1].assert_same(mla.decode(mla.batch([step])), f"request {i}, row {row}:")
