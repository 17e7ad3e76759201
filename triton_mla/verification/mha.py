"""The MHA form over the batches of a trial: queries of that form, keys and values up-projected from the same latent pages."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from triton_mla import prefill
from triton_mla.testing import PagedBatch, Request
from triton_mla.verification.trial import VICTIM, Rows, Trial

NAN = float("nan")


@dataclass(frozen=True)
class Prompts:
    """A batch with its keys and values: what `mla_prefill` takes.

    `batch.q` is [T, H, nope + P], `kv` [S, H, nope + V], `k_pe` [S, P]; `lengths` are the key tokens of each request.
    """

    batch: PagedBatch
    kv: torch.Tensor
    k_pe: torch.Tensor
    lengths: tuple[int, ...]

    @property
    def starts(self) -> torch.Tensor:
        """[B + 1] int32 first key of each request."""
        return torch.tensor([0, *self.lengths]).cumsum(0).to(device=self.kv.device, dtype=torch.int32)

    def keys(self, first: int, end: int) -> Prompts:
        """Of each request the keys `first` ... `end` of it."""
        starts = self.starts.tolist()
        parts = [slice(s + min(first, n), s + min(end, n)) for s, n in zip(starts, self.lengths, strict=False)]
        kv, k_pe = (torch.cat([tensor[part] for part in parts]) for tensor in (self.kv, self.k_pe))
        return dataclasses.replace(self, kv=kv, k_pe=k_pe, lengths=tuple(part.stop - part.start for part in parts))


@dataclass(frozen=True)
class Mha:
    """Calls of the MHA form in the dtype and order of a trial, of as many heads as the profile says."""

    trial: Trial

    @property
    def num_heads(self) -> int:
        """Heads of a call."""
        return self.trial.profile.prefill_heads or self.trial.num_heads

    @property
    def nope(self) -> int:
        """Columns of a head's query and key without position."""
        return self.trial.profile.qk_nope_head_dim

    @property
    def tile(self) -> int:
        """Tokens of a KV tile."""
        return self.trial.profile.prefill_order.block_n

    @property
    def tokens(self) -> int:
        """Tokens of the watched prompt."""
        return self.trial.profile.prompts[0][0]

    @cached_property
    def weight(self) -> torch.Tensor:
        """[H * (nope + V), R]; keys and values come out at twice the scale of the latents."""
        profile = self.trial.profile
        shape = (self.num_heads * (self.nope + profile.v_head_dim), profile.kv_lora_rank)
        values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        return (values * 2 * profile.kv_lora_rank**-0.5).to(self.trial.device, self.trial.dtype)

    def batch(self, requests: Sequence[Request], **options: Any) -> PagedBatch:
        """A paged batch whose q is that of the MHA form."""
        batch = self.trial.batch(requests, num_heads=self.num_heads, **options)
        q = torch.cat([batch.q[..., : self.nope], batch.q[..., batch.kv_lora_rank :]], dim=-1)
        return dataclasses.replace(batch, q=q)

    def prompt(self, tokens: int, start: int = 0, **options: Any) -> PagedBatch:
        """The watched sequence's tokens `start` ... `tokens`, behind those before them."""
        return self.batch([Request(tokens, q_len=tokens - start, key=VICTIM)], **options)

    def prompts(self, batch: PagedBatch) -> Prompts:
        """The batch with keys and values of all of its tokens."""
        latent = torch.cat([batch.kv(i) for i in range(len(batch.requests))])
        kv = prefill.project_kv(latent[:, : batch.kv_lora_rank], self.weight)
        lengths = tuple(request.seq_len for request in batch.requests)
        return Prompts(batch, kv.view(len(latent), self.num_heads, -1), latent[:, batch.kv_lora_rank :], lengths)

    def prefill(self, prompts: Prompts, **options: Any) -> Any:
        """`mla_prefill` into an `out` that was full of NaN; with `return_state` the state."""
        batch, kv = prompts.batch, prompts.kv
        tensors = (batch.q, kv[..., : self.nope], prompts.k_pe, kv[..., self.nope :], batch.cu_seqlens_q, prompts.starts)
        options = {"softmax_scale": batch.softmax_scale, "order": self.trial.profile.prefill_order, **options}
        if options.get("return_state"):
            return prefill.mla_prefill(*tensors, **options)
        return Rows(*prefill.mla_prefill(*tensors, out=self._out(batch), return_lse=True, **options))

    def rows(self, batch: PagedBatch, **options: Any) -> Rows:
        """`mla_prefill` over the batch's own keys and values."""
        return self.prefill(self.prompts(batch), **options)

    def streamed(self, prompts: Prompts, cuts: Sequence[int]) -> Rows:
        """The prefill in a call for each part of the keys between these tokens, from state to state."""
        requests = prompts.batch.requests
        ends = [*cuts, max(*prompts.lengths, *cuts)]
        state = None
        for first, end in zip([0, *cuts], ends, strict=True):
            at = [r.seq_len - r.q_len - first for r in requests]
            options = {"positions": torch.tensor(at, dtype=torch.int32, device=self.trial.device), "state": state}
            if len(ends) > 1 and end != ends[-1]:
                state = self.prefill(prompts.keys(first, end), return_state=True, **options)
        return self.prefill(prompts.keys(first, end), **options)

    def paged(self, batch: PagedBatch, **options: Any) -> Rows:
        """`mla_prefill_paged` into an `out`, and with a workspace, that were full of NaN."""
        profile = self.trial.profile
        dims: Any = {"qk_nope_head_dim": self.nope, "v_head_dim": profile.v_head_dim}
        options = {"order": profile.prefill_order, "chunk_tokens": 2 * self.tile, **options}
        size = prefill.prefill_workspace_bytes(
            num_tokens=len(batch.q),
            batch_size=len(batch.requests),
            num_heads=batch.q.shape[1],
            max_seq_len=batch.block_table.shape[1] * batch.page_size,
            qk_rope_head_dim=profile.qk_rope_head_dim,
            kv_lora_rank=profile.kv_lora_rank,
            dtype=self.trial.dtype,
            chunk_tokens=options["chunk_tokens"],
            order=options["order"],
            **dims,
        )
        return Rows(
            *prefill.mla_prefill_paged(
                batch.q,
                batch.kv_cache,
                self.weight,
                batch.block_table,
                batch.cu_seqlens_q,
                batch.seq_lens,
                softmax_scale=batch.softmax_scale,
                kv_lora_rank=batch.kv_lora_rank,
                out=self._out(batch),
                return_lse=True,
                workspace=torch.full((size,), 255, dtype=torch.uint8, device=self.trial.device),
                **dims,
                **options,
            )
        )

    def _out(self, batch: PagedBatch) -> torch.Tensor:
        shape = (*batch.q.shape[:2], self.trial.profile.v_head_dim)
        return torch.full(shape, NAN, dtype=self.trial.dtype, device=self.trial.device)
