"""All that is known of vLLM's interface: where names live, what differs between versions, which facts of an engine are read and changed.

vLLM is imported in the functions here, when they are called, and nowhere else in the integration.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import logging
import re
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from triton_mla.dims import MLADims

logger = logging.getLogger(__name__)

Version = tuple[int, int]
SUPPORTED: tuple[tuple[Version, Version], ...] = (((0, 20), (0, 23)), ((0, 33), (0, 33)))
"""First and last of each range whose interface this module has."""

CUSTOM, TRITON_MLA = "CUSTOM", "TRITON_MLA"
_MLA_KIND = "mla_attention"
_WRAPPED = "_triton_mla_wrapped"
_ARCHITECTURES = {"sm_103": "sm_100", "sm_87": "sm_86", "sm_121": "sm_120"}  # as tuning.arch_of


class Base(NamedTuple):
    """vLLM's classes that the backend's are made of."""

    backend: Any
    builder: Any
    impl: Any
    multiple_of: Any
    uniform_graphs: Any
    decoder: Any


def supported_versions() -> str:
    """The ranges in words."""
    return ", ".join(f"{a[0]}.{a[1]}" if a == b else f"{a[0]}.{a[1]} to {b[0]}.{b[1]}" for a, b in SUPPORTED)


def installed() -> str | None:
    """vLLM's version, or None where it is not installed or does not tell one."""
    if importlib.util.find_spec("vllm") is None:
        return None
    return str(getattr(importlib.import_module("vllm"), "__version__", "")) or None


def parse(version: str) -> Version | None:
    """(major, minor) of a version, also of one with a suffix."""
    match = re.match(r"(\d+)\.(\d+)(?:\D|$)", version)
    return (int(match[1]), int(match[2])) if match else None


def supports(version: str) -> bool:
    number = parse(version)
    return number is not None and any(first <= number <= last for first, last in SUPPORTED)


def base() -> Base:
    interface = importlib.import_module("vllm.v1.attention.backend")
    common = importlib.import_module("vllm.model_executor.layers.attention.mla_attention")
    return Base(common.MLACommonBackend, interface.AttentionMetadataBuilder, common.MLACommonImpl, interface.MultipleOf,
                interface.AttentionCGSupport.UNIFORM_BATCH, interface.AttentionType.DECODER)


# ---- what is registered and wrapped


def register_backend(slot: str, path: str) -> bool:
    """Put a class path into a slot of vLLM's registry; False where another package has taken it."""
    registry = importlib.import_module("vllm.v1.attention.backends.registry")
    member = registry.AttentionBackendEnum[slot]
    if member.is_overridden() and member.get_path() != path:
        logger.warning("vLLM's backend %s is left to %s, which registered it first", slot, member.get_path())
        return False
    registry.register_backend(member, path)
    return True


def is_registered(slot: str, path: str) -> bool:
    member = importlib.import_module("vllm.v1.attention.backends.registry").AttentionBackendEnum[slot]
    return bool(member.is_overridden() and member.get_path() == path)


def wrap_engine(before_workers: Callable[[Any], None], after_device: Callable[[Any, Any], None]) -> None:
    """Call ``before_workers(vllm_config)`` in the engine's process, with the config that its scheduler will read, before a worker starts, and
    ``after_device(vllm_config, model_runner)`` in each worker between the making of its model runner and the loading of the model."""
    executor = importlib.import_module("vllm.v1.executor.abstract").Executor
    wrapper = importlib.import_module("vllm.v1.worker.worker_base").WorkerWrapperBase
    _wrap(executor, "__init__", before=lambda _, vllm_config, *args, **kwargs: before_workers(vllm_config))
    _wrap(wrapper, "init_device", after=lambda self: after_device(self.vllm_config, getattr(self.worker, "model_runner", None)))


def _wrap(owner: Any, name: str, *, before: Callable[..., None] | None = None, after: Callable[[Any], None] | None = None) -> None:
    original = getattr(owner, name)
    if hasattr(original, _WRAPPED):
        return

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(self, *args, **kwargs)
        result = original(self, *args, **kwargs)
        if after is not None:
            after(self)
        return result

    setattr(wrapped, _WRAPPED, True)
    setattr(owner, name, wrapped)


# ---- facts of an engine's config


def uses_mla(vllm_config: Any) -> bool:
    return bool(vllm_config.model_config is not None and vllm_config.model_config.use_mla)


def named_backend(vllm_config: Any) -> str | None:
    """The backend that the user named for MLA layers; None where vLLM is to choose."""
    attention = vllm_config.attention_config
    kinds = getattr(attention, "backend_per_kind", None) or {}  # since 0.33
    backend = kinds.get(_MLA_KIND, attention.backend)
    return None if backend is None else str(backend.name)


