"""`mla_prefill_paged` and `project_kv`: the reference, `mla_prefill` over keys and values that are projected whole, the workspace, and refusals."""

from dataclasses import replace

import pytest
import torch
from memory import at_one_address
from prefill_cases import NAN
from torch._dynamo.testing import CompileCounter

from triton_mla import mla_prefill_paged, plan, prefill, prefill_workspace_bytes, project_kv
from triton_mla.plan import plan_prefill
from triton_mla.testing import Request, assert_bitwise_equal, assert_close, bitwise_equal

ATOL = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}


def requests(mha):
    """Some in one chunk of four tiles, some in three, with and without a prefix; one padded row, one request without queries."""
    tile = mha.tile
    return [Request(9 * tile + 5, 2 * tile, key=1), Request(7, 7, key=2), Request(4 * tile, 1, key=3), Request(0, 3, key=4), Request(5 * tile, 0, key=5),
            Request(4 * tile + 1, tile, key=6)]


@pytest.mark.parametrize("page_size", [16, 1])
def test_reference(mha_each, page_size):
    batch = mha_each.paged(requests(mha_each), page_size=page_size)
    rows = mha_each.prefill_paged(batch)
    whole = mha_each.projected(batch)
    rows.assert_close(mha_each.reference(whole), ATOL[mha_each.dtype])
    rows.assert_same(mha_each.prefill(whole))


def test_from_latent_to_output_in_float64(mha):
    """The definition itself: no value is rounded between the cache and the output."""
    from triton_mla.reference import mla_unabsorbed

    mha = mha.with_(dtype=torch.float32)
    batch = mha.paged(requests(mha))
    w_uk, w_uv = batch.weight.view(mha.num_heads, mha.nope + mha.value, mha.rank).split([mha.nope, mha.value], 1)
    q_nope, q_pe = batch.q.split([mha.nope, mha.rope], -1)
    expected = mla_unabsorbed(q_nope, q_pe, w_uk, w_uv.transpose(1, 2), batch.kv_cache, batch.block_table, batch.cu_seqlens_q, batch.seq_lens,
                              softmax_scale=mha.scale, kv_lora_rank=mha.rank)
    mha.prefill_paged(batch).assert_close(mha.rows(*expected), 1e-4)


@pytest.mark.parametrize("nope, rope, value, rank", [(192, 64, 256, 512), (64, 32, 64, 320), (16, 0, 48, 16)])
def test_dims(mha, nope, rope, value, rank):
    mha = mha.with_(nope=nope, rope=rope, value=value, rank=rank)
    batch = mha.paged([Request(3 * mha.tile + 1, 9, key=1), Request(5, 5, key=2)])
    rows = mha.prefill_paged(batch, chunk_tokens=mha.tile)
    rows.assert_close(mha.reference(mha.projected(batch)), ATOL[mha.dtype])


def test_padding_tokens(mha):
    batch = mha.paged(requests(mha))
    rows = mha.prefill_paged(batch)
    padded = replace(batch, q=torch.cat([batch.q, torch.full_like(batch.q, NAN)]))
    more = mha.prefill_paged(padded)
    more[: len(rows)].assert_same(rows)
    more[len(rows) :].assert_empty()


def test_no_requests(mha):
    batch = mha.paged(requests(mha))
    none = replace(batch, block_table=batch.block_table[:0], cu_seqlens_q=batch.cu_seqlens_q[:1], seq_lens=batch.seq_lens[:0], requests=())
    mha.prefill_paged(none).assert_empty()


@pytest.mark.parametrize("requests_together, heads_together", [(2, None), (1, None), (1, 1)])
def test_waves_fit_the_limit_and_change_no_bit(mha, monkeypatch, requests_together, heads_together):
    batch = mha.paged(requests(mha))
    rows = mha.prefill_paged(batch)
    heads = heads_together or mha.num_heads
    full = plan_of(mha, batch)
    limit = replace(full, request_group=requests_together, head_wave=heads).workspace_bytes + 16
    monkeypatch.setattr(plan, "MAX_WORKSPACE_BYTES", limit)
    small = plan_of(mha, batch)
    assert (small.request_group, small.head_wave) == (requests_together, heads) and small.workspace_bytes <= limit
    mha.prefill_paged(batch).assert_same(rows)


