"""The plan is data: what may reach a bit follows from a request's length and the order alone, never from the batch."""

import dataclasses
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from triton_mla.plan import plan_attention, split_table, tile_table
from triton_mla.tuning import ARCHITECTURES, DEFAULT_ORDER, ReductionOrder, Schedule

lengths = st.integers(0, 1 << 20) | st.integers(0, 5000)
short_lengths = st.integers(0, 9000)
orders = st.builds(
    lambda block_n, blocks: ReductionOrder(block_n=block_n, kv_split=block_n * blocks),
    st.sampled_from([16, 32, 64]),
    st.sampled_from([1, 2, 4, 32, 64, 3]),
)
coarse_orders = st.sampled_from([DEFAULT_ORDER, ReductionOrder(kv_split=512), ReductionOrder(kv_split=1024)])


@st.composite
def batches(draw):
    """Facts of a batch, as an engine has them."""
    batch_size = draw(st.integers(1, 512))
    decode = draw(st.booleans())
    return {
        "num_tokens": batch_size if decode else draw(st.integers(0, 20_000)),
        "batch_size": batch_size,
        "max_seq_len": draw(st.integers(0, 200_000)),
        "decode": decode,
    }


@st.composite
def models(draw):
    return {
        "num_heads": draw(st.integers(1, 128)),
        "kv_lora_rank": draw(st.sampled_from([512, 256, 128, 320, 64])),
        "qk_rope_head_dim": draw(st.sampled_from([64, 32, 16, 0])),
        "dtype": draw(st.sampled_from([torch.bfloat16, torch.float16])),
        "page_size": draw(st.sampled_from([1, 16, 32, 48, 64, 128, 480])),
        "arch": draw(st.sampled_from(sorted(ARCHITECTURES))),
        "num_sms": draw(st.integers(1, 200)),
    }


def covers(table, seq_len):
    """The intervals of a table are not empty, ascend without gaps from 0, and end with the sequence."""
    edges = [0, *(end for _, end in table)]
    return (
        [start for start, _ in table] == edges[:-1]
        and all(start < end for start, end in table)
        and edges[-1] == seq_len
    )


@given(lengths, coarse_orders)
def test_splits_cover_the_sequence_at_absolute_cuts(seq_len, order):
    table = split_table(seq_len, order)
    assert covers(table, seq_len)
    assert [start for start, _ in table] == list(range(0, seq_len, order.kv_split))


@given(short_lengths, orders)
def test_tiles_cover_the_sequence_at_absolute_cuts(seq_len, order):
    table = tile_table(seq_len, order)
    assert covers(table, seq_len)
    assert [start for start, _ in table] == list(range(0, seq_len, order.block_n))


@given(short_lengths, orders)
def test_a_tile_lies_inside_one_split(seq_len, order):
    splits = split_table(seq_len, order)
    for start, end in tile_table(seq_len, order):
        assert any(first <= start and end <= last for first, last in splits)


@given(short_lengths, short_lengths, orders)
def test_a_longer_sequence_keeps_every_full_part(one, other, order):
    """So the partial results of finished splits stay what they are while a request grows."""
    short, long = sorted((one, other))
    for table, width in ((split_table, order.kv_split), (tile_table, order.block_n)):
        full = short // width
        assert table(short, order)[:full] == table(long, order)[:full]


@given(st.lists(short_lengths, max_size=12), st.randoms(use_true_random=False), st.integers(0, 5), orders)
def test_tables_are_the_same_in_any_batch(lens, chance, padding, order):
    def tables(batch):
        return [(split_table(seq_len, order), tile_table(seq_len, order)) for seq_len in batch]

    alone = {seq_len: tables([seq_len])[0] for seq_len in lens}
    batch = lens + [0] * padding
    chance.shuffle(batch)
    for seq_len, table in zip(batch, tables(batch), strict=True):
        assert table == alone.get(seq_len, ((), ()))


def test_tables_of_nothing():
    assert split_table(0) == tile_table(0) == ()


@pytest.mark.parametrize("table", [split_table, tile_table])
@pytest.mark.parametrize("seq_len", [-1, -(1 << 40), 1.0, True, "64", None])
def test_tables_of_what_is_no_length(table, seq_len):
    with pytest.raises(ValueError, match=f"seq_len={seq_len!r} must be an int >= 0"):
        table(seq_len)


@given(batches(), batches(), models(), orders)
def test_the_order_never_follows_from_the_batch(one, other, model, order):
    plans = [plan_attention(**batch, **model, order=order) for batch in (one, other)]
    assert plans[0].order == plans[1].order == order


@given(batches(), models())
def test_the_default_order_for_every_model_and_machine(batch, model):
    assert plan_attention(**batch, **model).order == DEFAULT_ORDER


