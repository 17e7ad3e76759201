"""Runs held against each other, bit by bit."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from determinism.engine import Run


@dataclass(frozen=True)
class Comparison:
    """Log-probability rows of a run against those of another one.

    rows: compared (request, token) rows. differing: those with a differing bit, or NaN, or tokens before them that already differ.
    first: (request, position) of the first of these, in the order of requests and positions. max_delta: the largest |difference| of a
    log-probability among rows whose tokens agree. events: what happened in the run.
    """

    rows: int = 0
    differing: int = 0
    first: tuple[str, int] | None = None
    max_delta: float = 0.0
    events: tuple[tuple[str, int], ...] = ()

    def __add__(self, other: Comparison) -> Comparison:
        events = dict(self.events)
        for name, count in other.events:
            events[name] = max(events.get(name, 0), count) if name == "largest batch" else events.get(name, 0) + count
        return Comparison(
            self.rows + other.rows, self.differing + other.differing, self.first or other.first, max(self.max_delta, other.max_delta), tuple(events.items())
        )


def compare_rows(name: str, positions: torch.Tensor, rows: torch.Tensor, expected: torch.Tensor, agreeing: int) -> Comparison:
    """Rows [n, V] at positions [n] of a request against expected [L, V], of which the first `agreeing` ones stand behind equal tokens."""
    within = positions < min(agreeing, len(expected))
    theirs = expected[positions.clamp(max=len(expected) - 1)]
    bits = rows.contiguous().view(torch.int32) != theirs.view(torch.int32)
    wrong = bits.any(1) | rows.isnan().any(1) | ~within
    if not bool(wrong.any()):
        return Comparison(len(rows))
    delta = (rows - theirs).abs()[within].nan_to_num(float("inf"))
    largest = float(delta.max()) if delta.numel() else 0.0
    return Comparison(len(rows), int(wrong.sum()), (name, int(positions[wrong].min())), largest)


def compare(run: Run, reference: Run) -> Comparison:
    """Everything that a run computed of the reference's requests, as often as it did. The reference computed each token once."""
    result = Comparison(events=tuple(run.events.items()))
    for name, parts in reference.rows.items():
        if name not in run.rows:
            continue
        expected = torch.cat([rows for _, rows in parts])
        device = expected.device
        positions = torch.cat([torch.arange(first, first + len(rows), device=device) for first, rows in run.rows[name]])
        rows = torch.cat([rows for _, rows in run.rows[name]])
        result += compare_rows(name, positions, rows, expected, _agreeing(run.tokens[name], reference.tokens[name]))
    return result


def _agreeing(ours: list[int], theirs: list[int]) -> int:
    """How many tokens of both are equal, from the first one on."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
