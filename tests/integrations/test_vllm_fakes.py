"""vLLM's interface as recorded from its versions 0.23 and 0.33: the names, signatures and order of calls that the plugin touches, and an engine of
one layer that makes these calls. Nothing of vLLM is installed or copied."""

from __future__ import annotations

import abc
import copy
import dataclasses
import enum
import importlib
import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

VERSIONS = ("0.23.0", "0.33.0")
HEADS, RANK, ROPE, NOPE, VALUE, PAGE, PAGES = 2, 32, 16, 16, 16, 16, 24
DTYPE = torch.float16


def modules(version: str) -> dict[str, ModuleType]:
    """Fake modules by name. `version` decides the differences."""
    new = version.startswith("0.33")
    made: dict[str, ModuleType] = {}

    def module(name: str, **members: Any) -> None:
        made[name] = ModuleType(name)
        made[name].__dict__.update(members)

    class MultipleOf:
        def __init__(self, base: int) -> None:
            self.base = base

    class AttentionCGSupport(enum.Enum):
        ALWAYS, UNIFORM_BATCH, NEVER = 3, 2, 0

    class AttentionType(str, enum.Enum):
        DECODER, ENCODER = "decoder", "encoder"

    class AttentionMetadataBuilder(abc.ABC):
        _cudagraph_support = AttentionCGSupport.NEVER
        reorder_batch_threshold = None

        @abc.abstractmethod
        def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
            self.kv_cache_spec, self.layer_names, self.vllm_config, self.device = kv_cache_spec, layer_names, vllm_config, device

        def _init_reorder_batch_threshold(self, reorder_batch_threshold=1, supports_spec_as_decode=False, supports_dcp_with_varlen=False):
            self.reorder_batch_threshold = reorder_batch_threshold
            if supports_spec_as_decode and self.vllm_config.speculative_config is not None:
                self.reorder_batch_threshold += self.vllm_config.speculative_config.num_speculative_tokens

        @abc.abstractmethod
        def build(self, common_prefix_len, common_attn_metadata, fast_build=False): ...

    class MLACommonBackend(abc.ABC):
        @staticmethod
        @abc.abstractmethod
        def get_impl_cls(): ...

        @staticmethod
        def get_name():
            return "TRITON_MLA"

    class MLACommonImpl(abc.ABC):
        def __init__(self, num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap, attn_type,
                     kv_sharing_target_layer_name, q_lora_rank, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, qk_head_dim, v_head_dim, kv_b_proj,
                     indexer=None, q_pad_num_heads=None):
            self.num_heads, self.scale, self.kv_lora_rank, self.v_head_dim = num_heads, float(scale), kv_lora_rank, v_head_dim
            self.qk_nope_head_dim, self.qk_rope_head_dim, self.kv_cache_dtype = qk_nope_head_dim, qk_rope_head_dim, kv_cache_dtype
            self.supports_quant_query_input = True

        @abc.abstractmethod
        def forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata, layer): ...

    class AttentionBackendEnum(enum.Enum):
        TRITON_MLA, FLASH_ATTN_MLA, CUSTOM = "v.TritonMLABackend", "v.FlashAttnMLABackend", None

        def is_overridden(self):
            return self in overrides

        def get_path(self):
            return overrides.get(self, self.value)

    overrides: dict[Any, str] = {}

    def register_backend(backend, class_path=None, is_mamba=False):
        overrides[backend] = class_path
        return lambda cls: cls

    class Executor(abc.ABC):
        def __init__(self, vllm_config):
            self.vllm_config = vllm_config
            self._init_executor()

        @abc.abstractmethod
        def _init_executor(self): ...

    class WorkerWrapperBase:
        def init_worker(self, all_kwargs):
            self.vllm_config = all_kwargs[0]["vllm_config"]
            self.worker = SimpleNamespace()

        def init_device(self):
            self.worker.model_runner = (RunnerV2 if self.vllm_config.use_v2_model_runner else RunnerV1)(self.vllm_config)

    module("vllm", __version__=version)
    module("vllm.envs", __getattr__=_variable, VLLM_USE_V2_MODEL_RUNNER=False)
    platform = SimpleNamespace(is_cuda=lambda: True, get_device_capability=lambda: SimpleNamespace(major=9, minor=0))
    module("vllm.platforms", current_platform=platform)
    module("vllm.v1.attention.backend", MultipleOf=MultipleOf, AttentionCGSupport=AttentionCGSupport, AttentionType=AttentionType,
           AttentionMetadataBuilder=AttentionMetadataBuilder)
    module("vllm.v1.attention.backends.registry", AttentionBackendEnum=AttentionBackendEnum, register_backend=register_backend)
    module("vllm.model_executor.layers.attention.mla_attention", MLACommonBackend=MLACommonBackend, MLACommonImpl=MLACommonImpl, new=new)
    if not new:
        def matmul_persistent(a, b, bias=None):
            raise AssertionError("vLLM's own product")

        def linear_batch_invariant(input, weight, bias=None):
            return made["vllm.model_executor.layers.batch_invariant"].matmul_persistent(input, weight.t())

        module("vllm.model_executor.layers.batch_invariant", matmul_persistent=matmul_persistent, linear_batch_invariant=linear_batch_invariant)
    module("vllm.v1.executor.abstract", Executor=Executor)
    module("vllm.v1.worker.worker_base", WorkerWrapperBase=WorkerWrapperBase)
    made["vllm"].__spec__ = importlib.machinery.ModuleSpec("vllm", None)
    return made


