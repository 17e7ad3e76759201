"""register(), selection and policy against recorded interfaces of vLLM."""

import logging
import sys
from types import SimpleNamespace

import pytest
import torch
from test_vllm_fakes import (
    HEADS,
    NOPE,
    RANK,
    VALUE,
    VERSIONS,
    FakeEngine,
    RunnerV1,
    RunnerV2,
    VllmConfig,
    backend_enum,
    eighths,
    install,
    layer_arguments,
)

from triton_mla.companion import linear
from triton_mla.errors import UnsupportedError
from triton_mla.integrations.vllm import adapter, register
from triton_mla.integrations.vllm.decision import Decision
from triton_mla.integrations.vllm.policy import PATH, before_workers

KEEP = {"TRITON_MLA_PREFIX_CACHING": "keep"}


@pytest.fixture(params=VERSIONS)
def version(request, monkeypatch):
    install(monkeypatch, request.param)
    return request.param


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def config(version, backend="CUSTOM", **changes):
    return VllmConfig(backend and backend_enum()[backend], v2=version == "0.33.0", new=version == "0.33.0", **changes)


@pytest.mark.parametrize("given, number, supported", [
    ("0.20.0", (0, 20), True), ("0.23.1.dev4+gabc", (0, 23), True), ("0.33.0", (0, 33), True), ("0.19.3", (0, 19), False), ("0.24.0", (0, 24), False),
    ("0.34.0", (0, 34), False), ("1.0", (1, 0), False), ("dev", None, False), ("0.2", (0, 2), False),
])
def test_versions(given, number, supported):
    assert adapter.parse(given) == number and adapter.supports(given) is supported
    assert adapter.supported_versions() == "0.20 to 0.23, 0.33"


def test_register_may_be_called_again(version):
    register()
    executor = sys.modules["vllm.v1.executor.abstract"].Executor
    once = executor.__init__
    register()
    assert executor.__init__ is once
    assert backend_enum().CUSTOM.get_path() == PATH and not backend_enum().TRITON_MLA.is_overridden()


def test_an_engine_takes_it_in_place_of_triton_mla_on_request(version, monkeypatch, caplog):
    """By a name that workers have without the variable, which a worker on another machine may not be given; asked for before or after register()."""
    register()
    monkeypatch.setenv("TRITON_MLA_DECODE_BACKEND", "triton_mla")
    engine_config = config(version, "TRITON_MLA")
    with caplog.at_level(logging.INFO):
        before_workers(engine_config)
    assert engine_config.attention_config.backend is backend_enum().CUSTOM and Decision.read(engine_config) is not None
    assert "TRITON_MLA_DECODE_BACKEND=triton_mla asks for it in place of TRITON_MLA" in caplog.text
    assert not backend_enum().TRITON_MLA.is_overridden()


def test_register_leaves_a_slot_that_another_package_has(version, caplog):
    sys.modules["vllm.v1.attention.backends.registry"].register_backend(backend_enum().CUSTOM, "other.Backend")
    register()
    assert backend_enum().CUSTOM.get_path() == "other.Backend"
    assert any("other.Backend" in line for line in warnings(caplog))


@pytest.mark.parametrize("unknown", ["0.24.0", "0.19.0", "nonsense"])
def test_register_does_nothing_in_an_unknown_version(monkeypatch, caplog, unknown):
    install(monkeypatch, "0.23.0")
    sys.modules["vllm"].__version__ = unknown
    register()
    assert not backend_enum().CUSTOM.is_overridden()
    assert any(unknown in line and "0.20 to 0.23, 0.33" in line for line in warnings(caplog))


def test_register_does_nothing_without_vllm(monkeypatch, caplog):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with caplog.at_level(logging.INFO):
        register()
    assert "not installed" in caplog.text


def test_register_refuses_a_bad_variable(version, monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "yes")
    with pytest.raises(ValueError, match="VLLM_BATCH_INVARIANT=yes"):
        register()


