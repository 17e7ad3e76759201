"""Negative controls: calls that break the contract on purpose. A run in which one shows no difference fails."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from triton_mla.testing import PagedBatch, Request, bitwise_equal
from triton_mla.verification.control_kernels import row_sum_kernel, shifted_tiles_kernel
from triton_mla.verification.golden import fixed_values
from triton_mla.verification.trial import NotHereError, Rows, Trial, same

Differences = Iterator[tuple[str, bool]]


@dataclass(frozen=True)
class Control:
    """One negative control. `body` yields (what was compared, whether it DIFFERED)."""

    name: str
    body: Callable[[Trial], Differences]


def split_of_longest(batch: PagedBatch, block_n: int, pieces: int = 4) -> int:
    """The forbidden rule: a split size (tokens) that cuts the batch's longest request into `pieces`."""
    longest = int(batch.seq_lens.max())
    return -(-longest // (pieces * block_n)) * block_n


def batch_dependent_splits(trial: Trial) -> Differences:
    """The split size follows the longest request of the batch."""

    def decode(batch: PagedBatch) -> Rows:
        order = trial.profile.order
        order = dataclasses.replace(order, kv_split=split_of_longest(batch, order.block_n))
        return trial.decode(batch, order=order)

    alone = decode(trial.batch([trial.victim]))
    for factor in (2, 3):
        batch = trial.batch([trial.victim, Request(factor * trial.profile.victim, key=32)])
        yield f"beside a request {factor} times as long", not same(decode(batch)[:1], alone)


def row_sums_by_layout(trial: Trial) -> Differences:
    """`tl.sum` of the rows of a product, over tile shapes that leave the product itself equal."""
    if trial.device.type != "cuda":
        raise NotHereError("needs a GPU")
    values = fixed_values(2, 64 * 64, dtype=trial.dtype, device=trial.device)
    a, b = values.view(2, 64, 64)
    results = []
    for rows, warps in ((16, 2), (16, 4), (64, 4), (64, 8)):
        scores = torch.full((64, 64), float("nan"), device=trial.device)
        sums = torch.full((64,), float("nan"), device=trial.device)
        row_sum_kernel[(64 // rows,)](
            a, b, scores, sums, ROWS=rows, INNER=64, COLUMNS=64, num_warps=warps, enable_fp_fusion=False
        )
        results.append((f"{rows} rows, {warps} warps", scores, sums))
    _, scores, sums = results[0]
    for what, other_scores, other_sums in results[1:]:
        yield what, bitwise_equal(scores, other_scores) and not bitwise_equal(sums, other_sums)


def page_tail_leak(trial: Trial) -> Differences:
    """The token after the end of a request is seen, so that stale memory reaches the result."""
    requests = [trial.victim, Request(trial.profile.page_size + 1, key=63)]
    rows = []
    for stale in (0.0, 1.0):
        batch = trial.batch(requests, stale=stale)
        rows.append(trial.decode(dataclasses.replace(batch, seq_lens=batch.seq_lens + 1)))
    for i in range(len(requests)):
        yield f"request of {requests[i].seq_len} tokens", not same(rows[0][i : i + 1], rows[1][i : i + 1])


def shifted_tokens(trial: Trial) -> Differences:
    """The same tokens at other columns of their tiles."""
    tokens, rank = 200, trial.profile.kv_lora_rank
    values = fixed_values(16 + tokens, rank, dtype=trial.dtype, device=trial.device)
    outs = []
    for shift in (0, 1, 7, 33):
        out = torch.full((16, rank), float("nan"), device=trial.device)
        arguments = (values[:16], values[16:], out, shift, tokens, rank**-0.5)
        shifted_tiles_kernel[(1,)](*arguments, ROWS=16, RANK=rank, TILE=64, enable_fp_fusion=False)
        outs.append((f"by {shift} tokens", out))
    for what, out in outs[1:]:
        yield what, not bitwise_equal(out, outs[0][1])


CONTROLS = [
    Control("splits from the batch's longest request", batch_dependent_splits),
    Control("row sums by tl.sum", row_sums_by_layout),
    Control("a leak of the page tail", page_tail_leak),
    Control("tokens shifted inside their tile", shifted_tokens),
]
