"""Plans of one call that differ in schedule only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from triton_mla.plan import AttentionPlan, plan_attention
from triton_mla.testing import PagedBatch
from triton_mla.tuning import ARCHITECTURES, Schedule, arch_of
from triton_mla.verification.trial import Trial


def schedules(arch: str, dtype: torch.dtype) -> list[Schedule]:
    """Tiles of 16 to 64 rows, 2 to 8 warps, 1 to 3 stages, in all forms."""
    table = ARCHITECTURES[arch]
    if dtype == torch.float32:
        # Products of fp32 are unrolled multiplications: larger tiles take minutes to compile.
        return [table.fp32, replace(table.fp32, num_stages=1), replace(table.fp32, num_warps=8)]
    one_pass, two_phase = Schedule(pdl=table.few.pdl), table.few
    return [
        replace(one_pass, num_warps=2, num_stages=2),
        replace(one_pass, num_warps=4, num_stages=1),
        replace(one_pass, num_warps=4, num_stages=3),
        replace(one_pass, block_rows=32, num_warps=4, num_stages=2),
        replace(one_pass, block_rows=64, num_warps=4, num_stages=1),
        replace(one_pass, block_rows=64, num_warps=8, num_stages=2),
        replace(two_phase, block_rows=64, num_warps=8, num_stages=2, block_v=128),
        *table.schedules(),
    ]


def plans(trial: Trial, batch: PagedBatch, *, decode: bool) -> Iterator[tuple[str, AttentionPlan]]:
    """(name, plan) of every schedule for a call; all have the order of `trial`."""
    arch = arch_of(trial.device)
    for s in schedules(arch, trial.dtype):
        plan = plan_attention(
            num_tokens=len(batch.q),
            batch_size=len(batch.seq_lens),
            num_heads=batch.q.shape[1],
            max_seq_len=batch.block_table.shape[1] * batch.page_size,
            kv_lora_rank=batch.kv_lora_rank,
            qk_rope_head_dim=batch.q.shape[2] - batch.kv_lora_rank,
            dtype=trial.dtype,
            page_size=batch.page_size,
            decode=decode,
            arch=arch,
            num_sms=torch.cuda.get_device_properties(trial.device).multi_processor_count,
            order=trial.profile.order,
            schedule=s,
        )
        slices = f", {s.value_slices} slices" if s.value_slices > 1 else ""
        yield f"{s.form}, {s.block_rows} rows, {s.num_warps} warps, {s.num_stages} stages{slices}", plan
