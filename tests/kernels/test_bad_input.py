"""Bad arguments get a ValueError that names the argument, before any launch and with nothing written."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from triton_mla import mla_decode, mla_extend, write_kv_cache
from triton_mla.testing import Request
from triton_mla.tuning import ReductionOrder

NAN, INF = float("nan"), float("inf")
OPS = {"decode": mla_decode, "extend": mla_extend}


@pytest.fixture
def good(mla):
    """Arguments of a call that is right, with outputs that are full of 7."""
    batch = mla.batch([Request(40, key=1), Request(9, key=2)], extra_width=1)
    shape = (2, mla.num_heads, mla.kv_lora_rank)
    return {
        "q": batch.q,
        "kv_cache": batch.kv_cache,
        "block_table": batch.block_table,
        "cu_seqlens_q": batch.cu_seqlens_q,
        "seq_lens": batch.seq_lens,
        "softmax_scale": batch.softmax_scale,
        "kv_lora_rank": batch.kv_lora_rank,
        "order": mla.order,
        "return_lse": True,
        "out": torch.full(shape, 7.0, dtype=mla.dtype, device=mla.device),
        "lse": torch.full(shape[:2], 7.0, device=mla.device),
    }


def call(op, arguments):
    arguments = dict(arguments)
    if op == "decode":
        del arguments["cu_seqlens_q"]
    return OPS[op](**arguments)


def refuse(op, good, match, **changes):
    """The call with these changes is refused by a ValueError, and neither outputs nor cache have changed."""
    arguments = {**good, **changes}
    cache = good["kv_cache"].clone()
    with pytest.raises(ValueError, match=match) as caught:
        call(op, arguments)
    assert bool((good["out"] == 7.0).all()) and bool((good["lse"] == 7.0).all())
    assert torch.equal(cache.nan_to_num(), good["kv_cache"].nan_to_num())
    return str(caught.value)


both = pytest.mark.parametrize("op", ["decode", "extend"])


@both
def test_the_good_call_is_good(good, op):
    out, lse = call(op, good)
    assert not bool((out == 7.0).all()) and not bool((lse == 7.0).any())


@both
@pytest.mark.parametrize("name", ["q", "kv_cache", "block_table", "seq_lens", "out", "lse"])
def test_rank(good, op, name):
    refuse(op, good, name, **{name: good[name][None]})
    refuse(op, good, name, **{name: good[name][0]})


@both
@pytest.mark.parametrize(
    "name, dtype",
    [
        ("q", torch.float64),
        ("q", torch.int32),
        ("kv_cache", torch.float64),
        ("kv_cache", torch.uint8),
        ("block_table", torch.int64),
        ("block_table", torch.float32),
        ("seq_lens", torch.int64),
        ("seq_lens", torch.float32),
        ("out", torch.float64),
        ("lse", torch.float64),
        ("lse", torch.float16),
    ],
)
def test_dtype(good, op, name, dtype):
    message = refuse(op, good, name, **{name: good[name].to(dtype)})
    assert str(dtype).removeprefix("torch.") in message


@both
def test_dtypes_of_query_and_cache_differ(good, op):
    other = torch.float16 if good["q"].dtype == torch.float32 else torch.float32
    refuse(op, good, "q", q=good["q"].to(other), out=good["out"])
    refuse(op, good, "out", out=good["out"].to(other))


@both
@pytest.mark.parametrize("name", ["q", "kv_cache", "block_table", "seq_lens", "out", "lse"])
def test_device(good, op, name):
    message = refuse(op, good, f"^{name} is on", **{name: good[name].to("meta")})
    assert "meta" in message


@both
@pytest.mark.parametrize("name", ["q", "kv_cache", "block_table", "seq_lens"])
@pytest.mark.parametrize("value", [None, [1, 2]])
def test_not_a_tensor(good, op, name, value):
    refuse(op, good, name, **{name: value})


@both
def test_rows_that_do_not_match(good, op):
    refuse(op, good, "block_table|seq_lens", block_table=good["block_table"][:1])
    refuse(op, good, "block_table|seq_lens|q", seq_lens=good["seq_lens"][:1])
    refuse(op, good, "out", out=good["out"][:1])
    refuse(op, good, "out", out=good["out"][..., :-16])
    refuse(op, good, "lse", lse=good["lse"][:1])
    refuse(op, good, "lse", lse=good["lse"][:, :1])
    refuse(op, good, "kv_cache|q", kv_cache=good["kv_cache"][..., :-16])
    refuse(op, good, "q|kv_cache", q=good["q"][..., :-16])


def test_rows_of_decode(good):
    refuse("decode", good, "q", q=good["q"][:1])


@both
def test_query_pair(good, op):
    rank = good["kv_lora_rank"]
    nope, pe = good["q"][..., :rank], good["q"][..., rank:]
    bad = [(nope,), (nope, pe, pe), (pe, nope), (nope[:1], pe), (nope, pe[:, :1]), (nope, pe[0])]
    bad += [(nope, pe.to(torch.float64)), (nope.to("meta"), pe), (nope, None)]
    for pair in bad:
        refuse(op, good, "q", q=pair)


@both
def test_no_heads(good, op):
    refuse(op, good, "^q has 0 heads.*128", q=good["q"][:, :0], out=good["out"][:, :0], lse=good["lse"][:, :0])


@both
def test_too_many_heads(good, op):
    refuse(op, good, f"^q has {129 * good['q'].shape[1]} heads.*128", q=good["q"].repeat(1, 129, 1), out=None, lse=None)


@both
@pytest.mark.parametrize("page_size", [8, 24])
def test_page_size(good, op, page_size):
    pages = good["kv_cache"].repeat(1, 2, 1)[:, :page_size]
    refuse(op, good, f"^kv_cache has pages of {page_size} tokens.*1 or a multiple of 16", kv_cache=pages)


@both
@pytest.mark.parametrize("width, rest", [(-16, "-16"), (8, "8"), (80, "80")])
def test_a_rank_that_leaves_no_rope_key(good, op, width, rest):
    rank = good["kv_lora_rank"]
    cache = good["kv_cache"].new_zeros(*good["kv_cache"].shape[:2], rank + width)
    refuse(op, good, f"^kv_lora_rank={rank} leaves {rest} of kv_cache's {rank + width} columns.*0 or a multiple of 16 up to 64", kv_cache=cache)


@pytest.mark.parametrize("R, P, width, match", [(24, 16, 40, "^kv_c has 24 columns.*16 to 512"), (64, 8, 72, "^k_pe has 8 columns.*up to 64")])
def test_widths_of_what_is_written(mla, R, P, width, match):
    with pytest.raises(ValueError, match=match):
        write(mla, R, P, torch.zeros(1, 16, width, dtype=mla.dtype, device=mla.device))


def test_page_size_of_what_is_written_to(mla):
    with pytest.raises(ValueError, match="^kv_cache has pages of 8 tokens.*1 or a multiple of 16"):
        write(mla, 64, 16, torch.zeros(1, 8, 80, dtype=mla.dtype, device=mla.device))


def write(mla, R, P, cache):
    c, pe = torch.ones(1, R, dtype=mla.dtype, device=mla.device), torch.ones(1, P, dtype=mla.dtype, device=mla.device)
    write_kv_cache(c, pe, cache, torch.zeros(1, dtype=torch.int64, device=mla.device))


LAYOUTS = {
    "nested": lambda t: torch.nested.nested_tensor(list(t)),
    "jagged": lambda t: torch.nested.nested_tensor(list(t), layout=torch.jagged),
    "sparse_coo": lambda t: t.to_sparse(),
    "sparse_csr": lambda t: t.flatten(1).to_sparse_csr(),
}


@both
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["q", "kv_cache", "block_table", "out", "lse", "workspace"])
@pytest.mark.filterwarnings("ignore:.*(prototype|beta) (stage|state)")
def test_layout(good, op, name, layout):
    given = good["q"].new_zeros(2, 64, dtype=torch.uint8) if name == "workspace" else good[name]
    refuse(op, good, f"^{name} .*dense, strided tensor", **{name: LAYOUTS[layout](given)})


@pytest.mark.filterwarnings("ignore:.*(prototype|beta) (stage|state)")
def test_layout_in_a_pair(good):
    nope, pe = good["q"].split([good["kv_lora_rank"], good["q"].shape[2] - good["kv_lora_rank"]], -1)
    refuse("decode", good, r"^q\[1\] is nested.*dense, strided tensor", q=(nope, torch.nested.nested_tensor(list(pe))))


@both
@pytest.mark.parametrize("value", ["no", 1, 0, None, torch.tensor(True)])
def test_return_lse_is_a_bool(good, op, value):
    call(op, {**good, "out": None, "lse": None})
    refuse(op, good, "^return_lse=.*True or False", return_lse=value)


@both
def test_lse_without_return_lse(good, op):
    refuse(op, good, "lse", return_lse=False)


@both
@pytest.mark.parametrize("scale", [None, NAN, INF, -INF, "0.1", 0, -0.5])
def test_softmax_scale(good, op, scale):
    refuse(op, good, "softmax_scale", softmax_scale=scale)


@both
def test_softmax_scale_is_never_guessed(good, op):
    del good["softmax_scale"]
    with pytest.raises((TypeError, ValueError), match="softmax_scale"):
        call(op, good)


@both
@pytest.mark.parametrize("rank", [0, -16, 24, 1024, "64", 64.0, None])
def test_kv_lora_rank(good, op, rank):
    refuse(op, good, "kv_lora_rank", kv_lora_rank=rank)


@both
def test_k_scale(good, op):
    refuse(op, good, "k_scale", k_scale=1.0)


@both
@pytest.mark.parametrize("value", ["2048", 64, {"kv_split": 64}])
def test_order(good, op, value):
    refuse(op, good, "order", order=value)


@pytest.mark.parametrize("kv_split", [0, -1, 3.5, "256", True, None, 100, 64.0])
def test_kv_split(kv_split):
    with pytest.raises(ValueError, match=f"kv_split.*{kv_split}"):
        ReductionOrder(kv_split=kv_split)


@pytest.mark.parametrize("block_n", [0, -64, 8, 48, 128, "64", 64.0, None])
def test_block_n(block_n):
    with pytest.raises(ValueError, match="block_n"):
        ReductionOrder(block_n=block_n)


@both
@pytest.mark.parametrize("bad", ["short", "dtype", "rank", "device", "list"])
def test_workspace(mla, good, op, bad):
    good["order"] = ReductionOrder(block_n=16, kv_split=16)  # many splits, so that memory is needed
    needed = 1 << 22
    values = {
        "short": torch.empty(16, dtype=torch.uint8, device=mla.device),
        "dtype": torch.empty(needed, dtype=torch.float32, device=mla.device),
        "rank": torch.empty(2, needed, dtype=torch.uint8, device=mla.device),
        "device": torch.empty(needed, dtype=torch.uint8, device="meta"),
        "list": [0] * 4,
    }
    refuse(op, good, "workspace", workspace=values[bad])


@both
@pytest.mark.parametrize("plan", ["decode", 3, {}])
def test_plan_of_another_type(good, op, plan):
    refuse(op, good, "plan", plan=plan)


def test_cu_seqlens_q(mla, good):
    def starts(*values):
        return torch.tensor(values, dtype=torch.int32, device=mla.device)

    for bad in (starts(0, 1), starts(0, 1, 2, 2), starts(0, 1, 2)[None], starts(0, 1, 2).long(), None):
        refuse("extend", good, "cu_seqlens_q", cu_seqlens_q=bad)


cpu_only = pytest.mark.skipif(torch.cuda.is_available(), reason="the host does not read lengths that lie on a device")


@cpu_only
@pytest.mark.parametrize("values", [(0, 2, 1), (1, 1, 2), (0, 1, 3), (-1, 1, 2), (0, -1, 2)])
def test_values_of_cu_seqlens_q(good, values):
    refuse("extend", good, "cu_seqlens_q", cu_seqlens_q=torch.tensor(values, dtype=torch.int32))


@cpu_only
@both
@pytest.mark.parametrize("value", [-1, 65, 2**31 - 1])
def test_values_of_seq_lens(good, op, value):
    lens = good["seq_lens"].clone()
    lens[1] = value
    message = refuse(op, good, "seq_lens", seq_lens=lens)
    assert str(value) in message


@cpu_only
def test_more_query_tokens_than_tokens(mla):
    batch = mla.batch([Request(40, 4, key=1)])
    with pytest.raises(ValueError, match="seq_lens.*3"):
        mla.extend(replace(batch, seq_lens=torch.tensor([3], dtype=torch.int32)))


@cpu_only
@both
@pytest.mark.parametrize("value", [-1, 2**31 - 1])
def test_page_id_outside_of_the_cache(good, op, value):
    table = good["block_table"].clone()
    table[0, 1] = value
    refuse(op, good, "block_table", block_table=table)


@cpu_only
@both
def test_table_too_narrow(good, op):
    message = refuse(op, good, "block_table|seq_lens", block_table=good["block_table"][:, :2])
    assert "40" in message


BEFORE = {
    "off": (None, ""),
    "on after triton": (None, "import os, triton; os.environ['TRITON_INTERPRET'] = '1'"),
    "on after both": (None, "import os, triton_mla; os.environ['TRITON_INTERPRET'] = '1'"),
    "off after triton": ("1", "import os, triton; del os.environ['TRITON_INTERPRET']"),
    "off after both": ("1", "import os, triton_mla; del os.environ['TRITON_INTERPRET']"),
}


@pytest.mark.parametrize("interpreter", BEFORE)
def test_cpu_tensors_without_the_interpreter(interpreter):
    value, before = BEFORE[interpreter]
    script = """
