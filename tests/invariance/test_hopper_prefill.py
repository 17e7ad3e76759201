"""The Hopper form of the prefill has the bits of the portable one."""

from dataclasses import replace

import pytest
import torch
from prefill_cases import NAN

from triton_mla import hopper_prefill
from triton_mla.prefill import mla_prefill
from triton_mla.testing import Request, assert_bitwise_equal, bitwise_equal
from triton_mla.tuning import PrefillSchedule, arch_of

pytestmark = pytest.mark.gpu
PORTABLE, HOPPER = PrefillSchedule(), PrefillSchedule(form="hopper")
RAGGED = [(1, 1), (64, 64), (129, 129), (0, 5), (300, 300), (128, 128), (257, 400), (77, 1077), (4, 0), (130, 50)]


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=str)
def mha16(request, mha):
    if arch_of(mha.device) != "sm_90" or not hopper_prefill.available():
        pytest.skip("for sm_90 and triton 3.6")
    return mha.with_(dtype=request.param)


@pytest.fixture
def launches(monkeypatch):
    """One entry for each launch of the Hopper form."""
    taken = []
    attend = hopper_prefill.attend
    monkeypatch.setattr(hopper_prefill, "attend", lambda *args, **options: (taken.append(1), attend(*args, **options)))
    return taken


def assert_same(mha, launches, batch, **options):
    launches.clear()
    rows = mha.prefill(batch, schedule=HOPPER, **options)
    assert len(launches) == 1
    rows.assert_same(mha.prefill(batch, schedule=PORTABLE, **options))
    return rows


@pytest.mark.parametrize("num_heads", [1, 5, 128])
def test_ragged(mha16, launches, num_heads):
    assert_same(mha16.with_(num_heads=num_heads), launches, mha16.with_(num_heads=num_heads).make(RAGGED))


MANY = [(1 + i % 3, 1 + i * 7 % 300) for i in range(300)]


@pytest.mark.parametrize("requests", [[(2000, 2000)], [(2, 2048)] * 3, MANY, [(5, 0), (3, 40)]], ids=["long", "new", "many", "keyless"])
def test_batches(mha16, launches, requests):
    assert_same(mha16, launches, mha16.make(requests, [1 + i % 5 for i in range(len(requests))]))


@pytest.mark.parametrize("group_bytes", [1, 1 << 19], ids=["alone", "some"])
def test_requests_in_groups(mha16, group_bytes):
    """Too many keys for one head of all requests to be worked on together."""
    batch = mha16.make(RAGGED)
    mha16.prefill(batch, schedule=replace(HOPPER, group_bytes=group_bytes)).assert_same(mha16.prefill(batch, schedule=PORTABLE))


def test_without_causality(mha16, launches):
    assert_same(mha16, launches, mha16.make(RAGGED), causal=False)


@pytest.mark.parametrize("at", [(0, 0), (-5, 200), (-130, 1000), (77, -400)])
def test_positions(mha16, launches, at):
    assert_same(mha16, launches, mha16.make([(200, 500), (300, 129)]), positions=torch.tensor(at, dtype=torch.int32, device=mha16.device))


def test_without_lse(mha16, launches):
    batch = mha16.make(RAGGED)
    outs = [mha16.prefill(batch, schedule=schedule).out for schedule in (HOPPER, PORTABLE)]
    alone = torch.full_like(outs[0], NAN)
    mla_prefill(*batch.tensors, softmax_scale=mha16.scale, order=mha16.order, schedule=HOPPER, out=alone)
    assert_bitwise_equal(alone, outs[0])
    assert_bitwise_equal(outs[1], outs[0])


def test_padding(mha16, launches):
    batch = mha16.make([(130, 130), (20, 200)])
    padded = replace(batch, q=torch.cat([batch.q, torch.full_like(batch.q[:70], NAN)]))
    rows = assert_same(mha16, launches, padded)
    rows[150:].assert_empty()


def ramp(batch, first, last):
    return replace(batch, k_nope=batch.k_nope * torch.linspace(first, last, len(batch.k_pe), device=batch.q.device).to(batch.q.dtype)[:, None, None])


def spikes(batch):
    """Every fortieth key draws the maximum up."""
    k_nope = batch.k_nope.clone()
    k_nope[::40] *= 30
    return replace(batch, k_nope=k_nope)


def nothing_at_first(batch):
    """Scores of -inf, which move no reference, until there are others."""
    k_nope = batch.k_nope.clone()
    k_nope[:200] = -torch.inf
    return replace(batch, q=batch.q.abs() + 1, k_nope=k_nope)


@pytest.mark.parametrize("change", [
    lambda b: ramp(b, 0.05, 8), lambda b: ramp(b, 8, 0.05), lambda b: ramp(replace(b, q=b.q.abs(), k_nope=b.k_nope.abs()), 0, 20), spikes, nothing_at_first,
    lambda b: replace(b, q=b.q * 100), lambda b: replace(b, k_nope=b.k_nope * 0, k_pe=b.k_pe * 0),
    lambda b: replace(b, q=b.q.abs() * 4, k_nope=-b.k_nope.abs(), k_pe=-b.k_pe.abs()),
], ids=["rising", "falling", "always rising", "spikes", "nothing at first", "far apart", "all equal", "all negative"])
@pytest.mark.parametrize("requests", [[(1500, 1500)], [(700, 1200), (33, 162), (1, 1001), (300, 300)]], ids=["one", "ragged"])
def test_maxima_that_move(mha16, launches, change, requests):
    assert_same(mha16, launches, change(mha16.make(requests)))


