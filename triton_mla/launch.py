"""Launching a Triton kernel without paying its argument binder at every call, and the launches that one plan stands for."""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton import knobs
from triton.runtime import driver

from .kernels.one_pass import one_pass_kernel
from .kernels.partials import combine_kernel
from .kernels.two_phase import scores_kernel, values_kernel
from .plan import AttentionPlan

INTERPRETED = not isinstance(one_pass_kernel, triton.runtime.JITFunction)
LOG2E = 1.4426950408889634
COMBINE_WIDTH = 128
COMBINE_AHEAD = 2 if INTERPRETED else 8  # the interpreter computes the idle ones too

_compiled: dict[tuple[Any, ...], Any] = {}


def launch(kernel: Any, key: tuple[Any, ...], grid: tuple[int, int], args: tuple[Any, ...], constants: dict[str, Any], options: dict[str, Any]) -> None:
    """Run ``kernel`` on the current device and stream.

    ``key`` names all that the compiled code depends on. Triton's own cache look-up costs more than a small decode; with the compiled
    kernel in hand, only its C launcher is left. A profiler's launch hook takes the ordinary way.
    """
    if 0 in grid:
        return
    if INTERPRETED:
        kernel[grid](*args, **constants)
        return
    device = driver.active.get_current_device()
    key = (kernel, device, key)
    compiled = _compiled.get(key)
    if compiled is None or knobs.runtime.launch_enter_hook is not None:
        _compiled[key] = kernel[grid](*args, **constants, **options, enable_fp_fusion=False)
        return
    stream = driver.active.get_current_stream(device)
    compiled.run(grid[0], grid[1], 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *args, *constants.values())


def attend(
    plan: AttentionPlan, q_nope: torch.Tensor, q_pe: torch.Tensor, kv_cache: torch.Tensor, block_table: torch.Tensor, cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor, softmax_scale: float, out: torch.Tensor, lse: torch.Tensor, workspace: torch.Tensor,
) -> None:
    """All launches of a call: for each wave one pass or two phases, then the combine if a row can have partials. ``workspace``: fp32, aligned to 16."""
    schedule, order = plan.schedule, plan.order
    R, P, page_size = plan.kv_lora_rank, plan.qk_rope_head_dim, plan.page_size
    emulate = INTERPRETED and plan.dtype == torch.bfloat16
    max_seq_len = min(plan.max_seq_len, block_table.shape[1] * page_size)
    scale_log2 = softmax_scale * LOG2E
    q_strides = (q_nope.stride(0), q_nope.stride(1), q_pe.stride(0), q_pe.stride(1))
    kv_strides = (kv_cache.stride(0), kv_cache.stride(1))
    out_strides = (out.stride(0), out.stride(1))
    sizes = (plan.num_tokens, plan.batch_size, plan.num_heads, max_seq_len)
    pointers = (q_nope.data_ptr(), q_pe.data_ptr(), kv_cache.data_ptr(), out.data_ptr(), workspace.data_ptr())
    key = (plan.dtype, schedule, order, R, P, plan.decode, page_size, q_strides, kv_strides, out_strides,
           tuple(p % 16 for p in pointers))
    split_tiles = triton.next_power_of_2(order.kv_split // order.block_n)
    tiling = {"ROWS": schedule.block_rows, "BLOCK_N": order.block_n}
    flags = {"PRECISION": order.input_precision, "DECODE": plan.decode, "PAGE_SIZE": page_size}
    pdl = schedule.pdl and not INTERPRETED
    ends = {"PDL": pdl, "EMULATE_BF16": emulate}
    block_p = {"P": P, "BLOCK_P": triton.next_power_of_2(max(P, 16))}
    first: dict[str, Any] = {"num_warps": schedule.num_warps}
    dependent: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    scores = workspace[plan.partials_size:]
    slices = -(-R // schedule.block_v)
    width = min(COMBINE_WIDTH, triton.next_power_of_2(R))
    for first_row_tile in range(0, plan.num_row_tiles, plan.wave_row_tiles):
        row_tiles = min(plan.wave_row_tiles, plan.num_row_tiles - first_row_tile)
        wave = (first_row_tile, plan.num_splits, plan.wave_rows)
        if schedule.form == "one_pass":
            launch(one_pass_kernel, key, (row_tiles, plan.num_splits),
                   (q_nope, q_pe, kv_cache, block_table, cu_seqlens_q, seq_lens, out, lse, workspace, scale_log2, *q_strides, *kv_strides,
                    block_table.stride(0), *out_strides, *sizes, order.kv_split, *wave),
                   {**tiling, "SPLIT_TILES": split_tiles, "R": R, "BLOCK_R": triton.next_power_of_2(R), **block_p, "STEP": order.reference_step,
                    **flags, "STAGES": schedule.num_stages, **ends}, first)
        else:
            launch(scores_kernel, key, (row_tiles, plan.num_score_programs),
                   (q_nope, q_pe, kv_cache, block_table, cu_seqlens_q, seq_lens, scores, *q_strides, *kv_strides, block_table.stride(0), *sizes,
                    first_row_tile, plan.num_tiles),
                   {**tiling, "R": R, "BLOCK_K": min(schedule.block_k, triton.next_power_of_2(R)), **block_p, **flags, **ends},
                   {"num_warps": schedule.score_warps})
            launch(values_kernel, key, (row_tiles * slices, plan.num_splits),
                   (kv_cache, block_table, cu_seqlens_q, seq_lens, scores, out, lse, workspace, scale_log2, *kv_strides, block_table.stride(0),
                    *out_strides, *sizes, order.kv_split, *wave, plan.num_tiles),
                   {**tiling, "SPLIT_TILES": split_tiles, "R": R, "BLOCK_V": schedule.block_v, "STEP": order.reference_step, **flags,
                    "STAGES": schedule.num_stages, **ends}, {**first, **dependent})
        if plan.num_splits > 1:
            launch(combine_kernel, key, (row_tiles * schedule.block_rows, -(-R // width)),
                   (out, lse, workspace, *out_strides, plan.num_heads, plan.num_splits, plan.wave_rows),
                   {"R": R, "WIDTH": width, "AHEAD": COMBINE_AHEAD, **ends}, {"num_warps": 1, **dependent})
