"""Distance of the results from the float64 reference."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch

from triton_mla import attention
from triton_mla.reference import mha_prefill, mla_absorbed
from triton_mla.testing import PagedBatch, Request
from triton_mla.verification.mha import Mha, Prompts
from triton_mla.verification.trial import VICTIM, Check, Comparisons, Rows, Trial, empty, pick, register, same

OUT_TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float32: 5e-5}
"""Largest absolute error of `out` for inputs of unit scale: a little over one ulp of values from 2 to 4, the largest there.

That ulp is reached: a token that sees one key has that key's weight, rounded, over itself."""
LSE_TOLERANCE = 1e-4
"""Largest absolute error of `lse` (nats), relative to max(1, |lse|)."""
SCALES = (0.07217, 0.11472, 0.13523)
"""192 ** -0.5 * (0.1 * m * ln 40 + 1) ** 2 for YaRN's m of 0, 0.707 and 1."""

CHECKS: list[Check] = []
check = functools.partial(register, CHECKS, "accuracy")


def errors(rows: Rows, expected: Rows) -> tuple[float, float]:
    """Largest error of `out` and of `lse`; NaN or a wrong -inf gives inf."""
    gap = torch.where(
        expected.lse == rows.lse, 0.0, (rows.lse.double() - expected.lse).abs() / expected.lse.abs().clamp(min=1.0)
    )
    worst = [(rows.out.double() - expected.out).abs().max(), gap.max()]
    out_error, lse_error = (float(w.nan_to_num(nan=torch.inf)) for w in worst)
    return out_error, lse_error


def near(what: str, rows: Rows, expected: Rows, size: float) -> Comparisons:
    """Both errors against their bounds, for values of `out` of this size."""
    out, lse = errors(rows, expected)
    limit = OUT_TOLERANCE[rows.out.dtype] * max(1.0, size)
    yield f"{what}: out off by {out:.1e} of {limit:.0e}", out <= limit
    yield f"{what}: lse off by {lse:.1e} of {LSE_TOLERANCE:.0e}", lse <= LSE_TOLERANCE


def reference(batch: PagedBatch, *, extend: bool) -> Rows:
    """The float64 result of the absorbed form."""
    starts = batch.cu_seqlens_q if extend else None
    scale, rank = batch.softmax_scale, batch.kv_lora_rank
    layout = (batch.kv_cache, batch.block_table, starts, batch.seq_lens)
    return Rows(*mla_absorbed(batch.q, *layout, softmax_scale=scale, kv_lora_rank=rank))


def mha_reference(mha: Mha, prompts: Prompts) -> Rows:
    """The float64 result of the mha form over the same rounded keys and values."""
    batch, kv = prompts.batch, prompts.kv
    tensors = (batch.q, kv[..., : mha.nope], prompts.k_pe, kv[..., mha.nope :], batch.cu_seqlens_q, prompts.starts)
    return Rows(*mha_prefill(*tensors, softmax_scale=batch.softmax_scale))


@check("float64 reference", every_case=True, measures=True)
def accuracy(trial: Trial) -> Comparisons:
    """Decode and extend, with small scores and with large ones whose maxima move."""
    for gain in (0.5, 2.0):
        requests = [Request(n, key=80 + i) for i, n in enumerate(trial.profile.accuracy_lengths)]
        decoded = trial.batch(requests, gain=gain)
        tokens = trial.profile.prompt
        extended = trial.batch([Request(tokens, q_len=tokens, key=90), Request(2 * tokens, q_len=3, key=91)], gain=gain)
        yield from near(f"decode, gain {gain}", trial.decode(decoded), reference(decoded, extend=False), gain)
        yield from near(f"extend, gain {gain}", trial.extend(extended), reference(extended, extend=True), gain)


