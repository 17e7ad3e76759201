"""The launch of the Hopper form for few work items: one program for each split of each row tile, in the place of one_pass_kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .hopper_decode import cache_rows, segment
from .launch import Step, Strides, pick
from .plan import AttentionPlan

_ATTEND = pick("kv_cache", "kv_cache", "q_nope", "q_pe", "block_table", "cu_seqlens_q", "seq_lens", "out", "lse", "partials", "scale_log2")


def descriptions(plan: AttentionPlan, strides: Strides) -> tuple[Callable[[Any], Any], ...]:
    """From the cache, or its address, to TMA descriptors of latent columns and of rope columns.

    Where a page holds whole tiles, the latent columns of one come by one copy, of which each warp issues a part.
    """
    width = 512 if segment(plan.page_size) == 64 else 64
    return cache_rows(plan, strides, width), cache_rows(plan, strides, 64)


def step(plan: AttentionPlan, strides: Strides, row_tiles: int, sizes: tuple[int, ...], wave: tuple[int, ...], with_lse: bool) -> Step:
    """``sizes`` and ``wave``: integers of one_pass_kernel, as `launch.attention_steps` has them."""
    from .kernels.hopper.few import hopper_few_kernel
    from .kernels.hopper.few_rows import WARPS

    page, slot = strides.kv_cache
    return Step(
        hopper_few_kernel, (row_tiles, plan.num_splits), _ATTEND,
        (*strides.q_nope, *strides.q_pe, page // slot, strides.block_table, *strides.out, *sizes, plan.order.kv_split, *wave),
        {"ROWS": plan.schedule.block_rows, "PAGE_SIZE": plan.page_size, "SEG": segment(plan.page_size), "DECODE": plan.decode, "WITH_LSE": with_lse,
         "PDL": plan.schedule.pdl},
        {"num_warps": WARPS.value}, descriptions(plan, strides))
