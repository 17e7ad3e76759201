"""Eager, captured, compiled, repeated or in another process: the same bits."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from gpu import no_host_synchronisation
from memory import WithoutMemory

from triton_mla import Schedule, mla_decode
from triton_mla.testing import Request

LENS = [300, 1, 2000, 64, 513, 700, 40, 1025]


@pytest.fixture(scope="module")
def pool(mla):
    """Thirteen decode rows over one cache: rows 0..7 are captured, rows 8..12 come in later."""
    return mla.batch([Request(seq_len, key=i) for i, seq_len in enumerate([*LENS, 900, 65, 1, 1500, 128])])


def captured(run):
    """A graph of `run`, and the results that a replay fills."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows = run()
    return graph, rows


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["decode", "extend"])
def test_replays(mla, pool, op):
    static = mla.pick(pool, list(range(8)))
    graph, rows = captured(lambda: getattr(mla, op)(static))
    graph.replay()
    eight = mla.decode(mla.pick(pool, list(range(8))))
    rows.assert_same(eight)

    late = mla.pick(pool, list(range(8, 13)))
    static.q[:5], static.q[5:] = late.q, float("nan")
    static.block_table[:5], static.block_table[5:] = late.block_table, 2**31 - 1
    static.seq_lens[:5], static.seq_lens[5:] = late.seq_lens, 0
    graph.replay()
    rows[:5].assert_same(mla.decode(late))
    rows[5:].assert_empty()
    rows.assert_differs(eight)

    for name in ("q", "block_table", "seq_lens"):
        getattr(static, name).copy_(getattr(pool, name)[:8])
    graph.replay()
    rows.assert_same(eight)


@pytest.mark.gpu
def test_replays_of_extend_with_other_query_lengths(mla):
    def both(*q_lens):
        """Two requests that share 16 query tokens."""
        return mla.batch([Request(600, q_lens[0], key=1), Request(90, q_lens[1], key=2)])

    static = both(10, 6)
    graph, rows = captured(lambda: mla.extend(static))
    for q_lens in ((10, 6), (1, 15), (16, 0), (3, 13)):
        batch = both(*q_lens)
        static.q.copy_(batch.q)
        static.cu_seqlens_q.copy_(batch.cu_seqlens_q)
        graph.replay()
        rows.assert_same(mla.extend(batch), f"{q_lens}:")


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["decode", "extend"])
def test_no_allocation_and_no_synchronisation(mla, pool, op):
    batch = mla.pick(pool, list(range(8)))
    plan = mla.plan(op, batch)
    options = {
        "plan": plan,
        "workspace": torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=mla.device),
        "out": torch.empty(8, mla.num_heads, mla.kv_lora_rank, dtype=mla.dtype, device=mla.device),
        "lse": torch.empty(8, mla.num_heads, device=mla.device),
    }
    expected = getattr(mla, op)(batch)
    getattr(mla, op)(batch, **options).assert_same(expected)
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    with no_host_synchronisation():
        rows = getattr(mla, op)(batch, **options)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated
    rows.assert_same(expected)
    with no_host_synchronisation():
        rows = getattr(mla, op)(batch)
    rows.assert_same(expected)


@pytest.mark.gpu
def test_a_length_past_the_table_is_loud(mla):
    batch = mla.batch([Request(300, key=1), Request(70, key=2)])
    lens = batch.seq_lens.clone()
    lens[1] = batch.block_table.shape[1] * mla.page_size + 1
    rows = mla.decode(replace(batch, seq_lens=lens))
    rows[:1].assert_same(mla.decode(batch)[:1])
    assert bool(rows.out[1].isnan().all())


@pytest.mark.gpu
def test_a_thousand_launches(mla, pool):
    expected = mla.decode(pool)
    for _ in range(1000):
        rows = mla.decode(pool)
    rows.assert_same(expected)