@check("mha: float64 reference", every_case=True, measures=True)
def mha_accuracy(trial: Trial) -> Comparisons:
    """Prefill, also over the paged cache, and the up-projection."""
    mha = Mha(trial)
    for gain in (0.5, 2.0):
        batch = mha.batch([Request(mha.tokens, q_len=9, key=92), Request(70, q_len=70, key=93), Request(0, q_len=2)], gain=gain)
        prompts = mha.prompts(batch)
        expected = mha_reference(mha, prompts)
        size = float(prompts.kv.abs().max()) / 4 if gain > 1 else 1.0  # at 0.5 keys and values are of unit scale
        yield from near(f"gain {gain}", mha.prefill(prompts), expected, size)
        yield from near(f"paged, gain {gain}", mha.paged(batch), expected, size)
        latent = torch.cat([batch.kv(i) for i in range(3)])[:, : batch.kv_lora_rank].double()
        off = float((prompts.kv.flatten(1).double() - latent @ mha.weight.double().T).abs().max().nan_to_num(nan=torch.inf))
        limit = OUT_TOLERANCE[trial.dtype] * max(1.0, size)
        yield f"keys and values, gain {gain}: off by {off:.1e} of {limit:.0e}", off <= limit


@check("parts of a context merged by lse", measures=True)
def merged_parts(trial: Trial) -> Comparisons:
    """A prefix and a suffix in the mha form, pages of a context in the absorbed one, and parts that hold nothing."""
    mha, prefix, page = Mha(trial), trial.profile.prefix, trial.profile.page_size
    end = prefix + page
    prompts = mha.prompts(mha.prompt(end, prefix))
    before = mha.prefill(prompts.keys(0, prefix), causal=False)
    after = mha.prefill(prompts.keys(prefix, end))
    yield from near("prefix and suffix", merge(before, after), mha_reference(mha, prompts), 1.0)

    context = trial.batch([Request(end, key=VICTIM)], extra_width=0)
    shards = [part_of(trial, context, slice(i, None, 4)) for i in range(4)]
    yield from near("shards by page", functools.reduce(merge, shards), reference(context, extend=False), 1.0)
    for mark in (-torch.inf, torch.inf):
        nothing = Rows(torch.full_like(after.out, torch.nan), torch.full_like(after.lse, mark))
        yield f"an empty part before, lse {mark}", same(merge(nothing, after), after)
        yield f"an empty part behind, lse {mark}", same(merge(after, nothing), after)
        yield f"two empty parts, lse {mark}", empty(merge(nothing, nothing))


def merge(a: Rows, b: Rows) -> Rows:
    """`merge_attn_states`."""
    return Rows(*attention.merge_attn_states(a.out, a.lse, b.out, b.lse))


def part_of(trial: Trial, context: PagedBatch, pages: slice) -> Rows:
    """Decode over some pages of a request whose last page is full."""
    table = context.block_table[:, pages].contiguous()
    lens = torch.full_like(context.seq_lens, table.shape[1] * context.page_size)
    return trial.decode(dataclasses.replace(context, block_table=table, seq_lens=lens))


@check("softmax scales, and a query 50 times as large")
def scales_and_range(trial: Trial) -> Comparisons:
    mha = Mha(trial)
    requests = [Request(1, key=95), Request(64, key=96)]
    for gain in (1, 50):
        decoded, prompts = (dataclasses.replace(b, q=b.q * gain) for b in (trial.batch(requests), mha.batch(requests)))
        yield from _scaled(f"absorbed, q * {gain}", decoded, trial.decode, functools.partial(reference, extend=False))
        yield from _scaled(f"mha, q * {gain}", prompts, mha.rows, lambda batch: mha_reference(mha, mha.prompts(batch)))


def _scaled(
    what: str, batch: PagedBatch, call: Callable[[PagedBatch], Rows], expected: Callable[[PagedBatch], Rows]
) -> Comparisons:
    rows = [call(dataclasses.replace(batch, softmax_scale=scale)) for scale in SCALES]
    for scale, result in zip(SCALES, rows, strict=True):
        own = dataclasses.replace(batch, softmax_scale=scale)
        yield from near(f"{what}, scale {scale}", result, expected(own), 2.0)
        yield f"{what}, scale {scale}: in another batch", same(call(pick(own, [1, 0, 1]))[1:], result)
    for scale, result in zip(SCALES[1:], rows[1:], strict=True):
        yield f"{what}: scale {scale} counts over 64 tokens", not same(result[1:], rows[0][1:])
        off = float((result.out[0].double() - rows[0].out[0].double()).abs().max())
        yield f"{what}: scale {scale} does not over one", off <= OUT_TOLERANCE[result.out.dtype]
