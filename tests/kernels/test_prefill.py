"""`mla_prefill` against the float64 reference, its edges, and what it refuses."""

from dataclasses import replace

import pytest
import torch
from memory import at_one_address
from prefill_cases import NAN, starts

from triton_mla import PrefillState, mla_prefill
from triton_mla.testing import assert_bitwise_equal
from triton_mla.tuning import PrefillOrder, PrefillSchedule, ReductionOrder

ATOL = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}
LONG = 1 << 20


def check(mha, rows, batch, **options):
    expected = mha.reference(batch, **options)
    assert rows.out.dtype == mha.dtype and rows.lse.dtype == torch.float32
    rows.assert_close(expected, ATOL[mha.dtype])
    empty = expected.lse.isinf()
    assert bool((rows.out[empty] == 0).all())


def requests(mha):
    """Context, none, one token, whole tiles, nothing at all, no keys, and more queries than keys."""
    tile = mha.tile
    return [(5, 3 * tile + 7), (tile + 9, tile + 9), (1, 2 * tile), (2 * tile, 2 * tile), (0, 0), (3, 0), (0, 9), (20, 12)]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
def test_ragged(mha_each, causal):
    batch = mha_each.make(requests(mha_each))
    check(mha_each, mha_each.prefill(batch, causal=causal), batch, causal=causal)


@pytest.mark.parametrize("nope, rope, value", [(128, 64, 128), (64, 32, 64), (192, 64, 256), (48, 16, 80), (16, 0, 16), (240, 256, 176), (256, 48, 32)])
def test_head_dims(mha, nope, rope, value):
    mha = mha.with_(nope=nope, rope=rope, value=value)
    batch = mha.make([(17, mha.tile + 3), (2, 2)])
    check(mha, mha.prefill(batch), batch)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("nope, rope, value", [(128, 64, 128), (192, 64, 256)])
def test_head_dims_of_other_types(mha, nope, rope, value, dtype):
    test_head_dims(mha.with_(dtype=dtype), nope, rope, value)


@pytest.mark.parametrize("heads", [1, 3, 5])
def test_head_counts_and_memory_around(mha, heads):
    mha = mha.with_(num_heads=heads)
    batch = mha.make([(9, mha.tile + 9), (0, 4), (70, 70)])
    guard = 64
    memory = torch.full((79 * heads * mha.value + 2 * guard,), 7.0, dtype=mha.dtype, device=mha.device)
    out = memory[guard:-guard].view(79, heads, mha.value)
    rows = mha.prefill(batch, out=out)
    assert rows.out.data_ptr() == out.data_ptr()
    check(mha, rows, batch)
    assert bool((memory[:guard] == 7.0).all()) and bool((memory[-guard:] == 7.0).all())


def test_default_position_is_bottom_right(mha):
    batch = mha.make(requests(mha))
    at = torch.tensor([n - m for m, n in batch.requests], dtype=torch.int32, device=mha.device)
    mha.prefill(batch, positions=at).assert_same(mha.prefill(batch))


@pytest.mark.parametrize("at", [-1000, -3, 0, 2, 1000, 2**31 - 1, 2**31 - 3, -(2**31)])
def test_positions(mha, at):
    batch = mha.make([(9, mha.tile + 5), (6, 0), (4, 4)])
    positions = torch.full((3,), at, dtype=torch.int32, device=mha.device)
    check(mha, mha.prefill(batch, positions=positions), batch, positions=positions)


def test_padding_tokens(mha):
    batch = mha.make([(5, mha.tile + 5), (70, 70)])
    rows = mha.prefill(batch)
    padded = replace(batch, q=torch.cat([batch.q, torch.full_like(batch.q, NAN)]))
    more = mha.prefill(padded)
    more[:75].assert_same(rows)
    more[75:].assert_empty()


