"""Prompts in the MHA form: their workloads, this package's ways to attend them, and others'. A call returns out [T, H, 128]."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.implementation import Call, Implementation
from benchmarks.peers import Peers, Unavailable
from triton_mla import absorb_query, mla_extend, mla_prefill, mla_prefill_paged, project_values, split_kv_b

RANK, NOPE, ROPE, VALUE = 512, 128, 64, 128
SCALE = (NOPE + ROPE) ** -0.5
PAGE = 64
STREAM_CHUNK = 8192
TORCH_LIMIT_BYTES = 24 << 30
"""The torch form writes all scores; prompts beyond this are left out."""


@dataclass(frozen=True)
class Prompt:
    """Equal requests: `new` query tokens each, the last of `length` tokens; causal."""

    heads: int
    batch: int
    new: int
    length: int
    dtype: str = "bfloat16"
    op: str = "prefill"

    @property
    def name(self) -> str:
        context = f" over {self.length - self.new}" if self.length > self.new else ""
        return f"prefill H={self.heads} {self.batch}x{self.new}{context}"

    @property
    def pairs(self) -> int:
        """(query token, visible token) pairs."""
        return self.batch * (self.new * self.length - self.new * (self.new - 1) // 2)

    @property
    def flops(self) -> int:
        return 2 * self.heads * (NOPE + ROPE + VALUE) * self.pairs

    @property
    def bytes(self) -> int:
        """q, K, V and the rope key read once, out written once."""
        per_query, per_key = self.heads * (NOPE + ROPE + VALUE), self.heads * (NOPE + VALUE) + ROPE
        return self.batch * (self.new * per_query + self.length * per_key) * getattr(torch, self.dtype).itemsize

    @property
    def row(self) -> dict[str, Any]:
        """The fields that a result row repeats."""
        names = {"heads": self.heads, "batch": self.batch, "seq_len": self.length, "q_len": self.new}
        return {"op": self.op, **names, "dtype": self.dtype, "page_size": PAGE}

    def make_inputs(self, device: torch.device | str, *, small: bool = False) -> Inputs:
        """A random latent cache and queries, keys and values being projected from the cache. `small` shortens the requests."""
        if small:
            new = min(self.new, 256)
            context = min(self.length - self.new, STREAM_CHUNK)
            return replace(self, new=new, length=new + context).make_inputs(device)
        generator = torch.Generator(device=device).manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=device, dtype=getattr(torch, self.dtype))

        pages = -(-self.length // PAGE)
        cache = normal(self.batch * pages, PAGE, RANK + ROPE)
        table = torch.randperm(self.batch * pages, generator=generator, device=device, dtype=torch.int32).view(self.batch, pages)
        tokens = cache[table.long()].flatten(1, 2)[:, : self.length].flatten(0, 1)
        weight = normal(self.heads * (NOPE + VALUE), RANK) / RANK**0.5
        starts, key_starts = (torch.arange(self.batch + 1, dtype=torch.int32, device=device) * n for n in (self.new, self.length))
        return Inputs(
            prompt=self,
            q=normal(self.batch * self.new, self.heads, NOPE + ROPE),
            kv=(tokens[:, :RANK] @ weight.T).view(-1, self.heads, NOPE + VALUE),
            k_pe=tokens[:, RANK:].contiguous(),
            starts=starts,
            key_starts=key_starts,
            cache=cache,
            table=table,
            seq_lens=torch.full((self.batch,), self.length, dtype=torch.int32, device=device),
            weight=weight,
        )


@dataclass(frozen=True)
class Inputs:
    """q [T, H, 192], k_nope and v as halves of kv [S, H, 256], k_pe [S, 64], int32 starts and key_starts [B + 1] of queries and keys; and what kv
    and k_pe are of: cache [pages, 64, 576], int32 table [B, W] and seq_lens [B], weight [H * 256, 512]."""

    prompt: Prompt
    q: torch.Tensor
    kv: torch.Tensor
    k_pe: torch.Tensor
    starts: torch.Tensor
    key_starts: torch.Tensor
    cache: torch.Tensor
    table: torch.Tensor
    seq_lens: torch.Tensor
    weight: torch.Tensor

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        """Of `mla_prefill`."""
        return (self.q, self.kv[..., :NOPE], self.k_pe, self.kv[..., NOPE:], self.starts, self.key_starts)

    def whole_keys(self) -> torch.Tensor:
        """K [S, H, 192] with the rope key of every head, as kernels want it that know nothing of MLA."""
        return torch.cat([self.kv[..., :NOPE], self.k_pe[:, None].expand(-1, self.prompt.heads, -1)], -1)

    def expected(self, limit: int = 8) -> tuple[list[int], torch.Tensor]:
        """At most `limit` query rows, evenly spread, and their output [rows, H, 128] in float64."""
        p, last = self.prompt, len(self.q) - 1
        rows = sorted({round(i * last / (limit - 1)) for i in range(limit)})
        want = []
        for row in rows:
            request, t = divmod(row, p.new)
            seen = slice(request * p.length, request * p.length + p.length - p.new + t + 1)
            kv, q = self.kv[seen].double(), self.q[row].double()
            scores = torch.einsum("hd,nhd->hn", q[:, :NOPE], kv[..., :NOPE]) + q[:, NOPE:] @ self.k_pe[seen].double().T
            want.append(torch.einsum("hn,nhd->hd", (scores * SCALE).softmax(-1), kv[..., NOPE:]))
        return rows, torch.stack(want)


def empty_out(i: Inputs) -> torch.Tensor:
    """An output [T, H, 128] full of NaN."""
    return torch.full((*i.q.shape[:2], VALUE), float("nan"), dtype=i.q.dtype, device=i.q.device)


def ours(i: Inputs, peers: Peers) -> Call:
    """Over keys and values that are there."""
    out = empty_out(i)
    return lambda: mla_prefill(*i.arguments, softmax_scale=SCALE, out=out)


def streamed(i: Inputs, peers: Peers) -> Call:
    """The same rows, the keys of a request in chunks of STREAM_CHUNK through the resumable state."""
    p, (q, k, pe, v, first, _) = i.prompt, i.arguments
    if p.batch > 1 or p.length <= STREAM_CHUNK or p.new == p.length:
        raise Unavailable("for one request with a context over several chunks")
    cuts = [(at, min(at + STREAM_CHUNK, p.length)) for at in range(0, p.length, STREAM_CHUNK)]

    def int32(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=q.device)

    chunks = [(slice(*cut), int32(0, cut[1] - cut[0]), int32(p.length - p.new - cut[0])) for cut in cuts]

    def call() -> torch.Tensor:
        state: Any = None
        for part, starts, positions in chunks:
            state = mla_prefill(q, k[part], pe[part], v[part], first, starts, softmax_scale=SCALE, positions=positions, state=state,
                                return_state=part.stop < p.length)
        return state

    return call


def paged(i: Inputs, peers: Peers) -> Call:
    """Keys and values up-projected from the paged cache, chunk by chunk, within the time."""
    out = empty_out(i)
    return lambda: mla_prefill_paged(
        i.q, i.cache, i.weight, i.table, i.starts, i.seq_lens, softmax_scale=SCALE, max_seq_len=i.prompt.length, out=out
    )


def absorbed(i: Inputs, peers: Peers) -> Call:
    """The absorbed form of the same tokens, the products around it within the time."""
    w_uk, w_uv = split_kv_b(i.weight, i.prompt.heads, NOPE)

    def call() -> torch.Tensor:
        query = (absorb_query(i.q[..., :NOPE], w_uk), i.q[..., NOPE:])
        return project_values(mla_extend(query, i.cache, i.table, i.starts, i.seq_lens, softmax_scale=SCALE), w_uv)

    return call


def fa3(concatenate: bool) -> Callable[[Inputs, Peers], Call]:
    """FlashAttention-3, one split; its whole keys made beforehand, or within the time, as a model has to make them."""

    def prepare(i: Inputs, peers: Peers) -> Call:
        op, p = peers.fa3.fwd, i.prompt
        k, v = i.whole_keys(), i.kv[..., NOPE:].contiguous()

        def call() -> torch.Tensor:
            keys = i.whole_keys() if concatenate else k
            return op(
                i.q, keys, v, None, None, None, None, i.starts, i.key_starts, None, None, None, p.new, p.length, *[None] * 9, SCALE,
                True, -1, -1, 0.0, True, None, 1, None, 0, None, 1, 0, None,
            )[0]  # fmt: skip

        return call

    return prepare


def cudnn(i: Inputs, peers: Peers) -> Call:
    """torch's scaled_dot_product_attention by cuDNN, whole keys made beforehand."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    p = i.prompt
    if p.new != p.length:
        raise Unavailable("its causal mask is top-left")

    def batched(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(0, (p.batch, p.length)).transpose(1, 2).contiguous()

    q, k, v = batched(i.q), batched(i.whole_keys()), batched(i.kv[..., NOPE:])

    def call() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE)
        return out.transpose(1, 2).flatten(0, 1)

    return call


