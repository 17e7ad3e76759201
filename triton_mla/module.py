"""Latent attention as an engine or a model calls it: the cache write, both forms, and the projections between them."""

from __future__ import annotations

import torch

from . import checks
from .absorb import absorb_query, project_values, split_kv_b
from .attention import mla_decode, mla_extend, write_kv_cache
from .backends import Selection
from .batch import BatchLayout
from .dims import MLADims, check_dims, check_head_dims
from .paths import MHA, PathRule
from .plan import DEFAULT_CHUNK_TOKENS, plan_prefill
from .prefill import mla_prefill_paged
from .step import Rows, StepPlan
from .tuning import DEFAULT_ORDER, DEFAULT_PREFILL_ORDER, PrefillOrder, ReductionOrder


class MLAAttention(torch.nn.Module):
    """Attention of one layer over its paged latent cache, from projected queries and latents to [T, H * V]. Inference only.

    Each token's row has bits of its own: they depend on its request's tokens, the weights and the configuration, and not on what else is
    in the batch, how a prompt was cut, or (with `paths` for which that holds) whether the token is computed again.

    Attributes:
        w_kv_b: [H * (nope + V), R], the weight of the model's kv_b projection for the heads of this rank, in the dtype of the cache: for
            each head W_UK's rows, then W_UV's. A `Parameter` is shared with the model, not copied.
        dims, paths, order, prefill_order, chunk_tokens: as given.
    """

    def __init__(
        self, dims: MLADims, w_kv_b: torch.Tensor, *, paths: PathRule | None = None, order: ReductionOrder = DEFAULT_ORDER,
        prefill_order: PrefillOrder = DEFAULT_PREFILL_ORDER, chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    ) -> None:
        """paths: which form each token takes; by default the absorbed form for all. order: of the absorbed form; prefill_order: of the mha
        form. chunk_tokens: of `mla_prefill_paged`; it bounds memory and changes no bit.

        Raises ValueError: the weight has another shape than dims say or is not dense fp16, bf16 or fp32, no kernel serves the dims, or an option is wrong.
        """
        super().__init__()
        paths = PathRule() if paths is None else paths
        for name, value, kind in (("dims", dims, MLADims), ("paths", paths, PathRule), ("order", order, ReductionOrder),
                                  ("prefill_order", prefill_order, PrefillOrder)):
            if not isinstance(value, kind):
                raise ValueError(f"{name}={value!r} must be of type {kind.__name__}")
        check_dims(dims.kv_lora_rank, dims.qk_rope_head_dim)
        plan_prefill(num_tokens=0, batch_size=0, num_heads=dims.num_heads, max_seq_len=0, chunk_tokens=chunk_tokens, order=prefill_order)
        if paths.prompt == MHA:
            check_head_dims(dims.qk_nope_head_dim, dims.qk_rope_head_dim, dims.v_head_dim)
        expected = (dims.num_heads * (dims.qk_nope_head_dim + dims.v_head_dim), dims.kv_lora_rank)
        checks.shape("w_kv_b", checks.as_stored("w_kv_b", w_kv_b), expected, "num_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank")
        checks.float_dtype("w_kv_b", w_kv_b)
        if w_kv_b.stride(1) != 1:
            raise ValueError(f"w_kv_b has strides {w_kv_b.stride()}; its last dimension must be contiguous")
        self.dims = dims
        self.paths = paths
        self.order = order
        self.prefill_order = prefill_order
        self.chunk_tokens = chunk_tokens
        self.w_kv_b = w_kv_b if isinstance(w_kv_b, torch.nn.Parameter) else torch.nn.Parameter(w_kv_b, requires_grad=False)

    @classmethod
    def from_selection(cls, dims: MLADims, w_kv_b: torch.Tensor, selection: Selection) -> MLAAttention:
        """The module that a selection of `resolve` asks for.

        Raises ValueError: the selection has backends that are not this package's kernels.
        """
        if not isinstance(selection, Selection):
            raise ValueError(f"selection={selection!r} must be a Selection, such as resolve returns")
        for phase, own in (("decode", ("triton_mla",)), ("prefill", ("triton_mla", "triton_mla_mha"))):
            if getattr(selection, phase) not in own:
                raise ValueError(f"selection.{phase}={getattr(selection, phase)} must be {' or '.join(own)}: the module launches no other kernels")
        return cls(dims, w_kv_b, paths=selection.paths, order=selection.settings.order)

    def plan(self, layout: BatchLayout) -> StepPlan:
        """The plan of a step, for this layer and all others of the same `paths`."""
        return StepPlan.from_layout(layout, paths=self.paths, device=self.w_kv_b.device)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's
    @torch.no_grad()
    def forward(
        self, q: torch.Tensor, kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, plan: StepPlan, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Write the step's tokens into the cache and attend, each row in its form.

        Args:
            q: [T, H, nope + P], the rope part already rotated. T: the plan's tokens, padding included.
            kv_c: [T, R], after its norm; k_pe: [T, P], rotated. kv_cache: [num_blocks, block_size, R + P], written in place.
            plan: of `StepPlan`, whose tensors are on the cache's device.
            out: preallocated [T, H, V], which shares no memory with the others.

        Returns:
            [T, H * V] of q's dtype; 0 for padding.

        Raises:
            ValueError: an argument is wrong; nothing has been launched or written.
        """
        dims = self.dims
        if not isinstance(plan, StepPlan):
            raise ValueError(f"plan={plan!r} must be a StepPlan, such as plan(layout) returns")
        cache = checks.tensor("kv_cache", kv_cache, dims=3)
        device, dtype = cache.device, cache.dtype
        if self.w_kv_b.device != device or self.w_kv_b.dtype != dtype:
            raise ValueError(f"w_kv_b is {self.w_kv_b.dtype} on {self.w_kv_b.device}; it must be {dtype} on {device}, as kv_cache")
        q = checks.tensor("q", q, dims=3, dtype=dtype, device=device)
        checks.shape("q", q, (plan.num_tokens, dims.num_heads, dims.qk_head_dim), "the plan's tokens, num_heads, qk_nope_head_dim + qk_rope_head_dim")
        for name, value, width in (("kv_c", kv_c, dims.kv_lora_rank), ("k_pe", k_pe, dims.qk_rope_head_dim)):
            checks.shape(name, checks.tensor(name, value, dims=2), (plan.num_tokens, width), "one row for each of the plan's tokens")
        shape = (plan.num_tokens, dims.num_heads, dims.v_head_dim)
        checks.apart({"kv_cache": cache}, {"q": q, "w_kv_b": self.w_kv_b})
        if out is None:
            out = torch.empty(shape, dtype=dtype, device=device)
        else:
            checks.shape("out", checks.tensor("out", out, dims=3, dtype=dtype, device=device), shape, "a value vector for each head of the plan's tokens")
            checks.no_overlap("out", out)
            checks.apart({"out": out}, {"q": q, "kv_c": kv_c, "k_pe": k_pe, "kv_cache": cache, "w_kv_b": self.w_kv_b, **plan.tensors()})
        self._check_plan(plan, cache)
        write_kv_cache(kv_c, k_pe, cache, plan.slot_mapping)
        if plan.padded:  # after the write, which refuses bad arguments of its own
            out.zero_()
        for rows, attend in ((plan.absorbed, self._absorbed), (plan.mha, self._mha)):
            if rows is None:
                continue
            if isinstance(rows.tokens, slice):
                attend(rows.take(q), cache, rows, out[rows.tokens])
            else:
                part = torch.empty((len(rows.tokens), *shape[1:]), dtype=dtype, device=device)
                attend(rows.take(q), cache, rows, part)
                out.index_copy_(0, rows.tokens, part)
        return out.flatten(1)

    def _check_plan(self, plan: StepPlan, cache: torch.Tensor) -> None:
        """What the attention would refuse only after the write."""
        num_pages, page_size, _ = cache.shape
        if plan.page_size != page_size:
            raise ValueError(f"kv_cache has pages of {page_size} tokens; they must have plan.page_size={plan.page_size}, which table and slots are of")
        if plan.paths is not None and plan.paths != self.paths:
            raise ValueError(f"plan.paths is the rule that {plan.paths}; it must be that of this layer: {self.paths}")
        for rows in (plan.mha, plan.absorbed):
            if rows is not None:
                checks.lengths(rows.seq_lens, rows.block_table, page_size, num_pages, rows.cu_seqlens_q, plan.num_tokens)

    def _absorbed(self, q: torch.Tensor, cache: torch.Tensor, rows: Rows, out: torch.Tensor) -> None:
        dims = self.dims
        w_uk, w_uv = split_kv_b(self.w_kv_b, dims.num_heads, dims.qk_nope_head_dim)
        query = (absorb_query(q[..., : dims.qk_nope_head_dim], w_uk), q[..., dims.qk_nope_head_dim :])
        latent = torch.empty_like(query[0])
        if rows.one_each:
            mla_decode(query, cache, rows.block_table, rows.seq_lens, softmax_scale=dims.softmax_scale, kv_lora_rank=dims.kv_lora_rank, out=latent,
                       order=self.order)
        else:
            mla_extend(query, cache, rows.block_table, rows.cu_seqlens_q, rows.seq_lens, softmax_scale=dims.softmax_scale,
                       kv_lora_rank=dims.kv_lora_rank, out=latent, order=self.order)
        project_values(latent, w_uv, out=out)

    def _mha(self, q: torch.Tensor, cache: torch.Tensor, rows: Rows, out: torch.Tensor) -> None:
        dims = self.dims
        mla_prefill_paged(
            q, cache, self.w_kv_b, rows.block_table, rows.cu_seqlens_q, rows.seq_lens, softmax_scale=dims.softmax_scale,
            qk_nope_head_dim=dims.qk_nope_head_dim, v_head_dim=dims.v_head_dim, kv_lora_rank=dims.kv_lora_rank, chunk_tokens=self.chunk_tokens, out=out,
            max_seq_len=rows.max_seq_len, order=self.prefill_order,
        )

    def extra_repr(self) -> str:
        return f"{self.dims}, {self.order}, {self.prefill_order}; {self.paths}"
