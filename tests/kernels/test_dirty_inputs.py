"""Padded rows, stale slots, foreign pages and scratch: memory that no token owns never reaches a result."""

from dataclasses import replace

import pytest
import torch

from triton_mla.testing import Request, assert_bitwise_equal

NAN, INF = float("nan"), float("inf")


def test_pad_row(mla_each):
    real = [Request(37, key=1), Request(64, key=2), Request(129, key=3)]
    three = mla_each.decode(mla_each.batch(real, page_size=16))
    batch = mla_each.batch([*real, Request(0, key=4)], page_size=16, table_tail=0)
    assert not batch.block_table[3].any()
    four = mla_each.decode(batch)
    four[:3].assert_same(three)
    four[3:].assert_empty()
    mla_each.check(four, batch)
    four.assert_differs(replace(four, lse=four.lse.roll(1, 0)))


@pytest.mark.parametrize("op", ["decode", "extend"])
@pytest.mark.parametrize("pages", [0, 2])
@pytest.mark.parametrize("width", [0, 3])
def test_all_rows_padded(mla, op, pages, width):
    batch = mla.batch([Request(0, key=i) for i in range(4)], extra_pages=pages, extra_width=width)
    assert batch.kv_cache.shape[0] == pages and batch.block_table.shape[1] == width
    getattr(mla, op)(batch).assert_empty()


@pytest.mark.parametrize("op", ["decode", "extend"])
def test_no_request(mla, op):
    rows = getattr(mla, op)(mla.batch([]))
    assert rows.out.shape == (0, mla.num_heads, mla.kv_lora_rank) and rows.lse.shape == (0, mla.num_heads)


def test_extend_of_requests_without_query_tokens(mla):
    rows = mla.extend(mla.batch([Request(9, 0, key=1), Request(0, 0, key=2)]))
    assert rows.out.shape == (0, mla.num_heads, mla.kv_lora_rank)


def test_extend_with_empty_requests_between(mla):
    requests = [Request(40, 3, key=1), Request(17, 0, key=2), Request(0, 0, key=3), Request(0, 2, key=4), Request(5, 5)]
    batch = mla.batch(requests)
    rows = mla.extend(batch)
    mla.check(rows, batch)
    rows[batch.rows(3)].assert_empty()
    rows[batch.rows(0)].assert_same(mla.extend(mla.batch(requests[:1])))
    rows[batch.rows(4)].assert_same(mla.extend(mla.batch(requests[4:])))


def test_query_tokens_of_no_request(mla):
    batch = mla.batch([Request(40, 3, key=1), Request(5, 2, key=2)])
    padding = torch.full_like(batch.q, NAN)
    rows = mla.extend(replace(batch, q=torch.cat([batch.q, padding])))
    rows[:5].assert_same(mla.extend(batch))
    rows[5:].assert_empty()


@pytest.mark.parametrize("stale", [NAN, INF])
@pytest.mark.parametrize("page_size, lens", [(16, (13, 1)), (64, (65, 1))])
def test_dirty_last_page(mla_each, stale, page_size, lens):
    requests = [Request(seq_len, key=i) for i, seq_len in enumerate(lens)]
    clean = mla_each.batch(requests, page_size=page_size, stale=0.0)
    dirty = mla_each.batch(requests, page_size=page_size, stale=stale)
    rows = mla_each.decode(dirty)
    rows.assert_same(mla_each.decode(clean))
    mla_each.check(rows, dirty)

    token, query = dirty.kv(1)[0], dirty.q[1].double()
    value = token[: dirty.kv_lora_rank].expand_as(rows.out[1])
    if mla_each.dtype == torch.float32:
        torch.testing.assert_close(rows.out[1], value)
    else:
        assert_bitwise_equal(rows.out[1], value, "the one value")
    score = query @ token.double() * dirty.softmax_scale
    torch.testing.assert_close(rows.lse[1].double(), score, atol=1e-5, rtol=0)


@pytest.mark.parametrize("tail", [0, -1, 2**31 - 1])
@pytest.mark.parametrize("op", ["decode", "extend"])
def test_poisoned_foreign_pages(mla, tail, op):
    requests = [Request(5, key=1), Request(33, key=2)]
    options = {"page_order": "reversed", "extra_pages": 2, "extra_width": 5}
    poisoned = mla.batch(requests, table_tail=tail, **options)
    assert bool(poisoned.kv_cache[:2].isnan().all())
    rows = getattr(mla, op)(poisoned)
    rows.assert_same(getattr(mla, op)(mla.batch(requests, table_tail=0, stale=0.0, **options)))
    mla.check(rows, poisoned)


@pytest.mark.parametrize("block_n, kv_split", [(16, 16), (64, 64), (64, 256)])
def test_empty_splits(mla, block_n, kv_split):
    mla = mla.with_order(block_n=block_n, kv_split=kv_split)
    batch = mla.batch([Request(seq_len, key=seq_len) for seq_len in (1, 2, 3, 5, 7, 9, 31, 33)])
    rows = mla.decode(batch)
    mla.check(rows, batch)
    for _ in range(100 if mla.device.type == "cuda" else 2):
        mla.decode(batch).assert_same(rows)


def test_uninitialised_memory_is_dirty_during_a_call(mla, monkeypatch):
    import triton_mla

    seen = {}

    def spy(*args, **kwargs):
        seen["float"], seen["int"] = torch.empty(64, device=mla.device), torch.empty(64, dtype=torch.int32)
        seen["bytes"] = torch.empty(64, dtype=torch.uint8, device=mla.device)
        return original(*args, **kwargs)

    original = triton_mla.mla_decode
    monkeypatch.setattr(triton_mla, "mla_decode", spy)
    mla.decode(mla.batch([Request(3)]))
    assert bool(seen["float"].isnan().all()) and bool((seen["int"] == 2**31 - 1).all())
    assert bool(seen["bytes"].view(torch.float32).isnan().all())


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_later_token_that_is_not_finite(mla, bad):
    """Earlier rows of its request that share a tile with it are NaN or right, never another number; others do not see it."""
    requests = [Request(40, 6, key=1), Request(9, 2, key=2)]
    batch = mla.batch(requests, page_size=16)
    clean = mla.extend(batch)
    cache = batch.kv_cache.clone()
    page = batch.block_table[0, 37 // 16].long()
    cache[page, 37 % 16, 3] = bad
    rows = mla.extend(replace(batch, kv_cache=cache))
    before, expected = rows.out[:3], clean.out[:3]
    right = before == expected
    assert bool((right | before.isnan()).all()) and bool(right.any())
    assert_bitwise_equal(rows.lse[:3], clean.lse[:3])
    rows[batch.rows(1)].assert_same(clean[batch.rows(1)])
    assert not bool(rows.out[3:6].isfinite().all(-1).any())
