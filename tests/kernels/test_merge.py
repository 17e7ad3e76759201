"""lse is the natural logarithm, and partial results over disjoint tokens merge into the whole."""

from dataclasses import replace

import pytest
import torch

from triton_mla import merge_attn_states
from triton_mla.reference import merge_states
from triton_mla.testing import Request, assert_bitwise_equal, assert_close, bitwise_equal

INF = float("inf")
ATOL = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def empty_like(rows, mark):
    """A part that saw no token: lse says so, out is rubbish."""
    return torch.full_like(rows.out, float("nan")), torch.full_like(rows.lse, mark)


def part_of(mla, batch, pages, tokens):
    """Decode of one request over some of its pages, `tokens` in all."""
    lens = torch.tensor([tokens], dtype=torch.int32, device=mla.device)
    return mla.decode(replace(batch, block_table=batch.block_table[:, pages].contiguous(), seq_lens=lens))


def merge(a, b):
    return merge_attn_states(a.out, a.lse, b.out, b.lse)


def test_lse_is_a_natural_logarithm(mla_each):
    batch = mla_each.batch([Request(seq_len, key=seq_len) for seq_len in (1, 64, 3 * mla_each.order.kv_split + 5)])
    assert_close(mla_each.decode(batch).lse, mla_each.reference(batch).lse, 1e-5, "lse")


def test_prefix_and_suffix(mla_each):
    prefix = 48 * mla_each.order.kv_split if mla_each.device.type == "cuda" else 3 * mla_each.order.kv_split
    batch = mla_each.batch([Request(prefix + 64, key=1)], extra_width=0)
    pages = prefix // batch.page_size
    out, lse = merge(part_of(mla_each, batch, slice(0, pages), prefix), part_of(mla_each, batch, slice(pages, None), 64))
    assert out.dtype == mla_each.dtype and lse.dtype == torch.float32
    expected = mla_each.reference(batch)
    assert_close(out, expected.out, min(ATOL[mla_each.dtype], 2e-3), "out")
    assert_close(lse, expected.lse, 1e-4, "lse")


@pytest.mark.parametrize("interleave", [1, 64])
def test_shards(mla, interleave):
    shards = 8
    tokens = 4096 if mla.device.type == "cuda" else 512
    batch = mla.batch([Request(tokens, key=1)], page_size=interleave, extra_width=0)
    parts = [part_of(mla, batch, slice(i, None, shards), tokens // shards) for i in range(shards)]
    merged = parts[0]
    for part in parts[1:]:
        merged = replace(merged, **dict(zip(("out", "lse"), merge(merged, part), strict=True)))
    merged.assert_close(mla.reference(batch), min(ATOL[mla.dtype], 2e-3))


@pytest.mark.parametrize("mark", [-INF, INF])
def test_an_empty_part_is_ignored(mla_each, mark):
    rows = mla_each.decode(mla_each.batch([Request(5, key=1), Request(70, key=2)]))
    nothing = empty_like(rows, mark)
    for out, lse in (
        merge_attn_states(rows.out, rows.lse, *nothing),
        merge_attn_states(*nothing, rows.out, rows.lse),
    ):
        assert_bitwise_equal(out, rows.out, "out")
        assert_bitwise_equal(lse, rows.lse, "lse")
    out, lse = merge_attn_states(*nothing, *nothing)
    assert not out.any() and bool(torch.isneginf(lse).all())
    changed = merge_attn_states(rows.out, rows.lse, rows.out, rows.lse)
    assert not bitwise_equal(changed[1], rows.lse)


def test_random_states(mla_each):
    generator = torch.Generator().manual_seed(3)
    tokens, heads, rank = 9, mla_each.num_heads, mla_each.kv_lora_rank
    outs = torch.randn(2, tokens, heads, rank, generator=generator).to(mla_each.device, mla_each.dtype)
    lses = torch.randn(2, tokens, heads, generator=generator).to(mla_each.device) * 20
    lses[0, 3], lses[1, 4], lses[:, 5], lses[0, 6] = -INF, -INF, -INF, 0.0
    out, lse = merge_attn_states(outs[0], lses[0], outs[1], lses[1])
    expected = merge_states(outs[0], lses[0], outs[1], lses[1])
    assert_close(out, expected[0], ATOL[mla_each.dtype], "out")
    assert_close(lse, expected[1], 1e-5, "lse")
    rows = merge_attn_states(outs[0, 4:7], lses[0, 4:7], outs[1, 4:7], lses[1, 4:7])
    assert_bitwise_equal(rows[0], out[4:7], "some rows")
    assert_bitwise_equal(rows[1], lse[4:7], "some rows")


def test_strided_states(mla):
    rows = mla.decode(mla.batch([Request(5, key=1), Request(70, key=2), Request(9, key=3)]))
    out, lse = merge(rows[::2], rows[1:])
    expected = merge_attn_states(rows.out[::2].contiguous(), rows.lse[::2].contiguous(), rows.out[1:].contiguous(), rows.lse[1:].contiguous())
    assert_bitwise_equal(out, expected[0])
    assert_bitwise_equal(lse, expected[1])
    assert merge(rows[:0], rows[:0])[0].shape == (0, *rows.out.shape[1:])


def test_bad_states(mla):
    out = torch.zeros(3, 2, 16, dtype=mla.dtype, device=mla.device)
    lse = torch.zeros(3, 2, device=mla.device)
    bad = [
        ("out_a", (out[0], lse, out, lse)),
        ("lse_a", (out, lse[:, 0], out, lse)),
        ("out_b", (out, lse, out[:2], lse)),
        ("lse_b", (out, lse, out, lse[:2])),
        ("lse_a", (out, lse.double(), out, lse)),
        ("lse_b", (out, lse, out, lse.to(torch.bfloat16))),
        ("out_b", (out, lse, out.double(), lse)),
        ("out_a", (out.int(), lse, out.int(), lse)),
        ("out_a is on meta", (out.to("meta"), lse, out, lse)),
        ("lse_b is on meta", (out, lse, out, lse.to("meta"))),
    ]
    for name, arguments in bad:
        with pytest.raises(ValueError, match=name):
            merge_attn_states(*arguments)


@pytest.mark.parametrize("width", [0, 1 << 16])
def test_refused_widths(width, mla):
    out, lse = torch.zeros(1, 1, width, dtype=mla.dtype, device=mla.device), torch.zeros(1, 1, device=mla.device)
    with pytest.raises(ValueError, match="out_a has shape"):
        merge_attn_states(out, lse, out, lse)
