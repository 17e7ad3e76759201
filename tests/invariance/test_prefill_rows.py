"""A prompt's bits do not depend on the batch, on where it or its keys are cut, on the chunks of the workspace, or on the schedule."""

import random
from dataclasses import replace

import pytest
import torch
from gpu import or_skip
from prefill_cases import NAN

from triton_mla.testing import Request, bitwise_equal
from triton_mla.tuning import PREFILL_TABLES, PrefillSchedule


@pytest.fixture(scope="module")
def fp32(mha):
    """For controls: 16-bit outputs round away what another order changes in few values."""
    return mha.with_(dtype=torch.float32)


def sizes(mha):
    tile = mha.tile
    return [(tile + 3, 3 * tile + 7), (1, 1), (2 * tile, 2 * tile), (7, 2 * tile + 1), (0, 5), (4, 0)]


def test_alone_and_in_any_batch(mha_each):
    requests = sizes(mha_each)
    batch = mha_each.make(requests)
    together = mha_each.prefill(batch)
    for i, request in enumerate(requests):
        mha_each.prefill(mha_each.make([request], [i + 1])).assert_same(together[batch.rows(i)], f"request {i}:")
    order = list(range(len(requests)))
    random.Random(1).shuffle(order)
    shuffled = mha_each.make([requests[i] for i in order], [i + 1 for i in order])
    rows = mha_each.prefill(shuffled)
    for place, i in enumerate(order):
        rows[shuffled.rows(place)].assert_same(together[batch.rows(i)], f"request {i} at {place}:")


def test_many_requests(mha):
    """More than one look at the begins of requests finds; most of them bring no token, which the interpreter is quick with."""
    mha, count, some = mha.with_(num_heads=1), 260, (0, 7, 255, 256, 257, 259)
    requests = [(1 + i % 3, 2 + i % 5) if i in some else (0, i % 2) for i in range(count)]
    batch = mha.make(requests, [1 + i % 7 for i in range(count)])
    rows = mha.prefill(batch)
    for i in some:
        mha.prefill(mha.make([requests[i]], [1 + i % 7])).assert_same(rows[batch.rows(i)], f"request {i}:")


def test_repeats(mha):
    batch = mha.make(sizes(mha))
    rows = mha.prefill(batch)
    for _ in range(20 if mha.device.type == "cuda" else 1):
        mha.prefill(batch).assert_same(rows)


def test_a_part_of_the_heads(mha):
    batch = mha.make(sizes(mha))
    rows = mha.prefill(batch)
    for heads in (slice(0, 1), slice(1, None)):
        part = replace(batch, q=batch.q[:, heads], k_nope=batch.k_nope[:, heads], v=batch.v[:, heads])
        out = torch.full_like(rows.out[:, heads], NAN)
        mha.prefill(part, out=out).assert_same(mha.rows(rows.out[:, heads], rows.lse[:, heads]))


def test_prompt_cuts(mha):
    """New tokens over their whole context, wherever the prompt before them ended."""
    length = 3 * mha.tile + 7
    whole = mha.prefill(mha.make([(length, length)]))
    for cut in (1, mha.tile - 1, mha.tile, mha.tile + 1, 2 * mha.tile, length - 1):
        mha.prefill(mha.make([(length - cut, length)])).assert_same(whole[cut:], f"from {cut}:")
        mha.prefill(mha.make([(cut, cut)])).assert_same(whole[:cut], f"to {cut}:")


def test_streamed_keys(mha_each):
    """Every set of cuts at tiles; they lie before, inside and after the queries."""
    tile = mha_each.tile
    batch = mha_each.make([(2 * tile, 3 * tile + 9), (5, tile + 5), (tile, tile)])
    whole = mha_each.prefill(batch)
    for cuts in range(1, 8):
        at = [tile * (i + 1) for i in range(3) if cuts >> i & 1]
        mha_each.streamed(batch, at).assert_same(whole, f"cut at {at}:")


