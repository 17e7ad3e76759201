"""Runs each row on all ranks of a model that is split: a process a rank, with an engine of its own that takes the same steps."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from determinism.report import Row
from determinism.rows import Plan, lost_row, run_row

PATIENCE = datetime.timedelta(minutes=2)
"""How long a rank waits for the others: as long as one of them may compile alone."""


def ranked_rows(plan: Plan, items: Sequence[tuple[str, str]]) -> Iterator[tuple[int, Row]]:
    """(index, row) of every item, in order."""
    with joined(plan.ranks, plan.backend) as pools:
        yield from rows_on(pools, plan, items)


def rows_on(pools: Sequence[ProcessPoolExecutor], plan: Plan, items: Sequence[tuple[str, str]]) -> Iterator[tuple[int, Row]]:
    """The same in processes that have joined."""
    futures = [[pool.submit(run_row, plan.on_rank(rank), *item) for rank, pool in enumerate(pools)] for item in items]
    for index, (item, tries) in enumerate(zip(items, futures, strict=True)):
        errors = [error for future in tries if (error := future.exception()) is not None]
        yield index, lost_row(plan, *item, errors[0]) if errors else common_row([future.result() for future in tries])


@contextlib.contextmanager
def joined(ranks: int, backend: str) -> Iterator[list[ProcessPoolExecutor]]:
    """A process for each rank of a default group; with NCCL each has the GPU of its number. What runs there runs on all of them, in one order."""
    context = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stack:
        store = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "store"
        pools = [
            stack.enter_context(ProcessPoolExecutor(1, mp_context=context, initializer=_join, initargs=(rank, ranks, backend, store)))
            for rank in range(ranks)
        ]
        yield pools
        for pool in pools:
            with contextlib.suppress(BrokenExecutor):
                pool.submit(dist.destroy_process_group)


def _join(rank: int, ranks: int, backend: str, store: Path) -> None:
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=store.as_uri(), rank=rank, world_size=ranks, timeout=PATIENCE)


def common_row(rows: Sequence[Row]) -> Row:
    """The row of rank 0; it has failed where another rank did not find the same."""
    first = rows[0]
    for rank, row in enumerate(rows):
        if replace(row, seconds=first.seconds) != first:
            return replace(first, status="failed", detail=f"rank {rank} has {row.differing}/{row.compared}, {row.status} {row.detail}".strip())
    return first
