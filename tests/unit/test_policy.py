"""What resolve does to an engine's cache config, and the form that each token takes."""

import dataclasses
import json
import logging
from types import SimpleNamespace

import pytest
import torch

from triton_mla import backends, policy
from triton_mla.backends import BACKENDS
from triton_mla.capabilities import ABSORBED, DECODE, MHA, PHASES, PREFILL
from triton_mla.config import VARIABLES, Settings
from triton_mla.dims import MLADims
from triton_mla.errors import UnsupportedError
from triton_mla.paths import REFUSED, PathRule
from triton_mla.policy import explain, explain_lines, resolve

DIMS = MLADims(num_heads=16)
INVARIANT = Settings(batch_invariant=True)
KEEP = Settings(batch_invariant=True, prefix_caching="keep")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for variable in VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.DEBUG, logger="triton_mla")
    return caplog


def cache_config(caching=True, **values):
    return SimpleNamespace(enable_prefix_caching=caching, **{"block_size": 16, **values})


def run(config, settings=INVARIANT, **values):
    return resolve(config, settings=settings, **{"dims": DIMS, "arch": "sm_90", **values})


def warnings(log):
    return [record.getMessage() for record in log.records if record.levelno >= logging.WARNING]


# The three ways in which a backend comes to be selected.
WAYS = {
    "explicit": ({}, {"decode_backend": "triton_mla", "prefill_backend": "triton_mla"}),
    "automatic": ({}, {}),
    "environment": (
        {"TRITON_MLA_DECODE_BACKEND": "triton_mla", "TRITON_MLA_PREFILL_BACKEND": "triton_mla"},
        {},
    ),
}
ORIGINS = {"explicit": "argument", "automatic": "automatic", "environment": "TRITON_MLA_DECODE_BACKEND"}


@pytest.fixture(params=list(WAYS))
def way(request, monkeypatch):
    env, values = WAYS[request.param]
    for name, value in env.items():
        monkeypatch.setenv(name, value)

    def resolve_this_way(config, **more):
        selection = resolve(config, dims=DIMS, arch="sm_90", **values, **more)
        assert (selection.prefill, selection.decode) == ("triton_mla", "triton_mla")
        assert selection.origins["decode"] == ORIGINS[request.param]
        return selection

    return resolve_this_way


@pytest.mark.parametrize("variable", ["VLLM_BATCH_INVARIANT", "TRITON_MLA_BATCH_INVARIANT"])
@pytest.mark.parametrize("caching", [True, None])
def test_prefix_caching_is_turned_off_on_that_object_with_one_warning(way, variable, caching, monkeypatch, log):
    monkeypatch.setenv(variable, "1")
    config = cache_config(caching)
    selection = way(config)
    assert config.enable_prefix_caching is False
    assert config.block_size == 16
    (warning,) = warnings(log)
    for word in ("turned off", "triton_mla", f"{variable}=1", "TRITON_MLA_PREFIX_CACHING=keep"):
        assert word in warning
    assert selection.prefix_caching in warning


def test_a_second_call_does_not_warn_again(way, monkeypatch, log):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    config = cache_config()
    way(config)
    way(config)
    assert len(warnings(log)) == 1
    other = cache_config()
    way(other)
    assert len(warnings(log)) == 2 and other.enable_prefix_caching is False


def test_already_off_is_said_at_debug(way, monkeypatch, log):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    config = cache_config(False)
    selection = way(config)
    assert config.enable_prefix_caching is False and not warnings(log)
    (said,) = [record for record in log.records if "already off" in record.getMessage()]
    assert said.levelno == logging.DEBUG
    assert "already off" in selection.prefix_caching


def test_keep_leaves_it_on_and_says_so(way, monkeypatch, log):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    monkeypatch.setenv("TRITON_MLA_PREFIX_CACHING", "keep")
    config = cache_config()
    selection = way(config, token_roles=True)
    assert config.enable_prefix_caching is True and not warnings(log)
    assert selection.prefill_form == ABSORBED
    said = [record.getMessage() for record in log.records if record.levelno == logging.INFO]
    assert any("left as it is: TRITON_MLA_PREFIX_CACHING=keep" in text for text in said)
    assert any(text.startswith("prefill form: absorbed: TRITON_MLA_PREFIX_CACHING=keep") for text in said)


