"""A sum over ranks in one order, and the small model split over processes: what holds, and that the proof fails where it does not."""

import functools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from lanes import DTYPES, ON_GPU

from determinism import scenarios
from determinism.engine import Policy
from determinism.models import small
from determinism.ranks import common_row, joined, ranked_rows, rows_on
from determinism.report import Row
from determinism.rows import Plan, bench_of, run_row
from determinism.run import main
from determinism.tensor_parallel import SPLIT, agreed, config_for, ring_sum
from triton_mla.companion import ordered_all_reduce
from triton_mla.testing import assert_bitwise_equal, bitwise_equal

APART = "experts reduced apart where there is one row"


def on_all(pools, function, *args):
    """What the function gives on each rank."""
    return [future.result() for future in [pool.submit(function, *args) for pool in pools]]


@pytest.fixture(scope="module")
def three():
    with joined(3, "gloo") as pools:
        yield functools.partial(on_all, pools)


def values(rank, dtype):
    return torch.randn(7, 33, generator=torch.Generator().manual_seed(rank)).to(dtype)


def sums(dtype):
    x = values(dist.get_rank(), dtype)
    return {"whole": ordered_all_reduce(x), "row": ordered_all_reduce(x[5:6]), "turned": ordered_all_reduce(x.t()), "none": ordered_all_reduce(x[:0]),
            "ring": ring_sum(x), "ring of a row": ring_sum(x[5:6])}


def folded(ranks, dtype):
    return functools.reduce(torch.add, [values(rank, dtype).float() for rank in ranks]).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_sum_in_the_order_of_ranks(three, dtype):
    expected = folded(range(3), dtype)
    for rank, found in enumerate(three(sums, dtype)):
        assert_bitwise_equal(found["whole"], expected, f"rank {rank}")
        assert_bitwise_equal(found["row"], expected[5:6], f"rank {rank}, one row")
        assert_bitwise_equal(found["turned"], expected.t().contiguous(), f"rank {rank}, a view")
        assert found["none"].shape == (0, 33) and found["none"].dtype == dtype
        assert not bitwise_equal(found["ring of a row"], found["ring"][5:6]), "the control follows the place of a row"
    if dtype == torch.float32:
        assert not bitwise_equal(folded(reversed(range(3)), dtype), expected), "the order decides bits"


def difference():
    x = values(0, torch.float32)
    x[0, 1] += float(dist.get_rank() == 2)
    return agreed(x)


def test_ranks_that_disagree_get_nan(three):
    for found in three(difference):
        assert found.isnan().nonzero().tolist() == [[0, 1]]
        assert_bitwise_equal(found[1:], values(0, torch.float32)[1:])


@pytest.mark.parametrize(
    ("x", "group", "message"),
    [([1.0], None, "must be a torch.Tensor"), (torch.ones(2, dtype=torch.int32), None, "x has dtype torch.int32"),
     (torch.ones(2), 7, "group=7 must be a torch.distributed.ProcessGroup"), (torch.ones(2, device="meta"), None, "has a backend for: cpu:gloo")],
)
def test_wrong_arguments(three, x, group, message):
    with pytest.raises(ValueError, match=message):
        three(ordered_all_reduce, x, group)


def test_without_a_group():
    with pytest.raises(ValueError, match="call torch.distributed.init_process_group before"):
        ordered_all_reduce(torch.ones(2))


@pytest.fixture(scope="module")
def plan(device):
    return Plan("small", device, True, 2)


@pytest.fixture(scope="module")
def two(plan):
    if ON_GPU and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with joined(2, plan.backend) as pools:
        yield pools


def row(plan, name, all_reduce, lengths=None):
    """The row of this rank, with an all-reduce of this name; short requests, whose prompts take the mha form and other tokens the absorbed one."""
    sizes = replace(plan.sizes, lengths=lengths or (3, plan.sizes.page_size + 1), new_tokens=2, turns=(), batches=(2,), budgets=((9,),))
    if SPLIT.all_reduce is not ALL_REDUCES[all_reduce] or scenarios.SIZES[plan.device.type, True] != sizes:
        scenarios.SIZES[plan.device.type, True], SPLIT.all_reduce = sizes, ALL_REDUCES[all_reduce]
        bench_of.cache_clear()
    return run_row(plan.on_rank(dist.get_rank()), name, "mha")