def plan_of(mha, batch):
    return plan_prefill(
        num_tokens=len(batch.q), batch_size=len(batch.requests), num_heads=mha.num_heads, max_seq_len=batch.block_table.shape[1] * mha.page_size,
        qk_nope_head_dim=mha.nope, qk_rope_head_dim=mha.rope, v_head_dim=mha.value, kv_lora_rank=mha.rank, dtype=mha.dtype,
        chunk_tokens=4 * mha.tile, order=mha.order)


def test_workspace_is_as_large_as_stated(mha):
    batch = mha.paged(requests(mha))
    rows = mha.prefill_paged(batch)
    size = mha.workspace_bytes(batch, chunk_tokens=4 * mha.tile, order=mha.order)
    memory = torch.full((size + 512,), 255, dtype=torch.uint8, device=mha.device)
    mha.prefill_paged(batch, workspace=memory[256 : 256 + size]).assert_same(rows)
    assert bool((memory[:256] == 255).all()) and bool((memory[256 + size :] == 255).all())
    assert not bool((memory[256 + size - 16 : 256 + size] == 255).all())


def test_workspace_of_one_chunk_has_no_state():
    sizes = {"num_tokens": 1000, "batch_size": 1, "num_heads": 16, "max_seq_len": 1000}
    assert prefill_workspace_bytes(**sizes) == 512 + 1024 * (16 * 256 + 512 + 64) * 2  # work, and one chunk
    more = prefill_workspace_bytes(**{**sizes, "max_seq_len": 5000})
    assert more == 512 + 4096 * (16 * 256 + 512 + 64) * 2 + 1000 * 16 * 4 * (128 + 8 + 1)


@pytest.mark.parametrize("change", [{"chunk_tokens": 100}, {"chunk_tokens": 0}, {"num_heads": 129}, {"v_head_dim": 8}, {"max_seq_len": -1},
                                    {"kv_lora_rank": 520},
                                    {"dtype": torch.float64}, {"order": 3}])
def test_refused_sizes(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        prefill_workspace_bytes(**{"num_tokens": 1, "batch_size": 1, "num_heads": 1, "max_seq_len": 1, **change})


def test_return_values(mha):
    batch = mha.paged(requests(mha))
    sizes = {"qk_nope_head_dim": mha.nope, "v_head_dim": mha.value, "kv_lora_rank": mha.rank, "order": mha.order}
    assert_bitwise_equal(mla_prefill_paged(*batch.tensors, softmax_scale=mha.scale, **sizes), mha.prefill_paged(batch).out)


def test_max_seq_len(mha):
    batch = mha.paged(requests(mha), extra_width=9)
    longest = max(r.seq_len for r in batch.requests)
    mha.prefill_paged(batch, max_seq_len=longest).assert_same(mha.prefill_paged(batch))


@pytest.mark.gpu
def test_a_request_that_is_too_long_is_nan(mha):
    batch = mha.paged(requests(mha))
    rows = mha.prefill_paged(batch)
    bounded = mha.prefill_paged(batch, max_seq_len=8 * mha.tile)
    assert bool(bounded.out[batch.rows(0)].isnan().all()) and bool(bounded.lse[batch.rows(0)].isnan().all())
    bounded[batch.rows(0).stop :].assert_same(rows[batch.rows(0).stop :])
    long = replace(batch, seq_lens=batch.seq_lens + torch.tensor([0, 1 << 20, 0, 0, 0, 0], device=mha.device, dtype=torch.int32))
    over = mha.prefill_paged(long)
    assert bool(over.out[batch.rows(1)].isnan().all())
    over[batch.rows(0)].assert_same(rows[batch.rows(0)])


@pytest.mark.gpu
@pytest.mark.parametrize("change", [{}, {"num_heads": 8}, {"nope": 64, "value": 64, "rank": 320}, {"dtype": torch.float32}])
def test_a_call_of_known_sizes_is_repeated_for_other_tensors(mha, monkeypatch, change):
    """Bits of other data at other addresses, in the Hopper form and in the portable one; a control where the addresses stay."""
    mha = mha.with_(**change)
    first, second = (mha.paged([Request(9 * mha.tile + 5, 2 * mha.tile, key=k), Request(7, 7, key=k + 1)], extra_width=k) for k in (1, 1))
    second = replace(second, q=second.q.flip(0).contiguous(), kv_cache=second.kv_cache.flip(-1).contiguous(), weight=second.weight.flip(0).contiguous())
    monkeypatch.setattr(prefill, "_repeats", {})
    expected = mha.prefill_paged(second)
    prefill._repeats.clear()
    known = mha.prefill_paged(first)
    (_, repeat), = prefill._repeats.values()
    run, done = repeat.run, []
    monkeypatch.setattr(repeat, "run", lambda *arguments: (done.append(run(*arguments)), done[-1])[1])
    mha.prefill_paged(second).assert_same(expected)
    mha.prefill_paged(first).assert_same(known)
    assert done == [True, True] and len(prefill._repeats) == 1
    assert not bitwise_equal(known.out, expected.out)
    assert mha.prefill_paged(replace(first, q=at_odd_address(first.q))).out.shape == known.out.shape and done[2:] == [False]
    with pytest.raises(ValueError, match="out"):
        mha.prefill_paged(first, out=first.q[..., : mha.value])


@pytest.mark.gpu
def test_what_is_known_of_a_call_keeps_no_memory(mha, monkeypatch):
    monkeypatch.setattr(prefill, "_repeats", {})
    batch = mha.paged(requests(mha))
    mha.prefill_paged(batch)  # compiles
    prefill._repeats.clear()
    before = torch.cuda.memory_allocated()
    mha.prefill_paged(batch)
    assert len(prefill._repeats) == 1 and torch.cuda.memory_allocated() == before


def at_odd_address(t):
    memory = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)
    return memory[1:].view(t.shape).copy_(t)