def name_custom(vllm_config: Any) -> None:
    """Where `named_backend` looks."""
    custom = importlib.import_module("vllm.v1.attention.backends.registry").AttentionBackendEnum[CUSTOM]
    attention = vllm_config.attention_config
    kinds = getattr(attention, "backend_per_kind", None) or {}
    if _MLA_KIND in kinds:
        attention.backend_per_kind = {**kinds, _MLA_KIND: custom}
    else:
        attention.backend = custom


def dims_of(vllm_config: Any) -> MLADims:
    """The sizes of one rank."""
    model, text = vllm_config.model_config, vllm_config.model_config.hf_text_config
    return MLADims(
        num_heads=model.get_num_attention_heads(vllm_config.parallel_config), kv_lora_rank=text.kv_lora_rank,
        qk_rope_head_dim=text.qk_rope_head_dim, qk_nope_head_dim=text.qk_nope_head_dim, v_head_dim=text.v_head_dim,
    )


def arch() -> str:
    """The GPU's architecture, in the names of `tuning.ARCHITECTURES`, found without making a CUDA context: workers may yet be forked."""
    platform = importlib.import_module("vllm.platforms").current_platform
    if not platform.is_cuda():
        return str(getattr(platform, "device_type", "unknown"))
    capability = platform.get_device_capability()
    name = f"sm_{capability.major}{capability.minor}"
    return _ARCHITECTURES.get(name, name)


def limits(vllm_config: Any) -> tuple[str, ...]:
    """Every reason, beside sizes and dtypes, why the backend cannot serve this engine."""
    parallel, text = vllm_config.parallel_config, vllm_config.model_config.hf_text_config
    found = [
        f"{name}={getattr(parallel, name)}: context parallelism is not supported"
        for name in ("decode_context_parallel_size", "prefill_context_parallel_size") if getattr(parallel, name, 1) > 1
    ]
    for name in ("index_topk", "compress_ratios"):
        if getattr(text, name, None):
            found.append(f"the model is sparse ({name}={getattr(text, name)!r}); only dense attention is supported")
    window = vllm_config.cache_config.sliding_window
    if window:
        found.append(f"sliding_window={window} is not supported")
    cap = getattr(text, "attn_logit_softcapping", None)
    if cap:
        found.append(f"attn_logit_softcapping={cap} is not supported")
    if not isinstance(vllm_config.additional_config, dict):
        found.append(f"additional_config of type {type(vllm_config.additional_config).__name__} must be a dict, which carries the selection to workers")
    return tuple(found)


def engine_is_invariant() -> bool:
    """vLLM's own flag."""
    return bool(importlib.import_module("vllm.envs").VLLM_BATCH_INVARIANT)


def quantization(vllm_config: Any) -> str | None:
    """Of the weights of linear layers."""
    return getattr(vllm_config.model_config, "quantization", None)


def is_hybrid(vllm_config: Any) -> bool:
    return bool(vllm_config.model_config.is_hybrid)


def whole_prompts(vllm_config: Any) -> bool:
    return not vllm_config.scheduler_config.enable_chunked_prefill


def _runner_is_v2(vllm_config: Any) -> bool:
    if hasattr(type(vllm_config), "use_v2_model_runner"):
        return bool(vllm_config.use_v2_model_runner)
    return bool(importlib.import_module("vllm.envs").VLLM_USE_V2_MODEL_RUNNER)  # 0.20


def against_roles(vllm_config: Any) -> str | None:
    """Why the lengths of original prompts cannot be had of this engine's runner, or would not tell a token's role; None where they do."""
    version = parse(installed() or "")
    if _runner_is_v2(vllm_config) and (version is None or version < (0, 33)):
        return "this version's second model runner does not tell which request a row of the batch is of"
    if getattr(vllm_config.parallel_config, "use_ubatching", False):
        return "the batch is cut into microbatches"
    if vllm_config.kv_transfer_config is not None:
        return "a KV connector may bring generated tokens of another request"
    return None


# ---- the model runner of a worker

_runners: list[weakref.ref[Any]] = []


def remember(runner: Any) -> None:
    _runners[:] = [ref for ref in _runners if ref() is not None] + [weakref.ref(runner)]


