"""W_UK folded into queries and W_UV applied to latents: right, and each row as if it were alone."""

import pytest
import torch

from triton_mla.absorb import absorb_query, project_values, split_kv_b
from triton_mla.companion import bmm
from triton_mla.reference import absorb_q, apply_w_uv
from triton_mla.testing import assert_bitwise_equal, assert_close, bitwise_equal

ATOL = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(scope="module")
def sizes(mla):
    """(heads, nope, rope, R, V)"""
    return (16, 128, 64, 512, 128) if mla.device.type == "cuda" else (2, 32, 16, 64, 32)


def data(mla, sizes, rows, seed=0):
    """q [rows, H, nope + P] and a kv_b weight, both of unit size in the results."""
    heads, nope, rope, rank, value = sizes
    chance = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, heads, nope + rope, generator=chance)
    w = torch.randn(heads * (nope + value), rank, generator=chance) * nope**-0.5
    return q.to(mla.device, mla.dtype), w.to(mla.device, mla.dtype)


def both(mla, sizes, q, w):
    """(absorbed queries, values of these taken for attended latents)"""
    uk, uv = split_kv_b(w, sizes[0], sizes[1])
    absorbed = absorb_query(q[..., : sizes[1]], uk)
    return absorbed, project_values(absorbed, uv)


def test_against_the_reference(mla_each, sizes):
    q, w = data(mla_each, sizes, 21)
    uk, uv = split_kv_b(w, sizes[0], sizes[1])
    absorbed, values = both(mla_each, sizes, q, w)
    assert absorbed.dtype == values.dtype == mla_each.dtype
    assert_close(absorbed, absorb_q(q[..., : sizes[1]].double(), uk.double()), ATOL[mla_each.dtype])
    assert_close(values, apply_w_uv(absorbed.double(), uv.double()), ATOL[mla_each.dtype] * (sizes[3] / sizes[1]) ** 0.5)


def test_a_row_alone_and_among_others(mla_each, sizes):
    """Powers of two among the inner sizes, and rows 1, 2, 17, 64, 300: what another batch-invariant product got wrong."""
    counts = (300, 64, 17, 2, 1) if mla_each.device.type == "cuda" else (70, 17, 1)
    q, w = data(mla_each, sizes, counts[0])
    whole = both(mla_each, sizes, q, w)
    for count in counts[1:]:
        for first in (0, counts[0] - count):
            for got, expected in zip(both(mla_each, sizes, q[first : first + count], w), whole, strict=True):
                assert_bitwise_equal(got, expected[first : first + count], f"{count} rows from {first}:")
    order = torch.randperm(counts[0], generator=torch.Generator().manual_seed(1)).to(mla_each.device)
    for got, expected in zip(both(mla_each, sizes, q[order], w), whole, strict=True):
        assert_bitwise_equal(got, expected[order], "in another order:")
    assert not bitwise_equal(whole[0][order], whole[0])


def test_heads_of_a_rank(mla, sizes):
    q, w = data(mla, sizes, 5)
    heads = sizes[0] // 2
    whole = both(mla, sizes, q, w)
    some = both(mla, (heads, *sizes[1:]), q[:, heads:], w.view(sizes[0], -1, sizes[3])[heads:].flatten(0, 1))
    for got, expected in zip(some, whole, strict=True):
        assert_bitwise_equal(got, expected[:, heads:])


def test_they_are_products_of_each_head(mla_each, sizes):
    q, w = data(mla_each, sizes, 5)
    for got, x, heads in zip(both(mla_each, sizes, q, w), (q[..., : sizes[1]], both(mla_each, sizes, q, w)[0]), split_kv_b(w, sizes[0], sizes[1]), strict=True):
        assert got.is_contiguous()
        assert_bitwise_equal(got.transpose(0, 1).contiguous(), bmm(x.transpose(0, 1), heads))


@pytest.mark.gpu
def test_control_another_order_of_addition_differs(mla, sizes):
    """The inner dimension backwards: the same sum in another order."""
    mla = mla.with_dtype(torch.float32)
    q, w = data(mla, sizes, 5)
    uk, _ = split_kv_b(w, sizes[0], sizes[1])
    nope = q[..., : sizes[1]]
    assert not bitwise_equal(absorb_query(nope.flip(2).contiguous(), uk.flip(1).contiguous()), absorb_query(nope, uk))


