"""Distance of the results from the float64 reference."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from triton_mla.reference import mla_absorbed
from triton_mla.testing import PagedBatch, Request
from triton_mla.verification.trial import Check, Rows, Trial

OUT_TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float32: 5e-5}
"""Largest absolute error of `out` for unit-scale inputs."""
LSE_TOLERANCE = 1e-4
"""Largest absolute error of `lse` (nats), relative to max(1, |lse|)."""


def errors(batch: PagedBatch, rows: Rows, *, extend: bool) -> tuple[float, float]:
    """Largest error of `out` and of `lse` against float64; NaN or a wrong -inf gives inf."""
    starts = batch.cu_seqlens_q if extend else None
    scale, rank = batch.softmax_scale, batch.kv_lora_rank
    out, lse = mla_absorbed(
        batch.q, batch.kv_cache, batch.block_table, starts, batch.seq_lens, softmax_scale=scale, kv_lora_rank=rank
    )
    gap = torch.where(lse == rows.lse, 0.0, (rows.lse.double() - lse).abs() / lse.abs().clamp(min=1.0))
    worst = [(rows.out.double() - out).abs().max(), gap.max()]
    out_error, lse_error = (float(w.nan_to_num(nan=torch.inf)) for w in worst)
    return out_error, lse_error


def accuracy(trial: Trial) -> Iterator[tuple[str, bool]]:
    """Decode and extend against the reference, with small scores and with large ones whose maxima move."""
    for gain in (0.5, 2.0):
        requests = [Request(n, key=80 + i) for i, n in enumerate(trial.profile.accuracy_lengths)]
        decoded = trial.batch(requests, gain=gain)
        tokens = trial.profile.prompt
        extended = trial.batch([Request(tokens, q_len=tokens, key=90), Request(2 * tokens, q_len=3, key=91)], gain=gain)
        for what, batch in (("decode", decoded), ("extend", extended)):
            rows = trial.extend(batch) if what == "extend" else trial.decode(batch)
            out, lse = errors(batch, rows, extend=what == "extend")
            limit = OUT_TOLERANCE[trial.dtype] * max(1.0, gain)
            yield f"{what}, gain {gain}: out off by {out:.1e} of {limit:.0e}", out <= limit
            yield f"{what}, gain {gain}: lse off by {lse:.1e} of {LSE_TOLERANCE:.0e}", lse <= LSE_TOLERANCE


ACCURACY = Check("float64 reference", "accuracy", True, accuracy, measures=True)
