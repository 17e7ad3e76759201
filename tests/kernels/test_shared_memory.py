"""Memory that an op writes to and shares with another argument is refused; parts of one buffer that share none are taken."""

from types import SimpleNamespace

import pytest
import torch
from memory import at_one_address

from triton_mla import absorb_query, calls, companion, mla_decode, mla_extend, project_values, write_kv_cache
from triton_mla.testing import Request

both = pytest.mark.parametrize("op", ["decode", "extend"])


@pytest.fixture
def good(mla):
    """Arguments of a call that is right, with outputs that are full of 7."""
    batch = mla.batch([Request(40, key=1), Request(9, key=2)], extra_width=1)
    names = ("q", "kv_cache", "block_table", "cu_seqlens_q", "seq_lens", "softmax_scale", "kv_lora_rank")
    out = torch.full((2, mla.num_heads, mla.kv_lora_rank), 7.0, dtype=mla.dtype, device=mla.device)
    lse = torch.full(out.shape[:2], 7.0, device=mla.device)
    return {**{name: getattr(batch, name) for name in names}, "order": mla.order, "return_lse": True, "out": out, "lse": lse}


def call(op, arguments):
    return mla_extend(**arguments) if op == "extend" else mla_decode(**{name: value for name, value in arguments.items() if name != "cu_seqlens_q"})


def refuse(op, good, match, **changes):
    with pytest.raises(ValueError, match=match):
        call(op, {**good, **changes})
    assert bool((good["out"] == 7.0).all()) and bool((good["lse"] == 7.0).all())


PAIRS = [(name, other) for name in ("out", "lse", "workspace") for other in ("q", "kv_cache", "block_table", "cu_seqlens_q", "seq_lens")]


@both
@pytest.mark.parametrize("name, other", [*PAIRS, ("lse", "out"), ("workspace", "out"), ("workspace", "lse")])
def test_shared_memory(mla, good, op, name, other):
    if (op, other) == ("decode", "cu_seqlens_q"):
        return
    good["workspace"] = torch.empty(1 << 22, dtype=torch.uint8, device=mla.device)
    call(op, good)  # all but the addresses has passed
    good["out"].fill_(7.0)
    good["lse"].fill_(7.0)
    written, read = at_one_address(good[name], good[other])
    refuse(op, good, f"^{name} has shape .* must not share memory with {other}, since it is written to", **{name: written, other: read})


@both
def test_shared_memory_of_a_pair(good, op):
    nope, pe = good["q"].split([good["kv_lora_rank"], good["q"].shape[2] - good["kv_lora_rank"]], -1)
    for i, other in enumerate((nope, pe)):
        out, part = at_one_address(good["out"], other.contiguous())
        pair = [nope, pe]
        pair[i] = part
        refuse(op, good, rf"^out has shape .* share memory with q\[{i}\]", q=pair, out=out)


@both
def test_parts_of_one_buffer_share_no_memory(mla, good, op):
    expected = [x.clone() for x in call(op, good)]
    (rows, heads, width), rank = good["q"].shape, good["kv_lora_rank"]
    gap = 32
    columns = good["q"].new_zeros(rows, heads, width + rank + gap)
    of_heads = good["q"].new_zeros(rows, 2 * heads, width)
    for q, out in [
        (columns[..., :width], columns[..., width : width + rank]),
        (columns[..., gap + rank :], columns[..., gap : gap + rank]),
        (of_heads[:, :heads], of_heads[:, heads:, :rank]),
        (of_heads[:, ::2], of_heads[:, 1::2, :rank]),
    ]:
        got = call(op, {**good, "q": q.copy_(good["q"]), "out": out})
        assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1]) and torch.equal(q, good["q"])
    memory = torch.zeros(good["out"].numel() * good["out"].itemsize + good["lse"].numel() * 4, dtype=torch.uint8, device=mla.device)
    out, lse = memory[: -good["lse"].numel() * 4].view(mla.dtype).view(good["out"].shape), memory[-good["lse"].numel() * 4 :].view(torch.float32)
    got = call(op, {**good, "out": out, "lse": lse.view(good["lse"].shape)})  # next to each other
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


