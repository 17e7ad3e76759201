"""A token's bits do not tell how it came: alone, as a verify row, in a prompt, in a chunk, or over a cached prefix."""

from dataclasses import replace

import pytest

from triton_mla.testing import Request

KEY = 11


def on_gpu_only(*values):
    return [pytest.param(value, marks=pytest.mark.gpu) for value in values]


def part(mla, start, end, **options):
    """Tokens start..end of the prompt, over a cache that already holds what comes before them."""
    return mla.extend(mla.batch([Request(end, end - start, key=KEY)], **options))


def step(mla, position):
    return mla.decode(mla.batch([Request(position + 1, key=KEY)]))


@pytest.mark.parametrize("seq_len", [64, 65, 129, *on_gpu_only(63, 127, 128, 1024, 4096)])
def test_verify_rows(mla, seq_len):
    steps = [step(mla, position) for position in range(seq_len - 8, seq_len)]
    for drafts in (1, 3, 7):
        rows = part(mla, seq_len - drafts - 1, seq_len)
        for i in range(drafts + 1):
            rows[i : i + 1].assert_same(steps[7 - drafts + i], f"{drafts} drafts, row {i}:")
    steps[-1].assert_differs(steps[-2])


def test_verify_rows_in_each_dtype(mla_each):
    seq_len = mla_each.order.kv_split + 3
    rows = part(mla_each, seq_len - 5, seq_len)
    for i in range(5):
        rows[i : i + 1].assert_same(step(mla_each, seq_len - 5 + i), f"row {i}:")


def test_verify_rows_in_a_batch(mla):
    lens = [mla.order.kv_split + 2, 5, 130, 64]
    batch = mla.batch([Request(seq_len, 4, key=seq_len) for seq_len in lens])
    rows = mla.extend(batch)
    for i in range(4):
        late = [Request(seq_len - 3 + i, key=seq_len) for seq_len in lens]
        mla.decode(mla.batch(late)).assert_same(rows[i::4], f"row {i} of each:")


@pytest.mark.parametrize("order", [{"block_n": 16, "kv_split": 16}, {}])
def test_prefill_is_decode(mla, order):
    mla = mla.with_order(**order)
    tokens = 128 if mla.device.type == "cuda" else 20
    whole = part(mla, 0, tokens)
    mla.check(whole, mla.batch([Request(tokens, tokens, key=KEY)]))
    part(mla, 0, tokens - 1).assert_same(whole[:-1])
    part(mla, tokens - 1, tokens).assert_same(whole[-1:])
    for position in range(tokens):
        step(mla, position).assert_same(whole[position : position + 1], f"position {position}:")
    if order:
        part(mla.recut(), 0, tokens).assert_differs(whole)


@pytest.fixture(scope="module")
def short_splits(mla):
    """With several splits in a short prompt."""
    heads = mla.num_heads if mla.device.type == "cuda" else 2
    return replace(mla.with_order(kv_split=64), num_heads=heads)


@pytest.fixture(scope="module")
def tokens(mla):
    """Length of the prompt."""
    return 257 if mla.device.type == "cuda" else 135


@pytest.fixture(scope="module")
def prompt(short_splits, tokens):
    rows = part(short_splits, 0, tokens)
    short_splits.check(rows, short_splits.batch([Request(tokens, tokens, key=KEY)]))
    return rows


@pytest.mark.parametrize("cut", [1, 128, -2, *on_gpu_only(64, 100)])
def test_chunks(short_splits, prompt, tokens, cut):
    cut %= tokens
    part(short_splits, 0, cut).assert_same(prompt[:cut])
    part(short_splits, cut, tokens).assert_same(prompt[cut:])


def test_chunks_of_another_order_differ(short_splits, prompt, tokens):
    part(short_splits.recut(), 128, tokens).assert_differs(prompt[128:])


def test_many_chunks(short_splits, prompt, tokens):
    cuts = [0, 1, 2, 50, 63, 65, 129, tokens - 1, tokens]
    for start, end in zip(cuts, cuts[1:], strict=False):
        part(short_splits, start, end).assert_same(prompt[start:end], f"{start}..{end}:")


def test_chunks_in_a_batch_with_other_pages(short_splits, prompt, tokens):
    ends = [Request(tokens, tokens - 100, key=KEY), Request(40, key=3), Request(100, 100, key=KEY)]
    batch = short_splits.batch([*ends, Request(tokens - 1, key=KEY)], page_size=32, page_order="reversed")
    rows = short_splits.extend(batch)
    rows[batch.rows(0)].assert_same(prompt[100:])
    rows[batch.rows(2)].assert_same(prompt[:100])
    rows[batch.rows(3)].assert_same(prompt[-2:-1])


@pytest.fixture(scope="module")
def long_prompt(mla):
    return part(mla, 0, 4097)


@pytest.mark.gpu
@pytest.mark.parametrize("prefix", [1, 511, 2048, 4096])
def test_long_prefix(mla, long_prompt, prefix):
    part(mla, prefix, 4097).assert_same(long_prompt[prefix:])
    part(mla.recut(), prefix, 4097).assert_differs(long_prompt[prefix:])