@pytest.mark.gpu
def test_inside_torch_compile(mla, pool):
    batch = mla.pick(pool, list(range(5)))

    def model(q):
        return mla_decode(
            q + 0,
            batch.kv_cache,
            batch.block_table,
            batch.seq_lens,
            softmax_scale=batch.softmax_scale,
            kv_lora_rank=batch.kv_lora_rank,
            order=mla.order,
            return_lse=True,
        )

    expected = mla.decode(batch)
    out, lse = torch.compile(model)(batch.q)
    replace(expected, out=out, lse=lse).assert_same(expected)


@pytest.fixture(scope="module")
def small(mla):
    """A batch of two rows, its plan and a workspace."""
    batch = mla.batch([Request(2 * mla.order.kv_split + 5, key=1), Request(9, key=2)])
    plan = mla.plan("decode", batch)
    return batch, plan, torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=mla.device)


def compiled(mla, batch, fullgraph=False, **options):
    torch._dynamo.reset()
    return torch.compile(mla_decode, backend="eager", fullgraph=fullgraph)(
        batch.q,
        batch.kv_cache,
        batch.block_table,
        batch.seq_lens,
        softmax_scale=batch.softmax_scale,
        kv_lora_rank=batch.kv_lora_rank,
        **{"order": mla.order, "return_lse": True, **options},
    )


def test_a_plan_inside_torch_compile(mla, small):
    batch, plan, workspace = small
    expected = mla.decode(batch)
    for options in (
        {"plan": plan},
        {"plan": plan, "order": replace(plan.order)},
        {"plan": plan, "order": None, "workspace": workspace},
        {"workspace": workspace},
    ):
        out, lse = compiled(mla, batch, fullgraph=True, **options)
        replace(expected, out=out, lse=lse).assert_same(expected)


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")  # the repr of an order, where it is refused
@pytest.mark.parametrize(
    "changes, match",
    [
        ({"plan": {"num_tokens": 3}}, "plan.num_tokens=3 must be 2"),
        ({"plan": {"batch_size": 3}}, "plan.batch_size=3 must be 2"),
        ({"plan": {"num_heads": 7}}, "plan.num_heads=7 must be"),
        ({"plan": {"kv_lora_rank": 32}}, "plan.kv_lora_rank=32 must be"),
        ({"plan": {"page_size": 1}}, "plan.page_size=1 must be"),
        ({"plan": {"decode": False}}, "plan.decode=False must be True"),
        ({"plan": {"arch": "gfx942"}}, "plan.arch='gfx942' must be"),
        ({"plan": "zzz"}, "plan='zzz' must be an AttentionPlan"),
        ({"plan": {}, "order": {"kv_split": 4096}}, "order=.*must be the plan's"),
        ({"order": "zzz"}, "order='zzz' must be a ReductionOrder"),
        ({"workspace": "zzz"}, "workspace='zzz' must be a torch.Tensor"),
        ({"workspace": torch.int8}, "workspace has dtype torch.int8"),
        ({"workspace": torch.uint8}, "workspace has 1 bytes"),
        ({"workspace": torch.uint8, "plan": {}}, "workspace has 1 bytes"),
        ({"return_lse": "no"}, "return_lse='no' must be"),
    ],
)
def test_what_eager_refuses_is_refused_inside_torch_compile(mla, small, changes, match):
    batch, plan, _ = small
    options = dict(changes)
    if isinstance(options.get("plan"), dict):
        options["plan"] = replace(plan, **options["plan"])
    if isinstance(options.get("order"), dict):
        options["order"] = replace(mla.order, **options["order"])
    if isinstance(options.get("workspace"), torch.dtype):
        options["workspace"] = torch.empty(1, dtype=options["workspace"], device=mla.device)
    with pytest.raises(ValueError, match=match):
        mla.decode(batch, **options)
    with pytest.raises(ValueError, match=match):
        compiled(mla, batch, **options)
    with pytest.raises(torch._dynamo.exc.Unsupported):  # while it is traced
        compiled(mla, batch, fullgraph=True, **options)


