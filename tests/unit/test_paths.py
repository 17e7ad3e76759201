"""The form of each token: a function of its role and of the configuration, whatever the schedule does to it."""

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triton_mla.config import Settings
from triton_mla.errors import UnsupportedError
from triton_mla.paths import ABSORBED, CHUNKED, MHA, REFUSED, PathRule, prompt_forms, split_batch, token_path

MHA_RULE, ABSORBED_RULE = PathRule(MHA), PathRule(ABSORBED)
RULES = {"mha": MHA_RULE, "absorbed": ABSORBED_RULE}


@pytest.mark.parametrize(
    ("position", "prompt_len", "rule", "path"),
    [
        (0, 1, MHA_RULE, MHA),
        (9, 10, MHA_RULE, MHA),
        (10, 10, MHA_RULE, ABSORBED),
        (0, 0, MHA_RULE, ABSORBED),
        (0, None, MHA_RULE, ABSORBED),
        (0, 10, ABSORBED_RULE, ABSORBED),
        (10, 10, ABSORBED_RULE, ABSORBED),
    ],
)
def test_token_path(position, prompt_len, rule, path):
    assert token_path(position, prompt_len, rule) == path


def test_the_rule_takes_nothing_of_the_schedule():
    assert list(inspect.signature(token_path).parameters) == ["position", "prompt_len", "rule"]


def pieces(prompt_len, total, events):
    """[start, end) of each call of one run: a chunk for each event, and where an event says so a preemption after it,
    or a cache hit on the way back, so that the sequence is computed again from an earlier position."""
    computed = done = 0
    for chunk, again in [*events, *[(16, None)] * total]:
        # Behind the known tokens there is one at a time to decode.
        end = min(computed + chunk, max(done, prompt_len), total) if computed < max(done, prompt_len) else computed + 1
        if computed < total:
            yield computed, end
            done = max(done, end)
            computed = end if again is None else min(again, end - 1)


events = st.lists(st.tuples(st.integers(1, 16), st.none() | st.integers(0, 40)), max_size=10)
neighbours = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30), st.integers(0, 40)), max_size=4)


def forms_of(start, end, prompt_len, rule, others, place):
    """position -> form of one request's chunk, in a batch with others."""
    place = min(place, len(others))
    batch = [(min(q, n), n, p) for q, n, p in others]
    batch.insert(place, (end - start, end, prompt_len))
    query_lens, seq_lens, prompt_lens = zip(*batch, strict=True)
    found = {}
    segments = split_batch(query_lens, seq_lens, prompt_lens, rule)
    for form, group in zip((MHA, ABSORBED), segments, strict=True):
        for segment in group:
            if segment.request == place:
                for i in range(segment.query_len):
                    position = segment.seq_len - segment.query_len + i
                    assert segment.first + i == sum(query_lens[:place]) + position - start
                    assert found.setdefault(position, form) == form
    assert sorted(found) == list(range(start, end))
    assert sum(s.query_len for group in segments for s in group) == sum(query_lens)
    return found


@given(st.integers(1, 30), st.integers(0, 10), st.lists(events, min_size=1, max_size=3), st.sampled_from(list(RULES)), neighbours, st.integers(0, 4))
def test_no_schedule_and_no_neighbour_changes_the_form_of_a_token(prompt_len, generated, runs, name, others, place):
    total, rule = prompt_len + generated, RULES[name]
    wanted = [{token_path(position, prompt_len, rule)} for position in range(total)]
    assert wanted == [{MHA if name == MHA and position < prompt_len else ABSORBED} for position in range(total)]
    for run_events in runs:
        taken = [set() for _ in range(total)]
        for start, end in pieces(prompt_len, total, run_events):
            for position, form in forms_of(start, end, prompt_len, rule, others, place).items():
                taken[position].add(form)
        assert taken == wanted


def test_rules_that_look_at_how_a_token_arrives_fail_the_same_check():
    plain, preempted = [(0, 4), (4, 5), (5, 6)], [(0, 4), (4, 5), (0, 5), (5, 6)]

    def forms(rule):
        return [{rule(start, end) for start, end in run if start <= 4 < end} for run in (plain, preempted)]

    assert forms(lambda start, end: ABSORBED if end - start == 1 else MHA) == [{ABSORBED}, {ABSORBED, MHA}]
    assert forms(lambda start, end: token_path(4, end, MHA_RULE)) == [{MHA}, {MHA}]  # everything that arrives passes for a prompt
    assert forms(lambda start, end: token_path(4, 4, MHA_RULE)) == [{ABSORBED}, {ABSORBED}]


def test_the_fallback_outside_of_invariant_mode_follows_the_schedule():
    rule = PathRule(MHA, ABSORBED)
    assert not rule.batch_invariant
    assert set(forms_of(0, 8, 8, rule, [], 0).values()) == {MHA}
    assert set(forms_of(0, 5, 8, rule, [], 0).values()) == {MHA}
    assert set(forms_of(5, 8, 8, rule, [], 0).values()) == {ABSORBED}
    assert all(PathRule(prompt, prefix).batch_invariant for prompt in (MHA, ABSORBED) for prefix in (CHUNKED, REFUSED))