def test_inside_torch_compile(mha):
    batch = mha.paged(requests(mha))
    options = {"softmax_scale": mha.scale, "qk_nope_head_dim": mha.nope, "v_head_dim": mha.value, "kv_lora_rank": mha.rank, "order": mha.order}

    @torch.compile(backend="eager", fullgraph=True)
    def model(*tensors):
        return mla_prefill_paged(*tensors, return_lse=True, **options)

    mha.rows(*model(*batch.tensors)).assert_same(mha.prefill_paged(batch))


def test_a_compiled_call_is_not_guarded_by_what_is_known_of_others(mha, monkeypatch):
    batch, graphs = mha.paged(requests(mha)), CompileCounter()
    options = {"softmax_scale": mha.scale, "qk_nope_head_dim": mha.nope, "v_head_dim": mha.value, "kv_lora_rank": mha.rank, "order": mha.order}
    keys = [prefill._facts((batch.q[:n],), (None,)) for n in range(4)]
    monkeypatch.setattr(prefill, "_repeats", {keys[0]: None})  # dynamo does not look into an empty one
    torch._dynamo.reset()
    model = torch.compile(lambda *tensors: mla_prefill_paged(*tensors, **options), backend=graphs, fullgraph=True)
    for key in keys[1:]:
        model(*batch.tensors)
        prefill._repeats[key] = None
    prefill._repeats.clear()
    model(*batch.tensors)
    assert graphs.frame_count == 1