@pytest.mark.parametrize("backend, variables", [
    ("CUSTOM", {}), (None, {}), (None, {"TRITON_MLA_DECODE_BACKEND": "triton_mla"}), ("TRITON_MLA", {"TRITON_MLA_DECODE_BACKEND": "triton_mla"}),
], ids=["explicit", "automatic", "variable", "in_place"])
def test_the_cache_is_off_with_one_warning_however_the_backend_was_chosen(version, monkeypatch, caplog, backend, variables):
    for name, value in {"VLLM_BATCH_INVARIANT": "1", **variables}.items():
        monkeypatch.setenv(name, value)
    register()
    engine = FakeEngine(version, config(version, backend))
    assert engine.config.cache_config.enable_prefix_caching is False  # what the scheduler reads
    assert engine.worker_config.cache_config.enable_prefix_caching is False
    caching = [line for line in warnings(caplog) if line.startswith("prefix caching")]
    assert len(caching) == 1 and "VLLM_BATCH_INVARIANT=1" in caching[0] and "TRITON_MLA_PREFIX_CACHING=keep" in caching[0]
    assert Decision.read(engine.worker_config) == Decision("mha", "chunked", 1024, True)
    assert engine.config.attention_config.backend.name == engine.worker_config.attention_config.backend.name == "CUSTOM"


def test_keep_leaves_the_cache_on_and_takes_the_absorbed_form(version, monkeypatch, caplog):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    monkeypatch.setenv("TRITON_MLA_PREFIX_CACHING", "keep")
    register()
    with caplog.at_level(logging.INFO):
        engine = FakeEngine(version, config(version))
    assert engine.config.cache_config.enable_prefix_caching is True and Decision.read(engine.worker_config).prompt == "absorbed"
    assert "TRITON_MLA_PREFIX_CACHING=keep" in caplog.text
    assert not [line for line in warnings(caplog) if line.startswith("prefix caching")]


@pytest.mark.parametrize("own, said", [("0", "VLLM_BATCH_INVARIANT=1, but TRITON_MLA_BATCH_INVARIANT=0"), ("1", None)])
def test_flags_that_contradict_are_told(version, monkeypatch, caplog, own, said):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    monkeypatch.setenv("TRITON_MLA_BATCH_INVARIANT", own)
    register()
    engine_config = config(version)
    before_workers(engine_config)
    assert engine_config.cache_config.enable_prefix_caching is (own == "0")
    assert [line.startswith(said or "prefix caching") for line in warnings(caplog)] == [True]


def test_quantized_weights_are_told(version, monkeypatch, caplog):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    register()
    before_workers(config(version, model_config__quantization="fp8"))
    assert sum(line.startswith("quantization=fp8") for line in warnings(caplog)) == 1


@pytest.mark.parametrize("backend", [None, "FLASH_ATTN_MLA", "TRITON_MLA"])
def test_engines_that_do_not_want_it_are_left_alone(version, monkeypatch, backend):
    if backend is not None:
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    register()
    other = config(version, backend)
    before_workers(other)
    assert other.cache_config.enable_prefix_caching is True and other.additional_config == {}
    assert other.attention_config.backend == (backend and backend_enum()[backend])


