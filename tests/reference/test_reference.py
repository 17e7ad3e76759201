"""The forms of the reference agree with each other, with torch's own attention, and with values done by hand."""

import math
from dataclasses import replace

import pytest
import torch

from triton_mla.reference import (
    absorb_q,
    apply_w_uv,
    gather_kv,
    merge_states,
    mla_absorbed,
    mla_unabsorbed,
    write_kv_cache,
)
from triton_mla.testing import Request, assert_bitwise_equal, assert_close, make_paged_batch

SCALE = 192**-0.5
RAGGED = [Request(37, 5, key=1), Request(0, 2, key=2), Request(16, 16, key=3), Request(33, key=4), Request(9, 0, key=5)]


def batch_of(requests, **options):
    sizes = {"num_heads": 3, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "page_size": 16, "dtype": torch.float64}
    return make_paged_batch(requests, **{**sizes, **options})


def absorbed(batch, **options):
    return mla_absorbed(
        batch.q,
        batch.kv_cache,
        batch.block_table,
        batch.cu_seqlens_q,
        batch.seq_lens,
        **{"softmax_scale": SCALE, "kv_lora_rank": batch.kv_lora_rank, **options},
    )


def weights(heads, nope, rank, value):
    generator = torch.Generator().manual_seed(1)
    w_uk = torch.randn(heads, nope, rank, generator=generator, dtype=torch.float64) * rank**-0.5
    w_uv = torch.randn(heads, rank, value, generator=generator, dtype=torch.float64) * rank**-0.5
    return w_uk, w_uv


@pytest.mark.parametrize("rope", [16, 0])
def test_absorbed_and_unabsorbed_agree(rope):
    batch = batch_of(RAGGED, qk_rope_head_dim=rope)
    nope, value = 24, 20
    w_uk, w_uv = weights(3, nope, 32, value)
    tokens = len(batch.q)
    generator = torch.Generator().manual_seed(2)
    q_nope = torch.randn(tokens, 3, nope, generator=generator, dtype=torch.float64)
    q_pe = torch.randn(tokens, 3, rope, generator=generator, dtype=torch.float64)
    layout = (batch.kv_cache, batch.block_table, batch.cu_seqlens_q, batch.seq_lens)
    options = {"softmax_scale": SCALE, "kv_lora_rank": 32}
    out, lse = mla_absorbed((absorb_q(q_nope, w_uk), q_pe), *layout, **options)
    want, want_lse = mla_unabsorbed(q_nope, q_pe, w_uk, w_uv, *layout, **options)
    assert out.dtype == want.dtype == torch.float64
    assert_close(apply_w_uv(out, w_uv), want, 1e-12)
    assert_close(lse, want_lse, 1e-12)


def test_absorbed_is_torch_attention_with_one_shared_head():
    batch = batch_of([Request(50, 50, key=3)])
    out, _ = absorbed(batch)
    kv = batch.kv(0)[None]
    want = torch.nn.functional.scaled_dot_product_attention(
        batch.q.transpose(0, 1), kv, kv[..., :32], is_causal=True, scale=SCALE
    )
    assert_close(out, want.transpose(0, 1), 1e-12)


def test_one_token_is_its_own_value_and_score():
    batch = batch_of([Request(1, key=6)])
    out, lse = absorbed(batch)
    token = batch.kv(0)[0]
    assert_close(out[0], token[:32].expand(3, 32), 1e-15)
    assert_close(lse[0], batch.q[0] @ token * SCALE, 1e-14)


def test_two_tokens_by_hand():
    cache = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]], dtype=torch.float64)
    q = torch.tensor([[[math.log(3.0), 0.0]]], dtype=torch.float64)
    table, lens = torch.tensor([[0]], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    out, lse = mla_absorbed(q, cache, table, None, lens, softmax_scale=1.0, kv_lora_rank=2)
    assert_close(out[0, 0], torch.tensor([0.75, 0.25], dtype=torch.float64), 1e-15)
    assert lse.item() == pytest.approx(math.log(4.0), abs=1e-15)


def test_scores_far_out_of_range_of_exp():
    batch = batch_of([Request(20, key=1)])
    out, lse = absorbed(replace(batch, q=batch.q * 1e5))
    assert bool(out.isfinite().all()) and bool(lse.isfinite().all())


def test_rows_of_no_request_and_rows_that_see_nothing():
    batch = batch_of(RAGGED)
    padded = replace(batch, q=torch.cat([batch.q, batch.q.new_full((4, 3, 48), float("nan"))]))
    out, lse = absorbed(padded)
    for rows in (batch.rows(1), slice(len(batch.q), None)):
        assert not out[rows].any() and bool(torch.isneginf(lse[rows]).all())
    assert_bitwise_equal(out[: len(batch.q)], absorbed(batch)[0])


def test_a_row_is_its_decode_row():
    whole = batch_of([Request(19, 19, key=8)])
    out, lse = absorbed(whole)
    for position in range(19):
        row, row_lse = absorbed(batch_of([Request(position + 1, key=8)]))
        assert_close(row[0], out[position], 1e-14)
        assert_close(row_lse[0], lse[position], 1e-14)


def test_dtype_of_the_computation():
    batch = batch_of(RAGGED, dtype=torch.float16)
    out64, lse64 = absorbed(batch)
    out32, lse32 = absorbed(batch, dtype=torch.float32)
    assert out32.dtype == lse32.dtype == torch.float32
    assert_close(out32, out64, 1e-5)
    assert_close(lse32, lse64, 1e-5)


def test_merge_of_two_parts_is_the_whole():
    batch = batch_of([Request(48, key=2)])
    parts = []
    for pages, tokens in ((slice(0, 1), 16), (slice(1, 3), 32)):
        lens = torch.tensor([tokens], dtype=torch.int32)
        parts += absorbed(replace(batch, block_table=batch.block_table[:, pages], seq_lens=lens))
    out, lse = merge_states(*parts)
    want, want_lse = absorbed(batch)
    assert_close(out, want, 1e-14)
    assert_close(lse, want_lse, 1e-14)


@pytest.mark.parametrize("mark", [-math.inf, math.inf])
def test_merge_ignores_an_empty_part(mark):
    out, lse = absorbed(batch_of([Request(5, key=1)]))
    nothing = torch.full_like(out, float("nan")), torch.full_like(lse, mark)
    for merged in (merge_states(out, lse, *nothing), merge_states(*nothing, out, lse)):
        assert_bitwise_equal(merged[0], out)
        assert_bitwise_equal(merged[1], lse)
    both = merge_states(*nothing, *nothing)
    assert not both[0].any() and bool(torch.isneginf(both[1]).all())


def test_write_then_gather_gives_the_tokens_back():
    generator = torch.Generator().manual_seed(0)
    kv_c, k_pe = torch.randn(7, 32, generator=generator), torch.randn(7, 16, generator=generator)
    cache = torch.full((4, 4, 48), float("nan"))
    table = torch.tensor([3, 1, 2**31 - 1], dtype=torch.int32)
    slots = torch.tensor([12, 13, 14, 15, 4, 5, -1])
    write_kv_cache(kv_c, k_pe, cache, slots)
    assert_bitwise_equal(gather_kv(cache, table, 6), torch.cat([kv_c, k_pe], -1)[:6])
    assert int(cache.isnan().sum()) == (16 - 6) * 48


def test_gather_of_nothing():
    assert gather_kv(torch.empty(0, 16, 48), torch.empty(0, dtype=torch.int32), 0).shape == (0, 48)