@pytest.mark.parametrize(("query_len", "seq_len"), [(5, 5), (3, 8), (1, 8)])
def test_a_cut_prompt_is_refused_where_prompts_are_to_come_whole(query_len, seq_len):
    rule = PathRule(MHA, REFUSED)
    with pytest.raises(ValueError, match="request 1 brings tokens .* of a prompt of 8; it must come whole"):
        split_batch([1, query_len], [9, seq_len], [3, 8], rule)
    mha, absorbed = split_batch([1, 8, 10, 1], [9, 8, 10, 9], [3, 8, 8, 8], rule)
    assert [(s.request, s.query_len) for s in mha] == [(1, 8), (2, 8)]
    assert [(s.request, s.query_len) for s in absorbed] == [(0, 1), (2, 2), (3, 1)]


def test_padding_takes_the_absorbed_form():
    mha, absorbed = split_batch([1, 0, 3], [0, 7, 0], [5, 9, 5], MHA_RULE)
    assert not mha and [(s.request, s.first, s.query_len, s.seq_len) for s in absorbed] == [(0, 0, 1, 0), (2, 1, 3, 0)]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (([1], [5], None), "prompt_lens=None"),
        (([1], [5], [3, 4]), "prompt_lens has 2 requests"),
        (([1], [5, 6], [3]), "seq_lens has 2 requests"),
        (([1, 1], [5, 6], [3, -1]), r"prompt_lens\[1\]=-1"),
        (([1], [5], [True]), r"prompt_lens\[0\]=True"),
        (([1], [5], [2.0]), r"prompt_lens\[0\]=2.0"),
    ],
)
def test_bad_lengths(arguments, word):
    with pytest.raises(ValueError, match=word):
        split_batch(*arguments, MHA_RULE)


def test_the_absorbed_form_needs_no_roles():
    assert split_batch([3, 1], [3, 9], None, ABSORBED_RULE)[0] == ()


@pytest.mark.parametrize("values", [{"prompt": "auto"}, {"prefix": "mha"}, {"prompt": None}])
def test_bad_rule(values):
    (name,) = values
    with pytest.raises(ValueError, match=f"{name}=.*must be one of"):
        PathRule(**values)


def test_a_rule_says_itself():
    assert str(ABSORBED_RULE) == "every token takes the absorbed form"
    texts = {str(PathRule(MHA, prefix)) for prefix in (CHUNKED, REFUSED, ABSORBED)}
    assert len(texts) == 3 and all("before the end of its request's original prompt takes the mha form" in text for text in texts)


@pytest.mark.parametrize(
    ("values", "roles", "whole", "forms", "word"),
    [
        ({}, True, False, (MHA, ABSORBED), "roles of tokens are supplied"),
        ({}, False, False, (ABSORBED,), "not supplied"),
        ({"batch_invariant": True}, True, False, (MHA, ABSORBED), "supplied"),
        ({"batch_invariant": True}, False, True, (ABSORBED,), "not supplied"),
        ({"batch_invariant": True, "prefix_caching": "keep"}, True, True, (ABSORBED,), "prefix_caching=keep"),
        ({"prefix_caching": "keep"}, True, False, (MHA, ABSORBED), "supplied"),
        ({"chunked_prefix": False}, True, False, (MHA, ABSORBED), "bits follow the schedule"),
        ({"chunked_prefix": False, "batch_invariant": True}, True, False, (ABSORBED,), "gives prompts whole"),
        ({"chunked_prefix": False, "batch_invariant": True}, True, True, (MHA, ABSORBED), "prompts come whole"),
        ({"prefill_path": "absorbed"}, True, False, (ABSORBED,), "prefill_path=absorbed"),
        ({"prefill_path": "mha"}, True, False, (MHA,), "prefill_path=mha"),
        ({"prefill_path": "mha", "batch_invariant": True}, True, False, (MHA,), "prefill_path=mha"),
        ({"prefill_path": "mha", "batch_invariant": True, "chunked_prefix": False}, True, True, (MHA,), "chunked_prefix=0"),
    ],
)
def test_forms_of_prompt_tokens(values, roles, whole, forms, word):
    found, reason = prompt_forms(Settings(**values), token_roles=roles, whole_prompts=whole)
    assert found == forms and word in reason


@pytest.mark.parametrize(
    ("values", "roles", "words"),
    [
        ({"batch_invariant": True}, False, ["not supplied"]),
        ({}, False, ["not supplied"]),
        ({"batch_invariant": True, "prefix_caching": "keep"}, True, ["prefix_caching=keep"]),
        ({"batch_invariant": True, "chunked_prefix": False}, True, ["chunked_prefix=0"]),
        ({"batch_invariant": True, "prefix_caching": "keep", "chunked_prefix": False}, False, ["keep", "not supplied", "chunked_prefix=0"]),
    ],
)
def test_unsound_mha_is_refused_with_every_reason(values, roles, words):
    with pytest.raises(UnsupportedError, match="prefill_path=mha .argument. is refused") as caught:
        prompt_forms(Settings(prefill_path="mha", **values), token_roles=roles)
    reasons = caught.value.reasons["mha"]
    assert len(reasons) == len(words) and all(word in reason for word, reason in zip(words, reasons, strict=True))