def test_a_prepared_call_looks_at_addresses(good):
    """The way of a GPU's later calls, whose checks have passed before; without launches."""

    def given(**changes):
        return calls.Given(**{"decode": True, "k_scale": None, "plan": None, **good, **changes, "cu_seqlens_q": None})

    launched = []
    prepared = SimpleNamespace(run_ready=lambda at, device: launched.append(at) or True)
    spare = torch.zeros(1 << 22, dtype=torch.uint8, device=good["q"].device)
    call = calls._prepare(given(workspace=spare))._replace(prepared=prepared)

    def run(**changes):
        now = given(**{"workspace": spare, **changes})
        return calls._run_ready(call, now, now.out, now.lse, now.workspace)

    assert run() and len(launched) == 1 and len(launched[0]) == len(calls.Arguments._fields)
    for name, other in [*PAIRS, ("lse", "out"), ("workspace", "out"), ("workspace", "lse")]:
        if other != "cu_seqlens_q":
            written, read = at_one_address(spare if name == "workspace" else good[name], good[other])
            with pytest.raises(ValueError, match=f"^{name} has shape .* must not share memory with {other}"):
                run(**{name: written, other: read})
    assert len(launched) == 1


@pytest.mark.parametrize("other", ["kv_c", "k_pe", "slot_mapping"])
def test_a_cache_that_shares_memory_with_what_is_written(mla, other):
    cache = torch.zeros(2, 16, 80, dtype=mla.dtype, device=mla.device)
    given = {"kv_c": cache.new_ones(3, 64), "k_pe": cache.new_ones(3, 16), "slot_mapping": torch.arange(3, device=mla.device)}
    cache, given[other] = at_one_address(cache, given[other])
    before = cache.clone()
    with pytest.raises(ValueError, match=f"kv_cache has shape .* must not share memory with {other}, since it is written to"):
        write_kv_cache(kv_cache=cache, **given)
    assert torch.equal(cache, before)


def test_layers_of_one_buffer_share_no_memory(mla):
    layers = torch.zeros(2, 3, 16, 80, dtype=mla.dtype, device=mla.device)
    layers[:, 2] = 5
    write_kv_cache(layers[0, 2, :4, :64], layers[1, 2, :4, 64:], layers[:, 1], torch.arange(4, device=mla.device))
    assert bool((layers[0, 1, :4] == 5).all()) and not bool(layers[0, 1, 4:].any()) and not bool(layers[:, 0].any()) and bool((layers[:, 2] == 5).all())


def products(device):
    x, w = torch.ones(3, 16, device=device), torch.ones(16, 16, device=device)
    heads, of_heads = torch.ones(2, 3, 16, device=device), torch.ones(3, 16, 16, device=device)
    starts = torch.tensor([0, 1, 2, 3], dtype=torch.int32, device=device)
    return [
        (companion.matmul, {"a": x, "b": w}), (companion.linear, {"x": x, "weight": w, "bias": w[0].clone()}),
        (companion.bmm, {"a": of_heads, "b": of_heads.clone()}), (companion.grouped_linear, {"x": x, "weight": of_heads, "group_starts": starts}),
        (absorb_query, {"q_nope": heads, "w_uk": of_heads}), (project_values, {"out_latent": heads, "w_uv": of_heads}),
    ]


@pytest.mark.parametrize("which", range(6))
def test_products(mla, which):
    op, arguments = products(mla.device)[which]
    expected = op(**arguments)
    wide = torch.zeros(*expected.shape[:-1], 64, device=mla.device)
    op(**arguments, out=wide[..., 32 : 32 + expected.shape[-1]])
    assert torch.equal(wide[..., 32 : 32 + expected.shape[-1]], expected)
    for _ in range(2):  # the second call takes a shorter way on a GPU
        out = torch.empty_like(expected)
        assert torch.equal(op(**arguments, out=out), expected)
        for other, value in arguments.items():
            written, read = at_one_address(out, value)
            with pytest.raises(ValueError, match=f"^out has shape .* must not share memory with {other}, since"):
                op(**{**arguments, other: read}, out=written)
