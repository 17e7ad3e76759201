"""Page sizes, page orders, strided views and huge caches: where the bytes lie never reaches a bit."""

from dataclasses import replace

import pytest
import torch

from triton_mla.testing import Request, make_paged_batch

PAGE_SIZES = [1, 16, 32, 48, 64, 128, 256, 480, 528]


@pytest.fixture(scope="module")
def requests(mla):
    return [Request(seq_len, min(seq_len, 2), key=seq_len) for seq_len in (1, 100, 1000 if mla.num_heads > 4 else 180)]


@pytest.fixture(scope="module")
def expected(mla, requests):
    batch = mla.batch(requests, page_size=64, page_order="sequential", stale=0.0, table_tail=0)
    rows = mla.extend(batch)
    mla.check(rows, batch)
    rows.assert_differs(mla.recut().extend(batch))
    return rows


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("page_order", ["sequential", "reversed", "random"])
def test_page_size_and_order(mla, requests, expected, page_size, page_order):
    mla.extend(mla.batch(requests, page_size=page_size, page_order=page_order)).assert_same(expected)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_page_size_decode(mla, page_size):
    requests = [Request(seq_len, key=seq_len) for seq_len in (1, 100, 150)]
    mla.decode(mla.batch(requests, page_size=page_size)).assert_same(mla.decode(mla.batch(requests, page_size=64)))


@pytest.mark.parametrize("page_size", [2, 8, 24])
@pytest.mark.parametrize("op", ["decode", "extend"])
def test_unsupported_page_size(mla, page_size, op):
    with pytest.raises(ValueError, match=rf"{page_size}.*multiple of 16"):
        getattr(mla, op)(mla.batch([Request(5)], page_size=page_size))


def test_rows_that_share_pages(mla):
    requests = [Request(100, key=1), Request(90, key=1), Request(100, key=1)]
    apart = mla.batch(requests, page_size=16)
    table = apart.block_table.clone()
    table[1:] = table[0]
    mla.decode(replace(apart, block_table=table)).assert_same(mla.decode(apart))


def _swapped_planes(tensor):
    """The same values in every other plane of a larger tensor."""
    big = torch.full((len(tensor), 2, *tensor.shape[1:]), float("nan"), dtype=tensor.dtype, device=tensor.device)
    big[:, 0] = tensor
    return big[:, 0]


def _every_other_row(tensor):
    big = torch.full((2 * len(tensor), *tensor.shape[1:]), 7, dtype=tensor.dtype, device=tensor.device)
    big[::2] = tensor
    return big[::2]


def _wide(tensor):
    """The first columns of wider rows."""
    big = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 24), 7, dtype=tensor.dtype, device=tensor.device)
    big[..., : tensor.shape[-1]] = tensor
    return big[..., : tensor.shape[-1]]


@pytest.mark.parametrize("op", ["decode", "extend"])
@pytest.mark.parametrize(
    "field, view",
    [
        ("kv_cache", _swapped_planes),
        ("kv_cache", _wide),
        ("kv_cache", _every_other_row),
        ("q", _swapped_planes),
        ("q", _wide),
        ("q", _every_other_row),
        ("q", lambda q: q.transpose(0, 1).contiguous().transpose(0, 1)),
        ("block_table", _wide),
        ("block_table", _every_other_row),
        ("seq_lens", _wide),
        ("cu_seqlens_q", _wide),
    ],
)
def test_views(mla, op, field, view):
    batch = mla.batch([Request(70, key=1), Request(0, key=2), Request(33, key=3)])
    viewed = view(getattr(batch, field))
    assert torch.equal(viewed.nan_to_num(), getattr(batch, field).nan_to_num())
    getattr(mla, op)(replace(batch, **{field: viewed})).assert_same(getattr(mla, op)(batch))


@pytest.mark.parametrize("op", ["decode", "extend"])
@pytest.mark.parametrize("transposed", [False, True])
def test_query_pair(mla, op, transposed):
    batch = mla.batch([Request(70, key=1), Request(33, key=3)])
    q = batch.q.transpose(0, 1).contiguous().transpose(0, 1) if transposed else batch.q
    rank = batch.kv_lora_rank
    expected = getattr(mla, op)(batch)
    getattr(mla, op)(batch, q=(q[..., :rank], q[..., rank:])).assert_same(expected)
    getattr(mla, op)(batch, q=(q[..., :rank].contiguous(), q[..., rank:].contiguous())).assert_same(expected)


