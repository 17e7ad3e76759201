"""Decode and extend against the float64 reference: dtypes, ragged lengths, head counts, latent dims, scales."""

from dataclasses import replace

import pytest
import torch

from triton_mla import DEFAULT_ORDER
from triton_mla.testing import Request, assert_bitwise_equal, assert_close

HEADS = [1, 2, 4, 5, 6, 8, 10, 12]
MANY_HEADS = [16, 20, 24, 40, 48, 80, 96, 112, 128]
SCALES = [0.07217, 0.11472, 0.13523]


def test_decode(mla_each):
    split = mla_each.order.kv_split
    lens = [0, 1, 63, 64, 65, split, split + 1, 3 * split + 17]
    batch = mla_each.batch([Request(seq_len, key=seq_len) for seq_len in lens])
    mla_each.check(mla_each.decode(batch), batch)


def test_extend(mla_each):
    split = mla_each.order.kv_split
    lens = [(split + 40, 7), (0, 1), (33, 33), (1, 1), (2 * split + 3, 2), (64, 0), (split + 1, 19)]
    batch = mla_each.batch([Request(seq_len, q_len, key=seq_len) for seq_len, q_len in lens])
    mla_each.check(mla_each.extend(batch), batch)


def test_decode_is_extend_with_one_token(mla_each):
    batch = mla_each.batch([Request(seq_len, key=seq_len) for seq_len in (3, 64, 0, 2 * mla_each.order.kv_split + 5)])
    mla_each.decode(batch).assert_same(mla_each.extend(batch))


@pytest.mark.parametrize("op", ["decode", "extend"])
def test_default_order(mla, op):
    mla = mla.with_dtype(torch.float32)  # 16-bit outputs round away what another order changes in few values
    split = DEFAULT_ORDER.kv_split
    batch = mla.batch([Request(split + 70, key=1), Request(5, key=2)], num_heads=2)
    rows = getattr(mla, op)(batch, order=None)
    mla.check(rows, batch)
    rows.assert_same(getattr(mla.with_order(kv_split=split), op)(batch))
    rows.assert_differs(getattr(mla, op)(batch))


def test_return_lse(mla):
    from triton_mla import mla_decode

    batch = mla.batch([Request(20, key=1)])
    options = {"softmax_scale": batch.softmax_scale, "kv_lora_rank": batch.kv_lora_rank, "order": mla.order}
    out = mla_decode(batch.q, batch.kv_cache, batch.block_table, batch.seq_lens, **options)
    assert_bitwise_equal(out, mla.decode(batch).out)


@pytest.mark.parametrize("num_heads", [*HEADS, *(pytest.param(heads, marks=pytest.mark.gpu) for heads in MANY_HEADS)])
@pytest.mark.parametrize("op", ["decode", "extend"])
def test_head_counts(mla, num_heads, op):
    batch = mla.batch([Request(70, key=1), Request(129, key=2)], num_heads=num_heads)
    guard = 64
    shape = (2, num_heads, mla.kv_lora_rank)
    out_memory = torch.full((2 * num_heads * mla.kv_lora_rank + guard,), 7.0, dtype=mla.dtype, device=mla.device)
    lse_memory = torch.full((2 * num_heads + guard,), 7.0, device=mla.device)
    out, lse = out_memory[:-guard].view(shape), lse_memory[:-guard].view(shape[:2])
    rows = getattr(mla, op)(batch, out=out, lse=lse)
    assert rows.out.data_ptr() == out.data_ptr() and rows.lse.data_ptr() == lse.data_ptr()
    mla.check(rows, batch)
    assert bool((out_memory[-guard:] == 7.0).all()) and bool((lse_memory[-guard:] == 7.0).all())


@pytest.mark.parametrize("rank, rope", [(512, 64), (256, 64), (256, 32), (128, 64), (512, 0), (320, 32), (48, 48), (16, 16)])
@pytest.mark.parametrize("op", ["decode", "extend"])
def test_latent_dims(mla, rank, rope, op):
    batch = mla.batch([Request(70, key=1), Request(9, key=2)], kv_lora_rank=rank, qk_rope_head_dim=rope)
    mla.check(getattr(mla, op)(batch), batch)


@pytest.mark.parametrize("rank, rope, name", [(500, 64, "kv_lora_rank"), (512, 7, "qk_rope_head_dim")])
@pytest.mark.parametrize("op", ["decode", "extend"])
def test_unsupported_latent_dims(mla, rank, rope, name, op):
    batch = mla.batch([Request(9, key=1)], kv_lora_rank=rank, qk_rope_head_dim=rope)
    with pytest.raises(ValueError, match=rf"kv_lora_rank={rank}" if name == "kv_lora_rank" else rf"leaves {rope} of .*{name}"):
        getattr(mla, op)(batch)


@pytest.mark.parametrize("gain", [0.5, 25.0])
def test_scales_and_range(mla_each, gain):
    batch = mla_each.batch([Request(1, key=1), Request(64, key=2)])
    batch = replace(batch, q=batch.q * (gain / 0.5))
    rows = [mla_each.decode(replace(batch, softmax_scale=scale)) for scale in SCALES]
    for scale, result in zip(SCALES, rows, strict=True):
        expected = mla_each.reference(replace(batch, softmax_scale=scale))
        assert_close(result.out, expected.out, {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}[mla_each.dtype], "out")
        assert_close(result.lse, expected.lse, 1e-4 if gain < 1 else 1e-2, "lse")
        mla_each.decode(replace(mla_each.pick(batch, [1, 0, 1]), softmax_scale=scale)).assert_same(result[[1, 0, 1]])
    for other in rows[1:]:
        if mla_each.dtype == torch.float32:
            assert_close(rows[0].out[0], other.out[0], 1e-6, "one token")
        else:
            assert_bitwise_equal(rows[0].out[0], other.out[0], "one token")
        rows[0][1:].assert_differs(other[1:])


def test_values_far_below_the_maximum(mla_each):
    """A value column that only hidden-by-weight tokens carry is tiny, and never NaN."""
    split = mla_each.order.kv_split
    batch = mla_each.batch([Request(split + 10, key=1)], page_size=64)
    latent = batch.kv_cache[..., : mla_each.kv_lora_rank]
    latent[..., 0] = torch.where(latent[..., 0].isnan(), latent[..., 0], 0.0)
    first = batch.slots(0)[3]
    batch.kv_cache.view(-1, batch.kv_cache.shape[-1])[first, 0] = 1.0
    batch.q[..., 0] = -120.0
    rows = mla_each.decode(replace(batch, softmax_scale=1.0))
    expected = mla_each.reference(replace(batch, softmax_scale=1.0))
    assert_close(rows.out, expected.out, 2e-2)
    assert bool((rows.out[..., 0].double().abs() < 1e-30).all())


def test_lse_where_one_token_dominates(mla_each):
    """The weights are rounded to 16 bits before they are multiplied, the sum for lse is not."""
    batch = mla_each.batch([Request(seq_len, key=seq_len) for seq_len in (2, 40, mla_each.order.kv_split + 9)])
    for row in range(3):
        token = batch.kv(row)[1]
        batch.q[row] = token * 6
    batch = replace(batch, softmax_scale=0.02)  # logits of 20: at 265 the fp32 products alone are off by 3e-4
    assert_close(mla_each.decode(batch).lse, mla_each.reference(batch).lse, 1e-4, "lse")