def _variable(name: str) -> bool:
    if name != "VLLM_BATCH_INVARIANT":
        raise AttributeError(name)
    return os.environ.get(name) == "1"


class VllmConfig:
    """An engine's config, with the fields that the plugin reads."""

    def __init__(self, backend: Any = None, *, v2: bool = False, new: bool = False, **changes: Any) -> None:
        text = SimpleNamespace(kv_lora_rank=RANK, qk_rope_head_dim=ROPE, qk_nope_head_dim=NOPE, v_head_dim=VALUE)
        self.model_config = SimpleNamespace(use_mla=True, is_hybrid=False, dtype=DTYPE, hf_text_config=text, get_num_attention_heads=_heads)
        self.parallel_config = SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1, use_ubatching=False)
        self.cache_config = SimpleNamespace(enable_prefix_caching=True, block_size=PAGE, user_specified_block_size=False, cache_dtype="auto",
                                            sliding_window=None)
        self.attention_config = SimpleNamespace(backend=backend, **({"backend_per_kind": {}} if new else {}))
        self.scheduler_config = SimpleNamespace(enable_chunked_prefill=True)
        self.compilation_config = SimpleNamespace(static_forward_context={})
        self.additional_config: Any = {}
        self.kv_transfer_config = self.speculative_config = None
        self.v2 = v2
        for path, value in changes.items():
            *parts, name = path.split("__")
            owner: Any = self
            for part in parts:
                owner = getattr(owner, part)
            setattr(owner, name, value)

    @property
    def use_v2_model_runner(self) -> bool:
        return self.v2


def _heads(parallel_config: Any) -> int:
    return HEADS


class BatchState(NamedTuple):
    has_prefill: bool
    decode_graph_eligible: bool


class Projection(torch.nn.Module):
    _use_min_latency_gemm = True


class Gate(torch.nn.Module):
    allow_dsv3_router_gemm = allow_cublas_router_gemm = True


class RunnerV1:
    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config, self.drafter = vllm_config, SimpleNamespace(model=torch.nn.Sequential(Projection()))
        prompts = torch.zeros(8, dtype=torch.int32)
        self.input_batch = SimpleNamespace(num_reqs=0, num_prompt_tokens_cpu_tensor=prompts, num_prompt_tokens=prompts.numpy(),
                                           num_computed_tokens_cpu=np.zeros(8, np.int32))

    def load_model(self, load_dummy_weights: bool = False) -> None:
        self.model = torch.nn.Sequential(torch.nn.Identity(), Projection(), Gate())

    def get_model(self) -> torch.nn.Module:
        return self.model

    def _determine_batch_execution_and_padding(self, num_tokens: int, force_uniform_decode: bool | None = None) -> bool:
        return num_tokens == self.input_batch.num_reqs if force_uniform_decode is None else force_uniform_decode

    def tell(self, prompts: list[int], computed: list[int]) -> None:
        self.input_batch.num_reqs = len(prompts)
        self.input_batch.num_prompt_tokens[: len(prompts)] = prompts
        self.input_batch.num_computed_tokens_cpu[: len(prompts)] = computed

    def request_index(self, count: int) -> Any:
        return None


