"""The engine with a model that needs no kernel: whatever it does to requests, each token sees exactly the tokens before it."""

from dataclasses import replace

import pytest
import torch
from fake_model import FakeModel
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from determinism.compare import compare
from determinism.engine import Engine, Policy, Request
from triton_mla.paths import PathRule

PAGE = 16
LONGEST = 160
BASE = tuple(range(11)) * 3


@st.composite
def requests(draw):
    """A few requests whose prompts share beginnings, some of them behind the sequence of another one."""
    found = []
    for index in range(draw(st.integers(1, 5))):
        parent = draw(st.sampled_from([None, *(r.name for r in found if r.parent is None)])) if found else None
        prompt = BASE[: draw(st.integers(0, len(BASE)))] + (draw(st.integers(0, 10)),)
        found.append(Request(f"r{index}", prompt, draw(st.integers(1, 12)), parent))
    return found


@st.composite
def policies(draw, prompts):
    return Policy(
        max_batch=draw(st.integers(1, 5)),
        budgets=tuple(draw(st.lists(st.integers(1, 50), min_size=1, max_size=3))),
        shuffled=draw(st.booleans()),
        prefix_cache=draw(st.sampled_from(["off", "prompts", "all"] if prompts == "absorbed" else ["off", "prompts"])),
        preempt=draw(st.sampled_from([0.0, 0.1, 0.5])),
        num_pages=draw(st.sampled_from([None, LONGEST // PAGE, LONGEST // PAGE + 3])),
        drafts=draw(st.integers(0, 3)),
        padded=draw(st.booleans()),
        every_row=draw(st.booleans()),
        seed=draw(st.integers(0, 9)),
    )


def run(policy, asked, form="absorbed", times=1):
    engine = Engine(FakeModel(PathRule(form)), policy, page_size=PAGE, max_len=LONGEST)
    return [engine.run(asked) for _ in range(times)][-1]


def test_the_plain_run_computes_each_token_once():
    asked = [Request("a", (1, 2, 3, 4, 5), 4), Request("b", (7,), 2, parent="a")]
    plain = run(Policy(), asked)
    assert {name: len(tokens) for name, tokens in plain.tokens.items()} == {"a": 9, "b": 12}
    assert plain.tokens["b"][:10] == [*plain.tokens["a"], 7]
    assert [(first, len(rows)) for first, rows in plain.rows["a"]] == [(0, 5), (5, 1), (6, 1), (7, 1)]
    assert [(first, len(rows)) for first, rows in plain.rows["b"]] == [(0, 10), (10, 1)]
    assert all(tokens[first + len(rows)] == rows[-1].argmax() for name, tokens in plain.tokens.items() for first, rows in plain.rows[name])


@pytest.mark.parametrize("form", ["absorbed", "mha"])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_no_schedule_changes_what_a_token_sees(form, data):
    asked = data.draw(requests())
    plain = run(Policy(), asked, form)
    policy = replace(data.draw(policies(form)), oracle=plain.tokens)
    found = run(policy, asked, form, times=data.draw(st.integers(1, 2)))
    assert found.tokens == plain.tokens
    result = compare(found, plain)
    assert result.rows > 0 and result.differing == 0, result
    if policy.every_row and policy.prefix_cache == "off":
        expected = sum(len(rows) for parts in plain.rows.values() for _, rows in parts)
        assert result.rows >= expected and (policy.preempt or policy.num_pages or result.rows == expected)


def test_budgets_bound_steps():
    engine = Engine(FakeModel(PathRule()), Policy(max_batch=3, budgets=(5,)), page_size=PAGE, max_len=LONGEST)
    found = engine.run([Request(str(i), (1, 2), 4) for i in range(4)])
    assert max(engine.model.steps) == 5 and found.events["chunks"] and found.events["largest batch"] == 3


@pytest.mark.parametrize(
    ("policy", "events"),
    [
        (Policy(max_batch=3, budgets=(9,)), ["chunks"]),
        (Policy(max_batch=3, preempt=0.1), ["preempted", "generated tokens lost"]),
        (Policy(max_batch=3, num_pages=LONGEST // PAGE), ["preempted"]),
        (Policy(max_batch=3, prefix_cache="all"), ["cached", "cached generated"]),
        (Policy(max_batch=3, drafts=3), ["accepted drafts", "rejected drafts"]),
        (Policy(max_batch=3, padded=True), ["padded steps"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_a_policy_is_for_happens(policy, events):
    asked = [Request(str(i), BASE[i:], 60) for i in range(3)] + [Request("turn", (5,), 6, parent="0")]
    happened = run(replace(policy, oracle=run(Policy(), asked).tokens), asked).events
    assert all(happened[event] > 0 for event in events), happened


@pytest.mark.parametrize(
    "wrong",
    [Policy(max_batch=2, preempt=0.4, by_arrival=True), Policy(max_batch=2, prefix_cache="all", num_pages=40)],
    ids=["recomputed as prompt", "generated tokens in the prefix cache"],
)
def test_controls_change_the_form_of_a_token(wrong):
    asked = [Request("a", BASE[:5], 20), Request("b", (3,), 6, parent="a")]
    result = compare(run(wrong, asked, "mha"), run(Policy(), asked, "mha"))
    assert result.differing > 0 and result.max_delta > 0
    assert compare(run(wrong, asked), run(Policy(), asked)).differing == 0, "with the absorbed form there is nothing to confuse"


def test_comparison_names_the_first_difference():
    asked = [Request("a", (1, 2, 3), 4), Request("b", (2, 2), 4)]
    plain, other = run(Policy(), asked), run(Policy(), asked)
    assert compare(other, plain).differing == 0
    first, rows = other.rows["b"][1]
    rows[0, 3] = torch.nextafter(rows[0, 3], torch.tensor(1.0))
    result = compare(other, plain)
    assert (result.differing, result.first) == (1, ("b", first)) and 0 < result.max_delta < 1e-6
    other.tokens["a"][3] += 1
    assert compare(other, plain).first == ("a", 3), "rows behind another token differ, whatever their bits"
    plain.rows["b"][0][1][1] = float("nan")
    other.rows["b"][0][1][1] = float("nan")
    assert compare(other, plain).differing == 5, "NaN never passes"


def test_bad_arguments():
    with pytest.raises(ValueError, match="parent='b'"):
        run(Policy(), [Request("a", (1,), 1, parent="b")])
    with pytest.raises(ValueError, match="num_pages=3 must be at least 10"):
        run(Policy(num_pages=3), [])
