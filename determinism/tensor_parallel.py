"""The small model split over the ranks of a process group, and all-reduces that follow the batch as its controls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from determinism import models
from determinism.controls import Control, alone_and_beside
from determinism.models import Build, SmallConfig, SmallModel
from triton_mla.companion import ordered_all_reduce
from triton_mla.companion.collectives import gathered
from triton_mla.module import MLAAttention
from triton_mla.paths import ABSORBED, MHA, PathRule

DEGREES = (1, 2, 4, 8)
SPLIT = models.replaced(all_reduce=ordered_all_reduce)
"""The operations of a `SplitModel`."""


class SplitModel(SmallModel):
    """This rank's share of a `SmallModel` with the same weights: some of the heads, and some columns of the MLP and of each expert.

    What makes heads and columns is cut by outputs, what takes them by inputs, and `ops.all_reduce` adds the ranks' parts behind it. All
    else is whole on every rank. Where ranks do not agree on a log-probability it is NaN, on all of them: so they take the same steps.
    """

    def __init__(self, config: SmallConfig, paths: PathRule, device: torch.device, *, ops: Any = SPLIT) -> None:
        """As `SmallModel`, in a process that has joined a group. Its ranks must divide heads and intermediate columns."""
        super().__init__(config, paths, device, ops=ops)
        self.dims = replace(config.dims, num_heads=config.dims.num_heads // dist.get_world_size())
        self.attention = [
            MLAAttention(self.dims, _share(a.w_kv_b, 0), paths=a.paths, order=a.order, prefill_order=a.prefill_order) for a in self.attention
        ]
        for layer in self.layers:
            layer.query, layer.out = _share(layer.query, 0), _share(layer.out, 1)
            layer.gate_up, layer.down = _share(layer.gate_up, 0, blocks=2), _share(layer.down, 1)
            if layer.router is not None:
                layer.experts_gate_up, layer.experts_down = _share(layer.experts_gate_up, 1, blocks=2), _share(layer.experts_down, 2)

    def __call__(self, *args: Any) -> torch.Tensor:
        """As in `Model`."""
        return agreed(super().__call__(*args))

    def _attend(self, *args: Any) -> torch.Tensor:
        return self.ops.all_reduce(super()._attend(*args))

    def _feed_forward(self, layer: SimpleNamespace, x: torch.Tensor) -> torch.Tensor:
        return self.ops.all_reduce(super()._feed_forward(layer, x))


class ReducedApart(SplitModel):
    """Experts that a step of one row reduces apart from the shared one, and a larger step together with it."""

    def _feed_forward(self, layer: SimpleNamespace, x: torch.Tensor) -> torch.Tensor:
        if layer.router is None or len(x) > 1:
            return super()._feed_forward(layer, x)
        return self.ops.all_reduce(self._mlp(layer, x)) + self.ops.all_reduce(self._experts(layer, x))


def _share(weight: torch.Tensor, dim: int, *, blocks: int = 1) -> torch.Tensor:
    """This rank's part of each of a dimension's blocks."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    return torch.cat([block.chunk(ranks, dim)[rank] for block in weight.chunk(blocks, dim)], dim)


def agreed(logprobs: torch.Tensor) -> torch.Tensor:
    """[n, vocab] fp32 that all ranks have, and NaN where some rank has other bits."""
    bits = gathered(logprobs.view(torch.int32))
    return logprobs.where((bits == bits[0]).all(0), float("nan"))


def ring_sum(x: torch.Tensor) -> torch.Tensor:
    """[n, N] summed as around a ring: of the chunks of rows, one for each rank, each begins at another rank, and every sum is rounded."""
    parts = gathered(x)
    ranks, rows = len(parts), torch.arange(len(x), device=x.device)
    first = rows * len(parts) // max(len(x), 1)
    total = parts[first, rows]
    for step in range(1, ranks):
        total = total + parts[(first + step) % ranks, rows]
    return total


def config_for(device: torch.device, ranks: int) -> SmallConfig:
    """As of a model that is not split, with a head for each rank at least."""
    config = models.config_for(device)
    return replace(config, dims=replace(config.dims, num_heads=max(config.dims.num_heads, ranks)))


def split(device: torch.device, ranks: int, *, kind: type[SplitModel] = SplitModel, all_reduce: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Build:
    """Makes `SplitModel`s; all_reduce: another one than theirs."""
    ops = SPLIT if all_reduce is None else models.replaced(all_reduce=all_reduce)
    return lambda paths: kind(config_for(device, ranks), paths, device, ops=ops)


def controls(device: torch.device, ranks: int) -> tuple[Control, ...]:
    """What must change bits on so many ranks. A sum of two has one order, so that a ring shows something from three ranks on."""
    apart = Control("experts reduced apart where there is one row", ABSORBED, alone_and_beside(split(device, ranks, kind=ReducedApart)))
    ring = Control("sums around a ring, by the place of the row", MHA, alone_and_beside(split(device, ranks, all_reduce=ring_sum)))
    return (apart, ring) if ranks > 2 else (apart,)
