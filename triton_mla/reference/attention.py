"""Latent attention by its definition, absorbed and unabsorbed, and the merge of two partial results.

T query tokens, B requests, H heads, R = `kv_lora_rank`, P rotary dims, N = `nope` dims and V value dims of a head.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from triton_mla.reference.paging import gather_kv

Query = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def absorb_q(q_nope: torch.Tensor, w_uk: torch.Tensor) -> torch.Tensor:
    """Queries against the latent instead of against the up-projected keys: [T, H, N] x [H, N, R] -> [T, H, R]."""
    return torch.einsum("thn,hnr->thr", q_nope, w_uk)


def apply_w_uv(out: torch.Tensor, w_uv: torch.Tensor) -> torch.Tensor:
    """Values of each head from the attended latent: [T, H, R] x [H, R, V] -> [T, H, V]."""
    return torch.einsum("thr,hrv->thv", out, w_uv)


def mla_absorbed(
    q: Query,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    seq_lens: torch.Tensor,
    *,
    softmax_scale: float,
    kv_lora_rank: int = 512,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the latent itself, which is both the key (with its rotary part) and the value.

    Args:
        q: [T, H, R + P], or the pair ([T, H, R], [T, H, P]).
        kv_cache: [num_blocks, block_size, R + P].
        block_table: [B, W] page ids of each request in position order.
        cu_seqlens_q: [B + 1] first query token of each request; None: one query token a request.
        seq_lens: [B] tokens of each request, its query tokens included. Query i of a request with q_len of them is
            at position `seq_len - q_len + i` and sees the tokens up to its own.
        softmax_scale: factor of the scores.
        kv_lora_rank: R.
        dtype: of the computation and of the results.

    Returns:
        out [T, H, R] and lse [T, H] (natural log). A row that sees no token, and a query token of no request, has
        out 0 and lse -inf.
    """
    q = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
    tokens, heads = q.shape[:2]
    out = torch.zeros(tokens, heads, kv_lora_rank, dtype=dtype, device=q.device)
    lse = torch.full((tokens, heads), -torch.inf, dtype=dtype, device=q.device)
    for rows, table, seq_len, seen in _requests(cu_seqlens_q, seq_lens, block_table):
        kv = gather_kv(kv_cache, table, seq_len).to(dtype)
        scores = torch.einsum("thd,sd->ths", q[rows].to(dtype), kv) * softmax_scale
        probabilities, lse[rows] = _causal_softmax(scores, seen)
        out[rows] = probabilities @ kv[:, :kv_lora_rank]
    return out, lse


def mla_unabsorbed(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    seq_lens: torch.Tensor,
    *,
    softmax_scale: float,
    kv_lora_rank: int = 512,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ordinary multi-head attention over keys and values that are up-projected from the latent.

    Equal to `apply_w_uv` of `mla_absorbed` with `absorb_q(q_nope, w_uk)`, up to the rounding of `dtype`.

    Args:
        q_nope: [T, H, N].
        q_pe: [T, H, P].
        w_uk: [H, N, R].
        w_uv: [H, R, V].
        kv_cache, block_table, cu_seqlens_q, seq_lens, softmax_scale, kv_lora_rank, dtype: as in `mla_absorbed`.

    Returns:
        out [T, H, V] and lse [T, H] (natural log), empty rows as in `mla_absorbed`.
    """
    tokens, heads = q_nope.shape[:2]
    w_uk, w_uv = w_uk.to(dtype), w_uv.to(dtype)
    out = torch.zeros(tokens, heads, w_uv.shape[2], dtype=dtype, device=q_nope.device)
    lse = torch.full((tokens, heads), -torch.inf, dtype=dtype, device=q_nope.device)
    for rows, table, seq_len, seen in _requests(cu_seqlens_q, seq_lens, block_table):
        latent, k_pe = gather_kv(kv_cache, table, seq_len).to(dtype).tensor_split([kv_lora_rank], dim=-1)
        k_nope = torch.einsum("sr,hnr->shn", latent, w_uk)
        values = torch.einsum("sr,hrv->shv", latent, w_uv)
        scores = torch.einsum("thn,shn->ths", q_nope[rows].to(dtype), k_nope)
        scores = (scores + torch.einsum("thp,sp->ths", q_pe[rows].to(dtype), k_pe)) * softmax_scale
        probabilities, lse[rows] = _causal_softmax(scores, seen)
        out[rows] = torch.einsum("ths,shv->thv", probabilities, values)
    return out, lse


def merge_states(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint token sets from the results over each.

    Args:
        out_a, out_b: [T, H, R].
        lse_a, lse_b: [T, H], natural log. An lse of -inf or +inf marks an empty side, whose `out` is not read.
        dtype: of the computation and of the results.

    Returns:
        out [T, H, R] and lse [T, H]; where both sides are empty, 0 and -inf.
    """
    lses = torch.stack([lse_a, lse_b]).to(dtype)
    outs = torch.stack([out_a, out_b]).to(dtype)
    empty = torch.isinf(lses)
    lses = lses.masked_fill(empty, -torch.inf)
    outs = outs.masked_fill(empty[..., None], 0.0)
    lse = torch.logsumexp(lses, dim=0)
    weights = torch.exp(lses - lse.masked_fill(torch.isinf(lse), 0.0))
    return (outs * weights[..., None]).sum(0), lse


def _requests(
    cu_seqlens_q: torch.Tensor | None, seq_lens: torch.Tensor, block_table: torch.Tensor
) -> Iterator[tuple[slice, torch.Tensor, int, torch.Tensor]]:
    """For each request with query tokens: their slice, its table row, its length, and [q_len] tokens seen by each."""
    starts = list(range(len(seq_lens) + 1)) if cu_seqlens_q is None else cu_seqlens_q.tolist()
    for i, seq_len in enumerate(seq_lens.tolist()):
        q_len = starts[i + 1] - starts[i]
        if q_len and seq_len:
            seen = torch.arange(seq_len - q_len, seq_len, device=block_table.device) + 1
            yield slice(starts[i], starts[i + 1]), block_table[i], seq_len, seen


def _causal_softmax(scores: torch.Tensor, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities [q_len, H, S] and lse [q_len, H] of scores [q_len, H, S], row i over its first `seen[i]` tokens."""
    hidden = torch.arange(scores.shape[-1], device=scores.device) >= seen[:, None, None]
    scores = scores.masked_fill(hidden, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    return torch.exp(scores - lse.masked_fill(torch.isinf(lse), 0.0)[..., None]), lse
