"""Heads that share a call do not reach each other: a rank's slice of the heads gives the bits of the whole."""

import pytest
import torch

from triton_mla.testing import Request


@pytest.mark.parametrize("op", ["decode", "extend"])
@pytest.mark.parametrize(
    "total, some",
    [(12, 8), pytest.param(16, 8, marks=pytest.mark.gpu), pytest.param(128, 16, marks=pytest.mark.gpu)],
)
def test_some_heads_of_a_call(mla_each, op, total, some):
    requests = [Request(2 * mla_each.order.kv_split + 6, 1 if op == "decode" else 2, key=1), Request(70, key=2)]
    batch = mla_each.batch(requests, num_heads=total)
    whole = getattr(mla_each, op)(batch)
    mla_each.check(whole, batch)
    for first in range(0, total, some):
        heads = slice(first, min(first + some, total))
        alone = getattr(mla_each, op)(batch, q=batch.q[:, heads])
        alone.assert_same(whole[:, heads], f"heads {heads.start}..{heads.stop}:")
    if mla_each.dtype == torch.float32:
        getattr(mla_each.recut(), op)(batch).assert_differs(whole)


@pytest.mark.parametrize("op", ["decode", "extend"])
def test_order_of_heads(mla, op):
    batch = mla.batch([Request(130, key=1), Request(70, key=2)])
    whole = getattr(mla, op)(batch)
    turned = getattr(mla, op)(batch, q=batch.q.flip(1))
    turned.assert_same(whole[:, list(reversed(range(mla.num_heads)))])
    turned.assert_differs(whole)