def test_nothing(mha):
    batch = mha.make([(5, 0), (3, 0)])
    mha.prefill(batch).assert_empty()
    no_queries = mha.make([(0, 5), (0, 3)])
    assert mha.prefill(no_queries).out.shape == (0, mha.num_heads, mha.value)
    none = replace(batch, cu_seqlens_q=batch.cu_seqlens_q[:1], cu_seqlens_k=batch.cu_seqlens_k[:1])
    mha.prefill(none).assert_empty()


def test_memory_that_is_not_the_requests(mha):
    """NaN in other requests' keys and after the last: the end of a tile is not read."""
    batch = mha.make([(9, 9), (40, mha.tile + 40), (5, 5)])
    alone = mha.prefill(batch)[batch.rows(1)]
    kv = torch.full((len(batch.k_pe) + 300, mha.num_heads, mha.nope + mha.value), NAN, dtype=mha.dtype, device=mha.device)
    k_pe = torch.full((len(kv), mha.rope), NAN, dtype=mha.dtype, device=mha.device)
    own = slice(9, 9 + mha.tile + 40)
    kv[own, :, : mha.nope], kv[own, :, mha.nope :], k_pe[own] = batch.k_nope[own], batch.v[own], batch.k_pe[own]
    q = torch.full_like(batch.q, NAN)
    q[batch.rows(1)] = batch.q[batch.rows(1)]
    dirty = replace(batch, q=q, k_nope=kv[..., : mha.nope], k_pe=k_pe, v=kv[..., mha.nope :])
    mha.prefill(dirty)[dirty.rows(1)].assert_same(alone)


def test_strides(mha):
    batch = mha.make([(9, mha.tile + 9), (40, 40)])
    rows = mha.prefill(batch)

    def spread(t, dim):
        wide = torch.full([3 * n if d == dim else n for d, n in enumerate(t.shape)], NAN, dtype=t.dtype, device=t.device)
        view = wide.narrow(dim, 0, 3 * t.shape[dim])[tuple(slice(None, None, 3) if d == dim else slice(None) for d in range(t.dim()))]
        view.copy_(t)
        return view

    for dim in (0, 1):
        strided = replace(batch, q=spread(batch.q, dim), k_nope=spread(batch.k_nope, dim), k_pe=spread(batch.k_pe, 0), v=spread(batch.v, dim))
        out = torch.full((49, 2 * mha.num_heads, mha.value), NAN, dtype=mha.dtype, device=mha.device)[:, ::2]
        mha.prefill(strided, out=out).assert_same(rows)
    contiguous = replace(batch, k_nope=batch.k_nope.contiguous(), v=batch.v.contiguous())
    mha.prefill(contiguous).assert_same(rows)


def test_return_values(mha):
    batch = mha.make([(9, mha.tile + 9)])
    rows = mha.prefill(batch)
    out = mla_prefill(*batch.tensors, softmax_scale=mha.scale, order=mha.order)
    assert_bitwise_equal(out, rows.out)
    state = mha.prefill(batch, return_state=True)
    assert isinstance(state, PrefillState) and state.order == mha.order
    assert state.acc.shape == (9, mha.num_heads, mha.value) and state.total.shape == (9, mha.num_heads, 8)
    again = mha.prefill(batch, state=state, return_state=True)
    assert again is state  # changed in place


def test_large_scores(mha_each):
    """Weights of one token, and references that move."""
    batch = mha_each.make([(30, 2 * mha_each.tile + 30)])
    batch = replace(batch, q=batch.q * 30)
    rows = mha_each.prefill(batch)
    expected = mha_each.reference(batch)
    rows.assert_close(expected, 5e-2 if mha_each.dtype != torch.float32 else 2e-4, 2e-3)


@pytest.mark.gpu
def test_keys_past_the_end_are_nan(mha):
    batch = mha.make([(9, 9), (4, 4)])
    long = replace(batch, cu_seqlens_k=starts([9, 400], mha.device))
    rows = mha.prefill(long)
    assert bool(rows.out[9:].isnan().all()) and bool(rows.lse[9:].isnan().all())
    rows[:9].assert_same(mha.prefill(batch)[:9])