def by_rows(x):
    return ordered_all_reduce(x) * (1.0 if len(x) == 1 else 1.01)


def by_rank(x):
    return ordered_all_reduce(x) + 0.01 * dist.get_rank()


ALL_REDUCES = {"ordered": ordered_all_reduce, "by rows": by_rows, "by rank": by_rank}


@pytest.mark.parametrize("name", ["bsN", pytest.param("chunk budgets", marks=pytest.mark.slow)])
def test_a_split_model(two, plan, name):
    found = common_row(on_all(two, row, plan, name, "ordered"))
    assert found.status == "passed" and found.compared > 0, found


def distance(plan):
    """Between log-probabilities of the split model and of the whole one, in the mean: rounding may change the choice of an expert."""
    plan = plan.on_rank(dist.get_rank())
    bench = bench_of(plan, "mha")
    whole = small(plan.device, config=config_for(plan.device, plan.ranks))(scenarios.FORMS["mha"])
    prompt = [replace(bench.requests[0], new_tokens=1)]
    ours, theirs = (torch.cat([part for _, part in bench.engine(Policy(), model).run(prompt).rows[prompt[0].name]]) for model in (bench.model, whole))
    return float((ours - theirs).abs().mean())


@pytest.mark.slow
def test_a_split_model_is_the_whole_one_but_for_rounding(two, plan):
    assert max(on_all(two, distance, plan)) < (0.1 if ON_GPU else 1e-5)


def test_the_control_of_two_ranks_differs(two, plan):
    ((index, found),) = rows_on(two, plan, [(APART, "absorbed")])
    assert (index, found.kind, found.status) == (0, "control", "passed"), found


def test_an_all_reduce_that_follows_the_batch_is_caught(two, plan):
    found = common_row(on_all(two, row, plan, "bsN", "by rows", (2, 3)))
    assert (found.status, found.detail) == ("failed", "bits differ"), found


def test_ranks_that_go_apart_are_caught(two, plan):
    found = common_row(on_all(two, row, plan, "bs1", "by rank", (2,)))
    assert found.status == "failed" and found.differing == found.compared > 0, found


def test_a_rank_that_ends_is_a_failed_row(monkeypatch):
    monkeypatch.setattr(Plan, "backend", "carrier pigeon")
    rows = dict(ranked_rows(Plan("small", torch.device("cpu"), True), [("bsN", "mha"), ("bs1", "mha")]))
    assert [row.status for row in rows.values()] == ["failed", "failed"] and "BrokenProcessPool" in rows[0].detail


def test_ranks_with_other_rows_have_failed():
    first = Row("scenario", "bsN", "mha", "passed", 4, 0, events={"steps": 3})
    assert common_row([first, replace(first, seconds=2.0)]) == first
    other = common_row([first, replace(first, compared=3)])
    assert other.status == "failed" and other.detail == "rank 1 has 0/3, passed"


def test_what_is_run():
    cpu = torch.device("cpu")
    names = {name for name, _ in Plan("small", cpu, True, 2).items(None)}
    assert {"bs1", "bsN", "shuffled arrival", "chunk budgets", "preempt and resume", APART} <= names and "tp" not in names
    assert len({name for name, _ in Plan("small", cpu, True, 4).items(None)} - names) == 1, "a ring"


def test_wrong_usage(capsys):
    assert main(["--tensor-parallel", "2", "--device", "cuda:0"]) == 2
    assert "each of 2 ranks has a GPU of its own" in capsys.readouterr().err
    for model, ranks, message in (("small", 3, "ranks=3 must be one of 1, 2, 4, 8"), ("deepseek_v3", 2, "model='deepseek_v3' must be small")):
        with pytest.raises(ValueError, match=message):
            Plan(model, torch.device("cpu"), True, ranks)