def test_neighbours_of_nan_and_alone(mha16, launches):
    batch = mha16.make(RAGGED)
    whole = mha16.prefill(batch, schedule=HOPPER)
    for i, request in enumerate(RAGGED):
        begin, end = batch.cu_seqlens_k[i : i + 2].tolist()
        parts = {"q": batch.rows(i), "k_nope": slice(begin, end), "k_pe": slice(begin, end), "v": slice(begin, end)}
        poisoned = {name: torch.full_like(getattr(batch, name), NAN, memory_format=torch.contiguous_format) for name in parts}
        for name, part in parts.items():
            poisoned[name][part] = getattr(batch, name)[part]
        mha16.prefill(replace(batch, **poisoned), schedule=HOPPER)[batch.rows(i)].assert_same(whole[batch.rows(i)], f"request {i}:")
        mha16.prefill(mha16.make([request], [i + 1]), schedule=HOPPER).assert_same(whole[batch.rows(i)], f"request {i} alone:")


def test_repeats(mha16):
    batch = mha16.make(RAGGED)
    rows = mha16.prefill(batch, schedule=HOPPER)
    for _ in range(20):
        mha16.prefill(batch, schedule=HOPPER).assert_same(rows)


def test_other_layouts(mha16, launches):
    batch = mha16.with_(num_heads=8).make(RAGGED)
    heads = slice(2, 6)
    part = replace(batch, q=batch.q[:, heads], k_nope=batch.k_nope[:, heads], v=batch.v[:, heads])
    rows = assert_same(mha16, launches, part)
    outside = {name: getattr(part, name).transpose(0, 1).contiguous().transpose(0, 1) for name in ("q", "k_nope", "v")}
    assert_same(mha16, launches, replace(part, **outside)).assert_same(rows)


def test_what_tma_cannot_read_is_left_to_the_portable_kernel(mha16, launches):
    batch = mha16.make(RAGGED)
    flat = torch.empty(batch.q.numel() + 1, dtype=batch.q.dtype, device=batch.q.device)[1:]
    rows = mha16.prefill(replace(batch, q=flat.view(batch.q.shape).copy_(batch.q)), schedule=HOPPER)
    assert not launches
    rows.assert_same(mha16.prefill(batch, schedule=HOPPER))
    assert launches


@pytest.mark.parametrize("cuts", [(640,), (128, 896), (256, 512), (128, 256, 640, 1024)])
def test_states(mha16, launches, cuts):
    """After every part of the keys the states are equal, and in the end the results, whichever form goes on from whichever."""
    batch = mha16.make([(200, 1300), (77, 717), (130, 130), (1, 131), (9, 0), (300, 250)])
    whole = mha16.prefill(batch, schedule=PORTABLE)
    states = {HOPPER: None, PORTABLE: None}
    ends = [*cuts, 1300]
    for first, end in zip([0, *cuts], ends, strict=True):
        part = batch.keys(first, end)
        options = {"positions": torch.tensor([n - m - first for m, n in batch.requests], dtype=torch.int32, device=mha16.device)}
        if end == ends[-1]:
            for schedule in (HOPPER, PORTABLE):
                for state in states.values():
                    mha16.prefill(part, state=state, schedule=schedule, **options).assert_same(whole)
            return
        for schedule, state in states.items():
            states[schedule] = mha16.prefill(part, state=state, schedule=schedule, return_state=True, **options)
        for name in ("reference", "total", "acc"):
            assert_bitwise_equal(getattr(states[HOPPER], name), getattr(states[PORTABLE], name), f"{name} after {end}")


@pytest.mark.parametrize("chunk_tokens", [128, 384, 4096])
def test_a_cache_in_chunks(mha16, launches, chunk_tokens):
    requests = [Request(1300, 1300, key=1), Request(5, 3, key=2), Request(0, 0, key=3), Request(900, 17, key=4)]
    batch = mha16.paged(requests)
    rows = mha16.prefill_paged(batch, chunk_tokens=chunk_tokens, schedule=HOPPER)
    assert launches
    rows.assert_same(mha16.prefill_paged(batch, chunk_tokens=chunk_tokens, schedule=PORTABLE))


def test_in_a_graph(mha16):
    """Lengths are read on the device: a captured call serves every batch of its shape."""
    batch = mha16.make([(500, 500), (1500, 1500)])
    starts = batch.cu_seqlens_q.clone()
    out = torch.full((*batch.q.shape[:2], mha16.value), NAN, dtype=mha16.dtype, device=mha16.device)
    arguments = (batch.q, batch.k_nope, batch.k_pe, batch.v, starts, starts)

    def call(schedule, out):
        return mla_prefill(*arguments, softmax_scale=mha16.scale, order=mha16.order, schedule=schedule, out=out)

    call(HOPPER, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(HOPPER, out)
    for lens in ([500, 1500], [1500, 500], [1, 128], [0, 0], [129, 1871]):
        starts.copy_(torch.tensor([0, lens[0], sum(lens)], dtype=torch.int32))
        out.fill_(NAN)
        graph.replay()
        assert_bitwise_equal(out, call(PORTABLE, torch.full_like(out, NAN)), str(lens))


def test_control_another_input_differs(mha16):
    batch = mha16.make([(300, 300)])
    rows = mha16.prefill(batch, schedule=HOPPER)
    k_nope = batch.k_nope.clone()
    k_nope[:1] += 0.5
    assert not bitwise_equal(mha16.prefill(replace(batch, k_nope=k_nope), schedule=HOPPER).out, rows.out)
    mha16.with_(order=replace(mha16.order, reference_step=1)).prefill(batch, schedule=HOPPER).assert_differs(rows)