def test_inside_torch_compile(mha):
    batch = mha.make([(9, 2 * mha.tile + 9), (3, 3)])
    expected = mha.prefill(batch)
    at = torch.tensor([n - m for m, n in batch.requests], dtype=torch.int32, device=mha.device)
    first, rest = batch.keys(0, mha.tile), batch.keys(mha.tile, LONG)
    options = {"softmax_scale": mha.scale, "order": mha.order}

    @torch.compile(backend="eager", fullgraph=True)
    def model(batch, first, rest, at, after):
        plain = mla_prefill(*batch, return_lse=True, **options)
        state = mla_prefill(*first, positions=at, return_state=True, **options)
        return plain, mla_prefill(*rest, positions=after, state=state, return_lse=True, **options)

    for rows in model(batch.tensors, first.tensors, rest.tensors, at, at - mha.tile):
        mha.rows(*rows).assert_same(expected)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["portable", "hopper"])
def test_starts_that_only_the_device_sees_do_not_lead_out_of_the_tensors(mha, form):
    mha = mha.with_(dtype=torch.bfloat16)
    batch = mha.make([(300, 400), (40, 40), (9, 30)])
    guarded = torch.full((len(batch.q) + 800, mha.num_heads, mha.value), 7.0, dtype=mha.dtype, device=mha.device)
    out = guarded[400:-400]
    for begins in ([5, 300, 340, 349], [0, 300, 340, 700], [0, 340, 300, 720], [0, 349, 0, 349], [-20, 300, 340, 349], [400, 500, 600, 700]):
        bad = torch.tensor(begins, dtype=torch.int32, device=mha.device)
        mha.prefill(replace(batch, cu_seqlens_q=bad), out=out, schedule=PrefillSchedule(form=form))
        assert bool((guarded[:400] == 7).all()) and bool((guarded[-400:] == 7).all()), begins


@pytest.fixture
def good(mha):
    batch = mha.make([(5, mha.tile + 5), (3, 3)])
    names = ("q", "k_nope", "k_pe", "v", "cu_seqlens_q", "cu_seqlens_k")
    arguments = dict(zip(names, batch.tensors, strict=True))
    out = torch.full((8, mha.num_heads, mha.value), 7.0, dtype=mha.dtype, device=mha.device)
    return {**arguments, "softmax_scale": mha.scale, "order": mha.order, "out": out}


def refuse(good, match, **changes):
    with pytest.raises(ValueError, match=match) as caught:
        mla_prefill(**{**good, **changes})
    assert bool((good["out"] == 7.0).all())
    return str(caught.value)


@pytest.mark.parametrize("name", ["q", "k_nope", "k_pe", "v", "cu_seqlens_q", "cu_seqlens_k", "out"])
def test_refused_tensors(good, name):
    value = good[name]
    other = torch.int64 if value.dtype == torch.int32 else torch.float64
    for bad in (value[None], value.to(other), value.to("meta"), [1], value[:-1]):
        assert name.split("_")[0] in refuse(good, f"{name}|k_nope|q|out", **{name: bad})
    if value.is_floating_point():
        refuse(good, f"{name}|k_nope|q|v", **{name: value[..., :-1]})
        refuse(good, f"{name}.*contiguous", **{name: value.transpose(0, -1)})