@pytest.mark.parametrize("caching", [True, None, False])
@pytest.mark.parametrize("keep", ["auto", "keep"])
def test_flag_off_touches_nothing(way, caching, keep, monkeypatch, log):
    monkeypatch.setenv("TRITON_MLA_PREFIX_CACHING", keep)
    for block_size in (None, 16, 64):
        config = cache_config(caching, block_size=block_size)
        before = vars(config).copy()
        selection = way(config)
        assert vars(config) == before and not warnings(log)
        assert "not touched" in selection.prefix_caching


def test_flag_argument_wins_over_the_environment(monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    config = cache_config()
    run(config, Settings.from_env(batch_invariant=False))
    assert config.enable_prefix_caching is True


def test_bad_flag_is_an_error_that_names_the_variable(monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "yes!")
    config = cache_config()
    with pytest.raises(ValueError, match="VLLM_BATCH_INVARIANT=yes!"):
        resolve(config, dims=DIMS, arch="sm_90")
    assert config.enable_prefix_caching is True


def test_given_settings_leave_the_environment_unread(monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "yes!")
    assert run(cache_config(), Settings()).decode == "triton_mla"


@dataclasses.dataclass(frozen=True)
class Frozen:
    enable_prefix_caching: bool | None = True
    block_size: int = 16


class NoSetter:
    block_size = 16
    enable_prefix_caching = property(lambda self: True)


class DeafSetter:
    block_size = 16

    @property
    def enable_prefix_caching(self):
        return True

    @enable_prefix_caching.setter
    def enable_prefix_caching(self, value):
        pass


class Slots:
    __slots__ = ("block_size",)


@pytest.mark.parametrize("factory", [Frozen, NoSetter, DeafSetter])
def test_an_object_that_cannot_be_changed_is_an_error(way, factory, monkeypatch, log):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(ValueError, match=f"cache_config.enable_prefix_caching of type {factory.__name__}"):
        way(factory())
    assert not warnings(log)


@pytest.mark.parametrize("config", [None, object(), {"enable_prefix_caching": True}, SimpleNamespace(), Slots()])
def test_a_foreign_object_is_an_error(config):
    with pytest.raises(ValueError, match=f"{type(config).__name__} has no enable_prefix_caching"):
        run(config)
    assert run(config, Settings()).decode == "triton_mla"


def test_a_frozen_object_that_needs_no_change_is_fine():
    assert "already off" in run(Frozen(enable_prefix_caching=False)).prefix_caching
    assert run(Frozen(), KEEP).decode == "triton_mla"
    assert run(Frozen(), Settings()).decode == "triton_mla"


def test_nothing_happens_when_selection_fails(log):
    config = cache_config(block_size=None)
    before = vars(config).copy()
    for values in ({"decode_backend": "flashmla"}, {"arch": "cpu"}, {"decode_backend": "no_such"}):
        with pytest.raises(ValueError):
            run(config, **values)
    assert vars(config) == before and not warnings(log)


def test_the_changes_are_made_together_or_not_at_all(monkeypatch):
    class FixedCaching(DeafSetter):
        def __init__(self):
            self.block_size = None

    invariant = dataclasses.replace(backends.backend_named("flashmla"), invariant=True, phases=PHASES)
    monkeypatch.setattr(backends, "BACKENDS", tuple(invariant if row.name == "flashmla" else row for row in BACKENDS))
    config = FixedCaching()
    with pytest.raises(ValueError, match="the write had no effect"):
        run(config, decode_backend=invariant.name)
    assert config.block_size is None
    config = cache_config(block_size=None)
    assert run(config, decode_backend=invariant.name).page_size == 64
    assert (config.block_size, config.enable_prefix_caching) == (64, False)


@pytest.fixture
def invariant_peer(monkeypatch):
    """A peer that is invariant and recomputes its own tokens."""
    rows = [dataclasses.replace(row, invariant=True) if row.name == "flashinfer_mla" else row for row in BACKENDS]
    monkeypatch.setattr(backends, "BACKENDS", tuple(rows))
    return "flashinfer_mla"


def test_invariant_peer_gets_prefix_caching_off_too(invariant_peer, log):
    config = cache_config()
    selection = run(config, decode_backend=invariant_peer)
    assert (selection.prefill, selection.decode) == (invariant_peer, invariant_peer)
    assert config.enable_prefix_caching is False
    (warning,) = warnings(log)
    assert "decode backend flashinfer_mla" in warning and "prefill backend flashinfer_mla" in warning


@pytest.mark.parametrize("roles", [False, True])
def test_a_decode_backend_that_cannot_recompute_its_tokens_is_not_invariant(roles):
    config = cache_config()
    with pytest.raises(UnsupportedError) as caught:
        run(config, decode_backend="vllm_triton_mla", token_roles=roles)
    (reason,) = caught.value.reasons["vllm_triton_mla"]
    assert "generated tokens recomputed after a preemption would change backend" in reason
    assert config.enable_prefix_caching is True
    assert run(config, Settings(), decode_backend="vllm_triton_mla").prefill == "triton_mla"


@pytest.mark.parametrize("roles", [False, True])
def test_two_absorbed_backends_are_refused_in_invariant_mode(invariant_peer, roles):
    """Without roles all recomputed tokens go through prefill; with them the rule still gives both roles one form."""
    with pytest.raises(UnsupportedError) as caught:
        run(cache_config(), decode_backend="triton_mla", prefill_backend=invariant_peer, token_roles=roles)
    assert "not decode's triton_mla: recomputed generated tokens would change backend" in str(caught.value)
    assert run(cache_config(), Settings(), decode_backend="triton_mla", prefill_backend=invariant_peer).prefill == invariant_peer


def test_prompts_of_the_mha_form_may_stand_beside_another_decode(invariant_peer):
    selection = run(cache_config(), decode_backend=invariant_peer, token_roles=True)
    assert (selection.prefill, selection.decode) == ("triton_mla_mha", invariant_peer)
    assert selection.verdicts[DECODE][invariant_peer] == selection.verdicts[PREFILL]["triton_mla_mha"] == ()


@pytest.mark.parametrize("name", [row.name for row in BACKENDS if row.name != "triton_mla"])
def test_keep_is_refused_for_any_other_backend(name):
    config = cache_config(block_size=None)
    with pytest.raises(UnsupportedError) as caught:
        run(config, KEEP, decode_backend=name)
    assert any("prefix caching cannot be kept" in reason for reason in caught.value.reasons[name])
    assert config.enable_prefix_caching is True


def test_keep_with_an_explicit_mha_is_refused_with_the_reason():
    config = cache_config()
    with pytest.raises(UnsupportedError) as caught:
        run(config, dataclasses.replace(KEEP, prefill_path="mha"), token_roles=True)
    assert "prefill_path=mha (argument) is refused" in str(caught.value)
    (reason,) = caught.value.reasons["mha"]
    assert "prefix_caching=keep" in reason
    assert config.enable_prefix_caching is True


def test_the_mha_form_is_this_packages_own_backend(log):
    selection = run(cache_config(), Settings(batch_invariant=True, prefill_path="mha"), token_roles=True)
    assert (selection.prefill, selection.decode, selection.prefill_form) == ("triton_mla_mha", "triton_mla", MHA)
    assert selection.paths == PathRule(MHA)
    (warning,) = warnings(log)
    assert "turned off" in warning and "triton_mla_mha" in warning
    assert any("prefill form: mha: prefill_path=mha" in record.getMessage() for record in log.records)


def test_auto_takes_the_mha_form_with_roles_only():
    assert run(cache_config(), token_roles=True).prefill == "triton_mla_mha"
    selection = run(cache_config())
    assert selection.prefill == "triton_mla" and selection.paths == PathRule(ABSORBED)
    assert "roles of tokens are not supplied" in explain(selection)["forms"]["reason"]


def test_auto_falls_back_where_the_mha_form_has_no_kernel():
    dims = MLADims(num_heads=16, v_head_dim=24)
    selection = run(cache_config(), dims=dims, token_roles=True)
    assert selection.prefill == "triton_mla" and selection.prefill_form == ABSORBED
    assert "no capable backend has the mha form" in selection.reasons[PREFILL]
    with pytest.raises(UnsupportedError, match="v_head_dim=24"):
        run(cache_config(), Settings(prefill_path="mha"), dims=dims, token_roles=True)


@pytest.mark.parametrize(
    ("invariant", "whole", "rule"),
    [
        (True, False, PathRule(ABSORBED, REFUSED)),
        (True, True, PathRule(MHA, REFUSED)),
        (False, False, PathRule(MHA, ABSORBED)),
    ],
)
def test_without_the_chunked_prefix(invariant, whole, rule):
    settings = Settings(batch_invariant=invariant, chunked_prefix=False)
    selection = run(cache_config(), settings, token_roles=True, whole_prompts=whole)
    assert selection.paths == rule
    data = explain(selection)["forms"]
    assert data["batch_invariant"] == invariant and "chunked_prefix=0" in data["reason"]
    assert data["rule"] == str(rule)


@pytest.mark.parametrize("flag", [False, True])
def test_page_size_is_adjusted_where_the_config_leaves_it_open(flag, log, monkeypatch):
    rows = [dataclasses.replace(row, invariant=True, phases=PHASES) if row.name == "flashmla" else row for row in BACKENDS]
    monkeypatch.setattr(backends, "BACKENDS", tuple(rows))
    for config in (cache_config(block_size=None), cache_config(block_size=16, user_specified_block_size=False)):
        old = config.block_size
        log.clear()
        selection = run(config, Settings(batch_invariant=flag), decode_backend="flashmla")
        assert config.block_size == selection.page_size == 64
        (said,) = [r.getMessage() for r in log.records if "block_size" in r.getMessage()]
        assert f"block_size changed from {old} to 64: flashmla" in said
        assert len(warnings(log)) == flag


@pytest.mark.parametrize("more", [{}, {"user_specified_block_size": True}])
def test_page_size_set_by_the_user_is_refused(more):
    config = cache_config(block_size=16, **more)
    with pytest.raises(UnsupportedError, match="page size=16 is not supported .allowed: 64.; it was set explicitly"):
        run(config, Settings(), decode_backend="flashmla")
    assert config.block_size == 16


@pytest.mark.parametrize("value", [0, -16, True, "16", 16.0])
def test_bad_block_size(value):
    with pytest.raises(ValueError, match="cache_config.block_size"):
        run(cache_config(block_size=value))


@pytest.mark.parametrize(
    ("cache_dtype", "dtype", "request_dtypes"),
    [
        (None, None, ("bfloat16", "bfloat16")),
        ("auto", torch.float16, ("float16", "float16")),
        ("bf16", None, ("bfloat16", "bfloat16")),
        ("half", None, ("float16", "float16")),
        ("float16", "fp16", ("float16", "float16")),
    ],
)
def test_dtypes_of_the_request(cache_dtype, dtype, request_dtypes):
    request = run(cache_config(cache_dtype=cache_dtype), dtype=dtype).request
    assert (request.dtype, request.kv_cache_dtype) == request_dtypes


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
def test_fp8_cache_is_not_supported_yet(name):
    with pytest.raises(UnsupportedError, match="kv_cache_dtype=fp8_e4m3 is not supported yet"):
        run(cache_config(cache_dtype=name), decode_backend="triton_mla")


def test_unknown_and_unequal_dtypes():
    with pytest.raises(ValueError, match="cache_config.cache_dtype=int4"):
        run(cache_config(cache_dtype="int4"))
    with pytest.raises(UnsupportedError, match="kv_cache_dtype=float16 is not the query's dtype, bfloat16"):
        run(cache_config(cache_dtype="float16"), dtype="bf16")


def test_dims_reach_the_request():
    with pytest.raises(UnsupportedError, match="kv_lora_rank=500"):
        run(cache_config(), dims=MLADims(num_heads=16, kv_lora_rank=500))


def test_arch_is_planned_without_a_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("looked at a device"))
    assert run(cache_config(), arch="sm_100").request.arch == "sm_100"


