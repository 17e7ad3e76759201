"""Sizes of a verification run: real ones on a GPU, small ones under the interpreter."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from triton_mla.tuning import DEFAULT_ORDER, DEFAULT_PREFILL_ORDER, PrefillOrder, ReductionOrder


@dataclass(frozen=True)
class Profile:
    """Sizes of one run. Lengths are in tokens.

    `cases` are (dtype, query heads): the first one takes every check, the others those that are marked for every case.
    """

    name: str
    cases: tuple[tuple[torch.dtype, int], ...]
    kv_lora_rank: int
    qk_rope_head_dim: int
    page_size: int
    order: ReductionOrder
    victim: int
    neighbour: int
    batch_sizes: tuple[int, ...]
    copies: int
    repeats: int
    page_sizes: tuple[int, ...]
    prompt: int
    """Tokens of a short prompt that is extended at once."""
    pieces: tuple[tuple[int, int, tuple[int, ...]], ...]
    """(first, end, cuts): tokens first ... end of a sequence, extended at once and in two chunks that meet at a cut."""
    verify_lengths: tuple[int, ...]
    verify_tokens: tuple[int, ...]
    head_slices: tuple[tuple[int, int], ...]
    accuracy_lengths: tuple[int, ...]
    far_pages: int
    """Pages of the pool that crosses 2**31 elements; 0 leaves that out."""
    qk_nope_head_dim: int
    v_head_dim: int
    prefill_order: PrefillOrder
    prefill_heads: int | None
    """Heads of the mha form; None: those of the case."""
    prompts: tuple[tuple[int, tuple[int, ...]], ...]
    """(tokens, cuts) of prompts in the mha form. The first one is watched in batches."""
    prompt_batches: tuple[int, ...]
    cached: tuple[int, ...]
    """Lengths of a cached prefix of the watched prompt."""
    streamed_tiles: int
    """The keys of a request are streamed in parts that meet at every set of this many multiples of the KV tile."""
    chunk_tiles: tuple[int, ...]
    """KV tiles of a chunk of the up-projection."""
    prefix: int
    """Tokens of a prefix whose attention is merged with that of the tokens behind it."""
    sequence: tuple[int, int]
    """Tokens of a prompt, and of the sequence that starts with it."""


INTERPRETER = Profile(
    name="interpreter",
    cases=((torch.float32, 3), (torch.float16, 2), (torch.bfloat16, 2)),
    kv_lora_rank=64,
    qk_rope_head_dim=16,
    page_size=16,
    order=replace(DEFAULT_ORDER, kv_split=128),
    victim=150,
    neighbour=80,
    batch_sizes=(1, 2, 5),
    copies=3,
    repeats=2,
    page_sizes=(1, 32, 64, 80, 128),
    prompt=12,
    pieces=((0, 20, (16,)), (62, 68, (64,)), (125, 131, (128,))),
    verify_lengths=(65, 129),
    verify_tokens=(2, 3),
    head_slices=((0, 1), (0, 2), (1, 3)),
    accuracy_lengths=(0, 1, 64, 70, 150),
    far_pages=0,
    qk_nope_head_dim=32,
    v_head_dim=32,
    prefill_order=DEFAULT_PREFILL_ORDER,
    prefill_heads=1,
    prompts=((257, (1, 64, 100, 128, 255)),),
    prompt_batches=(4,),
    cached=(16, 48, 240),
    streamed_tiles=3,
    chunk_tiles=(1, 2, 4),
    prefix=192,
    sequence=(29, 33),
)

GPU = Profile(
    name="gpu",
    cases=((torch.bfloat16, 16), (torch.bfloat16, 128), (torch.float16, 16), (torch.float32, 16)),
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    page_size=64,
    order=DEFAULT_ORDER,
    victim=19_802,
    neighbour=4096,
    batch_sizes=(1, 2, 3, 15, 16, 17, 64, 257),
    copies=64,
    repeats=100,
    page_sizes=(1, 16, 128),
    prompt=128,
    pieces=(
        (0, 128, (1, 127)),
        (0, 257, (1, 64, 100, 128, 255)),
        (0, 4097, (1, 511, 2048, 4096)),
        (8192, 8300, (8200,)),
    ),
    verify_lengths=(63, 64, 65, 127, 128, 129, 1024, 4096),
    verify_tokens=(2, 4, 8),
    head_slices=((0, 8), (8, 16), (5, 6), (0, 12), (16, 32), (64, 128)),
    accuracy_lengths=(0, 1, 64, 70, 2048, 2049, 19_802),
    far_pages=60_000,
    qk_nope_head_dim=128,
    v_head_dim=128,
    prefill_order=DEFAULT_PREFILL_ORDER,
    prefill_heads=None,
    prompts=((257, (1, 64, 100, 128, 255)), (4097, (1, 511, 2048, 4096))),
    prompt_batches=(2, 5, 17),
    cached=(64, 128, 192, 256),
    streamed_tiles=4,
    chunk_tiles=(1, 2, 3, 8, 32),
    prefix=3072,
    sequence=(1276, 1284),
)


def profile_for(device: torch.device, *, quick: bool = False) -> Profile:
    """The profile of a device; `quick` keeps the first case and fewer sizes of each kind."""
    profile = INTERPRETER if device.type == "cpu" else GPU
    if not quick:
        return profile
    return replace(
        profile,
        cases=profile.cases[:1],
        batch_sizes=profile.batch_sizes[:2],
        repeats=1,
        page_sizes=profile.page_sizes[:2],
        pieces=profile.pieces[:1],
        verify_lengths=profile.verify_lengths[-2:],
        verify_tokens=profile.verify_tokens[:1],
        accuracy_lengths=profile.accuracy_lengths[:4],
        far_pages=0,
        prompts=profile.prompts[:1],
        prompt_batches=profile.prompt_batches[:1],
        cached=profile.cached[-1:],
        streamed_tiles=2,
        chunk_tiles=profile.chunk_tiles[:2],
    )
