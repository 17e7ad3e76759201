"""An engine's start: whether this backend serves it, the selection, prefix caching, and what workers have to change of vLLM's own."""

from __future__ import annotations

import logging
from typing import Any

import torch

from triton_mla.companion import linear, matmul
from triton_mla.config import AUTO, PREFIX, Settings
from triton_mla.errors import UnsupportedError
from triton_mla.paths import MHA
from triton_mla.policy import resolve

from . import adapter
from .decision import Decision
from .impl import Attention

logger = logging.getLogger(__name__)

OWN, OWN_MHA = "triton_mla", "triton_mla_mha"
PATH = "triton_mla.integrations.vllm.backend.TritonMLABackend"


def before_workers(vllm_config: Any) -> None:
    """Decide for one engine, on the config that its scheduler reads, and write the decision into it for the workers.

    Raises UnsupportedError with every reason, or ValueError, where the backend was asked for, by name or by a variable of this package, and cannot
    serve the engine. Where only vLLM's own flag asks, the engine is left to vLLM, with a warning.
    """
    if not adapter.uses_mla(vllm_config) or Decision.read(vllm_config) is not None:
        return
    settings = Settings.from_env()
    named = adapter.named_backend(vllm_config)
    asked = _asked_for(named, settings)
    if asked is None:
        return
    try:
        decision = _decide(vllm_config, settings)
    except ValueError as error:
        if named is not None or any(origin.startswith(PREFIX) for origin in settings.origins.values()):
            raise
        logger.warning("%s would be chosen for batch-invariant mode, but cannot serve this engine; vLLM chooses. %s", OWN, error)
        return
    if named != adapter.CUSTOM:  # by this name workers have it whatever their environment is
        adapter.name_custom(vllm_config)
        logger.info("attention backend: %s (%s), since %s", adapter.CUSTOM, OWN, asked)
    decision.write(vllm_config)
    logger.info("%s serves this engine: %s", OWN, decision.paths)


def _asked_for(named: str | None, settings: Settings) -> str | None:
    """Why this package's backend is wanted, None where it is not."""
    backend = settings.describe("decode_backend")
    if named is not None:
        if adapter.is_registered(adapter.CUSTOM, PATH):
            if named == adapter.CUSTOM:
                return f"attention backend {named} is named"
            if named == adapter.TRITON_MLA and settings.decode_backend == OWN:
                return f"{backend} asks for it in place of {named}"
        logger.debug("attention backend %s is named; %s does nothing", named, OWN)
        return None
    if settings.decode_backend not in (AUTO, OWN):
        logger.info("%s: vLLM chooses the attention backend", backend)
        return None
    if not adapter.is_registered(adapter.CUSTOM, PATH):
        return None
    if settings.decode_backend == OWN:
        return backend
    return settings.describe("batch_invariant") if settings.batch_invariant else None


def _decide(vllm_config: Any, settings: Settings) -> Decision:
    against = list(adapter.limits(vllm_config))
    if settings.prefill_backend not in (AUTO, OWN, OWN_MHA):
        against.append(f"{settings.describe('prefill_backend')}: it computes prompts itself, in its forms {OWN} and {OWN_MHA}")
    if settings.decode_backend not in (AUTO, OWN):
        against.append(f"{settings.describe('decode_backend')} names another backend than --attention-backend")
    if settings.batch_invariant and adapter.is_hybrid(vllm_config):
        against.append(f"{settings.describe('batch_invariant')}: the model has layers that are no attention, whose state prefix caching decided already")
    if against:
        raise UnsupportedError("the attention backend cannot serve this engine", {OWN: against})
    flag = settings.describe("batch_invariant")
    if settings.batch_invariant and not adapter.engine_is_invariant():
        logger.warning("%s, but not VLLM_BATCH_INVARIANT: vLLM's own products, norms and reductions will follow the batch", flag)
    if adapter.engine_is_invariant() and not settings.batch_invariant:
        logger.warning("VLLM_BATCH_INVARIANT=1, but %s: prefix caching is left on, and bits may follow what it holds", flag)
    if settings.batch_invariant and adapter.quantization(vllm_config):
        logger.warning("quantization=%s: products of quantized weights are vLLM's, and this package has not shown that their bits do not follow the batch",
                       adapter.quantization(vllm_config))
    no_roles = adapter.against_roles(vllm_config)
    if no_roles is not None:
        logger.info("the roles of tokens are not supplied: %s", no_roles)
    selection = resolve(
        vllm_config.cache_config, dims=adapter.dims_of(vllm_config), settings=settings, decode_backend=OWN, dtype=vllm_config.model_config.dtype,
        arch=adapter.arch(), token_roles=no_roles is None, whole_prompts=adapter.whole_prompts(vllm_config),
    )
    return Decision.of(selection)


def after_device(vllm_config: Any, runner: Any) -> None:
    """In a worker, before its model is loaded."""
    decision = Decision.read(vllm_config)
    if decision is None or runner is None:
        return
    adapter.remember(runner)
    if decision.prompt == MHA:
        adapter.keep_prompts_out_of_decode_graphs(runner)
    adapter.after_loading(runner, _prepare_layers)
    if decision.batch_invariant:
        adapter.after_loading(runner, _one_kernel_for_all_batches)
        # Elsewhere vLLM's are kept: on sm_100 tiles of few rows would go to other matrix instructions than those of many.
        if adapter.engine_is_invariant() and adapter.arch() == "sm_90" and adapter.replace_products(product):
            logger.info("linear layers that are not quantized take the products of %s in place of vLLM's invariant ones", OWN)


def product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """[M, K] . [K, N] (+ bias [N]) -> [M, N], whose rows do not depend on M."""
    return matmul(a, b) if bias is None else linear(a, b.t(), bias)


def _prepare_layers(models: list[torch.nn.Module]) -> None:
    """Raises RuntimeError where a layer of the model itself, which the engine was told to have this backend, has another one."""
    for number, model in enumerate(models):
        for name, layer in adapter.attention_layers(model):
            if isinstance(layer.impl, Attention):
                layer.impl.pack(layer)
            elif number == 0:
                raise RuntimeError(f"layer {name} has the attention of {type(layer.impl).__name__}, and the engine was told that {OWN} serves it")


def _one_kernel_for_all_batches(models: list[torch.nn.Module]) -> None:
    changed = sum(adapter.take_one_kernel(model) for model in models)
    if changed:
        logger.info("kernels for few tokens only are switched off in %d layers (fused a-projections, gates of routers): bits would follow the batch", changed)