def test_project_kv(mha_each):
    mha = mha_each
    batch = mha.paged([Request(70, 1, key=1)])
    latent = batch.kv_cache.view(-1, mha.rank + mha.rope)[:, : mha.rank].nan_to_num()[:77]
    whole = project_kv(latent, batch.weight)
    expected = latent.double() @ batch.weight.double().T
    assert_close(whole, expected, {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[mha.dtype])
    for rows in (slice(0, 1), slice(5, 30), slice(76, 77)):
        assert_bitwise_equal(project_kv(latent[rows], batch.weight), whole[rows], f"rows {rows}")
    for columns in (slice(0, 16), slice(32, 100)):
        assert_bitwise_equal(project_kv(latent, batch.weight[columns]), whole[:, columns], f"columns {columns}")
    assert project_kv(latent[:0], batch.weight).shape == (0, len(batch.weight))


def test_project_kv_refuses(mha):
    latent, weight = torch.zeros(4, 32, device=mha.device), torch.zeros(48, 32, device=mha.device)
    for name, arguments in (("latent", (latent[0], weight)), ("latent", (latent.double(), weight)), ("w_kv_b", (latent, weight[:, :16])),
                            ("w_kv_b", (latent, weight.half())), ("kv_lora_rank=8", (latent[:, :8], weight[:, :8])), ("latent", (3, weight))):
        with pytest.raises(ValueError, match=name):
            project_kv(*arguments)


@pytest.fixture
def good(mha):
    batch = mha.paged([Request(2 * mha.tile, 5, key=1), Request(3, 3, key=2)])
    names = ("q", "kv_cache", "w_kv_b", "block_table", "cu_seqlens_q", "seq_lens")
    out = torch.full((8, mha.num_heads, mha.value), 7.0, dtype=mha.dtype, device=mha.device)
    return {**dict(zip(names, batch.tensors, strict=True)), "softmax_scale": mha.scale, "qk_nope_head_dim": mha.nope, "v_head_dim": mha.value,
            "kv_lora_rank": mha.rank, "order": mha.order, "out": out}


def refuse(good, match, **changes):
    with pytest.raises(ValueError, match=match):
        mla_prefill_paged(**{**good, **changes})
    assert bool((good["out"] == 7.0).all())


@pytest.mark.parametrize("name", ["q", "kv_cache", "w_kv_b", "block_table", "cu_seqlens_q", "seq_lens", "out"])
def test_refused_tensors(good, name):
    value = good[name]
    other = torch.int64 if value.dtype == torch.int32 else torch.float64
    for bad in (value[None], value.to(other), value.to("meta"), [1]):
        refuse(good, f"{name}|device", **{name: bad})
    if name != "kv_cache":
        refuse(good, "q|w_kv_b|block_table|cu_seqlens_q|out", **{name: value[:-1]})
    if value.is_floating_point():
        refuse(good, "q|w_kv_b|kv_lora_rank|out", **{name: value[..., :-1]})


@pytest.mark.parametrize("name", ["out", "workspace"])
@pytest.mark.parametrize("other", ["q", "kv_cache", "w_kv_b", "block_table", "cu_seqlens_q", "seq_lens", "out"])
def test_shared_memory(good, name, other):
    if name == other:
        return
    good["workspace"] = good["q"].new_zeros(1 << 24, dtype=torch.uint8)
    written, read = at_one_address(good[name], good[other])
    refuse(good, f"{name} has shape .* must not share memory with {other}, since", **{name: written, other: read})


def test_no_chunk_lies_past_the_table(mha, monkeypatch):
    """A bound far above the table's capacity costs no launches."""
    from triton_mla import prefill_launch

    batch = mha.paged([Request(2 * mha.tile, 9, key=1)])
    expected = mha.prefill_paged(batch)
    launches = []
    project = prefill_launch.project
    monkeypatch.setattr(prefill_launch, "project", lambda *args, **options: (launches.append(1), project(*args, **options)))
    mha.prefill_paged(batch, max_seq_len=10**9, workspace=None).assert_same(expected)
    assert len(launches) <= 2


def test_refused_values(good, mha):
    for scale in (None, NAN, 0):
        refuse(good, "softmax_scale", softmax_scale=scale)
    for chunk in (0, -mha.tile, mha.tile + 1, mha.tile / 2, "128", True, None):
        refuse(good, "chunk_tokens", chunk_tokens=chunk)
    for longest in (-1, 3.5, "9"):
        refuse(good, "max_seq_len", max_seq_len=longest)
    for rank in (0, 24, mha.rank + 16, "64"):
        refuse(good, "kv_lora_rank|w_kv_b|q|qk_rope_head_dim", kv_lora_rank=rank)
    refuse(good, "qk_nope_head_dim", qk_nope_head_dim=8)
    refuse(good, "v_head_dim", v_head_dim=264)
    refuse(good, "order", order=3)
    refuse(good, "schedule", schedule=3)
    short, wide = torch.empty(64, dtype=torch.uint8, device=mha.device), torch.empty(1 << 22, dtype=torch.uint8, device=mha.device)
    for workspace in (short, wide[1:], wide.view(torch.float32), wide[None], wide.to("meta"), [1]):
        refuse(good, "workspace", workspace=workspace)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the host does not read lengths that lie on a device")
def test_refused_lengths(good):
    lens = good["seq_lens"]
    refuse(good, r"seq_lens\[0\]", seq_lens=lens + 1000)
    refuse(good, r"seq_lens\[1\]=2", seq_lens=lens - 1)
    refuse(good, "seq_lens.*max_seq_len", max_seq_len=8)
