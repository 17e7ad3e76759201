"""Ragged batches for tests of the prefill, whose contents depend on a request's key and on positions alone, and calls of it with dirty outputs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from triton_mla.reference import gather_kv
from triton_mla.testing import Request, make_paged_batch

LONGEST = 2048
NAN = float("nan")


@lru_cache(maxsize=256)
def _sequence(what: str, key: int, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(int.from_bytes(hashlib.blake2b(f"{what}/{key}".encode(), digest_size=4).digest(), "little"))
    return torch.randn(LONGEST, *shape, generator=generator, device=device)


def starts(lens: Sequence[int], device: torch.device) -> torch.Tensor:
    """[B + 1] int32 begins."""
    return torch.tensor([0, *lens]).cumsum(0).to(device=device, dtype=torch.int32)


@dataclass(frozen=True)
class Ragged:
    """The arguments of `mla_prefill`, and the requests (query tokens, key tokens) that they are of."""

    q: torch.Tensor
    k_nope: torch.Tensor
    k_pe: torch.Tensor
    v: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    requests: Sequence[tuple[int, int]]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.q, self.k_nope, self.k_pe, self.v, self.cu_seqlens_q, self.cu_seqlens_k

    def rows(self, i: int) -> slice:
        return slice(*self.cu_seqlens_q[i : i + 2].tolist())

    def keys(self, first: int, end: int) -> Ragged:
        """Of each request the keys from `first` to `end` of it."""
        begins = self.cu_seqlens_k.tolist()
        parts = [slice(b + min(first, n), b + min(end, n)) for b, (_, n) in zip(begins, self.requests, strict=False)]
        cut = [torch.cat([t[part] for part in parts]) for t in (self.k_nope, self.k_pe, self.v)]
        lens = [part.stop - part.start for part in parts]
        return replace(self, k_nope=cut[0], k_pe=cut[1], v=cut[2], cu_seqlens_k=starts(lens, self.q.device),
                       requests=[(q, n) for (q, _), n in zip(self.requests, lens, strict=True)])


@dataclass(frozen=True)
class Mha:
    """The prefill with sizes that the device can afford. Lengths of tests are told in units of `order.block_n`."""

    rows: Any
    device: torch.device
    dtype: torch.dtype
    num_heads: int
    nope: int
    rope: int
    value: int
    order: Any
    rank: int = 64
    page_size: int = 16
    scale: float = 0.15

    def with_(self, **changes: Any) -> Mha:
        return replace(self, **changes)

    @property
    def tile(self) -> int:
        return self.order.block_n

    def make(self, requests: Sequence[tuple[int, int]], keys: Sequence[int] | None = None) -> Ragged:
        """Requests of (query tokens, key tokens); keys and values are views of one tensor, as an up-projection leaves them."""
        keys = range(1, len(requests) + 1) if keys is None else keys
        q = [self.queries(key, max(n - m, 0), max(n - m, 0) + m) for (m, n), key in zip(requests, keys, strict=True)]
        kv = [_sequence("kv", key, (self.num_heads, self.nope + self.value), self.device)[:n] for (_, n), key in zip(requests, keys, strict=True)]
        pe = [_sequence("pe", key, (self.rope,), self.device)[:n] for (_, n), key in zip(requests, keys, strict=True)]
        kv, k_pe = torch.cat(kv).to(self.dtype), torch.cat(pe).to(self.dtype)
        lens = [starts(part, self.device) for part in zip(*requests, strict=True)]
        return Ragged(torch.cat(q), kv[..., : self.nope], k_pe, kv[..., self.nope :], *lens, requests)

    def queries(self, key: int, first: int, end: int) -> torch.Tensor:
        return _sequence("q", key, (self.num_heads, self.nope + self.rope), self.device)[first:end].to(self.dtype)

    def prefill(self, batch: Ragged, **options: Any) -> Any:
        """Rows of `mla_prefill` into an output that is full of NaN; or a state."""
        from triton_mla import mla_prefill

        arguments = {"softmax_scale": self.scale, "order": self.order, **options}
        if arguments.get("return_state"):
            return mla_prefill(*batch.tensors, **arguments)
        out = torch.full((*batch.q.shape[:2], self.value), NAN, dtype=self.dtype, device=self.device)
        return self.rows(*mla_prefill(*batch.tensors, **{"out": out, "return_lse": True, **arguments}))

    def reference(self, batch: Ragged, **options: Any) -> Any:
        from triton_mla.reference import mha_prefill

        return self.rows(*mha_prefill(*batch.tensors, softmax_scale=self.scale, **options))

    def streamed(self, batch: Ragged, cuts: Sequence[int], positions: Sequence[int] | None = None) -> Any:
        """The prefill with every request's keys cut at these tokens."""
        ends = [max(n for _, n in batch.requests)] if not cuts else [*cuts, max(max(n for _, n in batch.requests), cuts[-1])]
        state = None
        for first, end in zip([0, *ends[:-1]], ends, strict=True):
            at = torch.tensor([n - m - first for m, n in batch.requests], dtype=torch.int32, device=self.device)
            options = {"positions": at, "state": state}
            if end == ends[-1]:
                return self.prefill(batch.keys(first, end), **options)
            state = self.prefill(batch.keys(first, end), return_state=True, **options)

    def paged(self, requests: Sequence[Request], **options: Any) -> Paged:
        """Latent pages as `make_paged_batch` makes them, and a weight."""
        sizes = {"num_heads": 1, "kv_lora_rank": self.rank, "qk_rope_head_dim": self.rope, "page_size": self.page_size, "dtype": self.dtype,
                 "device": self.device}
        batch = make_paged_batch(requests, **{**sizes, **options})
        q = [self.queries(r.key, max(r.seq_len - r.q_len, 0), max(r.seq_len - r.q_len, 0) + r.q_len) for r in requests]
        weight = _sequence("w", 0, (self.rank,), self.device)[: self.num_heads * (self.nope + self.value)].to(self.dtype) / self.rank**0.5
        return Paged(torch.cat(q), batch.kv_cache, weight.to(self.dtype), batch.block_table, batch.cu_seqlens_q, batch.seq_lens, batch.requests)

    def prefill_paged(self, batch: Paged, **options: Any) -> Any:
        """Rows of `mla_prefill_paged`, whose output and workspace are full of NaN."""
        from triton_mla import mla_prefill_paged

        out = torch.full((*batch.q.shape[:2], self.value), NAN, dtype=self.dtype, device=self.device)
        options = {"order": self.order, "chunk_tokens": 4 * self.tile, "out": out, **options}
        options.setdefault("workspace", torch.full((self.workspace_bytes(batch, **options),), 255, dtype=torch.uint8, device=self.device))
        return self.rows(*mla_prefill_paged(
            *batch.tensors, softmax_scale=self.scale, qk_nope_head_dim=self.nope, v_head_dim=self.value, kv_lora_rank=self.rank, return_lse=True, **options))

    def workspace_bytes(self, batch: Paged, *, chunk_tokens: int, order: Any, max_seq_len: int | None = None, **_: Any) -> int:
        from triton_mla import prefill_workspace_bytes

        return prefill_workspace_bytes(
            num_tokens=len(batch.q), batch_size=len(batch.requests), num_heads=self.num_heads,
            max_seq_len=batch.block_table.shape[1] * batch.kv_cache.shape[1] if max_seq_len is None else max_seq_len, qk_nope_head_dim=self.nope,
            qk_rope_head_dim=self.rope, v_head_dim=self.value, kv_lora_rank=self.rank, dtype=self.dtype, chunk_tokens=chunk_tokens, order=order)

    def projected(self, batch: Paged) -> Ragged:
        """The same requests with their keys and values up-projected whole."""
        from triton_mla import project_kv

        lens = [r.seq_len for r in batch.requests]
        latent = torch.cat([gather_kv(batch.kv_cache, batch.block_table[i], n) for i, n in enumerate(lens)])
        kv = project_kv(latent[:, : self.rank], batch.weight).view(len(latent), self.num_heads, self.nope + self.value)
        return Ragged(batch.q, kv[..., : self.nope], latent[:, self.rank :], kv[..., self.nope :], batch.cu_seqlens_q, starts(lens, self.device),
                      [(r.q_len, r.seq_len) for r in batch.requests])


@dataclass(frozen=True)
class Paged:
    """The arguments of `mla_prefill_paged`."""

    q: torch.Tensor
    kv_cache: torch.Tensor
    weight: torch.Tensor
    block_table: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    requests: Sequence[Request]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.q, self.kv_cache, self.weight, self.block_table, self.cu_seqlens_q, self.seq_lens

    def rows(self, i: int) -> slice:
        return slice(*self.cu_seqlens_q[i : i + 2].tolist())