@pytest.mark.parametrize("op", ["decode", "extend"])
def test_query_pair_without_rope(mla, op):
    batch = mla.batch([Request(70, key=1)], qk_rope_head_dim=0)
    getattr(mla, op)(batch, q=(batch.q, batch.q[..., :0])).assert_same(getattr(mla, op)(batch))


@pytest.mark.parametrize("op", ["decode", "extend"])
def test_out_is_a_strided_view(mla, op):
    batch = mla.batch([Request(70, key=1), Request(33, key=3)])
    big = torch.full((2, 2 * mla.num_heads, mla.kv_lora_rank + 8), 7.0, dtype=mla.dtype, device=mla.device)
    out = big[:, ::2, : mla.kv_lora_rank]
    getattr(mla, op)(batch, out=out).assert_same(getattr(mla, op)(batch))
    assert bool((big[:, 1::2] == 7.0).all()) and bool((big[..., mla.kv_lora_rank :] == 7.0).all())


def _strided(tensor):
    """The same values, those of a row apart from each other."""
    return tensor.repeat_interleave(2, dim=-1)[..., ::2]


@pytest.mark.parametrize("name", ["q", "kv_cache", "block_table", "seq_lens", "cu_seqlens_q", "out", "lse"])
def test_rows_whose_elements_lie_apart_are_refused(mla, name):
    batch = mla.batch([Request(70, key=1), Request(33, key=3)])
    rows = mla.extend(batch)
    fields = {"out": rows.out, "lse": rows.lse, **vars(batch)}
    with pytest.raises(ValueError, match=f"{name}.*contiguous"):
        if name in ("out", "lse"):
            mla.extend(batch, **{name: _strided(fields[name])})
        else:
            mla.extend(replace(batch, **{name: _strided(fields[name])}))


@pytest.mark.parametrize("op", ["decode", "extend"])
def test_page_offsets_past_32_bits(mla, op):
    """Pages on both sides of byte 2^31 and of element 2^31 (byte 2^32). Memory in between is never touched."""
    mla = mla.with_dtype(torch.float16)
    near = mla.batch([Request(70, key=1), Request(33, key=2)], page_size=16, page_order="sequential", extra_pages=0)
    page, pages = near.kv_cache[0].numel(), len(near.kv_cache)
    half, full = (1 << 30) // page, (1 << 31) // page
    ids = torch.tensor([full - 1, full, full + 1, half, half + 1, 0, half - 1, full + 2], device=mla.device)[:pages]
    cache = torch.empty(full + 3, *near.kv_cache.shape[1:], dtype=mla.dtype, device=mla.device)
    cache[ids] = near.kv_cache
    table = torch.full_like(near.block_table, 2**31 - 1)
    for row, count in enumerate((5, 3)):
        table[row, :count] = ids[near.block_table[row, :count].long()].to(torch.int32)
    getattr(mla, op)(replace(near, kv_cache=cache, block_table=table)).assert_same(getattr(mla, op)(near))


@pytest.mark.gpu
def test_page_ids_of_a_large_pool(mla):
    straddling = [58_254, 58_255, 29_127, 29_128, 58_256]
    near = make_paged_batch([Request(300, key=1)], device=mla.device, page_order="sequential", extra_pages=0)
    pool = torch.empty(60_000, 64, 576, dtype=torch.bfloat16, device=mla.device)
    pool[straddling] = near.kv_cache
    table = torch.tensor([straddling], dtype=torch.int32, device=mla.device)
    far = replace(near, kv_cache=pool, block_table=table)
    mla.decode(far).assert_same(mla.decode(near))
    mla.extend(far).assert_same(mla.extend(near))

    big_pages = make_paged_batch([Request(1000, key=1)], device=mla.device, page_size=480, page_order="sequential")
    pool = pool.view(-1, 576)[: 7_800 * 480].view(7_800, 480, 576)
    pool[[7_766, 7_767, 7_768]] = big_pages.kv_cache[:3]
    table = torch.tensor([[7_766, 7_767, 7_768]], dtype=torch.int32, device=mla.device)
    mla.decode(replace(big_pages, kv_cache=pool, block_table=table)).assert_same(mla.decode(big_pages))