@pytest.mark.parametrize("op", ["decode", "extend"])
def test_a_plan_and_its_workspace_are_used_again(mla, op):
    split = mla.order.kv_split
    first = mla.batch([Request(2 * split + 5, 1, key=1), Request(3, 1, key=2)])
    second = mla.batch([Request(7, 1, key=3), Request(2 * split + 1, 1, key=4)])
    plan = mla.plan(op, first)
    workspace = torch.full((plan.workspace_bytes,), 255, dtype=torch.uint8, device=mla.device)
    for batch in (first, second, first):
        expected = getattr(mla, op)(batch)
        getattr(mla, op)(batch, plan=plan).assert_same(expected)
        getattr(mla, op)(batch, plan=plan, workspace=workspace).assert_same(expected)


@pytest.mark.parametrize("op", ["decode", "extend"])
@pytest.mark.parametrize("form", ["one_pass", "two_phase"])
def test_waves(mla, monkeypatch, op, form):
    """A call whose scratch memory would be too large is done in several waves."""
    from triton_mla import plan

    split = mla.order.kv_split
    q_len = 1 if op == "decode" else 7
    batch = mla.batch([Request(2 * split + 5, q_len, key=1), Request(split + 3, q_len, key=2), Request(9, q_len, key=3)])
    expected = getattr(mla, op)(batch)
    monkeypatch.setattr(plan, "MAX_WORKSPACE_BYTES", 1)
    waves = mla.plan(op, batch, Schedule(form=form))
    assert waves.wave_row_tiles == 1 < waves.num_row_tiles
    getattr(mla, op)(batch, plan=waves).assert_same(expected)


@pytest.mark.parametrize("op", ["decode", "extend"])
def test_a_call_that_repeats_an_earlier_one_in_all_but_values(mla, op):
    """The second call with equal shapes takes the short way: from addresses alone."""
    split = mla.order.kv_split
    lengths = (2 * split + 5, split + 70) if mla.device.type == "cuda" else (split + 5, split + 9)
    first, second = (mla.batch([Request(n, 1, key=n), Request(7, 1, key=1)], seed=n) for n in lengths)
    width = max(first.block_table.shape[1], second.block_table.shape[1])
    first, second = (replace(b, block_table=torch.nn.functional.pad(b.block_table, (0, width - b.block_table.shape[1]))) for b in (first, second))
    run = getattr(mla, op)
    expected = [run(b) for b in (first, second)]
    expected[0].assert_differs(expected[1])
    for rows, batch in zip(expected * 2, (first, second) * 2, strict=True):
        run(batch).assert_same(rows)
        shifted = torch.empty(batch.q.numel() + 1, dtype=batch.q.dtype, device=mla.device)[1:].view(batch.q.shape)
        run(replace(batch, q=shifted.copy_(batch.q))).assert_same(rows)  # an address that is not aligned
        nope, rope = batch.q.split([batch.kv_lora_rank, batch.q.shape[2] - batch.kv_lora_rank], -1)
        run(batch, q=(nope, rope)).assert_same(rows)
        run(batch, q=(nope.contiguous(), rope.contiguous())).assert_same(rows)


@pytest.mark.parametrize(
    "wrong",
    [
        {"softmax_scale": True},
        {"softmax_scale": "1"},
        {"softmax_scale": [1.0]},
        {"kv_lora_rank": 64.0},
        {"k_scale": 1.0},
        {"k_scale": []},
        {"q": [1]},
        {"return_lse": 1},
        {"return_lse": "no"},
    ],
)
def test_a_good_call_does_not_let_a_bad_one_pass(mla, wrong):
    small = replace(mla, kv_lora_rank=64, qk_rope_head_dim=16)
    batch = small.batch([Request(40, key=1)])
    for _ in range(2):
        small.decode(batch, softmax_scale=1.0)
        with pytest.raises(ValueError, match=next(iter(wrong))):
            small.decode(batch, **{"softmax_scale": 1.0, **wrong})


