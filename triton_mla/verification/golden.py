"""Digests of a few outputs on fixed inputs, so that a release whose results differ in a bit says so."""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from triton_mla import attention, prefill
from triton_mla.fingerprint import numerics_fingerprint, own_arch
from triton_mla.verification.profiles import Profile
from triton_mla.verification.trial import NotHereError, Rows

FOLDER = Path(__file__).resolve().parent / "digests"
"""The digests that come with the package: golden_<arch>.json for each architecture that was run."""

PAGE = 64
SCALE = 192**-0.5


def fixed_values(rows: int, columns: int, *, dtype: torch.dtype, device: torch.device, key: int = 0) -> torch.Tensor:
    """[rows, columns] numbers k/128 in [-1, 1), exact in every dtype, by integer arithmetic (no generator)."""
    x = torch.arange(rows * columns) + (key << 24)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x31848BAB)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    values = ((x ^ (x >> 16)) >> 24) - 128
    return (values.double() / 128).to(dtype).reshape(rows, columns).to(device)


def digest(rows: Rows) -> str:
    """SHA-256 (hex) of the bytes of `out` and `lse`."""
    sha = hashlib.sha256()
    for tensor in (rows.out, rows.lse):
        data = tensor.contiguous().cpu()
        sha.update(ctypes.string_at(data.data_ptr(), data.nbytes))
    return sha.hexdigest()


def outputs(profile: Profile, dtype: torch.dtype, device: torch.device) -> dict[str, str]:
    """Digests of calls with 16 heads: decode (lengths 1 ... 5000), extend (9 tokens across 4096) and prefill in the mha form.

    The prefill is over the paged cache (70 tokens across 4096, and 300 tokens from the start), and once more over the keys
    and values of the latter, non-causal.
    """
    rank, heads, lengths = profile.kv_lora_rank, 16, [1, 65, 2049, 5000]
    dim = rank + profile.qk_rope_head_dim
    pages = -(-max(lengths) // PAGE)
    cache = fixed_values(pages * PAGE, dim, dtype=dtype, device=device).view(pages, PAGE, dim)
    table = torch.arange(pages, dtype=torch.int32, device=device).expand(len(lengths), pages).contiguous()
    lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    shared: Any = {"softmax_scale": SCALE, "kv_lora_rank": rank, "order": profile.order, "return_lse": True}
    q = fixed_values(len(lengths) * heads, dim, dtype=dtype, device=device, key=1).view(-1, heads, dim)
    decoded = attention.mla_decode(q, cache, table, lens, **shared)
    q = fixed_values(9 * heads, dim, dtype=dtype, device=device, key=2).view(-1, heads, dim)
    starts = torch.tensor([0, 9], dtype=torch.int32, device=device)
    lens = torch.tensor([4100], dtype=torch.int32, device=device)
    extended = attention.mla_extend(q, cache, table[:1], starts, lens, **shared)
    nope, value = profile.qk_nope_head_dim, profile.v_head_dim
    weight = fixed_values(heads * (nope + value), rank, dtype=dtype, device=device, key=3) / 8  # exact in every dtype
    q = fixed_values(370 * heads, nope + profile.qk_rope_head_dim, dtype=dtype, device=device, key=4).view(370, heads, -1)
    starts, own = (torch.tensor(values, dtype=torch.int32, device=device) for values in ([0, 70, 370], [0, 300]))
    lens = torch.tensor([4100, 300], dtype=torch.int32, device=device)
    prompt: Any = {"softmax_scale": SCALE, "order": profile.prefill_order, "return_lse": True}
    dims: Any = {"qk_nope_head_dim": nope, "v_head_dim": value, "kv_lora_rank": rank, "chunk_tokens": 1024}
    paged = prefill.mla_prefill_paged(q, cache, weight, table[:2], starts, lens, **prompt, **dims)
    latent = cache.view(-1, dim)[:300]
    kv = prefill.project_kv(latent[:, :rank], weight).view(300, heads, -1)
    tensors = (q[70:], kv[..., :nope], latent[:, rank:], kv[..., nope:], own, own)
    whole = prefill.mla_prefill(*tensors, causal=False, **prompt)
    calls = {"decode": decoded, "extend": extended, "prefill paged": paged, "prefill": whole}
    return {name: digest(Rows(*rows)) for name, rows in calls.items()}


def measure(profile: Profile, device: torch.device) -> dict[str, Any]:
    """Golden digests of this machine: {fingerprint digest: {"fingerprint": ..., "outputs": {name: digest}}}."""
    result = {}
    for dtype in dict.fromkeys(dtype for dtype, _ in profile.cases):
        fingerprint = numerics_fingerprint(
            order=profile.order,
            dtype=dtype,
            arch=own_arch(device),
            kv_lora_rank=profile.kv_lora_rank,
            qk_rope_head_dim=profile.qk_rope_head_dim,
            prefill_order=profile.prefill_order,
        )
        result[fingerprint["digest"]] = {"fingerprint": fingerprint, "outputs": outputs(profile, dtype, device)}
    return result


def path_of(arch: str, folder: Path = FOLDER) -> Path:
    """The file of an architecture's golden digests."""
    return folder / f"golden_{arch}.json"


def load(arch: str, folder: Path = FOLDER) -> dict[str, Any]:
    """The stored golden digests of an architecture, in the form of `measure`; empty when there are none."""
    path = path_of(arch, folder)
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def compare(measured: dict[str, Any], stored: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    """Yields (output, equal) for each fingerprint that is in both; NotHereError when none is."""
    both = [key for key in measured if key in stored]
    if not both:
        raise NotHereError("no stored digests for this architecture, triton version and fingerprint")
    for key in both:
        dtype = measured[key]["fingerprint"]["dtype"]
        for name, value in measured[key]["outputs"].items():
            yield f"{dtype} {name}", stored[key]["outputs"].get(name) == value
