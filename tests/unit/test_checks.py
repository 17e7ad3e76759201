"""Lengths against the plan that they are given with, where the host sees them; and tensors that share memory."""

import itertools
import random

import pytest
import torch
from memory import WithoutMemory
from torch._subclasses.fake_tensor import FakeTensorMode

from triton_mla import checks


def lengths(max_seq_len, *values):
    seq_lens = torch.tensor(values, dtype=torch.int32)
    table = torch.arange(len(values) * 8, dtype=torch.int32).view(-1, 8)
    checks.lengths(seq_lens, table, 16, table.numel(), None, len(values), max_seq_len)


def test_lengths_up_to_the_plans():
    lengths(100, 0, 1, 100)
    lengths(None, 101, 128)


def test_a_length_past_the_plans_is_named():
    with pytest.raises(ValueError, match=r"seq_lens\[1\]=101 must be from 0 to plan.max_seq_len=100"):
        lengths(100, 7, 101)


def test_a_length_past_the_table_is_named_first():
    with pytest.raises(ValueError, match=r"seq_lens\[0\]=129 must be from 0 to 128: block_table has 8 pages of 16"):
        lengths(100, 129)


def bytes_of(tensor):
    """The address of each byte of each element."""
    found = set()
    for index in itertools.product(*map(range, tensor.shape)):
        at = tensor.data_ptr() + tensor.itemsize * sum(i * stride for i, stride in zip(index, tensor.stride(), strict=True))
        found.update(range(at, at + tensor.itemsize))
    return found


def shares(a, b):
    try:
        checks.apart({"a": a}, {"b": b})
    except ValueError as error:
        assert "a has shape" in str(error) and "must not share memory with b" in str(error)
        return True
    return False


def test_random_views_of_one_buffer():
    """None that has a byte of another passes; most of those that have none do."""
    draw = random.Random(3)
    memory = torch.zeros(600)

    def view():
        shape = [draw.choice((1, 2, 3, 4)) for _ in range(draw.choice((1, 2, 3)))]
        strides = [draw.choice((0, 1, 2, 3, 4, 6, 8, 12, 24, 48)) for _ in shape]
        return (memory if draw.random() < 0.7 else memory.view(torch.int16)).as_strided(shape, strides, draw.randrange(60))

    counts = {}
    for _ in range(3000):
        a, b = view(), view()
        case = bool(bytes_of(a) & bytes_of(b)), shares(a, b)
        assert case[1] == shares(b, a)
        counts[case] = counts.get(case, 0) + 1
    assert (True, False) not in counts
    assert counts[False, True] < counts[False, False] / 20
    assert counts[True, True] > 100


def test_views_that_take_turns():
    rows = torch.zeros(5, 4, 100)
    assert not shares(rows[..., :50], rows[..., 50:])
    assert shares(rows[..., :51], rows[..., 50:])
    assert not shares(rows[:, ::2], rows[:, 1::2])
    assert not shares(rows[1::2], rows[::2, 2:, 7:])
    assert not shares(rows[:3], rows[3:])
    assert shares(rows[:3], rows[2:])
    assert not shares(rows[:0], rows) and not shares(rows, rows[2, :, :0])
    assert not shares(rows, rows.clone())


def test_tensors_without_memory_are_refused():
    tensor = torch.zeros(3, 4)
    assert checks.strided("x", tensor) is tensor and checks.strided("x", tensor[:0]) is not None
    with pytest.raises(ValueError, match=r"w_kv_b of type WithoutMemory has no memory of its own.*to_local\(\)"):
        checks.strided("w_kv_b", WithoutMemory(tensor))
    with FakeTensorMode() as mode, pytest.raises(ValueError, match="q of type FakeTensor has no memory"):
        checks.strided("q", mode.from_tensor(tensor))
    with pytest.raises(ValueError, match="no memory"):
        torch.func.vmap(lambda x: checks.strided("q", x))(tensor)


def test_nothing_written():
    checks.apart({"out": None, "lse": None}, {"q": torch.zeros(3)})
    with pytest.raises(ValueError, match="lse has shape .* with out"):
        out = torch.zeros(3)
        checks.apart({"out": out, "lse": out[2:]}, {"q": None})


def test_dynamo_does_not_meet_the_question_whether_a_call_is_below_autograd(monkeypatch):
    """Dynamo of torch 2.11 cannot trace it, and enters frames after a refusal within a compiled function."""
    monkeypatch.setattr(torch._C, "_dispatch_tls_is_dispatch_key_excluded", torch.compiler.disable(lambda key: False))
    torch._dynamo.reset()
    traced = torch.compile(lambda x: x + int(checks.recording()), backend="eager", fullgraph=True)
    assert traced(torch.zeros(1)) == 1
    with torch.no_grad():
        assert traced(torch.zeros(1)) == 0
