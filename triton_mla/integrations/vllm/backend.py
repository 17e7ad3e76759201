"""The backend class that vLLM's registry names. It and its two parts are made when they are asked for, since their bases are vLLM's."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch

from triton_mla.capabilities import BACKENDS

from . import adapter
from .impl import Attention
from .metadata import StepBuilder

PREFERRED_PAGE_SIZE = 64  # what the kernels are tuned for


class Capabilities:
    """What the backend declares; vLLM's `MLACommonBackend` is the other base of the class that it gets."""

    supported_dtypes = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        """Not TRITON_MLA, also in its place: by that name vLLM turns prefix caching off in a worker, where the scheduler may not see it."""
        return adapter.CUSTOM

    @staticmethod
    def get_impl_cls() -> Any:
        return implementation()

    @staticmethod
    def get_builder_cls() -> Any:
        return builder()

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """kv_cache_spec: given since 0.33."""
        return [adapter.base().multiple_of(_own().page_sizes.step)]

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        return block_size is None or block_size % (_own().page_sizes.step or 1) == 0

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Where the user set no page size."""
        return PREFERRED_PAGE_SIZE

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Widths of a cached token, R + P."""
        own = _own()
        ranks = [rank for rank in range(1, (own.kv_lora_rank.limit or 0) + 1) if rank in own.kv_lora_rank]
        ropes = [rope for rope in range((own.qk_rope_head_dim.limit or 0) + 1) if rope in own.qk_rope_head_dim]
        return sorted({rank + rope for rank in ranks for rope in ropes})

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return _own().invariant

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return adapter.arch() in _own().architectures

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Asked since 0.33: rows are divided by form on the host."""
        return False


def _own() -> Any:
    return next(row for row in BACKENDS if row.name == "triton_mla")


def _made(name: str, own: type, base: Any, **attributes: Any) -> type:
    return types.new_class(name, (own, base), exec_body=lambda body: body.update({"__module__": __name__, **attributes}))


@functools.lru_cache(maxsize=1)
def backend() -> type:
    return _made("TritonMLABackend", Capabilities, adapter.base().backend)


@functools.lru_cache(maxsize=1)
def builder() -> type:
    base = adapter.base()
    return _made("TritonMLABuilder", StepBuilder, base.builder, _cudagraph_support=base.uniform_graphs)


@functools.lru_cache(maxsize=1)
def implementation() -> type:
    return _made("TritonMLAAttention", Attention, adapter.base().impl)


def __getattr__(name: str) -> Any:
    if name == "TritonMLABackend":
        return backend()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