def test_refused_values(good, mha):
    for scale in (None, NAN, 0, -1.0, "1"):
        refuse(good, "softmax_scale", softmax_scale=scale)
    for order in (3, "tree", PrefillSchedule()):
        refuse(good, "order", order=order)
    refuse(good, "schedule", schedule=mha.order)
    for name in ("causal", "return_lse", "return_state"):
        refuse(good, f"{name}='no'", **{name: "no"})
    at = torch.zeros(2, dtype=torch.int32, device=mha.device)
    refuse(good, "positions", positions=at, causal=False)
    for bad in (at[:1], at.long(), [0, 0]):
        refuse(good, "positions", positions=bad)
    refuse(good, "return_state", return_state=True)
    refuse({**good}, "return_state", return_state=True, return_lse=True)
    with pytest.raises(ValueError, match="qk_nope_head_dim=8"):
        small = {**good, "k_nope": good["k_nope"][..., :8], "q": good["q"][..., : 8 + mha.rope]}
        mla_prefill(**small)
    with pytest.raises(ValueError, match="q has 0 heads"):
        mla_prefill(**{**good, "q": good["q"][:, :0]})


def test_refused_states(good, mha):
    good["out"].fill_(7.0)
    state = mla_prefill(**{**good, "out": None, "return_state": True})
    for name in ("reference", "total", "acc"):
        value = getattr(state, name)
        for bad in (value[:-1], value[None], value.double(), value.to("meta"), value.transpose(0, 1), None):
            refuse(good, rf"state\.{name}", state=replace(state, **{name: bad}))
    other = replace(mha.order, reference_step=4)
    assert "reference_step=4" in refuse(good, r"state\.order", state=replace(state, order=other))
    refuse(good, r"state\.order", state=state, order=other)
    refuse(good, "state", state=(state.reference, state.total, state.acc))
    for other in ("x", None, ReductionOrder()):
        refuse(good, r"state\.order", state=replace(state, order=other), order=None)


def test_shared_memory(good, mha):
    for name in ("q", "k_nope", "k_pe", "v", "cu_seqlens_q", "cu_seqlens_k", "positions"):
        value = torch.zeros(2, dtype=torch.int32, device=mha.device) if name == "positions" else good[name].contiguous()
        out, value = at_one_address(good["out"], value)
        refuse(good, f"out has shape .* must not share memory with {name}, since", **{name: value, "out": out})


def test_shared_memory_of_a_state(good, mha):
    no_out = {**good, "out": None, "return_state": True}
    state = mla_prefill(**no_out)
    out, acc = at_one_address(good["out"], state.acc)
    refuse(good, r"out has shape .* must not share memory with state\.acc", out=out, state=replace(state, acc=acc))
    acc, total = at_one_address(state.acc, state.total)
    with pytest.raises(ValueError, match=r"state\.acc has shape .* share memory with state\.total"):
        mla_prefill(**{**no_out, "state": replace(state, acc=acc, total=total)})
    acc, q = at_one_address(state.acc, good["q"].contiguous())
    with pytest.raises(ValueError, match=r"state\.acc has shape .* share memory with q"):
        mla_prefill(**{**no_out, "state": replace(state, acc=acc), "q": q})


@pytest.mark.skipif(torch.cuda.is_available(), reason="the host does not read begins that lie on a device")
@pytest.mark.parametrize("name, total", [("cu_seqlens_q", 8), ("cu_seqlens_k", 64)])
def test_refused_begins(good, mha, name, total):
    total = len(good["q" if name == "cu_seqlens_q" else "k_pe"])
    for bad in ([1, 2, 3], [0, 5, 3], [0, 5, total + 1]):
        message = refuse(good, name, **{name: torch.tensor(bad, dtype=torch.int32)})
        assert str(bad) in message


@pytest.mark.parametrize("field, bad", [("block_n", 48), ("block_n", True), ("reference_step", 3), ("input_precision", "tf32"),
                                        ("fp_fusion", True)])
def test_refused_orders(field, bad):
    with pytest.raises(ValueError, match=field):
        PrefillOrder(**{field: bad})


@pytest.mark.parametrize("field, bad", [("block_m", 48), ("num_warps", 3), ("num_stages", 0), ("block_k", 8), ("group_bytes", -1)])
def test_refused_schedules(field, bad):
    with pytest.raises(ValueError, match=field):
        PrefillSchedule(**{field: bad})
