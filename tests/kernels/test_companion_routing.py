"""Routing by the rules of DeepSeek-V2 and V3: the experts, their weights, ties, and each token as if it were alone."""

import pytest
import torch
from lanes import dirty_memory

from triton_mla.companion.routing import route_tokens
from triton_mla.testing import assert_bitwise_equal, bitwise_equal

pytestmark = [pytest.mark.usefixtures("interpreter"), pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")]
INF, NAN = float("inf"), float("nan")
MODELS = {
    "V3": (256, True, {"top_k": 8, "num_groups": 8, "top_groups": 4, "scaling_factor": 2.5}),
    "V2": (160, False, {"top_k": 6, "num_groups": 8, "top_groups": 3, "scoring": "softmax", "normalize": False, "scaling_factor": 16.0}),
    "V2-Lite": (64, False, {"top_k": 6, "scoring": "softmax", "normalize": False}),
    "Kimi-K2": (384, True, {"top_k": 8, "scaling_factor": 2.827}),
    "softmax with a bias": (24, True, {"top_k": 4, "num_groups": 3, "top_groups": 2, "scoring": "softmax"}),
}


def data(device, tokens, num_experts, with_bias):
    chance = torch.Generator().manual_seed(num_experts)
    logits, bias = torch.randn(tokens, num_experts, generator=chance), 0.1 * torch.randn(num_experts, generator=chance)
    return logits.to(device), bias.to(device) if with_bias else None


def first_best(values, count):
    """Indices of the best of each row, those of lower index first among equals."""
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[..., :count]


def by_the_rule(logits, *, top_k, scoring="sigmoid", num_groups=1, top_groups=1, correction_bias=None, normalize=True, scaling_factor=1.0):
    """In float64."""
    logits = logits.double()
    scores = logits.sigmoid() if scoring == "sigmoid" else logits.softmax(-1)
    biased = scores if correction_bias is None else scores + correction_bias.double()
    groups = biased.unflatten(1, (num_groups, -1))
    two = scoring == "sigmoid" or correction_bias is not None
    if top_groups < num_groups:
        of_group = groups.topk(2, -1).values.sum(-1) if two else groups.amax(-1)
        kept = torch.zeros_like(of_group, dtype=torch.bool).scatter(1, first_best(of_group, top_groups), True)
        groups = groups.masked_fill(~kept[..., None], -INF)
    ids = first_best(groups.flatten(1), top_k)
    weights = scores.gather(1, ids)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scaling_factor, ids


@pytest.mark.parametrize("model", MODELS)
def test_against_the_rule(device, model):
    num_experts, with_bias, options = MODELS[model]
    logits, bias = data(device, 12, num_experts, with_bias)
    with dirty_memory():
        weights, ids = route_tokens(logits, correction_bias=bias, **options)
    expected, expected_ids = by_the_rule(logits, correction_bias=bias, **options)
    assert weights.dtype == torch.float32 and ids.dtype == torch.int32
    assert torch.equal(ids.long(), expected_ids)
    assert bool(((weights - expected).abs() <= 2e-6 * expected).all())


@pytest.mark.parametrize("model", MODELS)
def test_a_token_alone_and_among_others(device, model):
    num_experts, with_bias, options = MODELS[model]
    logits, bias = data(device, 9, num_experts, with_bias)
    wide = torch.full((9, num_experts + 3), NAN, device=device)
    wide[:, 1:-2] = logits
    weights, ids = route_tokens(logits, correction_bias=bias, **options)
    for some in (slice(0, 1), slice(8, 9), slice(2, 7)):
        got, got_ids = route_tokens(wide[some, 1:-2], correction_bias=bias, **options)
        assert_bitwise_equal(got, weights[some])
        assert torch.equal(got_ids, ids[some])
    assert not bitwise_equal(weights.flip(0), weights)


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
def test_ties_go_to_the_lower_index(device, scoring):
    same = torch.zeros(2, 32, device=device)
    _, ids = route_tokens(same, top_k=5, scoring=scoring)
    assert ids.tolist() == [[0, 1, 2, 3, 4]] * 2
    _, ids = route_tokens(same, top_k=5, scoring=scoring, num_groups=8, top_groups=2)
    assert ids.tolist() == [[0, 1, 2, 3, 4]] * 2
    same[1, 20:] = 1.0
    same[1, 30] = 2.0
    weights, ids = route_tokens(same, top_k=5, scoring=scoring, num_groups=8, top_groups=2)
    assert ids[1].tolist() == [30, 20, 21, 22, 23]
    assert_bitwise_equal(weights[1, 1:2], weights[1, 4:5])
    zeros = torch.tensor([[-0.0, 0.0, -0.0]], device=device)
    assert route_tokens(zeros, top_k=3, scoring=scoring)[1].tolist() == [[0, 1, 2]]


def test_the_bias_chooses_and_does_not_weigh(device):
    logits, _ = data(device, 3, 16, False)
    bias = torch.full((16,), -5.0, device=device)
    bias[[3, 7, 8]] = 5.0
    weights, ids = route_tokens(logits, top_k=3, correction_bias=bias, normalize=False)
    assert ids.sort(-1).values.tolist() == [[3, 7, 8]] * 3
    assert bool((weights - logits.sigmoid().gather(1, ids.long())).abs().max() < 1e-6)
    # a group that was not chosen is out, though its biased scores are above the negative ones of the chosen
    bias = torch.tensor([0.0, -9.0, -9.0, -9.0] * 2 + [-3.0] * 4, device=device)
    _, ids = route_tokens(torch.zeros(1, 12, device=device), top_k=4, num_groups=3, top_groups=1, correction_bias=bias)
    assert ids.tolist() == [[8, 9, 10, 11]]


def test_weights_are_added_in_the_order_of_slots(device):
    logits, bias = data(device, 64, 64, True)
    raw, ids = route_tokens(logits, top_k=8, correction_bias=bias, normalize=False)
    weights, again = route_tokens(logits, top_k=8, correction_bias=bias)
    assert torch.equal(ids, again)
    total, backwards = torch.zeros(64, device=device), torch.zeros(64, device=device)
    for i in range(8):
        total, backwards = total + raw[:, i], backwards + raw[:, 7 - i]
    assert_bitwise_equal(weights, raw / (total + 1e-20)[:, None])
    assert not bitwise_equal(weights, raw / (backwards + 1e-20)[:, None])


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
@pytest.mark.parametrize("row", [[NAN] * 8, [-INF] * 8, [INF] * 8, [0.0, NAN, -INF, INF, 1.0, NAN, 2.0, -INF]], ids=str)
def test_ids_are_distinct_experts_whatever_the_logits(device, scoring, row):
    for options in ({}, {"num_groups": 4, "top_groups": 3}, {"correction_bias": torch.tensor(row, device=device)}):
        _, ids = route_tokens(torch.tensor([row], device=device), top_k=6, scoring=scoring, **options)
        assert len(set(ids[0].tolist())) == 6 and int(ids.min()) >= 0 and int(ids.max()) < 8


def test_nan_ranks_below_every_number(device):
    _, ids = route_tokens(torch.tensor([[NAN, -INF, 0.0, NAN]], device=device), top_k=4)
    assert ids.tolist() == [[2, 1, 0, 3]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtypes_and_no_tokens(device, dtype):
    logits, bias = data(device, 3, 64, True)
    for got, expected in zip(route_tokens(logits.to(dtype), top_k=6, correction_bias=bias.to(dtype)),
                             route_tokens(logits.to(dtype).float(), top_k=6, correction_bias=bias.to(dtype).float()), strict=True):
        assert_bitwise_equal(got, expected)
    weights, ids = route_tokens(logits[:0], top_k=6)
    assert weights.shape == ids.shape == (0, 6)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"top_k": 0}, "top_k=0"),
        ({"top_k": True}, "top_k=True"),
        ({"top_k": 17}, "top_k=17 must be an int from 1 to 16"),
        ({"top_k": 5, "num_groups": 4, "top_groups": 1}, "top_k=5 must be an int from 1 to 4"),
        ({"top_k": 2, "num_groups": 3}, "num_groups=3 must divide"),
        ({"top_k": 2, "num_groups": 4, "top_groups": 5}, "top_groups=5"),
        ({"top_k": 2, "num_groups": 16, "top_groups": 4}, "num_groups=16 must leave two"),
        ({"top_k": 2, "scoring": "tanh"}, "scoring='tanh'"),
        ({"top_k": 2, "correction_bias": torch.zeros(3)}, "correction_bias"),
        ({"top_k": 2, "scaling_factor": None}, "scaling_factor=None"),
        ({"top_k": 2, "scaling_factor": float("nan")}, "scaling_factor=nan"),
        ({"top_k": 2, "scaling_factor": 1e39}, "scaling_factor=1e"),
        ({"top_k": 2, "scaling_factor": 10**400}, "scaling_factor=1000"),
        ({"top_k": 2, "normalize": "no"}, "normalize='no' must be True or False"),
    ],
)
def test_bad_input(device, options, words):
    with pytest.raises(ValueError, match=words):
        route_tokens(torch.zeros(2, 16, device=device), **options)


@pytest.mark.parametrize("logits", [torch.zeros(16), torch.zeros(2, 0), torch.zeros(2, 2000), torch.zeros(2, 16, dtype=torch.int32), None])
def test_bad_logits(device, logits):
    with pytest.raises(ValueError, match="logits"):
        route_tokens(logits if logits is None else logits.to(device), top_k=1)


@pytest.mark.gpu
def test_inside_torch_compile(device):
    logits, bias = data(device, 5, 256, True)
    options = {**MODELS["V3"][2], "correction_bias": bias}
    for got, expected in zip(torch.compile(route_tokens)(logits, **options), route_tokens(logits, **options), strict=True):
        assert_bitwise_equal(got, expected)
