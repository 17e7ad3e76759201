"""The contract, line by line, as checks: each yields what it compared and whether the bytes were equal."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from triton_mla.testing import Request
from triton_mla.verification.schedules import plans
from triton_mla.verification.trial import VICTIM, Check, Comparisons, NotHereError, Trial, empty, need_gpu, pick, register, same, where_it_fits

CHECKS: list[Check] = []
check = functools.partial(register, CHECKS)


@check("batch", "batch size and place in the batch", every_case=True)
def batch_size(trial: Trial) -> Comparisons:
    for size in trial.profile.batch_sizes:
        for place in sorted({0, size // 2, size - 1}):
            order = list(range(1, size))
            order.insert(place, 0)
            rows = trial.decode(pick(trial.crowd, order))
            yield f"batch of {size}, row {place}", same(rows[place : place + 1], trial.alone)


@check("batch", "order of the batch")
def batch_order(trial: Trial) -> Comparisons:
    batch = pick(trial.crowd, range(min(16, len(trial.crowd.requests))))
    size = len(batch.requests)
    straight = trial.decode(batch)
    for what, order in (("reversed", range(size)[::-1]), ("rotated", [*range(1, size), 0])):
        yield what, same(trial.decode(pick(batch, order)), straight[list(order)])


@check("batch", "neighbours' lengths and contents", every_case=True)
def neighbours(trial: Trial) -> Comparisons:
    short, long = Request(1, key=31), Request(2 * trial.profile.victim, key=32)
    for what, others in (("short", [short] * 3), ("empty", [Request(0, key=33)] * 3), ("longer", [short, long, short])):
        rows = trial.decode(trial.batch([others[0], trial.victim, *others[1:]]))
        yield f"{what} neighbours", same(rows[1:2], trial.alone)
    batch = trial.batch([short, trial.victim])
    batch.q[0] = float("nan")
    yield "a neighbour full of NaN", same(trial.decode(batch)[1:2], trial.alone)


@check("batch", "copies of one request", every_case=True)
def copies(trial: Trial) -> Comparisons:
    rows = trial.decode(pick(trial.crowd, [0] * trial.profile.copies))
    for i in range(trial.profile.copies):
        yield f"copy {i}", same(rows[i : i + 1], trial.alone)


@check("batch", "padded rows", every_case=True)
def padding(trial: Trial) -> Comparisons:
    batch = pick(trial.crowd, [0, 1, 0, 1])
    batch.seq_lens[2:] = 0
    batch.block_table[2:] = 0
    rows = trial.decode(batch)
    yield "row beside padding", same(rows[:1], trial.alone)
    yield "padding is empty", empty(rows[2:])
    tokens = trial.profile.prompt
    prompt = trial.prompt(tokens)
    padded = dataclasses.replace(prompt, q=torch.cat([prompt.q, prompt.q[:3]]))
    rows = trial.extend(padded)
    yield "tokens before padding", same(rows[:tokens], trial.extend(prompt))
    yield "padded tokens are empty", empty(rows[tokens:])


@check("batch", "width of the block table")
def table_width(trial: Trial) -> Comparisons:
    batch = pick(trial.crowd, [0, 1])
    for extra, junk in ((1, 0), (7, -1), (64, 2**31 - 1), (300, 0)):
        tail = torch.full((2, extra), junk, dtype=torch.int32, device=trial.device)
        wide = dataclasses.replace(batch, block_table=torch.cat([batch.block_table, tail], dim=1))
        yield f"{extra} more columns of {junk}", same(trial.decode(wide)[:1], trial.alone)


@check("batch", "extend in a ragged batch", every_case=True)
def ragged_extend(trial: Trial) -> Comparisons:
    tokens = trial.profile.prompt
    alone = trial.extend(trial.prompt(tokens))
    sizes = ((70, 3), (0, 0), (trial.profile.neighbour, 5), (9, 1))
    others = [Request(length, q_len=count, key=40 + i) for i, (length, count) in enumerate(sizes)]
    for place in (0, 1, len(others)):
        requests = [*others[:place], Request(tokens, q_len=tokens, key=VICTIM), *others[place:]]
        start = sum(r.q_len for r in requests[:place])
        rows = trial.extend(trial.batch(requests))
        yield f"request {place} of {len(requests)}", same(rows[start : start + tokens], alone)


@check("batch", "the same call again", every_case=True)
def repeats(trial: Trial) -> Comparisons:
    batch = pick(trial.crowd, range(min(16, len(trial.crowd.requests))))
    first = trial.decode(batch)
    for i in range(trial.profile.repeats):
        yield f"repeat {i}", same(trial.decode(batch), first)


@check("batch", "CUDA graph replay with other contents")
def graph(trial: Trial) -> Comparisons:
    need_gpu(trial)
    crowd = trial.batch([trial.victim, *trial.neighbours(7)])
    eight = pick(crowd, range(8))
    static = dataclasses.replace(eight, q=eight.q.clone(), block_table=eight.block_table.clone())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        trial.decode(static)
    torch.cuda.current_stream().wait_stream(stream)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        rows = trial.decode(static)
    for count in (5, 8, 1):
        step = pick(crowd, range(count)[::-1])
        eager = trial.decode(step)
        static.seq_lens.zero_()
        static.block_table.zero_()
        for held, new in ((static.q, step.q), (static.seq_lens, step.seq_lens), (static.block_table, step.block_table)):
            held[:count].copy_(new)
        captured.replay()
        yield f"{count} of 8 rows", same(rows[:count], eager)
        if count < 8:
            yield f"{8 - count} padded rows", empty(rows[count:])


@check("memory", "page ids and their order", every_case=True)
def page_ids(trial: Trial) -> Comparisons:
    for order, extra in (("sequential", 3), ("reversed", 3), ("random", 3), ("random", 50)):
        batch = trial.batch([trial.victim, *trial.neighbours(2)], page_order=order, extra_pages=extra)
        yield f"{order}, {extra} pages without an owner", same(trial.decode(batch)[:1], trial.alone)


@check("memory", "page size")
def page_sizes(trial: Trial) -> Comparisons:
    for size in trial.profile.page_sizes:
        batch = trial.batch([trial.victim], page_size=size)
        yield f"pages of {size}", same(trial.decode(batch), trial.alone)


@check("memory", "strides of views")
def strides(trial: Trial) -> Comparisons:
    batch = pick(trial.crowd, [0, 1, 2])
    rank = batch.kv_lora_rank
    expected = trial.decode(batch)

    def view(what: str, **fields: Any) -> tuple[str, bool]:
        return what, same(trial.decode(dataclasses.replace(batch, **fields)), expected)

    small = trial.batch([Request(trial.profile.neighbour, key=51)])
    pages, size, dim = small.kv_cache.shape
    wide = torch.full((pages, 2, size, dim + 32), float("nan"), dtype=trial.dtype, device=trial.device)
    wide[:, 0, :, :dim] = small.kv_cache
    strided = dataclasses.replace(small, kv_cache=wide[:, 0, :, :dim])
    yield "cache: one layer of a wider pool", same(trial.decode(strided), trial.decode(small))
    yield view("q: transposed", q=batch.q.transpose(0, 1).contiguous().transpose(0, 1))
    yield view("q: every second head", q=batch.q.repeat_interleave(2, dim=1)[:, ::2])
    pair = (batch.q[..., :rank], batch.q[..., rank:])
    yield "q: a pair of slices", same(trial.decode(batch, q=pair), expected)
    yield "q: a pair of tensors", same(trial.decode(batch, q=(pair[0].contiguous(), pair[1].contiguous())), expected)
    wider = batch.block_table.repeat(1, 2)
    yield view("table: the first columns of a wider one", block_table=wider[:, : batch.block_table.shape[1]])
    yield view("table: every second row", block_table=batch.block_table.repeat_interleave(2, dim=0)[::2])
    yield view("lengths: the end of a longer tensor", seq_lens=torch.cat([batch.seq_lens[:1], batch.seq_lens])[1:])


@check("memory", "stale tokens, NaN and Inf included", every_case=True)
def stale_tokens(trial: Trial) -> Comparisons:
    requests = [Request(1, key=61), Request(13, key=62), trial.victim, Request(trial.profile.page_size + 1, key=63)]
    clean = trial.decode(trial.batch(requests, stale=0.0))
    for value in (float("nan"), float("inf"), 1.0):
        yield f"stale tokens of {value}", same(trial.decode(trial.batch(requests, stale=value)), clean)


@check("memory", "pages beyond 2**31 elements")
def far_pages(trial: Trial) -> Comparisons:
    need_gpu(trial)
    pages = trial.profile.far_pages
    near = trial.batch([Request(300, key=71)])
    _, size, dim = near.kv_cache.shape
    if pages == 0:
        raise NotHereError("left out by --quick")
    if torch.cuda.mem_get_info(trial.device)[0] < 2 * pages * size * dim * near.kv_cache.element_size():
        raise NotHereError("needs 9 GB of free device memory")
    pool = torch.full((pages, size, dim), float("nan"), dtype=trial.dtype, device=trial.device)
    expected = trial.decode(near)
    own = near.block_table[0, : -(-300 // size)].long()
    for power in (31, 30):
        middle = 2**power // (size * dim)
        ids = torch.arange(middle - 2, middle - 2 + len(own), device=trial.device)
        pool[ids] = near.kv_cache[own]
        moved = dataclasses.replace(near, kv_cache=pool, block_table=ids.int()[None])
        yield f"pages {int(ids[0])} ... {int(ids[-1])}", same(trial.decode(moved), expected)


@check("schedule", "token by token", every_case=True)
def token_by_token(trial: Trial) -> Comparisons:
    tokens = trial.profile.prompt
    prompt = trial.prompt(tokens)
    whole = trial.extend(prompt)
    for i in range(tokens):
        yield f"token {i} of {tokens}", same(trial.step(prompt, i), whole[i : i + 1])


@check("schedule", "prompts cut into chunks", every_case=True)
def chunks(trial: Trial) -> Comparisons:
    for first, end, cuts in trial.profile.pieces:
        prompt = trial.prompt(end)
        whole = trial.part(prompt, first, end)
        for cut in cuts:
            for start, stop in ((first, cut), (cut, end)):
                expected = whole[start - first : stop - first]
                yield f"tokens {start} ... {stop} of {first} ... {end}", same(trial.part(prompt, start, stop), expected)


@check("schedule", "verify rows are decode rows", every_case=True)
def verify_rows(trial: Trial) -> Comparisons:
    for length in trial.profile.verify_lengths:
        prompt = trial.prompt(length)
        steps = {p: trial.step(prompt, p) for p in range(length - max(trial.profile.verify_tokens), length)}
        for count in trial.profile.verify_tokens:
            rows = trial.part(prompt, length - count, length)
            for i in range(count):
                yield f"row {i} of {count} at {length}", same(rows[i : i + 1], steps[length - count + i])


@check("tile shape", "rows, warps, stages and form of a tile", every_case=True, first=True)
def tile_shapes(trial: Trial) -> Comparisons:
    need_gpu(trial)
    extended = trial.batch([Request(trial.profile.neighbour, q_len=9, key=52), Request(70, q_len=5, key=53)])
    for what, call, batch in (
        ("decode", trial.decode, pick(trial.crowd, [0, 1, 2])),
        ("extend", trial.extend, extended),
    ):
        expected = call(batch)
        for name, plan in plans(trial, batch, decode=what == "decode"):
            with where_it_fits():
                yield f"{what}, {name}", same(call(batch, plan=plan), expected)


@check("tile shape", "heads that share a call", every_case=True)
def head_slices(trial: Trial) -> Comparisons:
    batch = pick(trial.crowd, [0, 1, 2])
    whole = trial.decode(batch)
    for start, end in trial.profile.head_slices:
        if end > trial.num_heads:
            continue
        rows = trial.decode(dataclasses.replace(batch, q=batch.q[:, start:end]))
        yield f"heads {start}:{end}", same(rows, whole[:, start:end])