class RunnerV2(RunnerV1):
    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config)
        self.req_states = SimpleNamespace(prompt_len=SimpleNamespace(np=np.full(8, 999, np.int32)))
        self.speculator, self.drafter = self.drafter, None
        self.has_prefill = False

    def gather_batch_req_state(self, scheduler_output: Any, dummy_run: bool) -> tuple[BatchState | None, int | None]:
        return BatchState(self.has_prefill, True), 1

    def tell(self, prompts: list[int], computed: list[int]) -> None:
        self.req_states.prompt_len.np[self.request_index(len(prompts))] = prompts

    def request_index(self, count: int) -> Any:
        return np.arange(7, 7 - count, -1)


@dataclasses.dataclass
class CommonAttentionMetadata:
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    seq_lens_cpu_upper_bound: torch.Tensor | None
    req_idx: Any = None


def eighths(draw: torch.Generator, *shape: int) -> torch.Tensor:
    """Multiples of 1/8, whose products have exact sums: the interpreter's are BLAS's, in an order that follows a row's place in its tile."""
    return (torch.randint(-8, 9, shape, generator=draw) / 8).to(DTYPE)


class Request:
    """Tokens of one request: latents, queries and pages, which follow from its key alone."""

    def __init__(self, key: int, prompt: int, pages: list[int], length: int = 64) -> None:
        draw = torch.Generator().manual_seed(key)
        self.prompt, self.pages, self.computed = prompt, pages, 0
        self.latents, self.queries = eighths(draw, length, RANK + ROPE), eighths(draw, length, HEADS, NOPE + ROPE)


