"""Schedules: tile rows, warps, stages, forms and grids give one set of bits, on data whose references move."""

import functools
import itertools
from dataclasses import replace

import pytest
import torch
from gpu import or_skip

from triton_mla import Schedule
from triton_mla.testing import Request

ONE_PASS = [
    Schedule(block_rows=rows, num_warps=warps, num_stages=stages)
    for rows, warps, stages in [
        *((16, warps, stages) for warps in (2, 4, 8) for stages in (1, 2, 3)),
        *((32, 4, 1), (32, 8, 2), (64, 4, 1), (64, 8, 1), (64, 8, 2), (128, 8, 1)),
    ]
]
TWO_PHASE = [
    Schedule("two_phase", rows, warps, num_stages=stages, block_v=block_v, block_k=block_k, score_warps=score_warps)
    for rows, warps, stages, block_v, block_k, score_warps in [
        (16, 2, 1, 16, 512, 8),
        (16, 4, 3, 64, 128, 4),
        (16, 4, 5, 64, 512, 4),
        (16, 8, 2, 128, 64, 2),
        (32, 4, 2, 512, 16, 4),
        (32, 8, 3, 32, 256, 2),
        (64, 4, 2, 64, 32, 8),
        (64, 8, 2, 256, 128, 4),
    ]
]
DEPENDENT_LAUNCHES = [replace(ONE_PASS[4], pdl=True), replace(TWO_PHASE[1], pdl=True)]
# Warps, stages and launches mean nothing to the interpreter, and wide tiles take it long.
INTERPRETED = [ONE_PASS[0], ONE_PASS[12], TWO_PHASE[1], TWO_PHASE[4]]
SCHEDULES = [
    pytest.param(schedule, id=str(schedule), marks=() if schedule in INTERPRETED else pytest.mark.gpu) for schedule in ONE_PASS + TWO_PHASE + DEPENDENT_LAUNCHES
]


def plain(batch):
    return batch


def rising(batch):
    """Later tokens score higher, so that the reference of a row moves in most tiles."""
    for i, request in enumerate(batch.requests):
        slots = batch.slots(i)
        steps = torch.arange(request.seq_len, device=slots.device) / 64
        batch.kv_cache.view(-1, batch.kv_cache.shape[-1])[slots, 5] = steps.to(batch.q.dtype)
    batch.q[..., 5] = 8.0
    return replace(batch, softmax_scale=0.5)


def spiky(batch):
    return replace(batch, q=batch.q * 20)


def far_below(batch):
    """A column of values that only tokens about 80 nats below the maximum carry: the edge of what fp32 holds."""
    tokens = batch.kv_cache.view(-1, batch.kv_cache.shape[-1])
    for i, request in enumerate(batch.requests):
        slots = batch.slots(i)
        tokens[slots, 0] = 0.0
        tokens[slots[: request.seq_len // 2 : 3], 0] = 1.0
        tokens[slots[: request.seq_len // 2 : 3], 1] = -8.0
    batch.q[..., 0], batch.q[..., 1] = 0.0, 10.0
    return replace(batch, softmax_scale=1.0)


def batches(mla, op):
    split = mla.order.kv_split
    if mla.device.type == "cuda":
        kinds, heads, q_len = (plain, rising, spiky, far_below), (16, 128), 9
    else:
        kinds, heads, q_len = (rising, far_below), (6,), 3
    q_len = 1 if op == "decode" else q_len
    requests = [Request(3 * split + 9, q_len, key=1), Request(split + 1, q_len, key=3)]
    for data, num_heads in itertools.product(kinds, heads):
        yield f"{data.__name__}, {num_heads} heads:", data(mla.batch(requests, num_heads=num_heads))


@pytest.fixture(scope="module")
def chosen(mla):
    """A function of an operation: its batches, and their rows by the chosen schedule."""
    return functools.cache(lambda op: [(what, batch, getattr(mla, op)(batch)) for what, batch in batches(mla, op)])


@pytest.mark.parametrize("op", ["decode", "extend"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_has_the_bits_of_the_chosen_one(mla, chosen, op, schedule):
    for what, batch, expected in chosen(op):
        with or_skip():
            rows = getattr(mla, op)(batch, plan=mla.plan(op, batch, schedule))
        rows.assert_same(expected, what)


@pytest.mark.parametrize("op", ["decode", "extend"])
def test_the_data_are_right_and_tell_orders_apart(mla, op):
    mla = mla.with_dtype(torch.float32)  # 16-bit outputs round away what another order changes in few values
    for _, batch in batches(mla, op):
        rows = getattr(mla, op)(batch)
        rows.assert_close(mla.reference(batch), 1e-1, 1e-3)  # outputs up to 24
        getattr(mla.recut(), op)(batch).assert_differs(rows)


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["decode", "extend"])
@pytest.mark.parametrize("schedule", [ONE_PASS[4], ONE_PASS[-2], TWO_PHASE[1]], ids=str)
def test_fp32_and_fp16(mla_each, op, schedule):
    for what, batch in batches(mla_each, op):
        if "16 heads" in what and "far" not in what:
            with or_skip():
                rows = getattr(mla_each, op)(batch, plan=mla_each.plan(op, batch, schedule))
            rows.assert_same(getattr(mla_each, op)(batch), what)