@pytest.mark.parametrize(("interpreted", "arch"), [(True, "interpreter"), (False, "cpu")])
def test_the_cpu_needs_the_interpreter(interpreted, arch, monkeypatch):
    monkeypatch.setattr(policy, "INTERPRETED", interpreted)
    selection = run(cache_config(), Settings(), arch=None, device="cpu")
    assert selection.request.arch == arch
    assert selection.decode == ("triton_mla" if interpreted else "torch_reference")


def test_the_device_is_by_default_the_current_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(policy, "INTERPRETED", True)
    assert run(cache_config(), arch=None).request.arch == "interpreter"


def test_another_kind_of_device_is_refused_with_reasons():
    with pytest.raises(UnsupportedError, match="triton_mla: architecture mps is not supported"):
        run(cache_config(), arch=None, device="mps")


class Unreadable:
    """An engine's config with a getter that fails."""

    block_size = 16

    @property
    def enable_prefix_caching(self):
        raise RuntimeError("not initialised")


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"arch": None, "device": "foo"}, "device='foo'"),
        ({"arch": None, "device": 5.5}, "device=5.5"),
        ({"arch": None, "device": "cuda"}, "device='cuda'"),
        ({"arch": None, "device": 5}, "device=5"),
        ({"arch": ""}, "arch='' must be the name of an architecture, such as sm_90, or None"),
        ({"arch": 90}, "arch=90 must be the name of an architecture"),
        ({"dims": None}, "dims=None must be of type MLADims"),
        ({"token_roles": "no"}, "token_roles='no' must be True or False"),
        ({"token_roles": None}, "token_roles=None must be True or False"),
        ({"whole_prompts": 0}, "whole_prompts=0 must be True or False"),
        ({"settings": {"batch_invariant": True}}, "settings={'batch_invariant': True} must be of type Settings"),
        ({"config": Unreadable()}, "cache_config.enable_prefix_caching of type Unreadable cannot be read: not initialised"),
    ],
)
def test_bad_arguments_are_named(values, word, monkeypatch):
    def missing(device):
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(policy, "arch_of", missing)
    with pytest.raises(ValueError) as caught:
        run(**{"config": cache_config(), **values})
    assert word in str(caught.value)


