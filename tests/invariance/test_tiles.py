"""Schedules: tile rows, warps, stages, forms and grids give one set of bits, on data whose references move."""

import dataclasses
import itertools
from dataclasses import replace

import pytest
import torch

from triton_mla import UnsupportedError, plan_attention
from triton_mla.testing import Request
from triton_mla.tuning import Schedule, arch_of

pytestmark = pytest.mark.gpu

SCHEDULES = [
    dict(zip(("form", "block_rows", "num_warps", "num_stages"), values, strict=True))
    for values in itertools.product(("one_pass", "two_phase"), (16, 32, 64), (2, 4, 8), (1, 2, 3))
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


def results(mla, op, batch):
    """(schedule, rows) of every schedule that the machine can run."""
    facts = {
        "num_tokens": len(batch.q),
        "batch_size": len(batch.seq_lens),
        "num_heads": batch.q.shape[1],
        "max_seq_len": max(request.seq_len for request in batch.requests),
        "kv_lora_rank": batch.kv_lora_rank,
        "qk_rope_head_dim": batch.q.shape[2] - batch.kv_lora_rank,
        "dtype": mla.dtype,
        "page_size": batch.page_size,
        "decode": op == "decode",
        "arch": arch_of(mla.device),
        "num_sms": torch.cuda.get_device_properties(mla.device).multi_processor_count,
        "order": mla.order,
    }
    chosen = plan_attention(**facts)
    yield chosen.schedule, getattr(mla, op)(batch, plan=chosen)
    known = {field.name for field in dataclasses.fields(Schedule)}
    for changes in SCHEDULES:
        schedule = replace(chosen.schedule, **{name: value for name, value in changes.items() if name in known})
        try:
            plan = plan_attention(**facts, schedule=schedule)
        except UnsupportedError:
            continue
        yield schedule, getattr(mla, op)(batch, plan=plan)


@pytest.mark.parametrize("data", [plain, rising, spiky, far_below])
@pytest.mark.parametrize("heads, op", [(16, "decode"), (128, "decode"), (16, "extend")])
def test_every_schedule(mla, data, heads, op):
    q_len = 1 if op == "decode" else 9
    batch = data(mla.batch([Request(1400, q_len, key=1), Request(70, q_len, key=2)], num_heads=heads))
    everything = list(results(mla, op, batch))
    assert len(everything) > 6
    _, expected = everything[0]
    expected.assert_close(mla.reference(batch), 3e-2, 1e-3)
    for schedule, rows in everything[1:]:
        rows.assert_same(expected, f"{schedule}:")
    getattr(mla.recut(), op)(batch).assert_differs(expected)