def runner_of(vllm_config: Any) -> Any:
    """The runner of an engine of this process, told by the cache config, which an engine's derived configs share, unless there is only one.

    Raises RuntimeError where there is none.
    """
    alive = [runner for ref in _runners if (runner := ref()) is not None]
    fitting = [runner for runner in alive if runner.vllm_config.cache_config is vllm_config.cache_config]
    if fitting or len(alive) == 1:
        return (fitting or alive)[-1]
    raise RuntimeError("this engine's model runner is not known: triton_mla.integrations.vllm.register() must have run before the worker's init_device")


def prompt_lens(runner: Any, common: Any) -> Any:
    """[num_reqs] tokens of each row's original prompt, in numpy on the host; rows of padding may have any value."""
    if not hasattr(runner, "req_states"):
        batch = runner.input_batch
        lens = batch.num_prompt_tokens[: common.num_reqs]
        if common.num_reqs > batch.num_reqs:  # in a dummy step of an idle rank there are rows, and what is left here is of requests that have ended
            lens = lens.copy()
            lens[batch.num_reqs :] = 0
        return lens
    lens = torch.zeros(common.num_reqs, dtype=torch.int32).numpy()
    if common.req_idx is not None:
        lens[: len(common.req_idx)] = runner.req_states.prompt_len.np[common.req_idx]
    return lens


def keep_prompts_out_of_decode_graphs(runner: Any) -> None:
    """A step whose requests all bring as many tokens as a decode replays a graph of decodes, although some may be the last tokens of a prompt.
    Let such a step run as a mixed one: in a graph every row has the absorbed form."""
    if hasattr(runner, "gather_batch_req_state"):
        gather = runner.gather_batch_req_state

        def gather_batch_req_state(*args: Any, **kwargs: Any) -> Any:
            state, uniform = gather(*args, **kwargs)
            if state is not None and state.has_prefill:
                return state._replace(decode_graph_eligible=False), None
            return state, uniform

        runner.gather_batch_req_state = gather_batch_req_state
        return
    determine = runner._determine_batch_execution_and_padding

    def determine_batch(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("force_uniform_decode") is None:
            batch = runner.input_batch
            count = batch.num_reqs
            if bool((batch.num_computed_tokens_cpu[:count] < batch.num_prompt_tokens[:count]).any()):
                kwargs["force_uniform_decode"] = False
        return determine(*args, **kwargs)

    runner._determine_batch_execution_and_padding = determine_batch


def after_loading(runner: Any, action: Callable[[list[torch.nn.Module]], None]) -> None:
    """Call ``action`` with the runner's models, the draft one included, each time they have been loaded."""
    load = runner.load_model

    def load_model(*args: Any, **kwargs: Any) -> Any:
        result = load(*args, **kwargs)
        drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
        models = (runner.get_model(), getattr(drafter, "model", None))
        action([model for model in models if isinstance(model, torch.nn.Module)])
        return result

    runner.load_model = load_model


def attention_layers(model: torch.nn.Module) -> list[tuple[str, Any]]:
    """MLA layers by name; loaded, they have `impl`, W_UK_T and W_UV (`layer_of`)."""
    return [(name, module) for name, module in model.named_modules() if hasattr(module, "impl") and hasattr(module, "W_UK_T")]


_BY_BATCH = ("_use_min_latency_gemm", "allow_dsv3_router_gemm", "allow_fp32_router_gemm", "allow_cublas_router_gemm")
"""Switches of layers that take another kernel for up to 16 or 32 tokens, or one that a library chooses, whatever the batch-invariant flag says: the
fused a-projections of DeepSeek-V3, and the gates of routers."""


def take_one_kernel(model: torch.nn.Module) -> int:
    """Turns these switches off, and returns of how many layers."""
    count = 0
    for module in model.modules():
        on = [name for name in _BY_BATCH if getattr(module, name, False)]
        for name in on:
            setattr(module, name, False)
        count += bool(on)
    return count


def replace_products(product: Callable[..., torch.Tensor]) -> bool:
    """Have vLLM's linear layers call ``product(a, b, bias=None)`` where under its flag they call its own invariant product of [M, K] and [K, N].
    False where this version has no such function, as 0.33, whose tiles follow a table. It is for all engines of the process, and stays."""
    name = "vllm.model_executor.layers.batch_invariant"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        return False
    own = getattr(module, "matmul_persistent", None)
    if own is None or list(inspect.signature(own).parameters) != ["a", "b", "bias"]:
        return False
    module.matmul_persistent = product  # type: ignore[attr-defined]  # its other functions look it up at each call
    return True


def layer_of(vllm_config: Any, name: str) -> Any:
    """The attention layer of that name; it has `impl`, and after loading W_UK_T [H, nope, R] and W_UV [H, R, V]."""
    return vllm_config.compilation_config.static_forward_context[name]
