"""Whole sequences through two layers of `MLAAttention`: no schedule of an engine changes a bit of any token."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from triton_mla.testing import bitwise_equal
from triton_mla.verification.sequences import FORMS, PREEMPT, Engine, Events, Model, Sequence, alone, plain, plain_events, same_rows
from triton_mla.verification.trial import VICTIM, Check, Comparisons, Trial, register

CHECKS: list[Check] = []
check = functools.partial(register, CHECKS)


def compare(trial: Trial, form: str, schedules: Mapping[str, Events]) -> Comparisons:
    """Each schedule against the plain run."""
    model = Model(trial, form)
    for name, events in schedules.items():
        sequence = alone(model, events)
        yield f"{form}: {name}", sequence.consistent and same_rows(sequence, plain(model))


@check("schedule", "sequences: chunks of the prompt, and neighbours")
def chunks(trial: Trial) -> Comparisons:
    prompt, total = trial.profile.sequence
    ones = [1] * (total - prompt)
    yield from compare(trial, "mha", {"chunks": [1, prompt - 6, 4, 1, *ones]})
    model = Model(trial, "mha")
    engine = Engine(model, seed=1)
    victim, early, late = (Sequence(model.tokens(key, total), n) for key, n in ((VICTIM, prompt), (1, 3), (2, prompt)))
    engine.step((early, prompt))
    engine.step((late, 5), (victim, prompt - 2), (early, 2))
    engine.step((early, 1), (late, prompt - 5), (victim, 2))
    while not victim.done:
        engine.step(*[(sequence, 1) for sequence in (victim, early) if not sequence.done])
    yield "mha: beside two others", same_rows(victim, plain(model))


@check("schedule", "sequences: preemption and recomputation")
def preemption(trial: Trial) -> Comparisons:
    prompt, total = trial.profile.sequence
    left = [1] * (total - prompt - 3)
    schedules = {
        "recomputed at once": [prompt, 1, 1, 1, PREEMPT, prompt + 3, *left],
        "recomputed with a cut in the prompt": [prompt, 3, PREEMPT, prompt - 5, 8, *left],
        "preempted twice": [prompt - 3, PREEMPT, prompt, 3, PREEMPT, prompt + 1, 2, *left],
    }
    yield from compare(trial, "mha", schedules)


@check("schedule", "sequences: verify rows are those of the plain run")
def verify_rows(trial: Trial) -> Comparisons:
    prompt, total = trial.profile.sequence
    for form in FORMS:
        yield from compare(trial, form, {"verified in two steps": [prompt, 2, total - prompt - 2]})


@check("schedule", "sequences: pages of an earlier turn, absorbed form")
def reused_pages(trial: Trial) -> Comparisons:
    model = Model(trial, "absorbed")
    prompt, total = trial.profile.sequence
    end, page = total + 9, trial.profile.page_size
    tokens = model.tokens(VICTIM, end)

    def second_turn(cached: int) -> torch.Tensor:
        engine = Engine(model)
        first = engine.run(Sequence(tokens[:total], prompt), plain_events(trial) if cached else [])
        turn = Sequence(tokens, end - 1, cached, first.pages[: cached // page])
        engine.run(turn, [end - 1 - cached, 1])
        return torch.stack([turn.rows[i] for i in range(total, end)])

    cold = second_turn(0)
    for cached in sorted({prompt // page * page, total // page * page}):
        yield f"{cached} of {end} tokens cached", bitwise_equal(second_turn(cached), cold) and not bool(cold.isnan().any())
