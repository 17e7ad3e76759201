"""Negative controls of prefill: what engines do whose prompts lose their bits to the batch."""

from __future__ import annotations

import functools

from triton_mla.testing import Request
from triton_mla.verification.accuracy import merge
from triton_mla.verification.controls import Control, Differences
from triton_mla.verification.mha import Mha, Prompts
from triton_mla.verification.sequences import PREEMPT, Model, alone, plain, plain_events, same_rows
from triton_mla.verification.trial import VICTIM, Rows, Trial, same


def prefix_chunk(capacity: int, batch_size: int, page_size: int) -> int:
    """The forbidden rule: tokens of a chunk of the prefix, when the requests of a batch share the workspace's `capacity`."""
    return max(capacity // batch_size // page_size, 1) * page_size


def _prompts(mha: Mha) -> tuple[Prompts, int, int]:
    """(the watched prompt's last tokens over a prefix, tokens of the prefix, tokens that a workspace holds)."""
    prefix = 3 * mha.tile
    return mha.prompts(mha.batch([Request(prefix + 9, q_len=9, key=VICTIM)])), prefix, 2 * mha.tile


def merged_by_batch(trial: Trial) -> Differences:
    """Each chunk of the prefix and the new tokens are attended by themselves, and the normalised results are merged."""
    mha = Mha(trial)
    prompts, prefix, capacity = _prompts(mha)

    def attend(batch_size: int) -> Rows:
        chunk = prefix_chunk(capacity, batch_size, trial.profile.page_size)
        starts = range(0, prefix, chunk)
        parts = [mha.prefill(prompts.keys(start, min(start + chunk, prefix)), causal=False) for start in starts]
        new = mha.prefill(prompts.keys(prefix, prefix + 9))
        return merge(functools.reduce(merge, parts), new)

    by_itself = attend(1)
    for batch_size in (2, 3, 5):
        yield f"beside {batch_size - 1} others", not same(attend(batch_size), by_itself)


def streamed_by_batch(trial: Trial) -> Differences:
    """The prefix is streamed through the state in chunks that end inside of KV tiles."""
    mha = Mha(trial)
    prompts, prefix, capacity = _prompts(mha)

    def attend(batch_size: int) -> Rows:
        chunk = prefix_chunk(capacity, batch_size, 1)
        return mha.streamed(prompts, range(chunk, prefix, chunk))

    by_itself = attend(1)
    for batch_size in (3, 5):
        yield f"beside {batch_size - 1} others", not same(attend(batch_size), by_itself)


def forms_by_arrival(trial: Trial) -> Differences:
    """Tokens that come together take the mha form and one alone the absorbed form, whatever they are."""
    model = Model(trial, "mha")
    prompt, total = trial.profile.sequence
    for what, events in (
        ("recomputed after a preemption", [*plain_events(trial)[:4], PREEMPT, total]),
        ("a prompt's last token alone", [prompt - 1, *[1] * (total - prompt + 1)]),
    ):
        yield what, not same_rows(alone(model, events, by_arrival=True), plain(model))


CONTROLS = [
    Control("prefix merged in chunks of capacity // batch_size", merged_by_batch),
    Control("prefix streamed in chunks of capacity // batch_size", streamed_by_batch),
    Control("recomputed tokens take the form they arrive in", forms_by_arrival),
]
