"""What the registry holds of an implementation, and the shape that workloads and their inputs have for all ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from benchmarks.peers import Peers, Unavailable

Call = Callable[[], torch.Tensor]
"""Takes nothing, launches the op without waiting for the device, and returns its output, one row a query token."""


class Inputs(Protocol):
    """The tensors of a workload."""

    def expected(self) -> tuple[list[int], torch.Tensor]:
        """Some rows of the output, and what they must hold, in float64."""


class Workload(Protocol):
    """One call of an op. flops and bytes are the least that it takes; `row` are the fields that result rows repeat."""

    @property
    def op(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def flops(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def row(self) -> dict[str, Any]: ...

    def make_inputs(self, device: torch.device | str, *, small: bool = False) -> Any:
        """Random `Inputs` on `device`; `small` ones need the same kernels, but little memory and time."""


@dataclass(frozen=True)
class Implementation:
    """One way to compute an op.

    Attributes:
        name: what result rows carry.
        prepare: from the inputs of a workload to the call that is timed. What is computed once for a step and reused in every layer (plans, split
            metadata) is prepared outside of the call. Raises `Unavailable` for a workload that it does not serve.
        needs: the property of `Peers` that it cannot do without; empty: nothing.
        compiles: whether it compiles Triton kernels at first use.
    """

    name: str
    prepare: Callable[[Any, Peers], Call]
    needs: str = ""
    compiles: bool = False

    def available(self, peers: Peers) -> str | None:
        """Why it cannot run on this machine, or None."""
        try:
            if self.needs:
                getattr(peers, self.needs)
        except Unavailable as error:
            return str(error)
        return None
