"""A stand-in for the kernels: torch attention that keeps the contract, fast enough to run whole verifications."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton import knobs

from triton_mla import attention
from triton_mla.reference import gather_kv


def attend(q: Any, kv_cache: Any, table: Any, starts: Any, lens: Any, *, order: Any, **options: Any) -> Any:
    """`mla_extend`, one row and one split at a time; a row's result depends on nothing else."""
    q = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
    out, lse, rank = options["out"], options["lse"], options["kv_lora_rank"]
    out.zero_()
    lse.fill_(-torch.inf)
    for request in range(len(lens)):
        first, last, length = int(starts[request]), int(starts[request + 1]), int(lens[request])
        kv = gather_kv(kv_cache, table[request], length).float()
        for row in range(first, last):
            seen = kv[: length - (last - row) + 1]
            for head in range(q.shape[1]) if len(seen) else ():
                total, acc = torch.zeros(()), torch.zeros(rank)
                for start in range(0, len(seen), order.kv_split):
                    part = seen[start : start + order.kv_split]
                    p = ((part * q[row, head].float()).sum(dim=1) * options["softmax_scale"]).exp()
                    total, acc = total + p.sum(), acc + (p[:, None] * part[:, :rank]).sum(dim=0)
                out[row, head], lse[row, head] = (acc / total).to(out.dtype), total.log()
    return out, lse


def stand_in_extend(q: Any, kv_cache: Any, table: Any, starts: Any, lens: Any, **options: Any) -> Any:
    """`mla_extend` of the stand-in."""
    return attend(q, kv_cache, table, starts, lens, **options)


def stand_in_decode(q: Any, kv_cache: Any, table: Any, lens: Any, **options: Any) -> Any:
    """`mla_decode` of the stand-in."""
    return attend(q, kv_cache, table, torch.arange(len(lens) + 1), lens, **options)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the stand-in in place of the kernels, on the CPU."""
    if not knobs.runtime.interpret:
        pytest.skip("runs under Triton's interpreter")
    monkeypatch.setattr(attention, "mla_decode", stand_in_decode)
    monkeypatch.setattr(attention, "mla_extend", stand_in_extend)
