"""Every implementation must agree with float64 before it is timed."""

from __future__ import annotations

import torch

from benchmarks.workloads import RANK, SOFTMAX_SCALE, Inputs
from triton_mla.reference import mla_absorbed

TOLERANCE = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 1e-5}
"""Largest relative error (Frobenius norm over the checked rows)."""


def spot_rows(inputs: Inputs, limit: int = 12) -> list[tuple[int, int]]:
    """(query row, tokens it sees) for at most `limit` rows: the first, the last and rows evenly between."""
    w = inputs.workload
    count = min(limit, w.num_tokens)
    rows = sorted({round(i * (w.num_tokens - 1) / max(1, count - 1)) for i in range(count)})
    return [(t, w.seq_lens[t // w.q_len] - w.q_len + t % w.q_len + 1) for t in rows]


def expected(inputs: Inputs) -> tuple[list[int], torch.Tensor]:
    """The checked query rows and their output [rows, H, R] in float64.

    A row that sees n tokens is the decode of a request of n tokens, so one reference serves every op.
    """
    rows, lengths = (list(part) for part in zip(*spot_rows(inputs), strict=True))
    device = inputs.q.device
    outs = [
        mla_absorbed(
            inputs.q[t : t + 1],
            inputs.kv_cache,
            inputs.block_table[t // inputs.workload.q_len][None],
            None,
            torch.tensor([n], dtype=torch.int32, device=device),
            softmax_scale=SOFTMAX_SCALE,
            kv_lora_rank=RANK,
        )[0]
        for t, n in zip(rows, lengths, strict=True)
    ]
    return rows, torch.cat(outs)


def relative_error(out: torch.Tensor, rows: list[int], want: torch.Tensor) -> float:
    """||out - want|| / ||want|| over the checked rows; NaN where any element of the whole output is not finite."""
    if not torch.isfinite(out).all():
        return float("nan")
    got = out[rows].double()
    return float((got - want).norm() / want.norm())
