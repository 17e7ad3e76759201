"""The launches of a prefill: one of the attention kernel, or for a paged cache for each chunk the gathering of its rows, their up-projection, and it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from . import hopper_prefill
from .calls import device_facts
from .kernels.prefill import prefill_kernel
from .kernels.up_projection import gather_kernel, up_projection_kernel, up_projection_tma_kernel
from .launch import INTERPRETED, LOG2E, launch
from .plan import PrefillPlan
from .tuning import PREFILL_TABLES, ROW_SUMS, PrefillOrder, PrefillSchedule

GATHERED_TOKENS = 16


@dataclass(frozen=True)
class PrefillState:
    """Rows in the middle of their keys: not normalised, and exact to go on from.

    Attributes:
        reference: [T, H] softmax reference in the log2 domain; -inf for a row that has seen no token.
        total: [T, H, 8] partial sums of the weights.
        acc: [T, H, V] weighted sum of the values. All are fp32 and contiguous.
        order: the `PrefillOrder` that made it, and the only one that goes on from it.
    """

    reference: torch.Tensor
    total: torch.Tensor
    acc: torch.Tensor
    order: PrefillOrder


def attend_paged(
    plan: PrefillPlan, q: torch.Tensor, cache: torch.Tensor, weight: torch.Tensor, table: torch.Tensor, starts: torch.Tensor, lens: torch.Tensor, scale: float,
    out: torch.Tensor, lse: torch.Tensor | None, workspace: torch.Tensor, order: PrefillOrder, schedule: PrefillSchedule | None, kv_limit: int,
) -> None:
    """The launches of a plan. ``workspace``: at least ``plan.workspace_bytes``, aligned to 16."""
    nope, P, V, chunk = plan.qk_nope_head_dim, plan.qk_rope_head_dim, plan.v_head_dim, plan.chunk_tokens
    work, kv_part, latent_part, pe_part, acc_part, total_part, reference_part = workspace[: plan.workspace_bytes].split(plan.sections)
    heads_of_weight = weight.unflatten(0, (plan.num_heads, nope + V))
    for head in range(0, plan.num_heads, plan.head_wave):
        heads = slice(head, min(head + plan.head_wave, plan.num_heads))
        num_heads = heads.stop - heads.start
        rows = plan.num_tokens * num_heads
        kv = kv_part.view(plan.dtype)[: plan.request_group * chunk * num_heads * (nope + V)].view(-1, num_heads, nope + V)
        latent = latent_part.view(plan.dtype).view(-1, plan.kv_lora_rank)
        k_pe = pe_part.view(plan.dtype).view(-1, P) if P else kv[:, 0, :0]
        state = None
        if plan.num_chunks > 1:
            state = PrefillState(reference_part.view(torch.float32)[:rows], total_part.view(torch.float32)[: rows * ROW_SUMS],
                                 acc_part.view(torch.float32)[: rows * V], order)
        for first in range(0, max(plan.batch_size, 1), plan.request_group):
            end = min(first + plan.request_group, plan.batch_size)
            for number in range(plan.num_chunks):
                part: Any = {"requests": (first, end), "chunk": (number * chunk, chunk), "kv_limit": kv_limit}
                gather(cache, table, lens, latent, k_pe, **part)
                project(latent, heads_of_weight[heads].flatten(0, 1), lens, kv, **part)
                # the padding after the last request goes with it
                attend(q[:, heads], kv[..., :nope], k_pe, kv[..., nope:], out[:, heads], None if lse is None else lse[:, heads], state, starts, lens, None,
                       scale, order, schedule, resume=number > 0, keep=number + 1 < plan.num_chunks, causal=True, kv_limit=kv_limit, mean_keys=chunk,
                       requests=(first, end if end < plan.batch_size else end + 1), chunk=(number * chunk, chunk), work=work.view(torch.int32))


def gather(
    cache: torch.Tensor, table: torch.Tensor, lens: torch.Tensor, latent: torch.Tensor, k_pe: torch.Tensor, *, requests: tuple[int, int],
    chunk: tuple[int, int], kv_limit: int,
) -> None:
    """The cached rows of one chunk (begin, tokens) of some requests: latent [requests * tokens, R], k_pe [requests * tokens, P]."""
    R, P = latent.shape[1], k_pe.shape[1]
    constants = {"R": R, "BLOCK_R": triton.next_power_of_2(R), "P": P, "BLOCK_P": triton.next_power_of_2(max(P, 1)), "PAGE_SIZE": cache.shape[1],
                 "BLOCK_S": GATHERED_TOKENS}
    strides = (cache.stride(0), cache.stride(1), table.stride(0))
    aligned = tuple(t.data_ptr() % 16 for t in (cache, latent, k_pe))
    launch(gather_kernel, (cache.dtype, *constants.values(), strides[:2], aligned), ((requests[1] - requests[0]) * -(-chunk[1] // GATHERED_TOKENS), 1),
           (cache, table, lens, latent, k_pe, *strides, kv_limit, requests[0], *chunk), constants, {"num_warps": 4})


def project(
    latent: torch.Tensor, weight: torch.Tensor, lens: torch.Tensor, kv: torch.Tensor, *, requests: tuple[int, int], chunk: tuple[int, int], kv_limit: int,
) -> None:
    """Keys and values of one chunk (begin, tokens) of some requests: kv [requests * tokens, rows of weight] of latent [requests * tokens, R]."""
    arch, num_sms = device_facts(latent.device)
    prefill = PREFILL_TABLES[arch]
    (columns, R), num_requests = weight.shape, requests[1] - requests[0]
    numbers = (columns, kv_limit, requests[0])
    aligned = tuple(t.data_ptr() % 16 for t in (latent, weight, kv))
    by_tma = prefill.product_tma
    strides = (latent.stride(0), weight.stride(0))
    # a row that is no multiple of the product's block would get products with zeros
    if by_tma is not None and latent.dtype != torch.float32 and not any(aligned) and R % by_tma.block_k == 0 and (
            num_requests == 1 or chunk[1] % by_tma.block_s == 0) and all(0 < s < 1 << 33 and s % 8 == 0 for s in (*strides, columns)):
        tiles = num_requests * -(-chunk[1] // by_tma.block_s) * -(-columns // by_tma.block_o)
        if not tiles:  # of which there is no descriptor
            return
        constants: dict[str, Any] = {"R": R, "REQUESTS": max(16, triton.next_power_of_2(num_requests)), "BLOCK_S": by_tma.block_s, "BLOCK_O": by_tma.block_o,
                                     "BLOCK_K": by_tma.block_k, "SUBTILES": by_tma.subtiles}
        shapes = ((by_tma.block_s, by_tma.block_k), (by_tma.block_o, by_tma.block_k), (by_tma.block_s, by_tma.block_o // by_tma.subtiles))
        described = [TensorDescriptor(t, [1, rows, width], [stride, stride, 1], [1, *shape]) for t, rows, width, stride, shape in zip(
            (latent, weight, kv), (len(latent), columns, len(latent)), (R, R, columns), (*strides, columns), shapes, strict=True)]
        launch(up_projection_tma_kernel, (latent.dtype, by_tma, *constants.values()), (min(tiles, num_sms), 1),
               (*described, lens, *numbers, num_requests, *chunk), constants, {"num_warps": by_tma.num_warps, "num_stages": by_tma.num_stages})
        return
    schedule = prefill.product_fp32 if latent.dtype == torch.float32 else prefill.product
    constants = {"R": R, "BLOCK_S": schedule.block_s, "BLOCK_O": schedule.block_o, "BLOCK_K": min(schedule.block_k, R & -R), "PRECISION": "ieee",
                 "STAGES": schedule.num_stages, "EMULATE_BF16": INTERPRETED and latent.dtype == torch.bfloat16}
    launch(up_projection_kernel, (latent.dtype, schedule, *constants.values(), strides, aligned),
           (num_requests * -(-chunk[1] // schedule.block_s), -(-columns // schedule.block_o)),
           (latent, weight, kv, lens, *strides, *numbers, *chunk), constants, {"num_warps": schedule.num_warps})


def attend(
    q: torch.Tensor, k_nope: torch.Tensor, k_pe: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None, state: PrefillState | None,
    starts: torch.Tensor, kv_lengths: torch.Tensor, positions: torch.Tensor | None, scale: float, order: PrefillOrder, schedule: PrefillSchedule | None, *,
    resume: bool, keep: bool, causal: bool, kv_limit: int, mean_keys: int, requests: tuple[int, int] = (0, 0), chunk: tuple[int, int] | None = None,
    work: torch.Tensor | None = None,
) -> None:
    """One launch of the attention kernel. With ``chunk`` (begin, tokens), ``kv_lengths`` is seq_lens and the keys are those of one chunk.

    ``work``: int32 [`plan.prefill_work_size`], else it is allocated."""
    num_tokens, num_heads, _ = q.shape
    nope, P, V, dtype = k_nope.shape[2], k_pe.shape[1], v.shape[2], q.dtype
    batch_size = starts.shape[0] - 1
    if schedule is None:
        table = PREFILL_TABLES[device_facts(q.device)[0]]
        schedule = table.fp32 if dtype == torch.float32 else table.narrow if max(nope, V) <= 128 else table.wide
    if schedule.form == "hopper" and hopper_prefill.serves(q, k_nope, k_pe, v, order):
        hopper_prefill.attend(q, k_nope, k_pe, v, out, lse, state, starts, kv_lengths, positions, scale, schedule, resume=resume, keep=keep, causal=causal,
                              kv_limit=kv_limit, mean_keys=mean_keys, requests=requests, chunk=chunk, work=work)
        return
    unused = out if lse is None else lse
    reference, total, acc = (unused,) * 3 if state is None else (state.reference, state.total, state.acc)
    held = 1 << (nope.bit_length() - 1)  # the rest, if any, is a second product
    block_k = min(schedule.block_k, nope & -nope) or held
    rest = nope - held if not schedule.block_k else 0
    # k_pe is not narrower than a swizzle of K: ptxas 12.8 spoils the descriptors of two swizzles at one address (tests/compile/uniform_registers.py)
    block_p = triton.next_power_of_2(max(P, 16, min(block_k, 64) if P else 0))
    head_group = max(1, min(num_heads, schedule.group_bytes // max(1, mean_keys * (nope + V) * dtype.itemsize)))
    strides = (q.stride(0), q.stride(1), k_nope.stride(1), v.stride(1), out.stride(0), out.stride(1), 0 if lse is None else lse.stride(0))
    constants = {
        "STRIDE_K": k_nope.stride(0), "STRIDE_PE": k_pe.stride(0), "STRIDE_V": v.stride(0), "BLOCK_M": schedule.block_m, "BLOCK_N": order.block_n,
        "NOPE": nope, "BLOCK_K": block_k, "BLOCK_REST": triton.next_power_of_2(rest) if rest else 0, "P": P,
        "BLOCK_P": block_p, "V_DIM": V, "BLOCK_V": triton.next_power_of_2(V), "STEP": order.reference_step,
        "PRECISION": order.input_precision, "HOLD_Q": not schedule.block_k, "CAUSAL": causal,
        "HAS_POSITIONS": positions is not None, "CHUNKED": chunk is not None, "RESUME": resume, "KEEP": keep, "WITH_LSE": lse is not None,
        "STAGES": schedule.num_stages, "EMULATE_BF16": INTERPRETED and dtype == torch.bfloat16,
    }
    aligned = tuple(t.data_ptr() % 16 for t in (q, k_nope, k_pe, v, out, reference, total, acc))
    launch(prefill_kernel, (dtype, tuple(constants.values()), strides, aligned, schedule.num_warps),
           ((num_tokens // schedule.block_m + batch_size + 1) * num_heads, 1),
           (q, k_nope, k_pe, v, out, unused, reference, total, acc, starts, kv_lengths, starts if positions is None else positions, scale * LOG2E, *strides,
            num_tokens, batch_size, num_heads, kv_limit, head_group, *requests, *(chunk or (0, 0))),
           constants, {"num_warps": schedule.num_warps})
