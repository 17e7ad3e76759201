"""Ordinary multi-head attention of ragged requests, with a rope key that the heads share."""

from __future__ import annotations

import torch


def mha_prefill(
    q: torch.Tensor,
    k_nope: torch.Tensor,
    k_pe: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    softmax_scale: float,
    causal: bool = True,
    positions: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each request's queries over its own keys.

    Args:
        q: [T, H, N + P].
        k_nope: [S, H, N].
        k_pe: [S, P].
        v: [S, H, V].
        cu_seqlens_q, cu_seqlens_k: [B + 1] first query and first key of each request.
        softmax_scale: factor of the scores.
        causal: query i of a request at position p sees the keys 0 to p + i of it; else all.
        positions: [B] the p of each request, counted from its first key; None: its last query is at its last key.
        dtype: of the computation and of the results.

    Returns:
        out [T, H, V] and lse [T, H] (natural log). A row that sees no key, and a query of no request, has out 0 and
        lse -inf.
    """
    tokens, heads = q.shape[:2]
    out = torch.zeros(tokens, heads, v.shape[2], dtype=dtype, device=q.device)
    lse = torch.full((tokens, heads), -torch.inf, dtype=dtype, device=q.device)
    q_starts, k_starts = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for i in range(len(q_starts) - 1):
        rows, keys = slice(*q_starts[i : i + 2]), slice(*k_starts[i : i + 2])
        q_len, kv_len = rows.stop - rows.start, keys.stop - keys.start
        if not (q_len and kv_len):
            continue
        k = torch.cat([k_nope[keys], k_pe[keys, None].expand(-1, heads, -1)], dim=-1).to(dtype)
        scores = torch.einsum("thd,shd->ths", q[rows].to(dtype), k) * softmax_scale
        if causal:
            position = kv_len - q_len if positions is None else int(positions[i])
            seen = position + 1 + torch.arange(q_len, device=q.device)
            hidden = torch.arange(kv_len, device=q.device) >= seen[:, None, None]
            scores = scores.masked_fill(hidden, -torch.inf)
        lse[rows] = torch.logsumexp(scores, dim=-1)
        probabilities = torch.exp(scores - lse[rows].masked_fill(lse[rows].isinf(), 0.0)[..., None])
        out[rows] = torch.einsum("ths,shv->thv", probabilities, v[keys].to(dtype))
    return out, lse
