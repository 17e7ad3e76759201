"""The launches of a call, made again for one that differs from it in addresses only: nothing is checked, planned or described twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from triton.runtime import driver

from . import checks
from .hopper_decode import Address, Encoded
from .kernels.hopper import available
from .launch import Launch, hooked

MAX_LAUNCHES = 64
"""Of a call that is kept: some 7 KB each, and half a KB for each address of a TMA descriptor. With more of them the device is slower than the host."""
MAX_MAPS = 128
"""Addresses of a descriptor whose encoded form is kept: of 61 layers' weights, and of what torch's allocator gives in turn."""


class Repeat:
    """``launches`` of a call with ``tensors``, for the addresses of others of the same sizes, strides and dtypes.

    ``aligned``: how many of the tensors, the first ones, begin at multiples of 16 bytes, as Triton compiled for. ``written``: indices of those
    that must share no memory with another.
    """

    def __init__(self, launches: Sequence[Launch], tensors: Sequence[torch.Tensor], aligned: int, written: Sequence[int]) -> None:
        spans = [checks.span(t) for t in tensors]
        self._aligned = aligned
        self._apart = [(i, j, -spans[i], spans[j]) for i in written for j in range(len(tensors)) if j != i and spans[i] and spans[j]]
        begins = [t.data_ptr() for t in tensors]
        self._launches = [_prepared(launch, begins, spans) for launch in launches]

    @classmethod
    def of(cls, launches: Sequence[Launch], tensors: Sequence[torch.Tensor], aligned: int, written: Sequence[int]) -> Repeat | None:
        """None where they cannot be repeated: a launch reads memory of another tensor, or of which one cannot be told; or are too many; or a
        profiler saw them."""
        order = sorted((t.data_ptr(), checks.span(t)) for t in tensors)
        shared = any(begin + size > later for (begin, size), (later, _) in zip(order, order[1:], strict=False))
        if not 0 < len(launches) <= MAX_LAUNCHES or hooked() or shared or any(t.data_ptr() % 16 for t in tensors[:aligned]):
            return None
        if not available() and any(_described(launch) for launch in launches):
            return None
        try:
            return cls(launches, tensors, aligned, written)
        except LookupError:
            return None

    def run(self, addresses: Sequence[int], device: int | None) -> bool:
        """Launch on the current device and stream; False if the call must be made in the ordinary way."""
        if hooked() or 0 in addresses:  # of no memory, which the checks refuse
            return False
        low = 0
        for address in addresses[: self._aligned]:
            low |= address
        if low & 15:
            return False
        for i, j, least, most in self._apart:
            if least < addresses[i] - addresses[j] < most:
                return False
        stream = driver.active.get_current_stream(device)
        for run, x, y, function, metadata, places, rest in self._launches:
            run(x, y, 1, stream, function, metadata, None, None, None, *[addresses[i] + offset for i, offset in places], *rest)
        return True


def _described(launch: Launch) -> list[Any]:
    """The arguments that are TMA descriptors."""
    return [argument for argument in launch.args if hasattr(argument, "block_shape")]


def _prepared(launch: Launch, begins: Sequence[int], spans: Sequence[int]) -> tuple[Any, ...]:
    compiled, described = launch.compiled, _described(launch)
    tensors = [argument for argument in launch.args if isinstance(argument, torch.Tensor)]
    count = len(described) + len(tensors)
    rest = launch.args[count:]
    if any(a is not b for a, b in zip(launch.args, (*described, *tensors), strict=False)):
        raise LookupError("descriptors must come first, then tensors, then numbers")
    run = compiled.run
    places = tuple(_place(t.data_ptr(), begins, spans) for t in (*(d.base for d in described), *tensors))
    if described:  # no tensor is kept: a workspace would stay in memory with what is known of its call
        forms = [replace(d, base=Address(d.base.data_ptr(), d.base.dtype)) for d in described]
        run = Encoded(compiled, tuple(partial(_described_at, form) for form in forms), forms[0].base.dtype, MAX_MAPS)
    return run, *launch.grid, compiled.function, compiled.packed_metadata, places, (*rest, *launch.constants.values())


def _described_at(descriptor: Any, base: Any) -> Any:
    return replace(descriptor, base=base)


def _place(address: int, begins: Sequence[int], spans: Sequence[int]) -> tuple[int, int]:
    """(tensor, bytes from its begin)"""
    for i, (begin, size) in enumerate(zip(begins, spans, strict=True)):
        if begin <= address < begin + size:
            return i, address - begin
    raise LookupError(f"{address:#x} lies in none of the call's tensors")