def plain(i: Inputs, peers: Peers) -> Call:
    """Plain torch: two batched products, a mask and a softmax, whole keys made beforehand."""
    p = i.prompt
    if (needed := 8 * p.batch * p.heads * p.new * p.length) > TORCH_LIMIT_BYTES:
        raise Unavailable(f"would take {needed / 2**30:.0f} GiB")
    q = i.q.unflatten(0, (p.batch, p.new)).transpose(1, 2)
    k, v = (x.unflatten(0, (p.batch, p.length)).transpose(1, 2) for x in (i.whole_keys(), i.kv[..., NOPE:]))
    hidden = torch.ones(p.new, p.length, dtype=torch.bool, device=q.device).triu(p.length - p.new + 1)

    def call() -> torch.Tensor:
        scores = (q @ k.transpose(-1, -2)).mul_(SCALE).masked_fill_(hidden, float("-inf"))
        return (torch.softmax(scores, -1) @ v).transpose(1, 2).flatten(0, 1)

    return call


IMPLEMENTATIONS = (
    Implementation("triton_mla", ours, compiles=True),
    Implementation("triton_mla_streamed", streamed, compiles=True),
    Implementation("triton_mla_paged", paged, compiles=True),
    Implementation("triton_mla_absorbed", absorbed, compiles=True),
    Implementation("fa3", fa3(concatenate=False), needs="fa3"),
    Implementation("fa3_cat", fa3(concatenate=True), needs="fa3"),
    Implementation("cudnn", cudnn, needs="cuda"),
    Implementation("torch", plain),
)
PROMPTS = [Prompt(128, 1, 8192, 8192), Prompt(128, 4, 2048, 2048), Prompt(16, 1, 32768, 32768), Prompt(16, 8, 4096, 4096)]
CONTINUED = [Prompt(128, 1, 2048, 10240), Prompt(128, 1, 2048, 32768), Prompt(16, 1, 2048, 10240), Prompt(16, 1, 2048, 32768)]