import torch
from triton_mla import merge_attn_states, mla_decode, mla_extend, write_kv_cache
q, cache = torch.zeros(1, 2, 80), torch.zeros(1, 16, 80)
ints = dict(dtype=torch.int32)
table, lens, starts = torch.zeros(1, 1, **ints), torch.ones(1, **ints), torch.tensor([0, 1], **ints)
out, lse = torch.zeros(1, 2, 64), torch.zeros(1, 2)
options = dict(softmax_scale=0.1, kv_lora_rank=64)
calls = [
    lambda: mla_decode(q, cache, table, lens, **options),
    lambda: mla_extend(q, cache, table, starts, lens, **options),
    lambda: merge_attn_states(out, lse, out, lse),
    lambda: write_kv_cache(torch.zeros(1, 64), torch.zeros(1, 16), cache, torch.zeros(1, dtype=torch.int64)),
]
for call in calls:
    try:
        call()
    except ValueError as error:
        assert "set TRITON_INTERPRET=1 in the environment before triton is imported" in str(error), error
    else:
        raise SystemExit("no error")
"""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {} if value is None else {"TRITON_INTERPRET": value}
    done = subprocess.run([sys.executable, "-c", before + script], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_gpu_with_kernels_of_two_kinds(monkeypatch):
    from triton_mla import checks

    monkeypatch.setattr(checks, "MIXED", True)
    with pytest.raises(ValueError, match="^q is on cuda.*TRITON_INTERPRET must not change"):
        checks.runnable(torch.device("cuda"), "q")


@both
@pytest.mark.parametrize("scale", [1e39, 1e-320, 10**400])
def test_a_scale_out_of_the_range_of_fp32(good, op, scale):
    refuse(op, good, "softmax_scale", softmax_scale=scale)


@both
def test_an_out_that_overlaps_itself(good, op):
    out = good["out"]
    refuse(op, good, "out has shape.*overlap", out=out[:1].expand(2, -1, -1))
    refuse(op, good, "out has shape.*overlap", out=out.flatten().as_strided(out.shape, (out.stride(0) // 2, out.shape[2], 1)))


def test_a_cache_that_overlaps_itself(mla):
    cache = torch.zeros(1, 16, 80, dtype=mla.dtype, device=mla.device)
    c, pe, slots = torch.ones(1, 64, dtype=mla.dtype, device=mla.device), cache[0, :1, :16], torch.zeros(1, dtype=torch.int64, device=mla.device)
    with pytest.raises(ValueError, match="kv_cache has shape.*overlap"):
        write_kv_cache(c, pe, cache.expand(3, -1, -1), slots)
    assert not cache.any()


def test_a_page_of_more_than_32_bits():
    from triton_mla import checks

    cache = torch.empty(1, dtype=torch.float16, device="meta")
    checks.paged_cache(cache.as_strided((1, 32, 80), (1, 2**26, 1)))
    with pytest.raises(ValueError, match="kv_cache has strides"):
        checks.paged_cache(cache.as_strided((1, 32, 80), (1, 2**27, 1)))
    with pytest.raises(ValueError, match="kv_cache has pages of 24 tokens"):
        checks.paged_cache(cache.as_strided((1, 24, 80), (1, 80, 1)))


@pytest.mark.gpu
@pytest.mark.parametrize("q_len", [1, 3])
def test_head_strides_beyond_32_bits(mla, q_len):
    """q and out of 65 heads that lie 2**25 elements apart: offsets of 2**31."""
    batch = mla.batch([Request(1100, q_len, key=1)], num_heads=65)
    op = "decode" if q_len == 1 else "extend"
    expected = getattr(mla, op)(batch)
    far = torch.empty(64 * 2**25 + q_len * 1024, dtype=mla.dtype, device=mla.device)
    q = far.as_strided(batch.q.shape, (1024, 2**25, 1)).copy_(batch.q)
    getattr(mla, op)(batch, q=q).assert_same(expected)
    getattr(mla, op)(batch, out=far.as_strided(expected.out.shape, (1024, 2**25, 1))).assert_same(expected)


@pytest.mark.gpu
def test_starts_that_only_the_device_sees_do_not_lead_out_of_the_tensors(mla):
    batch = mla.batch([Request(70, 3, key=1), Request(40, 2, key=2)])
    guarded = torch.full((len(batch.q) + 8, *batch.q.shape[1:2], mla.kv_lora_rank), 7.0, dtype=mla.dtype, device=mla.device)
    for starts in ([2, 3, 5], [0, 3, 12], [1, 9, 13], [-3, 3, 5]):
        bad = torch.tensor(starts, dtype=torch.int32, device=mla.device)
        mla.extend(replace(batch, cu_seqlens_q=bad), out=guarded[4 : 4 + len(batch.q)])
        assert bool((guarded[:4] == 7).all()) and bool((guarded[4 + len(batch.q) :] == 7).all())


def test_a_schedule_that_does_not_fit(mla):
    if mla.device.type != "cuda":
        pytest.skip("the interpreter has no shared memory")
    from triton_mla import Schedule

    batch = mla.batch([Request(40, 1, key=1)], kv_lora_rank=512, qk_rope_head_dim=64)
    mla = replace(mla, kv_lora_rank=512, qk_rope_head_dim=64)
    with pytest.raises(ValueError, match="schedule of one_pass_kernel .*shared memory"):
        mla.decode(batch, plan=mla.plan("decode", batch, Schedule(block_rows=128, num_warps=8, num_stages=4)))


def test_splits_longer_than_the_registers_hold():
    with pytest.raises(ValueError, match="kv_split=134217728"):
        ReductionOrder(kv_split=2**27)


def test_negatives_of_what_is_stored_are_refused():
    from triton_mla import checks

    view = torch.zeros(3, 1, dtype=torch.complex64).conj().imag
    with pytest.raises(ValueError, match="lse_a is a view of the negatives"):
        checks.tensor("lse_a", view, dims=2)
    with pytest.raises(ValueError, match="lse_a has shape"):  # past that check
        checks.tensor("lse_a", view.resolve_neg(), dims=3)