def test_models_without_mla_are_left_alone(version, monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    register()
    for other in (config(version, None, model_config__use_mla=False), config(version, None, model_config=None)):
        before_workers(other)
        assert other.cache_config.enable_prefix_caching is True


REFUSED = [
    ({"cache_config__cache_dtype": "fp8"}, "fp8"),
    ({"cache_config__sliding_window": 128}, "sliding_window=128"),
    ({"model_config__hf_text_config__attn_logit_softcapping": 30.0}, "attn_logit_softcapping=30.0"),
    ({"model_config__hf_text_config__index_topk": 2048}, "sparse"),
    ({"model_config__hf_text_config__kv_lora_rank": 513}, "kv_lora_rank=513"),
    ({"parallel_config__decode_context_parallel_size": 2}, "decode_context_parallel_size=2"),
    ({"model_config__is_hybrid": True}, "no attention"),
    ({"additional_config": None}, "additional_config"),
]


@pytest.mark.parametrize("changes, reason", REFUSED, ids=[reason for _, reason in REFUSED])
def test_an_engine_that_cannot_be_served_is_refused_at_its_start(version, monkeypatch, caplog, changes, reason):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    register()
    named = config(version, "CUSTOM", **changes)
    with pytest.raises(UnsupportedError, match=reason):
        before_workers(named)
    assert named.cache_config.enable_prefix_caching is True
    automatic = config(version, None, **changes)
    before_workers(automatic)
    assert automatic.attention_config.backend is None and automatic.cache_config.enable_prefix_caching is True
    assert any(reason in line for line in warnings(caplog))


def test_settings_that_contradict_are_refused_even_without_a_name(version, monkeypatch):
    for name, value in {"VLLM_BATCH_INVARIANT": "1", "TRITON_MLA_PREFILL_PATH": "mha", **KEEP}.items():
        monkeypatch.setenv(name, value)
    register()
    with pytest.raises(UnsupportedError, match="TRITON_MLA_PREFILL_PATH=mha"):
        before_workers(config(version, None))


@pytest.mark.parametrize("changes", [{"parallel_config__use_ubatching": True}, {"kv_transfer_config": object()}])
def test_without_roles_every_token_takes_the_absorbed_form(version, monkeypatch, changes):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    register()
    engine_config = config(version, **changes)
    before_workers(engine_config)
    assert Decision.read(engine_config).prompt == "absorbed"


def test_the_second_runner_tells_roles_in_the_new_version_only(monkeypatch):
    for version, form in (("0.23.0", "absorbed"), ("0.33.0", "mha")):
        install(monkeypatch, version)
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
        register()
        engine_config = VllmConfig(backend_enum().CUSTOM, v2=True)
        before_workers(engine_config)
        assert Decision.read(engine_config).prompt == form


def test_a_layer_is_refused_for_what_the_kernels_have_not(version):
    register()
    from triton_mla.integrations.vllm.backend import TritonMLABackend

    impl = TritonMLABackend.get_impl_cls()
    for name, value in (("sliding_window", 128), ("logits_soft_cap", 30.0), ("alibi_slopes", [1.0]), ("kv_cache_dtype", "fp8"), ("indexer", object())):
        with pytest.raises(UnsupportedError, match=name):
            impl(**layer_arguments(**{name: value}))


def test_what_the_backend_declares(version):
    register()
    from triton_mla.integrations.vllm.backend import TritonMLABackend as backend

    assert (backend.__module__, backend.__qualname__) == tuple(PATH.rsplit(".", 1))
    assert backend.get_name() == "CUSTOM" and backend.supports_batch_invariance()
    assert [size.base for size in backend.get_supported_kernel_block_sizes()] == [16] and backend.get_preferred_block_size(16) == 64
    assert backend.supports_block_size(None) and backend.supports_block_size(48) and not backend.supports_block_size(24)
    assert {576, 320, 512} <= set(backend.get_supported_head_sizes()) and 577 not in backend.get_supported_head_sizes()
    assert "fp8" not in backend.supported_kv_cache_dtypes and torch.bfloat16 in backend.supported_dtypes
    assert backend.supports_compute_capability(None)
    assert backend.get_builder_cls()._cudagraph_support.name == "UNIFORM_BATCH"


def test_projections_take_one_kernel_under_the_flag(version, monkeypatch, caplog):
    for flag, left in (("1", False), ("0", True)):
        install(monkeypatch, version)
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", flag)
        register()
        with caplog.at_level(logging.INFO):
            runner = FakeEngine(version, config(version)).runner
        drafter = runner.drafter or runner.speculator
        assert runner.model[1]._use_min_latency_gemm is left and drafter.model[0]._use_min_latency_gemm is left
        assert runner.model[2].allow_dsv3_router_gemm is runner.model[2].allow_cublas_router_gemm is left
    assert sum("kernels for few tokens" in line and " 3 layers" in line for line in caplog.messages) == 1


def test_products_are_replaced_where_they_are_proven_only(monkeypatch):
    install(monkeypatch, "0.23.0")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    monkeypatch.setattr(sys.modules["vllm.platforms"].current_platform, "get_device_capability", lambda: SimpleNamespace(major=10, minor=0))
    register()
    layers = sys.modules["vllm.model_executor.layers.batch_invariant"]
    own = layers.matmul_persistent
    FakeEngine("0.23.0", config("0.23.0"))
    assert layers.matmul_persistent is own


@pytest.mark.parametrize("variable, invariant", [("VLLM_BATCH_INVARIANT", True), ("TRITON_MLA_BATCH_INVARIANT", False)])
def test_linear_layers_take_the_products_of_this_package_under_the_flag_of_vllm(monkeypatch, caplog, variable, invariant):
    install(monkeypatch, "0.23.0")
    monkeypatch.setenv(variable, "1")
    sys.modules["vllm.envs"].VLLM_BATCH_INVARIANT = invariant
    register()
    with caplog.at_level(logging.INFO):
        FakeEngine("0.23.0", config("0.23.0"))
    layers = sys.modules["vllm.model_executor.layers.batch_invariant"]
    x, weight, bias = (eighths(torch.Generator().manual_seed(3), *shape) for shape in ((5, 32), (16, 32), (16,)))
    if not invariant:
        with pytest.raises(AssertionError, match="vLLM's own product"):
            layers.linear_batch_invariant(x, weight)
        return
    assert torch.equal(layers.linear_batch_invariant(x, weight), linear(x, weight))
    assert torch.equal(layers.matmul_persistent(x, weight.t(), bias), linear(x, weight, bias))
    compiled = torch.compile(layers.linear_batch_invariant, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x, weight), linear(x, weight))
    assert sum("linear layers" in line for line in caplog.messages) == 1


