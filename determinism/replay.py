"""Decode steps in batches padded to a few sizes: replays of CUDA graphs on a GPU, the same calls without a graph elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from determinism.models import Model
from triton_mla.step import StepPlan

NO_PAGE = 2**31 - 1


class _Batch:
    """A decode step of one size over tensors that stay where they are."""

    def __init__(self, model: Model, caches: list[torch.Tensor], page_size: int, width: int, size: int) -> None:
        device = model.device
        self.tokens, self.positions = (torch.zeros(size, dtype=torch.int64, device=device) for _ in range(2))
        self.slots = torch.full((size,), -1, dtype=torch.int64, device=device)
        self.seq_lens = torch.zeros(size, dtype=torch.int32, device=device)
        self.table = torch.full((size, width), NO_PAGE, dtype=torch.int32, device=device)
        rows = torch.arange(size, device=device)
        plan = StepPlan.decode(self.table, self.seq_lens, self.slots, page_size=page_size)

        def step() -> torch.Tensor:
            return model(self.tokens, self.positions, plan, caches, rows)

        self._step = step  # holds tensors that the graph reads
        self.run = _captured(step) if device.type == "cuda" else step


def _captured(step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """The step as a graph: captured while all of its rows are padding, so that nothing is written to a cache."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()

    def replay() -> torch.Tensor:
        graph.replay()
        return out

    return replay


class Replays:
    """Decode steps of any size. A batch has the next larger power of two rows, so that one at least is padding."""

    def __init__(self, model: Model, caches: list[torch.Tensor], page_size: int, width: int) -> None:
        """width: pages of the longest request."""
        self._made_of = (model, caches, page_size, width)
        self._batches: dict[int, _Batch] = {}

    def __call__(self, tokens: Sequence[int], positions: Sequence[int], pages: Sequence[Sequence[int]]) -> torch.Tensor:
        """[n, vocab] log-probabilities after n generated tokens, each of another request."""
        model, _, page_size, width = self._made_of
        count = len(tokens)
        size = 1 << count.bit_length()
        if size not in self._batches:
            self._batches[size] = _Batch(*self._made_of, size)
        batch = self._batches[size]
        padding = size - count
        slots = [own[p // page_size] * page_size + p % page_size for own, p in zip(pages, positions, strict=True)]
        table = [[*own[:width], *[NO_PAGE] * (width - len(own))] for own in pages] + [[NO_PAGE] * width] * padding
        for tensor, values in (
            (batch.tokens, [*tokens, *range(padding)]), (batch.positions, [*positions, *[0] * padding]), (batch.slots, [*slots, *[-1] * padding]),
            (batch.seq_lens, [*(p + 1 for p in positions), *[0] * padding]), (batch.table, table),
        ):
            tensor.copy_(torch.tensor(values, dtype=tensor.dtype))
        return batch.run()[:count].clone()
