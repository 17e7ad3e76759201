"""write_kv_cache puts each token into its slot and touches nothing else."""

import pytest
import torch

from triton_mla import reference, write_kv_cache
from triton_mla.testing import Request, assert_bitwise_equal


@pytest.fixture
def tokens(mla_each):
    """20 tokens of both parts, and a cache that is full of NaN."""
    generator = torch.Generator().manual_seed(5)
    rank, rope = mla_each.kv_lora_rank, mla_each.qk_rope_head_dim
    both = torch.randn(20, rank + rope, generator=generator).to(mla_each.device, mla_each.dtype)
    cache = torch.full((6, 16, rank + rope), float("nan"), dtype=mla_each.dtype, device=mla_each.device)
    return both[:, :rank].contiguous(), both[:, rank:].contiguous(), cache


def slots_of(device, ids):
    return torch.tensor(ids, dtype=torch.int64, device=device)


SLOTS = [95, 0, -1, 17, 18, 16, 40, -1, 3, 1, 2, 50, 51, 52, 53, 54, 55, 64, 63, -1]


def test_tokens_land_in_their_slots(tokens):
    kv_c, k_pe, cache = tokens
    expected = cache.clone()
    slots = slots_of(cache.device, SLOTS)
    reference.write_kv_cache(kv_c, k_pe, expected, slots)
    write_kv_cache(kv_c, k_pe, cache, slots)
    assert_bitwise_equal(cache, expected, "cache", allow_nan=True)
    assert int(cache.isnan().any(-1).sum()) == 96 - 17


def test_strided_cache_and_tokens(tokens):
    kv_c, k_pe, cache = tokens
    expected = cache.clone()
    slots = slots_of(cache.device, SLOTS)
    reference.write_kv_cache(kv_c, k_pe, expected, slots)
    big = torch.full((6, 2, 16, cache.shape[2] + 24), 7.0, dtype=cache.dtype, device=cache.device)
    view = big[:, 0, :, : cache.shape[2]]
    view[:] = cache
    both = torch.cat([kv_c, k_pe], -1)
    write_kv_cache(both[:, : kv_c.shape[1]], both[:, kv_c.shape[1] :], view, slots)
    assert_bitwise_equal(view, expected, "view", allow_nan=True)
    assert bool((big[:, 1] == 7.0).all()) and bool((big[..., cache.shape[2] :] == 7.0).all())


def test_equal_slots(tokens):
    """Refused where the host sees them; on a GPU the slot holds a mixture of the two tokens, and nothing else is written."""
    kv_c, k_pe, cache = tokens
    slots = slots_of(cache.device, [33, 33])
    if cache.device.type == "cpu":
        with pytest.raises(ValueError, match="slot_mapping.*33.*twice"):
            write_kv_cache(kv_c[:2], k_pe[:2], cache, slots)
        assert bool(cache.isnan().all())
        return
    write_kv_cache(kv_c[:2], k_pe[:2], cache, slots)
    slots = cache.view(96, -1)
    both = torch.cat([kv_c[:2], k_pe[:2]], 1)
    assert bool((slots[33] == both).any(0).all())
    assert bool(slots[torch.arange(96, device=slots.device) != 33].isnan().all())


def test_nothing_to_write(tokens):
    kv_c, k_pe, cache = tokens
    write_kv_cache(kv_c[:0], k_pe[:0], cache, slots_of(cache.device, []))
    write_kv_cache(kv_c, k_pe, cache, slots_of(cache.device, [-1] * 20))
    write_kv_cache(kv_c[:1], k_pe[:1], cache[:0], slots_of(cache.device, [-1]))
    assert bool(cache.isnan().all())


def test_without_rope(tokens):
    kv_c, k_pe, cache = tokens
    narrow = torch.full((6, 16, kv_c.shape[1]), float("nan"), dtype=cache.dtype, device=cache.device)
    write_kv_cache(kv_c, k_pe[:, :0], narrow, slots_of(cache.device, list(range(20))))
    assert_bitwise_equal(narrow.view(96, -1)[:20], kv_c)


def test_written_tokens_are_attended(mla):
    batch = mla.batch([Request(70, key=1), Request(33, key=2)])
    cache = torch.full_like(batch.kv_cache, float("nan"))
    tokens = torch.cat([batch.kv(0), batch.kv(1)])
    slots = torch.cat([batch.slots(0), batch.slots(1)])
    write_kv_cache(tokens[:, : batch.kv_lora_rank], tokens[:, batch.kv_lora_rank :], cache, slots)
    assert_bitwise_equal(cache, batch.kv_cache, allow_nan=True)


@pytest.mark.parametrize("page_size", [1, 16, 64, 480])
def test_page_sizes(mla, page_size):
    batch = mla.batch([Request(70, key=1)], page_size=page_size)
    cache = torch.full_like(batch.kv_cache, float("nan"))
    tokens = batch.kv(0)
    write_kv_cache(tokens[:, : batch.kv_lora_rank], tokens[:, batch.kv_lora_rank :], cache, batch.slots(0))
    assert_bitwise_equal(cache, batch.kv_cache, allow_nan=True)


def test_bad_arguments_write_nothing(tokens):
    kv_c, k_pe, cache = tokens
    slots = slots_of(cache.device, list(range(20)))
    good = {"kv_c": kv_c, "k_pe": k_pe, "kv_cache": cache, "slot_mapping": slots}
    bad = [
        ("kv_c", kv_c[0]),
        ("kv_c", kv_c[:19]),
        ("kv_c", kv_c[:, :-16]),
        ("kv_c", kv_c.double()),
        ("k_pe", k_pe[:, None]),
        ("k_pe", k_pe[:5]),
        ("k_pe", k_pe.double()),
        ("kv_cache", cache[0]),
        ("kv_cache", cache[..., :-1]),
        ("kv_cache", cache.int()),
        ("slot_mapping", slots[:, None]),
        ("slot_mapping", slots[:7]),
        ("slot_mapping", slots.int()),
        ("slot_mapping", slots.double()),
    ]
    if cache.device.type == "cpu":
        bad += [("slot_mapping", slots + 90), ("slot_mapping", slots - 2)]
    for name, value in bad:
        with pytest.raises(ValueError):
            write_kv_cache(**{**good, name: value})
    for name, value in good.items():
        with pytest.raises(ValueError, match=f"^{name} is on meta"):
            write_kv_cache(**{**good, name: value.to("meta")})
    with pytest.raises(ValueError, match="k_scale"):
        write_kv_cache(**good, k_scale=0.5)
    assert bool(cache.isnan().all())