def test_explain_tells_what_pages_the_engine_may_choose():
    lines = explain_lines(run(cache_config(block_size=None), Settings()))
    assert "page size: left to the engine; triton_mla takes 1 or a multiple of 16" in lines


def test_explain_is_json_and_tells_every_decision():
    selection = run(cache_config(block_size=None), Settings(), decode_backend="flashmla")
    data = json.loads(json.dumps(explain(selection)))
    assert data["settings"]["decode_backend"] == {"value": "flashmla", "origin": "argument"}
    assert data["settings"]["kv_split"]["origin"] == "default"
    assert set(data["backends"]) == {row.name for row in BACKENDS}
    assert data["backends"]["cutlass_mla"]["reasons"]["decode"]
    assert data["backends"]["flashmla"]["reasons"]["decode"] == []
    assert data["selection"]["decode"]["backend"] == "flashmla"
    assert data["selection"]["decode"]["origin"] == "argument"
    assert data["selection"]["prefill"] == {
        "backend": "triton_mla",
        "origin": "automatic",
        "reason": selection.reasons["prefill"],
    }
    assert data["forms"]["prompt"] == data["forms"]["generated"] == "absorbed"
    assert data["page_size"] == 64
    assert data["adjustments"][0]["old"] is None and data["adjustments"][0]["new"] == 64
    assert "not touched" in data["prefix_caching"]


def test_explain_lines():
    selection = run(cache_config(), Settings.from_env({"VLLM_BATCH_INVARIANT": "1"}))
    text = "\n".join(explain_lines(selection))
    assert "batch_invariant = True  (VLLM_BATCH_INVARIANT)" in text
    assert "flashmla: it is not batch-invariant" in text
    assert "-> triton_mla (automatic)" in text
    assert f"prefix caching: {selection.prefix_caching}" in text
    assert explain_lines(Settings()) == text.replace("True  (VLLM_BATCH_INVARIANT)", "False  (default)").split("\n")[:8]
    assert explain(Settings()) == {"settings": Settings().as_dict()}