class FakeEngine:
    """One layer, one worker: starts as vLLM's engine does and runs steps of (request, number of tokens)."""

    def __init__(self, version: str, config: VllmConfig, *, strided: bool = False, weight_layout: str = "view") -> None:
        self.version, self.config = version, config
        names = {name: importlib.import_module(name) for name in ("vllm.v1.executor.abstract", "vllm.v1.worker.worker_base")}
        executor = names["vllm.v1.executor.abstract"].Executor

        class Single(executor):
            def _init_executor(self) -> None:
                pass

        Single(config)
        self.worker_config = copy.deepcopy(config)  # as pickled for a worker's process
        wrapper = names["vllm.v1.worker.worker_base"].WorkerWrapperBase()
        wrapper.init_worker([{"vllm_config": self.worker_config}])
        wrapper.init_device()
        self.runner = wrapper.worker.model_runner
        self.runner.load_model()
        self.weight = eighths(torch.Generator().manual_seed(7), HEADS * (NOPE + VALUE), RANK) / 4
        stored = self.weight if weight_layout == "view" else self.weight.t().contiguous().t()
        heads = stored.T.view(RANK, HEADS, NOPE + VALUE) if weight_layout == "view" else stored.T.reshape(RANK, HEADS, NOPE + VALUE)
        uk, uv = heads.split([NOPE, VALUE], dim=-1)
        backend = importlib.import_module("triton_mla.integrations.vllm.backend").TritonMLABackend
        impl = backend.get_impl_cls()(**layer_arguments())
        self.layer = SimpleNamespace(impl=impl, W_UK_T=uk.permute(1, 2, 0), W_UV=uv.transpose(0, 1))
        self.worker_config.compilation_config.static_forward_context["layer"] = self.layer
        self.builder = backend.get_builder_cls()(SimpleNamespace(block_size=PAGE), ["layer"], self.worker_config, torch.device("cpu"))
        memory = torch.full((PAGES, 2, PAGE, RANK + ROPE), torch.nan, dtype=DTYPE)
        self.cache = memory[:, 1] if strided else memory[:, 1].contiguous()

    def common(self, batch: list[tuple[Request, int]], *, slack: int = 0) -> CommonAttentionMetadata:
        """`slack`: how much the host's lengths are above the device's."""
        counts = [count for _, count in batch]
        starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        lens = torch.tensor([request.computed + count for request, count in batch], dtype=torch.int32)
        table = torch.zeros(len(batch), max(len(request.pages) for request, _ in batch), dtype=torch.int32)
        slots = []
        for row, (request, count) in zip(table, batch, strict=True):
            row[: len(request.pages)] = torch.tensor(request.pages)
            slots += [request.pages[p // PAGE] * PAGE + p % PAGE for p in range(request.computed, request.computed + count)]
        self.runner.tell([request.prompt for request, _ in batch], [request.computed for request, _ in batch])
        return CommonAttentionMetadata(starts, starts, lens, len(batch), sum(counts), max(counts), int(lens.max()) + slack, table,
                                       torch.tensor(slots, dtype=torch.int64), lens + slack, self.runner.request_index(len(batch)))

    def step(self, *batch: tuple[Request, int]) -> list[torch.Tensor]:
        """[count, H * V] of each request, whose tokens are then computed."""
        common = self.common(list(batch))
        tokens = [(request, slice(request.computed, request.computed + count)) for request, count in batch]
        q = torch.cat([request.queries[part] for request, part in tokens])
        latents = torch.cat([request.latents[part] for request, part in tokens])
        self.cache[common.slot_mapping // PAGE, common.slot_mapping % PAGE] = latents
        metadata = self.builder.build(0, common)
        output = torch.full((len(q), HEADS * VALUE), torch.nan, dtype=DTYPE)
        assert metadata.num_decode_tokens == 0 and metadata.num_actual_tokens == len(q) and metadata.prefill is None
        scale = {"output_scale": None} if self.version.startswith("0.33") else {}
        self.layer.impl.forward_mha(q, latents[:, :RANK], latents[:, RANK:], self.cache, metadata, torch.ones(1), output=output, **scale)
        for request, count in batch:
            request.computed += count
        return list(output.split([count for _, count in batch]))


def layer_arguments(**changes: Any) -> dict[str, Any]:
    """What vLLM's layer gives its implementation."""
    decoder = importlib.import_module("vllm.v1.attention.backend").AttentionType.DECODER
    return {"num_heads": HEADS, "head_size": RANK + ROPE, "scale": (NOPE + ROPE) ** -0.5, "num_kv_heads": 1, "alibi_slopes": None, "sliding_window": None,
            "kv_cache_dtype": "auto", "logits_soft_cap": None, "attn_type": decoder, "kv_sharing_target_layer_name": None, "q_lora_rank": None,
            "kv_lora_rank": RANK, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "qk_head_dim": NOPE + ROPE, "v_head_dim": VALUE,
            "kv_b_proj": None, "indexer": None, **changes}


def install(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Fake modules in place of vLLM, and no trace of an earlier one in the plugin or in the environment."""
    for name in [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]:
        monkeypatch.delitem(sys.modules, name)
    for name, fake in modules(version).items():
        monkeypatch.setitem(sys.modules, name, fake)
    for variable in ("VLLM_BATCH_INVARIANT", "TRITON_MLA_BATCH_INVARIANT", "TRITON_MLA_PREFIX_CACHING", "TRITON_MLA_DECODE_BACKEND",
                     "TRITON_MLA_PREFILL_BACKEND", "TRITON_MLA_PREFILL_PATH"):
        monkeypatch.delenv(variable, raising=False)
    backend = importlib.import_module("triton_mla.integrations.vllm.backend")
    for made in (backend.backend, backend.builder, backend.implementation):
        made.cache_clear()
    importlib.import_module("triton_mla.integrations.vllm.adapter")._runners.clear()


def backend_enum() -> Any:
    return sys.modules["vllm.v1.attention.backends.registry"].AttentionBackendEnum


@pytest.mark.parametrize("version", VERSIONS)
def test_the_fakes_take_the_place_of_vllm(monkeypatch, version):
    install(monkeypatch, version)
    import vllm

    assert vllm.__version__ == version and not backend_enum().CUSTOM.is_overridden()