def test_linear_layers_keep_a_product_of_another_form(monkeypatch, version):
    """0.33 has none by that name, and one with other arguments is not replaced."""
    layers = sys.modules.get("vllm.model_executor.layers.batch_invariant")
    other = None
    if layers is not None:
        other = layers.matmul_persistent = lambda a, b, bias=None, out=None: a @ b
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    register()
    FakeEngine(version, config(version))
    assert layers is None or layers.matmul_persistent is other


def test_it_is_named_where_a_kind_of_layer_has_a_backend_of_its_own(monkeypatch):
    install(monkeypatch, "0.33.0")
    register()
    monkeypatch.setenv("TRITON_MLA_DECODE_BACKEND", "triton_mla")
    kinds = {"mla_attention": backend_enum().TRITON_MLA, "attention": backend_enum().FLASH_ATTN_MLA}
    engine_config = config("0.33.0", None, attention_config__backend_per_kind=kinds)
    before_workers(engine_config)
    assert adapter.named_backend(engine_config) == "CUSTOM" and engine_config.attention_config.backend is None
    assert engine_config.attention_config.backend_per_kind["attention"] is backend_enum().FLASH_ATTN_MLA
    assert kinds["mla_attention"] is backend_enum().TRITON_MLA, "the caller's own"


class Layer(torch.nn.Module):
    """One of a loaded model; since 0.33 its weights are parameters."""

    def __init__(self, impl, dequantised, parameters=False):
        super().__init__()
        self.impl, weight = impl, eighths(torch.Generator().manual_seed(7), HEADS * (NOPE + VALUE), RANK)
        heads = (weight.t().contiguous() if dequantised else weight.t()).reshape(RANK, HEADS, NOPE + VALUE)
        keys, values = heads.split([NOPE, VALUE], dim=-1)
        self.W_UK_T, self.W_UV = keys.permute(1, 2, 0), values.transpose(0, 1)
        if parameters:
            self.W_UK_T, self.W_UV = (torch.nn.Parameter(weight, requires_grad=False) for weight in (vars(self).pop(name) for name in ("W_UK_T", "W_UV")))


