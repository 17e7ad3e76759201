"""The paged latent cache: where a request's tokens lie, and how they get there."""

from __future__ import annotations

import torch


def gather_kv(kv_cache: torch.Tensor, block_table_row: torch.Tensor, seq_len: int) -> torch.Tensor:
    """The first `seq_len` tokens of a request, in position order.

    Args:
        kv_cache: [num_blocks, block_size, D], any dtype and strides.
        block_table_row: [W] page ids; entries past the request's own pages are never read.
        seq_len: tokens of the request.

    Returns:
        [seq_len, D], a copy in the dtype of the cache.
    """
    page_size = kv_cache.shape[1]
    position = torch.arange(seq_len, device=kv_cache.device)
    pages = block_table_row[: -(-seq_len // page_size)].to(device=kv_cache.device, dtype=torch.int64)
    return kv_cache[pages[position // page_size], position % page_size]


def write_kv_cache(kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write tokens to their slots, in place. Slot -1 is skipped; of equal slots any one token is kept.

    Args:
        kv_c: [T, R] latents.
        k_pe: [T, P] rotary keys.
        kv_cache: [num_blocks, block_size, R + P], changed in place.
        slot_mapping: [T] int64, `page * block_size + offset` or -1.
    """
    page_size = kv_cache.shape[1]
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    tokens = torch.cat([kv_c, k_pe], dim=-1)[kept]
    kv_cache[slots // page_size, slots % page_size] = tokens.to(kv_cache.dtype)
