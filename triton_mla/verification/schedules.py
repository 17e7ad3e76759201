"""Plans of one call that differ in schedule only."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from triton_mla.errors import UnsupportedError
from triton_mla.plan import AttentionPlan, plan_attention
from triton_mla.testing import PagedBatch
from triton_mla.tuning import arch_of
from triton_mla.verification.trial import Trial

SHAPES = (
    ("one_pass", 16, 2, 2),
    ("one_pass", 16, 4, 1),
    ("one_pass", 16, 4, 3),
    ("one_pass", 32, 4, 2),
    ("one_pass", 64, 4, 1),
    ("one_pass", 64, 8, 1),
    ("one_pass", 64, 8, 2),
    ("two_phase", 16, 4, 3),
    ("two_phase", 64, 8, 2),
)
"""(form, rows, warps, stages) of a tile."""


def plans(trial: Trial, batch: PagedBatch, *, decode: bool) -> Iterator[tuple[str, AttentionPlan]]:
    """(name, plan) of every shape that this architecture can run; all have the order of `trial`."""
    facts: dict[str, Any] = {
        "num_tokens": len(batch.q),
        "batch_size": len(batch.seq_lens),
        "num_heads": batch.q.shape[1],
        "max_seq_len": batch.block_table.shape[1] * batch.page_size,
        "kv_lora_rank": batch.kv_lora_rank,
        "qk_rope_head_dim": batch.q.shape[2] - batch.kv_lora_rank,
        "dtype": trial.dtype,
        "page_size": batch.page_size,
        "decode": decode,
        "arch": arch_of(trial.device),
        "num_sms": torch.cuda.get_device_properties(trial.device).multi_processor_count,
        "order": trial.profile.order,
    }
    chosen = plan_attention(**facts).schedule
    for form, rows, warps, stages in SHAPES:
        shape = {"form": form, "block_rows": rows, "num_warps": warps, "num_stages": stages}
        try:
            plan = plan_attention(**facts, schedule=dataclasses.replace(chosen, **shape))
        except UnsupportedError:
            continue
        yield f"{form}, {rows} rows, {warps} warps, {stages} stages", plan
