"""One step of an engine for all of its layers: which rows take which form, made once a step and without waiting for the device."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from triton_mla.paths import ABSORBED, MHA
from triton_mla.step import Rows, StepPlan

from . import adapter
from .decision import Decision


class Part(NamedTuple):
    """Rows of one form. Their tokens are counted among all of the step's."""

    form: str
    rows: Rows


@dataclass
class StepMetadata:
    """What vLLM's common layer and the implementation read of a step.

    num_actual_tokens: rows of the step, those included that pad a CUDA graph. parts: all rows that have a token. covered: how many those are.
    num_decodes, num_decode_tokens: 0: the common layer multiplies the queries of such rows by W_UK itself, with a product whose bits are not
    those that the same token gets when it is recomputed beside a prompt. So all rows go through `forward_mha`.
    """

    num_actual_tokens: int
    num_prefills: int
    parts: tuple[Part, ...]
    covered: int
    slot_mapping: torch.Tensor
    num_decodes: int = 0
    num_decode_tokens: int = 0
    prefill: None = None
    decode: None = None


class StepBuilder:
    """The builder's part that is this package's; vLLM's `AttentionMetadataBuilder` is the other base of the class that it gets."""

    reorder_batch_threshold: int
    vllm_config: Any
    kv_cache_spec: Any

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # type: ignore[call-arg]  # vLLM's
        decision = Decision.read(vllm_config)
        if decision is None:
            raise RuntimeError("the engine's config carries no decision: triton_mla.integrations.vllm.register() must run in the engine's process first")
        self.decision = decision
        super()._init_reorder_batch_threshold(1, supports_spec_as_decode=True)  # type: ignore[misc]  # vLLM's
        layers = [adapter.layer_of(vllm_config, name) for name in layer_names]
        for layer in layers:
            layer.impl.bind(layer, decision)
        draft = all(getattr(layer, "is_draft_layer", False) for layer in layers)  # since 0.33; before, drafts have a call of their own
        self.runner = adapter.runner_of(vllm_config) if decision.prompt == MHA and not draft else None
        if device.type == "cuda":
            model = vllm_config.model_config
            layers[0].impl.warm_up(mha=self.runner is not None, page_size=kv_cache_spec.block_size, max_model_len=model.max_model_len, dtype=model.dtype,
                                   device=device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> StepMetadata:
        """The step's rows by form. `common_attn_metadata` is vLLM's `CommonAttentionMetadata`."""
        common = common_attn_metadata
        if self.runner is None:
            return self._step(common, _first_long(common, self.reorder_batch_threshold))
        prompts = adapter.prompt_lens(self.runner, common)
        if common.seq_lens_cpu_upper_bound is None:
            raise RuntimeError("vLLM's metadata has no seq_lens_cpu_upper_bound: which tokens are a prompt's cannot be told without waiting for the device")
        return self._step(common, _first_prompt(common, prompts, self.reorder_batch_threshold), prompts)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> StepMetadata:
        """A graph is captured, and replayed, for generated tokens only."""
        if common_attn_metadata.max_query_len > self.reorder_batch_threshold:
            raise ValueError(f"max_query_len={common_attn_metadata.max_query_len} must be at most {self.reorder_batch_threshold} in a captured step")
        return self._step(common_attn_metadata, None)

    def build_for_drafting(self, common_attn_metadata: Any, draft_index: int) -> StepMetadata:
        """What a draft computes is checked token by token and cannot change a bit: every row takes the absorbed form."""
        return self._step(common_attn_metadata, _first_long(common_attn_metadata, self.reorder_batch_threshold))

    def update_draft_decode_metadata(self, metadata: StepMetadata) -> None:
        """Nothing to do: a step's tensors are the engine's own."""

    def _step(self, common: Any, first: int | None, prompts: Any = None) -> StepMetadata:
        """Rows of requests before `first` are generated tokens, in order and at the front of the batch; None: all are. Those from `first` on are
        divided by the lengths of original prompts; without these they take the absorbed form."""
        requests, tokens = common.num_reqs, common.num_actual_tokens
        table, starts, lens = common.block_table_tensor[:requests], common.query_start_loc[: requests + 1], common.seq_lens[:requests]
        if first is None:
            # No tensor is made here: a graph reads the engine's own, which the next steps fill.
            rows = Rows(slice(0, tokens), table, starts, lens, common.max_query_len == 1 and tokens == requests)
            return StepMetadata(tokens, 0, (Part(ABSORBED, rows),), tokens, common.slot_mapping)
        query_lens = _query_lens(common)
        done = int(common.query_start_loc_cpu[first])
        parts = []
        if first:
            one_each = bool((query_lens[:first] == 1).all())
            parts.append(Part(ABSORBED, Rows(slice(0, done), table[:first], starts[: first + 1], lens[:first], one_each)))
        if prompts is None:
            rows = Rows(slice(done, tokens), table[first:], starts[first:] - starts[first], lens[first:], False)
            parts.append(Part(ABSORBED, rows))
            return StepMetadata(tokens, requests - first, tuple(parts), tokens, common.slot_mapping)
        query_lens, host_lens, prompts = query_lens[first:], common.seq_lens_cpu_upper_bound.numpy()[first:requests], prompts[first:]
        plan = StepPlan.from_lengths(
            query_lens.tolist(), host_lens.tolist(), table[first:], common.slot_mapping[done:tokens], page_size=self.kv_cache_spec.block_size,
            paths=self.decision.paths, prompt_lens=prompts.tolist(), generated_lens=lens[first:],
        )
        if plan.mha is not None:
            parts.append(Part(MHA, _shifted(plan.mha, done)))
        if plan.absorbed is not None:
            parts.append(Part(ABSORBED, _shifted(plan.absorbed, done)))
        return StepMetadata(tokens, requests - first, tuple(parts), int(common.query_start_loc_cpu[requests]), common.slot_mapping)


def _query_lens(common: Any) -> Any:
    """[num_reqs] on the host, as numpy: torch takes ten times as long for arrays of this size, 90 microseconds of each step of decodes."""
    starts = common.query_start_loc_cpu.numpy()
    return starts[1 : common.num_reqs + 1] - starts[: common.num_reqs]


def _first_long(common: Any, threshold: int) -> int | None:
    """The first request that brings more tokens than a decode."""
    return None if common.max_query_len <= threshold else _first(_query_lens(common) > threshold)


def _first_prompt(common: Any, prompts: Any, threshold: int) -> int | None:
    """The first request that brings a token of its original prompt, or more tokens than a decode."""
    query_lens = _query_lens(common)
    begins = common.seq_lens_cpu_upper_bound.numpy()[: common.num_reqs] - query_lens
    return _first((query_lens > threshold) | ((query_lens > 0) & (begins < prompts)))


def _first(found: Any) -> int | None:
    first = int(found.argmax())
    return first if found[first] else None


def _shifted(rows: Rows, by: int) -> Rows:
    tokens = rows.tokens
    return dataclasses.replace(rows, tokens=slice(tokens.start + by, tokens.stop + by) if isinstance(tokens, slice) else tokens + by)