@pytest.mark.parametrize("pair", [False, True])
def test_a_good_query_does_not_let_one_of_another_kind_pass(mla, pair):
    batch = mla.batch([Request(40, key=1)])
    query = (batch.q[..., : mla.kv_lora_rank], batch.q[..., mla.kv_lora_rank :]) if pair else batch.q
    mla.decode(batch, q=query)
    for wrong in (iter(query), set(query)) if pair else ((query,), [query]):
        with pytest.raises(ValueError, match="q="):
            mla.decode(batch, q=wrong)


def test_a_good_call_does_not_let_tensors_without_memory_pass(mla):
    batch = mla.batch([Request(40, key=1)])
    mla.decode(batch)
    for name in ("q", "kv_cache", "block_table", "seq_lens"):
        with pytest.raises(ValueError, match=f"{name} of type WithoutMemory has no memory of its own"):
            mla.decode(replace(batch, **{name: WithoutMemory(getattr(batch, name))}))


def test_a_plan_brings_its_order(mla):
    batch = mla.batch([Request(3 * mla.order.kv_split + 5, key=1)])
    expected = mla.decode(batch)
    plan = mla.plan("decode", batch)
    mla.decode(batch, plan=plan, order=None).assert_same(expected)
    with pytest.raises(ValueError, match="order"):
        mla.recut().decode(batch, plan=plan)
    mla.recut().decode(batch).assert_differs(expected)


def test_a_plan_that_is_too_small(mla):
    small = mla.batch([Request(40, key=1)])
    plan = mla.plan("decode", small)
    with pytest.raises(ValueError, match="plan"):
        mla.decode(mla.batch([Request(40, key=1), Request(40, key=2)]), plan=plan)
    with pytest.raises(ValueError, match="plan"):
        mla.decode(mla.batch([Request(40, key=1)], num_heads=2 * mla.num_heads), plan=plan)
    longer = mla.batch([Request(40 + 4 * mla.order.kv_split, key=1)])
    if mla.device.type == "cuda":  # the host does not see the length
        assert bool(mla.decode(longer, plan=plan).out.isnan().all())
    else:
        with pytest.raises(ValueError, match=r"seq_lens\[0\].*max_seq_len"):
            mla.decode(longer, plan=plan)


@pytest.mark.parametrize("form", ["one_pass", "two_phase"])
def test_out_is_the_same_without_lse(mla, form):
    from triton_mla import mla_decode

    batch = mla.batch([Request(2 * mla.order.kv_split + 5, key=1), Request(3, key=2), Request(0, key=3)])
    plan = mla.plan("decode", batch, Schedule(form=form))
    expected = mla.decode(batch, plan=plan)
    out = mla_decode(batch.q, batch.kv_cache, batch.block_table, batch.seq_lens, softmax_scale=batch.softmax_scale, kv_lora_rank=batch.kv_lora_rank, plan=plan)
    replace(expected, out=out).assert_same(expected)


SCRIPT = """
import hashlib, sys, torch
from triton_mla import mla_decode
from triton_mla.testing import Request, make_paged_batch
for key in (3, 4):
    requests = [Request(150, key=key), Request(9, key=2)]
    batch = make_paged_batch(requests, num_heads=4, kv_lora_rank=128, device=sys.argv[1])
    out, lse = mla_decode(batch.q, batch.kv_cache, batch.block_table, batch.seq_lens,
                          softmax_scale=batch.softmax_scale, kv_lora_rank=128, return_lse=True)
    assert not out.isnan().any() and not lse.isnan().any()
    values = out.cpu().view(torch.int16).numpy().tobytes() + lse.cpu().numpy().tobytes()
    print(hashlib.sha256(values).hexdigest())
"""


def test_two_processes_with_fresh_compile_caches(mla, tmp_path):
    def digests(cache):
        command = [sys.executable, "-c", SCRIPT, mla.device.type]
        env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / cache)}
        done = subprocess.run(command, env=env, check=True, capture_output=True, text=True, timeout=300)
        return done.stdout.split()

    first = digests("first")
    assert len(first) == 2 and first[0] != first[1]
    assert digests("second") == first