@pytest.mark.parametrize("sizes", [(3, 40, 0, 48, 24), (1, 17, 16, 33, 5)], ids=str)
def test_sizes_that_fill_no_tile_and_memory_around_them(mla, sizes):
    q, w = data(mla, sizes, 19)
    uk, uv = split_kv_b(w, sizes[0], sizes[1])
    padded = torch.full((21, sizes[0], sizes[3] + 2), float("nan"), dtype=mla.dtype, device=mla.device)
    absorbed = absorb_query(q[..., : sizes[1]], uk, out=padded[1:20, :, :-2])
    assert_close(absorbed, absorb_q(q[..., : sizes[1]].double(), uk.double()), ATOL[mla.dtype])
    assert bool(padded[0].isnan().all() and padded[20].isnan().all() and padded[..., -2:].isnan().all())
    assert_close(project_values(absorbed, uv), apply_w_uv(absorbed.double(), uv.double()), 2 * ATOL[mla.dtype])


def test_strides_do_not_matter(mla, sizes):
    q, w = data(mla, sizes, 9)
    uk, uv = split_kv_b(w, sizes[0], sizes[1])
    absorbed, values = both(mla, sizes, q, w)
    assert_bitwise_equal(absorb_query(q[..., : sizes[1]].contiguous(), uk.contiguous()), absorbed)
    assert_bitwise_equal(project_values(absorbed.transpose(0, 1).contiguous().transpose(0, 1), uv.contiguous()), values)


@pytest.mark.gpu
def test_inside_torch_compile(mla, sizes):
    q, w = data(mla, sizes, 5)
    for got, expected in zip(torch.compile(both)(mla, sizes, q + 0, w), both(mla, sizes, q, w), strict=True):
        assert_bitwise_equal(got, expected)


def test_no_rows(mla, sizes):
    q, w = data(mla, sizes, 0)
    absorbed, values = both(mla, sizes, q, w)
    assert absorbed.shape == (0, sizes[0], sizes[3]) and values.shape == (0, sizes[0], sizes[4])


def test_split_kv_b_copies_nothing(mla, sizes):
    _, w = data(mla, sizes, 1)
    heads, nope, _, rank, value = sizes
    uk, uv = split_kv_b(w, heads, nope)
    assert uk.shape == (heads, nope, rank) and uv.shape == (heads, rank, value)
    assert uk.untyped_storage().data_ptr() == uv.untyped_storage().data_ptr() == w.untyped_storage().data_ptr()
    assert_bitwise_equal(uv[1, 3], w.view(heads, -1, rank)[1, nope:, 3])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"w_kv_b": None}, "w_kv_b=None"),
        ({"w_kv_b": torch.zeros(12)}, "w_kv_b has shape"),
        ({"w_kv_b": torch.zeros(12, 4).to_sparse()}, "w_kv_b has layout"),
        ({"num_heads": 0}, "num_heads=0"),
        ({"num_heads": -1}, "num_heads=-1"),
        ({"num_heads": 5}, "num_heads=5 must be .* divides the 12 rows"),
        ({"num_heads": 2.0}, "num_heads=2.0"),
        ({"num_heads": True}, "num_heads=True"),
        ({"qk_nope_head_dim": 0}, "qk_nope_head_dim=0 must be an int from 1 to 5"),
        ({"qk_nope_head_dim": 6}, "qk_nope_head_dim=6"),
        ({"qk_nope_head_dim": -2}, "qk_nope_head_dim=-2"),
        ({"qk_nope_head_dim": None}, "qk_nope_head_dim=None"),
    ],
)
def test_bad_split(change, words):
    with pytest.raises(ValueError, match=words):
        split_kv_b(**{"w_kv_b": torch.zeros(12, 4), "num_heads": 2, "qk_nope_head_dim": 2, **change})


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda q, w: (q[0], w), "q_nope has shape"),
        (lambda q, w: (q.to(torch.float64), w), "q_nope has dtype"),
        (lambda q, w: (q, w.double()), "w_uk=torch.float64"),
        (lambda q, w: (q, None), "w_uk=None"),
        (lambda q, w: (q, w[:1]), "w_uk has shape"),
        (lambda q, w: (q, w[:, :-1]), "w_uk has shape"),
        (lambda q, w: (q, w[..., ::2].transpose(1, 2)[:, : q.shape[2]]), "w_uk has "),
        (lambda q, w: (q[..., ::2], w[:, ::2]), "q_nope has strides"),
    ],
)
def test_bad_input(mla, sizes, change, word):
    q, w = data(mla, sizes, 3)
    with pytest.raises(ValueError, match=word):
        absorb_query(*change(q[..., : sizes[1]], split_kv_b(w, sizes[0], sizes[1])[0]))


def test_bad_out(mla, sizes):
    q, w = data(mla, sizes, 3)
    uk, _ = split_kv_b(w, sizes[0], sizes[1])
    with pytest.raises(ValueError, match="out has shape"):
        absorb_query(q[..., : sizes[1]], uk, out=q)
    out = absorb_query(q[..., : sizes[1]], uk)
    with pytest.raises(ValueError, match="out.*strides"):
        absorb_query(q[..., : sizes[1]], uk, out=out[:1].expand_as(out))