@pytest.mark.parametrize("dequantised", [False, True])
def test_weights_are_packed_once_when_they_have_been_loaded(version, dequantised):
    register()
    runner = FakeEngine(version, config(version)).runner
    from triton_mla.integrations.vllm.backend import TritonMLABackend

    impl = TritonMLABackend.get_impl_cls()(**layer_arguments())
    layer = Layer(impl, dequantised, parameters=version == "0.33.0")
    before = [weight.clone() for weight in (layer.W_UK_T, layer.W_UV)]
    packed, at = impl._w_kv_b(layer), layer.W_UK_T.data_ptr()
    assert (packed.data_ptr() == at) is not dequantised
    loaded(runner, layer)
    assert torch.equal(layer.W_UK_T, before[0]) and torch.equal(layer.W_UV, before[1])
    assert torch.equal(impl._w_kv_b(layer), packed)
    moved = dequantised and version != "0.33.0"
    assert (layer.W_UK_T.data_ptr() != at) is moved
    assert (impl._w_kv_b(layer).data_ptr() == layer.W_UK_T.data_ptr()) is (moved or not dequantised)


def test_a_worker_whose_layers_have_another_attention_does_not_start(version):
    register()
    runner = FakeEngine(version, config(version)).runner
    with pytest.raises(RuntimeError, match="layer 0 has the attention of SimpleNamespace"):
        loaded(runner, Layer(SimpleNamespace(), False))


def loaded(runner, layer):
    runner.get_model = lambda: torch.nn.Sequential(layer)
    runner.load_model()


def test_an_idle_rank_has_no_prompt(monkeypatch):
    """Its dummy step has a row where the batch has none, and the row's prompt would be of a request that has ended."""
    install(monkeypatch, "0.23.0")
    register()
    runner = FakeEngine("0.23.0", VllmConfig(backend_enum().CUSTOM)).runner
    runner.tell([10, 20], [10, 21])
    for running, lens in ((2, [10, 20]), (1, [10, 0]), (0, [0, 0])):
        runner.input_batch.num_reqs = running
        assert adapter.prompt_lens(runner, SimpleNamespace(num_reqs=2)).tolist() == lens
    assert runner.input_batch.num_prompt_tokens[:2].tolist() == [10, 20]


def test_a_prompt_of_one_token_replays_no_graph_of_decodes(monkeypatch):
    install(monkeypatch, "0.23.0")
    register()
    engine_config = VllmConfig(backend_enum().CUSTOM)
    runner = FakeEngine("0.23.0", engine_config).runner
    assert isinstance(runner, RunnerV1)
    runner.tell([10, 20], [10, 21])
    assert runner._determine_batch_execution_and_padding(num_tokens=2) is True
    runner.tell([10, 20], [10, 19])
    assert runner._determine_batch_execution_and_padding(num_tokens=2) is False
    assert runner._determine_batch_execution_and_padding(num_tokens=2, force_uniform_decode=True) is True  # a capture


def test_a_prompt_of_one_token_replays_no_graph_of_decodes_in_the_second_runner(monkeypatch):
    install(monkeypatch, "0.33.0")
    register()
    runner = FakeEngine("0.33.0", VllmConfig(backend_enum().CUSTOM, v2=True, new=True)).runner
    assert isinstance(runner, RunnerV2) and runner.gather_batch_req_state(None, False)[1] == 1
    runner.has_prefill = True
    state, uniform = runner.gather_batch_req_state(None, False)
    assert uniform is None and state.decode_graph_eligible is False
