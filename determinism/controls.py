"""What must change bits: rules of real engines that follow the batch. A run in which one changes none proves nothing."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from determinism.compare import Comparison, compare
from determinism.engine import Policy, Request
from determinism.models import COMPANION, MODELS, Build, Model, config_for, deepseek_v3, replaced, small, with_attention
from determinism.scenarios import FORMS, Bench, Body, make_requests
from triton_mla.absorb import absorb_query, project_values, split_kv_b
from triton_mla.attention import merge_attn_states, mla_decode
from triton_mla.module import MLAAttention
from triton_mla.paths import ABSORBED, MHA, PathRule
from triton_mla.step import Rows
from triton_mla.verification.prefill_controls import prefix_chunk


@dataclass(frozen=True)
class Control:
    """body: yields comparisons, each of which must differ. models: those that it can be done to; gpu: whether it needs one."""

    name: str
    form: str
    body: Body
    models: tuple[str, ...] = ("small", "deepseek_v3")
    gpu: bool = False


def _split_by_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A product whose K is cut in four where there are few rows, as libraries do to fill a machine."""
    if len(x) > 1:
        return COMPANION.linear(x, weight)
    parts = [COMPANION.linear(a.contiguous(), b.contiguous()) for a, b in zip(x.chunk(4, 1), weight.chunk(4, 1), strict=True)]
    return functools.reduce(torch.add, parts)


def _torch_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    if residual is not None:
        x = x + residual
    out = torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)
    return out if residual is None else (out, x)


def _torch_silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


TORCH = replaced(
    linear=torch.nn.functional.linear, rms_norm=_torch_rms_norm, silu_and_mul=_torch_silu_and_mul, log_softmax=functools.partial(torch.log_softmax, dim=-1)
)
SPLIT_BY_ROWS = replaced(linear=_split_by_rows)


class LongestSplits(MLAAttention):
    """Attention that cuts the longest request of a batch into two splits, and the others at the same places."""

    def _absorbed(self, q: torch.Tensor, cache: torch.Tensor, rows: Rows, out: torch.Tensor) -> None:
        block = self.order.block_n
        self.order = replace(self.order, kv_split=-(-int(rows.seq_lens.max()) // (2 * block)) * block)
        super()._absorbed(q, cache, rows, out)


class MergedChunks(MLAAttention):
    """Attention over chunks of a capacity that the requests of a batch share, whose normalised results are merged."""

    PAGES = 2

    def _absorbed(self, q: torch.Tensor, cache: torch.Tensor, rows: Rows, out: torch.Tensor) -> None:
        dims, page = self.dims, cache.shape[1]
        w_uk, w_uv = split_kv_b(self.w_kv_b, dims.num_heads, dims.qk_nope_head_dim)
        query = (absorb_query(q[..., : dims.qk_nope_head_dim], w_uk), q[..., dims.qk_nope_head_dim :])
        starts = rows.cu_seqlens_q.long()
        token = torch.arange(len(q), device=q.device)
        request = torch.searchsorted(starts[1:], token, right=True)
        seen = rows.seq_lens[request] - (starts[request + 1] - 1 - token)
        chunk = prefix_chunk(self.PAGES * page, len(rows.seq_lens), page)
        parts = [
            mla_decode(query, cache, rows.block_table[request, start // page :].contiguous(), (seen - start).clamp(0, chunk).int(),
                       softmax_scale=dims.softmax_scale, kv_lora_rank=dims.kv_lora_rank, order=self.order, return_lse=True)
            for start in range(0, int(seen.max()), chunk)
        ]
        latent, _ = functools.reduce(lambda a, b: merge_attn_states(*a, *b), parts)
        project_values(latent, w_uv, out=out)


def _alone_and_batched(bench: Bench, model: Model, watched: Sequence[Request], others: Sequence[Request]) -> Comparison:
    """Requests one by one against the same ones in a batch with others, both by a model that may be wrong."""
    alone = bench.engine(Policy(), model).run(watched)
    return compare(bench.engine(Policy(max_batch=len(watched) + len(others)), model).run([*others, *watched]), alone)


def _pair(bench: Bench, build: Build, watched: int, other: int) -> Iterator[Comparison]:
    """A request of `watched` tokens alone and beside one of `other` tokens."""
    model = build(FORMS[bench.form])
    pair = make_requests(replace(bench.sizes, lengths=(watched, other), turns=(), new_tokens=3), model.vocab_size)
    yield _alone_and_batched(bench, model, pair[:1], pair[1:])


def other_products(build: Build) -> Body:
    """The control of a model with other products: a few requests alone, and all at once."""
    return lambda bench: iter([_alone_and_batched(bench, build(FORMS[bench.form]), bench.first_turns[:8], bench.first_turns[8:])])


def alone_and_beside(build: Build) -> Body:
    """The control of a model whose bits follow the number of rows: a request alone, and beside one of the same length."""
    return lambda bench: _pair(bench, build, 3, 3)


def longest_splits(build: Build) -> Body:
    """The control of `LongestSplits`. A cut leaves a trace where more than one tile lies behind it."""

    def body(bench: Bench) -> Iterator[Comparison]:
        watched = max(3 * bench.sizes.page_size + 2, *bench.sizes.lengths)
        return _pair(bench, lambda paths: with_attention(build(paths), LongestSplits), watched, watched + bench.sizes.page_size)

    return body


def merged_chunks(build: Build) -> Body:
    """The control of `MergedChunks`."""
    return lambda bench: _pair(bench, lambda paths: with_attention(build(paths), MergedChunks), bench.sizes.page_size + 2, 3)


def generated_in_prefix_cache(bench: Bench) -> Iterator[Comparison]:
    """A prefix cache holds generated tokens, which a prompt that contains them would compute in the mha form."""
    turns = [request for request in bench.requests if request.parent is not None]
    first = [request for request in bench.requests if request.name in {turn.parent for turn in turns}]
    policy = Policy(max_batch=2, prefix_cache="all", num_pages=len(turns) * 2 * bench.longest // bench.sizes.page_size + 1)
    yield compare(bench.engine(policy).run([*first, *turns]), bench.reference)


def recomputed_as_prompt(bench: Bench) -> Iterator[Comparison]:
    """What a preempted request brings again passes for a prompt, generated tokens included."""
    yield bench.compare(Policy(max_batch=3, preempt=0.3, by_arrival=True, seed=3))



def controls(model: str, device: torch.device) -> tuple[Control, ...]:
    """All controls of a model that `MODELS` names."""
    off = {"small": lambda: small(device, ops=TORCH), "deepseek_v3": lambda: deepseek_v3(device, invariant=False)}[model]
    shallow = replace(config_for(device), layers=1)

    def one_layer(paths: PathRule) -> Model:
        return MODELS[model](device, config=shallow)(paths)

    return (
        Control("invariant mode off", ABSORBED, other_products(lambda paths: off()(paths)), gpu=True),
        Control("products split by the number of rows", MHA, alone_and_beside(small(device, ops=SPLIT_BY_ROWS)), models=("small",)),
        Control("splits from the longest request", ABSORBED, longest_splits(one_layer)),
        Control("chunks of capacity // batch size", ABSORBED, merged_chunks(one_layer)),
        Control("generated tokens in the prefix cache of mha prompts", MHA, generated_in_prefix_cache),
        Control("recomputed tokens routed as prompt", MHA, recomputed_as_prompt),
    )
