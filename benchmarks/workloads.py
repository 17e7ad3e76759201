"""Workloads of the absorbed form, which decode, verify and extend take: their arithmetic, traffic, tensors and float64 results."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

from triton_mla.reference import mla_absorbed

RANK = 512
"""kv_lora_rank: latent dims of a cached token, and of a row of the output."""
ROPE = 64
"""qk_rope_head_dim: rope dims of a cached token."""
SOFTMAX_SCALE = 192**-0.5
"""DeepSeek-V2/V3 without YaRN: (128 nope + 64 rope dims) ** -0.5."""


@dataclass(frozen=True)
class Workload:
    """One call: every request has `q_len` query tokens, the last of its `seq_lens[r]` tokens.

    op is "decode" (q_len 1), "verify" (a few drafted tokens) or "extend". `label` names a ragged mix; it is empty where all lengths are equal.
    """

    op: str
    heads: int
    seq_lens: tuple[int, ...]
    q_len: int = 1
    page_size: int = 64
    dtype: str = "bfloat16"
    label: str = ""

    @property
    def batch(self) -> int:
        return len(self.seq_lens)

    @property
    def seq_len(self) -> int:
        """The longest request, in tokens."""
        return max(self.seq_lens)

    @property
    def pages(self) -> int:
        """Pages of the longest request: the width of the block table."""
        return -(-self.seq_len // self.page_size)

    @property
    def num_tokens(self) -> int:
        return self.batch * self.q_len

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def name(self) -> str:
        lengths = self.label or f"L={self.seq_len}"
        return f"{self.op} H={self.heads} B={self.batch} {lengths}" + (f" q={self.q_len}" if self.q_len > 1 else "")

    @property
    def flops(self) -> int:
        """Multiplies and adds of the two products over the visible (query row, token) pairs."""
        pairs = sum(self.q_len * n - self.q_len * (self.q_len - 1) // 2 for n in self.seq_lens)
        return 2 * self.heads * (RANK + ROPE + RANK) * pairs

    @property
    def bytes(self) -> int:
        """The least traffic: KV of every request read once, q read once, out written once."""
        rows = self.num_tokens * self.heads * (RANK + ROPE + RANK)
        return (sum(self.seq_lens) * (RANK + ROPE) + rows) * self.torch_dtype.itemsize

    @property
    def row(self) -> dict[str, Any]:
        """The fields that a result row repeats."""
        return {
            "op": self.op,
            "heads": self.heads,
            "batch": self.batch,
            "seq_len": self.seq_len,
            "q_len": self.q_len,
            "dtype": self.dtype,
            "page_size": self.page_size,
        }

    def make_inputs(self, device: torch.device | str, *, small: bool = False) -> Inputs:
        """Random q and KV, pages in random order.

        `small` gives the same shapes, but for a cache of a single page that every table entry names, and requests no longer than their query.
        """
        generator = torch.Generator(device=device).manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=device, dtype=self.torch_dtype)

        pages = 1 if small else self.batch * self.pages
        order = torch.randperm(self.batch * self.pages, generator=generator, device=device, dtype=torch.int32)
        return Inputs(
            workload=self,
            q=2 * normal(self.num_tokens, self.heads, RANK + ROPE),
            kv_cache=normal(pages, self.page_size, RANK + ROPE),
            block_table=(order % pages).view(self.batch, self.pages),
            seq_lens=torch.tensor([self.q_len] * self.batch if small else self.seq_lens, device=device, dtype=torch.int32),
            cu_seqlens_q=torch.arange(self.batch + 1, device=device, dtype=torch.int32) * self.q_len,
        )


@dataclass(frozen=True)
class Inputs:
    """Tensors of one workload: q [T, H, R+P], kv_cache [pages, page, R+P], and int32 block_table [B, W], seq_lens [B], cu_seqlens_q [B+1]."""

    workload: Workload
    q: torch.Tensor
    kv_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor

    def expected(self, limit: int = 12) -> tuple[list[int], torch.Tensor]:
        """At most `limit` query rows, evenly spread, and their output [rows, H, R] in float64.

        A row that sees n tokens is the decode of a request of n tokens, so one reference serves every op.
        """
        w = self.workload
        count = min(limit, w.num_tokens)
        rows = sorted({round(i * (w.num_tokens - 1) / max(1, count - 1)) for i in range(count)})
        outs = []
        for t in rows:
            request = t // w.q_len
            seen = self.seq_lens[request : request + 1] - w.q_len + t % w.q_len + 1
            outs.append(
                mla_absorbed(
                    self.q[t : t + 1], self.kv_cache, self.block_table[request : request + 1], None, seen, softmax_scale=SOFTMAX_SCALE, kv_lora_rank=RANK
                )[0]
            )
        return rows, torch.cat(outs)


def decode(heads: int, batch: int, seq_len: int) -> Workload:
    """A decode step of equal requests."""
    return Workload("decode", heads, (seq_len,) * batch)


def verify(heads: int, batch: int, seq_len: int, q_len: int) -> Workload:
    """The verification of q_len - 1 drafted tokens and their successor, in equal requests."""
    return Workload("verify", heads, (seq_len,) * batch, q_len)


def extend(heads: int, new_tokens: int, prefix: int) -> Workload:
    """One request of `new_tokens` query tokens over `prefix` cached ones."""
    return Workload("extend", heads, (prefix + new_tokens,), new_tokens)


def ragged(heads: int) -> list[Workload]:
    """Two mixes: 128 lengths evenly from 1 to 8192, and 64 requests of which four are long."""
    rng = random.Random(3)
    even = tuple(rng.randint(1, 8192) for _ in range(128))
    skewed = (32768, 32768, 16384, 16384) + tuple(int(2 ** rng.uniform(5, 12)) for _ in range(60))
    return [
        Workload("decode", heads, even, label="ragged 1..8192"),
        Workload("decode", heads, skewed, label="ragged skewed"),
    ]


def grid(heads: tuple[int, ...] = (16, 64, 128)) -> list[Workload]:
    """The cells on which the split size is chosen, ordered so that every beginning is spread over the whole grid."""
    cells: list[Workload] = []
    for h in heads:
        cells += [decode(h, b, n) for b in (1, 4, 16, 64, 128) for n in (1024, 2048, 4096, 8192, 16384, 32768)]
        cells += ragged(h)
    golden = (5**0.5 - 1) / 2
    return [cells[i] for i in sorted(range(len(cells)), key=lambda i: i * golden % 1)]


def parse(text: str) -> Workload:
    """A workload written `H,B,L` (decode) or `H,B,L,Q` (Q new tokens, L the whole length: verify up to 4, else extend).

    Raises:
        ValueError: the text is not three or four positive integers, or Q is larger than L.
    """
    parts = text.split(",")
    numbers = [int(part) for part in parts if part.strip().isdecimal()]
    query = numbers[3] if len(numbers) == 4 else 1
    if len(parts) not in (3, 4) or len(numbers) != len(parts) or min(numbers) < 1 or query > numbers[2]:
        raise ValueError(f"workload={text!r}: allowed is H,B,L or H,B,L,Q with positive integers and Q <= L")
    heads, batch, seq_len = numbers[:3]
    if query == 1:
        return decode(heads, batch, seq_len)
    return Workload("verify" if query <= 4 else "extend", heads, (seq_len,) * batch, query)
