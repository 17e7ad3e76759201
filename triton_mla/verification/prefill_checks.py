"""The contract of the MHA form as checks: prefill over given keys, over the paged cache, and through the state."""

from __future__ import annotations

import dataclasses
import functools
from itertools import combinations

import torch

from triton_mla import absorb, prefill
from triton_mla.testing import PagedBatch, Request, bitwise_equal
from triton_mla.tuning import PREFILL_TABLES, PrefillSchedule, arch_of
from triton_mla.verification.mha import NAN, Mha
from triton_mla.verification.trial import VICTIM, Check, Comparisons, Trial, empty, need_gpu, register, same, where_it_fits

CHECKS: list[Check] = []
check = functools.partial(register, CHECKS)


def company(mha: Mha, size: int) -> list[Request]:
    """`size` requests: prompts, later chunks, single tokens and an empty one."""
    tokens = mha.tokens
    kinds = [(tokens // 2, 3), (1, 1), (tokens + 9, tokens // 4), (0, 0), (tokens // 3, tokens // 3)]
    return [Request(*kinds[i % len(kinds)], key=100 + i) for i in range(size)]


def of_all_heads(trial: Trial) -> Mha:
    """Calls of as many heads as the case has."""
    return Mha(dataclasses.replace(trial, profile=dataclasses.replace(trial.profile, prefill_heads=None)))


@check("batch", "mha: a prompt in any batch", every_case=True, first=True)
def prompt_batches(trial: Trial) -> Comparisons:
    mha = Mha(trial)
    victim = Request(mha.tokens, q_len=mha.tokens, key=VICTIM)
    alone = mha.rows(mha.batch([victim]))
    yield "alone, paged", same(mha.paged(mha.batch([victim])), alone)
    for size in trial.profile.prompt_batches:
        for place in (0, size - 1):
            others = company(mha, size - 1)[:: 1 if place else -1]
            batch = mha.batch([*others[:place], victim, *others[place:]])
            own = batch.rows(place)
            yield f"request {place} of {size}", same(mha.rows(batch)[own], alone)
            yield f"request {place} of {size}, paged", same(mha.paged(batch)[own], alone)


@check("batch", "mha: neighbours, padding and tails of NaN", every_case=True)
def dirty_neighbours(trial: Trial) -> Comparisons:
    mha = Mha(trial)
    tokens = mha.tile + 5
    victim = Request(tokens, q_len=9, key=VICTIM)
    alone = mha.rows(mha.batch([victim]))
    batch = mha.batch([Request(9, q_len=9, key=101), victim, Request(70, q_len=3, key=102)])
    own, count = batch.rows(1), len(batch.q)
    padded = torch.full_like(batch.q, NAN)
    padded[own] = batch.q[own]
    batch = dataclasses.replace(batch, q=torch.cat([padded, padded[:3]]))
    clean = mha.prompts(batch)
    kv, k_pe = (torch.full((len(t) + 200, *t.shape[1:]), NAN, dtype=t.dtype, device=t.device) for t in (clean.kv, clean.k_pe))
    for dirty, source in ((kv, clean.kv), (k_pe, clean.k_pe)):
        dirty[9 : 9 + tokens] = source[9 : 9 + tokens]
    rows = mha.prefill(dataclasses.replace(clean, kv=kv, k_pe=k_pe))
    yield "between NaN", same(rows[own], alone)
    yield "padding is empty", empty(rows[count:])
    for i in (0, 2):
        batch.kv_cache[batch.block_table[i, :1].long()] = NAN
    rows = mha.paged(batch)
    yield "between NaN, paged", same(rows[own], alone)
    yield "padding is empty, paged", empty(rows[count:])


@check("batch", "mha: the same call again")
def repeats(trial: Trial) -> Comparisons:
    mha = Mha(trial)
    batch = mha.batch([*company(mha, 2), Request(2 * mha.tile, q_len=3, key=VICTIM)])
    first = mha.rows(batch)
    for i in range(trial.profile.repeats):
        yield f"repeat {i}", same(mha.rows(batch), first)
        yield f"repeat {i}, paged", same(mha.paged(batch), first)


@check("batch", "products of a row in any number of rows", every_case=True)
def products(trial: Trial) -> Comparisons:
    mha, profile = Mha(trial), trial.profile
    w_uk, w_uv = absorb.split_kv_b(mha.weight, mha.num_heads, mha.nope)
    batch = trial.batch([Request(300, q_len=300, key=VICTIM)], num_heads=mha.num_heads)
    latent = batch.q[..., : profile.kv_lora_rank]
    for what, product, values, weight in (
        ("latent query", absorb.absorb_query, latent[..., : mha.nope], w_uk),
        ("values", absorb.project_values, latent, w_uv),
        ("keys and values", prefill.project_kv, batch.kv(0)[:, : profile.kv_lora_rank], mha.weight),
    ):
        whole = product(values, weight)
        for count in (1, 2, 17, 64):
            start = 299 - count
            yield f"{what}, {count} of 300 rows", bitwise_equal(product(values[start:299], weight), whole[start:299])


@check("memory", "mha: pages, their size and order")
def pages(trial: Trial) -> Comparisons:
    mha = Mha(trial)
    start = mha.tokens - 9
    expected = mha.rows(mha.prompt(mha.tokens, start))
    for size in trial.profile.page_sizes:
        yield f"pages of {size}", same(mha.paged(mha.prompt(mha.tokens, start, page_size=size)), expected)
    for order in ("sequential", "reversed"):
        yield order, same(mha.paged(mha.prompt(mha.tokens, start, page_order=order, extra_pages=20)), expected)
    for extra, junk in ((40, -1), (3, 0)):
        batch = mha.prompt(mha.tokens, start, extra_width=extra, table_tail=junk)
        yield f"{extra} more columns of {junk}", same(mha.paged(batch), expected)


@check("memory", "mha: stale tokens and views")
def memory(trial: Trial) -> Comparisons:
    mha = of_all_heads(trial)
    start = mha.tokens - 9
    prompts = mha.prompts(mha.prompt(mha.tokens, start))
    expected = mha.prefill(prompts)
    for value in (0.0, float("inf"), 1.0):
        yield f"stale tokens of {value}", same(mha.paged(mha.prompt(mha.tokens, start, stale=value)), expected)
    wide = torch.full((mha.tokens, 2, *prompts.kv.shape[1:]), NAN, dtype=trial.dtype, device=trial.device)
    wide[:, 0] = prompts.kv
    yield "keys and values of a wider tensor", same(mha.prefill(dataclasses.replace(prompts, kv=wide[:, 0])), expected)
    q = prompts.batch.q.transpose(0, 1).contiguous().transpose(0, 1)
    batch = dataclasses.replace(prompts.batch, q=q)
    yield "q: transposed", same(mha.prefill(dataclasses.replace(prompts, batch=batch)), expected)
    yield "q: transposed, paged", same(mha.paged(batch), expected)


@check("schedule", "mha: prompts cut into chunks", every_case=True)
def chunks(trial: Trial) -> Comparisons:
    mha = Mha(trial)
    for tokens, cuts in trial.profile.prompts:
        whole = mha.rows(mha.prompt(tokens))
        for cut in cuts:
            yield f"0 ... {cut} of {tokens}", same(mha.rows(mha.prompt(cut)), whole[:cut])
            yield f"{cut} ... {tokens}", same(mha.rows(mha.prompt(tokens, cut)), whole[cut:])
            yield f"{cut} ... {tokens}, paged", same(mha.paged(mha.prompt(tokens, cut)), whole[cut:])


@check("schedule", "mha: lengths of a cached prefix")
def cached_prefixes(trial: Trial) -> Comparisons:
    mha = Mha(trial)
    whole = mha.paged(mha.prompt(mha.tokens))
    for hit in trial.profile.cached:
        chunk = mha.batch([*company(mha, 1), Request(mha.tokens, q_len=mha.tokens - hit, key=VICTIM)])
        yield f"{hit} of {mha.tokens} tokens cached", same(mha.paged(chunk)[chunk.rows(1)], whole[hit:])


@check("schedule", "mha: keys streamed through the state", first=True)
def streamed(trial: Trial) -> Comparisons:
    mha = Mha(trial)
    tiles = trial.profile.streamed_tiles
    tokens = tiles * mha.tile + 7
    batch = mha.batch([Request(tokens, q_len=20, key=VICTIM), Request(mha.tile + 3, q_len=6, key=101)])
    prompts = mha.prompts(batch)
    whole = mha.prefill(prompts)
    places = [mha.tile * (i + 1) for i in range(tiles)]
    for count in range(1, tiles + 1):
        for cuts in combinations(places, count):
            yield f"cut at {', '.join(map(str, cuts))}", same(mha.streamed(prompts, cuts), whole)


@check("schedule", "mha: chunks of the up-projection")
def up_projection_chunks(trial: Trial) -> Comparisons:
    mha = Mha(trial)
    tokens = trial.profile.prompts[-1][0]
    batch = mha.prompt(tokens, tokens - 9)
    expected = mha.rows(batch)
    for tiles in trial.profile.chunk_tiles:
        chunk = tiles * mha.tile
        yield f"chunks of {chunk} tokens", same(mha.paged(batch, chunk_tokens=chunk), expected)


def prefill_schedules(arch: str, dtype: torch.dtype) -> list[PrefillSchedule]:
    """The schedules of the architecture's table, and others of every size."""
    table = PREFILL_TABLES[arch]
    if dtype == torch.float32:
        return [table.fp32, dataclasses.replace(table.fp32, num_warps=4)]
    own = [value for value in vars(table).values() if isinstance(value, PrefillSchedule)]
    sizes = ((16, 4, 1), (64, 4, 2), (64, 8, 1), (128, 8, 1), (128, 8, 2))
    others = [PrefillSchedule(block_m=m, num_warps=warps, num_stages=stages) for m, warps, stages in sizes]
    return list(dict.fromkeys([*own, dataclasses.replace(table.narrow, group_bytes=1), *others]))


@check("tile shape", "mha: rows, warps and stages of a tile")
def tile_shapes(trial: Trial) -> Comparisons:
    need_gpu(trial)
    mha = Mha(trial)
    for gain in (0.5, 2.0):
        batch = mha.batch([Request(mha.tokens, q_len=mha.tokens, key=VICTIM), Request(2000, q_len=70, key=101)], gain=gain)
        expected = mha.rows(batch)
        for schedule in prefill_schedules(arch_of(trial.device), trial.dtype):
            with where_it_fits():
                yield f"{schedule} with scores of {gain}", same(mha.rows(batch, schedule=schedule), expected)


@check("tile shape", "mha: heads that share a call", every_case=True)
def head_slices(trial: Trial) -> Comparisons:
    mha = of_all_heads(trial)
    prompts = mha.prompts(mha.prompt(2 * mha.tile, 2 * mha.tile - 9))
    whole = mha.prefill(prompts)
    for start, end in trial.profile.head_slices:
        if end > trial.num_heads:
            continue
        batch: PagedBatch = dataclasses.replace(prompts.batch, q=prompts.batch.q[:, start:end])
        part = dataclasses.replace(prompts, batch=batch, kv=prompts.kv[:, start:end])
        yield f"heads {start}:{end}", same(mha.prefill(part), whole[:, start:end])
