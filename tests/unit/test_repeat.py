"""`repeat.Repeat` on launches of which nothing is launched."""

from types import SimpleNamespace

import pytest
import torch

from triton_mla import repeat
from triton_mla.launch import Launch
from triton_mla.repeat import Repeat


@pytest.fixture
def run(monkeypatch):
    """What the launchers were called with."""
    made = []
    stream = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: 77))
    monkeypatch.setattr(repeat, "driver", stream)
    monkeypatch.setattr(repeat, "hooked", lambda: False)
    compiled = SimpleNamespace(run=lambda *arguments: made.append(arguments), function=5, packed_metadata="packed")
    return made, compiled


def tensors(*sizes):
    return [torch.zeros(size) for size in sizes]


def test_views_are_found_again_at_other_addresses(run):
    made, compiled = run
    a, b = tensors(64, 32)
    launches = [Launch(compiled, (3, 2), (a[16:], b, a[4:8], 0.5, 7), {"SIZE": 64}), Launch(compiled, (1, 1), (b[8:],), {})]
    repeated = Repeat.of(launches, [a, b], 2, [])
    assert repeated.run([4096, 8192], 0) is True
    common = (77, 5, "packed", None, None, None)
    assert made == [(3, 2, 1, *common, 4096 + 64, 8192, 4096 + 16, 0.5, 7, 64), (1, 1, 1, *common, 8192 + 32)]


def test_what_cannot_be_repeated(run):
    _, compiled = run
    a, b, other = tensors(64, 32, 16)
    assert Repeat.of([], [a, b], 2, []) is None
    assert Repeat.of([Launch(compiled, (1, 1), (a, other), {})], [a, b], 2, []) is None  # a tensor of its own
    assert Repeat.of([Launch(compiled, (1, 1), (a,), {})], [a, a[8:]], 1, []) is None  # of which is a view?
    assert Repeat.of([Launch(compiled, (1, 1), (a,), {})], [a[1:], b], 2, []) is None  # not aligned
    assert Repeat.of([Launch(compiled, (1, 1), (a[1:],), {})], [b, a[1:]], 1, []) is not None
    assert Repeat.of([Launch(compiled, (1, 1), (3, a), {})], [a, b], 2, []) is None  # numbers come last
    assert Repeat.of([Launch(compiled, (1, 1), (a,), {})] * (repeat.MAX_LAUNCHES + 1), [a, b], 2, []) is None


def test_what_must_be_made_in_the_ordinary_way(run, monkeypatch):
    made, compiled = run
    a, b = tensors(64, 32)
    repeated = Repeat.of([Launch(compiled, (1, 1), (a, b), {})], [a, b], 1, [1])
    assert repeated.run([4096 + 8, 8192], 0) is False  # not aligned
    for begin, shared in ((4096 - 128, False), (4096 - 124, True), (4096, True), (4096 + 252, True), (4096 + 256, False)):
        assert repeated.run([4096, begin], 0) is not shared, begin
    assert len(made) == 2
    assert repeated.run([4096, 0], 0) is False  # of a tensor without memory
    monkeypatch.setattr(repeat, "hooked", lambda: True)
    assert repeated.run([4096, 8192], 0) is False and len(made) == 2
    assert Repeat.of([Launch(compiled, (1, 1), (a, b), {})], [a, b], 1, [1]) is None