def test_control_cuts_inside_a_tile_differ(fp32):
    batch = fp32.make([(5, 4 * fp32.tile + 9)])
    whole = fp32.prefill(batch)
    for cut in (fp32.tile // 2, fp32.tile + 16, 3 * fp32.tile - 1):
        fp32.streamed(batch, [cut]).assert_differs(whole)


def test_control_another_order_differs(fp32):
    batch = fp32.make(sizes(fp32))
    rows = fp32.prefill(batch)
    for change in ({"block_n": fp32.tile // 2}, {"reference_step": 1}):
        other = fp32.with_(order=replace(fp32.order, **change)).prefill(batch)
        assert not bitwise_equal(other.out, rows.out), change


SCHEDULES = [
    PrefillSchedule(block_m=m, num_warps=warps, num_stages=stages)
    for m, warps, stages in [(16, 4, 1), (16, 8, 1), (32, 4, 1), (32, 8, 2), (64, 4, 1), (64, 4, 2), (64, 8, 1), (64, 8, 2), (128, 8, 1), (128, 8, 2)]
]
SCHEDULES += [PrefillSchedule(block_m=16, num_warps=8, num_stages=1, block_k=32), PrefillSchedule(block_m=64, num_warps=8, num_stages=1, block_k=64)]
SCHEDULES += [PrefillSchedule(group_bytes=size) for size in (1, 1 << 16, 1 << 40)]
INTERPRETED = [SCHEDULES[0], SCHEDULES[9], SCHEDULES[10], SCHEDULES[-3]]


def plain(batch):
    return batch


def rising(batch):
    """Later keys score higher, so that a row's reference moves in most tiles."""
    ramp = torch.linspace(0.05, 4, len(batch.k_pe), device=batch.q.device).to(batch.q.dtype)
    return replace(batch, q=batch.q.abs(), k_nope=batch.k_nope.abs() * ramp[:, None, None])


def spiky(batch):
    return replace(batch, q=batch.q * 4)


@pytest.fixture(scope="module")
def chosen(mha):
    """Kinds of data, and their rows by the chosen schedule."""
    batches = {data.__name__: data(mha.make(sizes(mha))) for data in (plain, rising, spiky)}
    return [(name, batch, mha.prefill(batch)) for name, batch in batches.items()]


@pytest.mark.parametrize("schedule", [pytest.param(s, id=str(s), marks=() if s in INTERPRETED else pytest.mark.gpu) for s in SCHEDULES])
def test_every_schedule_has_the_bits_of_the_chosen_one(mha, chosen, schedule):
    for name, batch, expected in chosen:
        with or_skip():
            rows = mha.prefill(batch, schedule=schedule)
        rows.assert_same(expected, f"{name}:")


@pytest.mark.gpu
@pytest.mark.parametrize("nope, rope, value", [(64, 32, 64), (192, 64, 256), (48, 0, 80)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("schedule", [SCHEDULES[0], SCHEDULES[6], SCHEDULES[10]], ids=str)
def test_schedules_of_other_heads(mha, nope, rope, value, dtype, schedule):
    mha = mha.with_(nope=nope, rope=rope, value=value, dtype=dtype)
    batch = rising(mha.make(sizes(mha)))
    with or_skip():
        rows = mha.prefill(batch, schedule=schedule)
    rows.assert_same(mha.prefill(batch))


@pytest.mark.parametrize("data", [rising, spiky])
def test_the_data_tell_orders_apart(fp32, data):
    batch = data(fp32.make(sizes(fp32)))
    fp32.prefill(batch).assert_differs(fp32.with_(order=replace(fp32.order, block_n=fp32.tile // 2)).prefill(batch))


@pytest.fixture(scope="module")
def prompt(mha):
    """A request of nine tiles and some, whole: (requests' key and length, its rows)."""
    length = 9 * mha.tile + 5
    return length, mha.prefill_paged(mha.paged([Request(length, length, key=7)], page_order="sequential"))


def test_paged_prompt_in_any_chunks_and_company(mha, prompt):
    """The prompt's tokens arrive in pieces, each beside other requests, over other pages; what came before is in the cache."""
    length, whole = prompt
    tile = mha.tile
    for ends in ([1, 2, length], [tile, 4 * tile, length], [tile - 1, 3 * tile + 7, 8 * tile, length - 1, length]):
        for first, end in zip([0, *ends[:-1]], ends, strict=True):
            company = [Request(3, 3, key=1), Request(end, end - first, key=7), Request(5 * tile, 2, key=2)]
            batch = mha.paged(company)
            mha.prefill_paged(batch)[batch.rows(1)].assert_same(whole[first:end], f"tokens {first} to {end}:")


def test_paged_chunk_length(mha, prompt):
    length, whole = prompt
    batch = mha.paged([Request(length, length, key=7)])
    for tiles in (1, 3, 8, 9, 10) if mha.device.type == "cpu" else range(1, 12):
        mha.prefill_paged(batch, chunk_tokens=tiles * mha.tile).assert_same(whole, f"chunks of {tiles} tiles:")


def test_paged_layout(mha, prompt):
    length, whole = prompt
    for options in ({"page_size": 1}, {"page_size": 64}, {"page_order": "reversed"}, {"extra_width": 40}):
        batch = mha.paged([Request(length, 9, key=7), Request(0, 2, key=1)], **options)
        mha.prefill_paged(batch)[:9].assert_same(whole[-9:], str(options))


def test_paged_equals_whole_keys(mha_each):
    batch = mha_each.paged([Request(5 * mha_each.tile + 1, 40, key=1), Request(8, 8, key=2)])
    mha_each.prefill_paged(batch).assert_same(mha_each.prefill(mha_each.projected(batch)))


def test_control_chunks_from_the_batch_size_differ(fp32):
    """Boundaries from capacity // batch_size, as some engines cut a prefix: the batch decides the bits."""
    batch = fp32.paged([Request(9 * fp32.tile + 5, 9, key=7)])
    keys = fp32.projected(batch)
    rows = {}
    for batch_size in (1, 5, 7):
        chunk = 10 * fp32.tile // batch_size
        rows[batch_size] = fp32.streamed(keys, [*range(chunk, 9 * fp32.tile + 5, chunk)])
    rows[5].assert_same(rows[1])  # of whole tiles, as it happens
    rows[7].assert_differs(rows[1])


def test_control_the_keys_decide(mha, prompt):
    length, whole = prompt
    mha.prefill_paged(mha.paged([Request(length, 9, key=8)])).assert_differs(whole[-9:])
    batch = mha.paged([Request(length, 9, key=7)])
    bits = torch.int16 if mha.dtype.itemsize == 2 else torch.int32
    batch.kv_cache.view(bits)[batch.block_table[0, 1].long()] ^= 1
    mha.prefill_paged(batch).assert_differs(whole[-9:])


def test_up_projection_schedules(mha_each, monkeypatch):
    """Tiles of the up-projection change no bit of keys and values, so none of the result."""
    from triton_mla import prefill, prefill_launch
    from triton_mla.tuning import ProductSchedule, arch_of

    batch = mha_each.paged([Request(5 * mha_each.tile + 1, 40, key=1)])
    rows = mha_each.prefill_paged(batch)
    table = PREFILL_TABLES[arch_of(mha_each.device)]
    pointers = [ProductSchedule(16, 32, 16, 4, 1), ProductSchedule(128, 64, 64, 4, 2), ProductSchedule(64, 256, 32, 8, 3)]
    changes = [{"product": p, "product_fp32": replace(p, block_k=16, num_stages=1), "product_tma": None} for p in pointers]
    if arch_of(mha_each.device) == "sm_90":
        changes += [{"product_tma": ProductSchedule(128, 256, 64, 8, 4, subtiles=2)}, {"product_tma": ProductSchedule(64, 64, 64, 4, 3)}]
    for change in changes if mha_each.device.type == "cuda" else changes[:1]:
        monkeypatch.setattr(prefill_launch, "PREFILL_TABLES", {**PREFILL_TABLES, table_name(table): replace(table, **change)})
        prefill._repeats.clear()  # its sizes are known with the schedule before
        mha_each.prefill_paged(batch).assert_same(rows, str(change))


def table_name(table):
    return next(name for name, value in PREFILL_TABLES.items() if value is table)