@given(batches(), models(), coarse_orders)
def test_equal_facts_give_equal_plans(batch, model, order):
    first, second = (plan_attention(**batch, **model, order=order) for _ in range(2))
    assert first == second
    assert isinstance(first.schedule, Schedule)
    assert isinstance(first.workspace_bytes, int) and first.workspace_bytes >= 0


@given(batches(), models(), coarse_orders)
def test_a_plan_is_frozen_data(batch, model, order):
    plan = plan_attention(**batch, **model, order=order)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.order = ReductionOrder()
    assert pickle.loads(pickle.dumps(plan)) == plan


@given(batches(), models(), coarse_orders)
def test_a_given_schedule_is_used_and_leaves_the_order(batch, model, order):
    plan = plan_attention(**batch, **model, order=order)
    again = plan_attention(**batch, **model, order=order, schedule=plan.schedule)
    assert again == plan


def test_schedules_and_orders_have_no_field_in_common():
    def names(kind):
        return {field.name for field in dataclasses.fields(kind)}

    assert not names(Schedule) & names(ReductionOrder)


@pytest.mark.parametrize("form, rows", [("hopper", 32), ("hopper_few", 64), ("hopper_two_phase", 128)])
def test_rows_that_a_form_does_not_take(form, rows):
    with pytest.raises(ValueError, match=f"block_rows={rows} must be .* with form='{form}'"):
        Schedule(form, rows)


@pytest.mark.parametrize(
    "form, block_rows, slices, message",
    [
        ("hopper", 64, 3, r"value_slices=3 must be one of \(1, 2\)"),
        ("hopper", 64, 4, r"value_slices=4 must be one of \(1, 2\)"),
        ("hopper", 64, 0, r"value_slices=0 must be one of \(1, 2\)"),
        ("one_pass", 64, 2, "value_slices=2 must be 1 with form='one_pass'"),
        ("two_phase", 16, 2, "value_slices=2 must be 1 with form='two_phase'"),
        ("hopper_few", 16, 2, "value_slices=2 must be 1 with form='hopper_few'"),
    ],
)
def test_bad_value_slices_are_named(form, block_rows, slices, message):
    with pytest.raises(ValueError, match=message):
        Schedule(form, block_rows, value_slices=slices)
    assert Schedule("hopper", 64, value_slices=2).value_slices == 2


FACTS = {
    "num_tokens": 4,
    "batch_size": 4,
    "num_heads": 16,
    "max_seq_len": 5000,
    "dtype": torch.bfloat16,
    "page_size": 64,
    "decode": True,
    "arch": "sm_90",
    "num_sms": 132,
}


@pytest.mark.parametrize(
    "name, value",
    [
        ("num_tokens", -1),
        ("batch_size", -1),
        ("num_heads", 0),
        ("num_heads", 129),
        ("max_seq_len", -1),
        ("kv_lora_rank", 500),
        ("kv_lora_rank", 0),
        ("kv_lora_rank", 1024),
        ("qk_rope_head_dim", 7),
        ("qk_rope_head_dim", -16),
        ("qk_rope_head_dim", 128),
        ("dtype", torch.float64),
        ("dtype", "bf16"),
        ("page_size", 8),
        ("page_size", 0),
        ("arch", "sm_70"),
        ("num_sms", 0),
        ("order", 2048),
        ("schedule", "one_pass"),
        ("decode", 1),
        ("decode", None),
    ],
)
def test_bad_facts_are_named(name, value):
    with pytest.raises(ValueError, match=name):
        plan_attention(**{**FACTS, name: value})
    assert plan_attention(**FACTS).order == DEFAULT_ORDER


@pytest.mark.parametrize(("heads", "batch", "q_len", "seq_len", "form", "rows", "slices"), [
    (16, 1, 1, 8192, "hopper_two_phase", 16, 1), (16, 1, 1, 32768, "hopper_few", 16, 1), (16, 128, 1, 8192, "hopper_few", 16, 1),
    (128, 1, 1, 2048, "hopper_two_phase", 16, 1), (128, 1, 1, 8192, "hopper_two_phase", 64, 1), (128, 1, 1, 16384, "hopper_few", 16, 1),
    (128, 4, 1, 8192, "hopper", 64, 2), (128, 4, 1, 32768, "hopper", 64, 1), (16, 1, 4, 8192, "hopper_few", 16, 1), (16, 64, 2, 8192, "hopper", 64, 1),
    (4, 1, 1, 1024, "two_phase", 16, 1), (4, 64, 1, 8192, "one_pass", 16, 1),
])
def test_forms_of_sm_90(heads, batch, q_len, seq_len, form, rows, slices):
    """What was measured to be the fastest on a GPU of 132 multiprocessors; fewer than 8 heads have no Hopper form."""
    plan = plan_attention(num_tokens=batch * q_len, batch_size=batch, num_heads=heads, max_seq_len=seq_len, decode=q_len == 1)
    assert (plan.schedule.form, plan.schedule.block_rows, plan.schedule.value_slices) == (form, rows, slices)
