"""Settings: parsing, precedence, origins, and the table of variables."""

import dataclasses
import logging
import pickle

import pytest
import torch

from triton_mla import config
from triton_mla.config import VARIABLES, Settings, normalize_dtype
from triton_mla.tuning import DEFAULT_ORDER

FIELDS = [item.name for item in dataclasses.fields(Settings) if item.name != "origins"]


def test_defaults_and_their_origin():
    settings = Settings.from_env({})
    assert settings == Settings()
    assert settings.order == DEFAULT_ORDER
    assert {settings.origin(name) for name in FIELDS} == {"default"}


def test_table_covers_every_field_and_states_the_defaults():
    assert {variable.field for variable in VARIABLES} == set(FIELDS)
    assert len({variable.name for variable in VARIABLES}) == len(VARIABLES)
    for variable in VARIABLES:
        settings = Settings.from_env({variable.name: variable.default})
        assert settings == Settings()
        assert settings.origin(variable.field) == variable.name
        assert variable.meaning.endswith(".")


@pytest.mark.parametrize("name", ["TRITON_MLA_BATCH_INVARIANT", "VLLM_BATCH_INVARIANT"])
@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("true", True), ("TRUE", True), ("0", False), ("False", False)]
)
def test_flag_spellings(name, text, value):
    settings = Settings.from_env({name: text})
    assert settings.batch_invariant is value
    assert settings.origin("batch_invariant") == name


@pytest.mark.parametrize("name", ["TRITON_MLA_BATCH_INVARIANT", "VLLM_BATCH_INVARIANT", "TRITON_MLA_CHUNKED_PREFIX"])
@pytest.mark.parametrize("text", ["yes!", "", " 1", "2", "on", "None", "1.0"])
def test_bad_flag_names_the_variable_its_value_and_what_is_allowed(name, text):
    with pytest.raises(ValueError) as caught:
        Settings.from_env({name: text})
    assert f"{name}={text}: allowed are 1, true, 0, false" == str(caught.value)


def test_precedence_of_the_flag():
    both = {"VLLM_BATCH_INVARIANT": "1", "TRITON_MLA_BATCH_INVARIANT": "0"}
    settings = Settings.from_env(both)
    assert not settings.batch_invariant and settings.origin("batch_invariant") == "TRITON_MLA_BATCH_INVARIANT"
    settings = Settings.from_env(both, batch_invariant=True)
    assert settings.batch_invariant and settings.origin("batch_invariant") == "argument"
    settings = Settings.from_env(both, batch_invariant=None)
    assert settings.origin("batch_invariant") == "TRITON_MLA_BATCH_INVARIANT"


def test_an_argument_equal_to_the_default_is_an_argument():
    settings = Settings.from_env({"VLLM_BATCH_INVARIANT": "1"}, batch_invariant=False)
    assert settings.origin("batch_invariant") == "argument"


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("TRITON_MLA_PREFIX_CACHING", "keep", "prefix_caching", "keep"),
        ("TRITON_MLA_PREFIX_CACHING", "KEEP", "prefix_caching", "keep"),
        ("TRITON_MLA_PREFILL_PATH", "mha", "prefill_path", "mha"),
        ("TRITON_MLA_PREFILL_PATH", "absorbed", "prefill_path", "absorbed"),
        ("TRITON_MLA_PREFILL_BACKEND", "triton_mla", "prefill_backend", "triton_mla"),
        ("TRITON_MLA_DECODE_BACKEND", "flashmla", "decode_backend", "flashmla"),
        ("TRITON_MLA_CHUNKED_PREFIX", "0", "chunked_prefix", False),
        ("TRITON_MLA_KV_SPLIT", "4096", "kv_split", 4096),
    ],
)
def test_other_variables(name, text, field, value):
    settings = Settings.from_env({name: text})
    assert getattr(settings, field) == value
    assert settings.origin(field) == name
    assert [other for other in FIELDS if settings.origin(other) != "default"] == [field]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("TRITON_MLA_PREFIX_CACHING", "off"),
        ("TRITON_MLA_PREFILL_PATH", "fast"),
        ("TRITON_MLA_PREFILL_BACKEND", ""),
        ("TRITON_MLA_KV_SPLIT", "0"),
        ("TRITON_MLA_KV_SPLIT", "-1"),
        ("TRITON_MLA_KV_SPLIT", "3.5"),
        ("TRITON_MLA_KV_SPLIT", "100"),
        ("TRITON_MLA_KV_SPLIT", "many"),
    ],
)
def test_bad_values_name_the_variable(name, text):
    with pytest.raises(ValueError, match=f"^{name}={text}: "):
        Settings.from_env({name: text})


@pytest.mark.parametrize("value", [0, -1, 3.5, "256", True, None, 100])
def test_bad_kv_split_argument(value):
    with pytest.raises(ValueError, match="kv_split"):
        Settings(kv_split=value)


@pytest.mark.parametrize(
    "values",
    [
        {"batch_invariant": "yes!"},
        {"batch_invariant": 2},
        {"prefix_caching": True},
        {"prefill_path": "fast"},
        {"decode_backend": 3},
        {"chunked_prefix": None},
    ],
)
def test_bad_argument_names_the_field(values):
    [(name, value)] = values.items()
    with pytest.raises(ValueError, match=f"^{name}={value}: allowed are "):
        Settings(**values)


def test_kv_split_reaches_the_reduction_order():
    assert Settings(kv_split=4096).order == dataclasses.replace(DEFAULT_ORDER, kv_split=4096)


def test_the_environment_is_the_processes_by_default(monkeypatch):
    for variable in VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    assert Settings.from_env() == Settings()
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert Settings.from_env().batch_invariant


def test_direct_settings_count_as_arguments():
    settings = Settings(batch_invariant=True)
    assert settings.origin("batch_invariant") == "argument"
    assert settings.origin("kv_split") == "default"


def test_a_direct_value_equal_to_the_default_is_an_argument():
    settings = Settings(kv_split=DEFAULT_ORDER.kv_split, batch_invariant=False)
    assert [name for name in FIELDS if settings.origin(name) == "argument"] == ["batch_invariant", "kv_split"]
    assert settings == Settings() and hash(settings) == hash(Settings())
    assert dataclasses.replace(Settings(), prefill_path="auto").origin("kv_split") == "default"


@pytest.mark.parametrize("value", [None, ["kv_split"]])
def test_bad_origins(value):
    with pytest.raises(ValueError, match="^origins="):
        Settings(origins=value)


@pytest.mark.parametrize("text", ["AUTO", "Auto"])
def test_auto_in_any_case(text):
    assert Settings(decode_backend=text, prefill_backend=text, prefill_path=text, prefix_caching=text) == Settings()
    assert Settings.from_env({"TRITON_MLA_DECODE_BACKEND": text}) == Settings()


def test_messages_name_the_value_once():
    for make, where in [
        (lambda: Settings(kv_split=0), "kv_split"),
        (lambda: Settings.from_env({"TRITON_MLA_KV_SPLIT": "0"}), "TRITON_MLA_KV_SPLIT"),
    ]:
        with pytest.raises(ValueError) as caught:
            make()
        assert str(caught.value) == f"{where}=0: must be a positive int, a multiple of block_n=64"


def test_a_number_of_thousands_of_digits_names_the_variable():
    with pytest.raises(ValueError) as caught:
        Settings.from_env({"TRITON_MLA_KV_SPLIT": "6" * 5000})
    message = str(caught.value)
    assert message.startswith("TRITON_MLA_KV_SPLIT=666") and "(5000 characters): must be" in message and len(message) < 200


def test_override_replaces_only_what_is_given():
    settings = Settings.from_env({"TRITON_MLA_DECODE_BACKEND": "flashmla", "VLLM_BATCH_INVARIANT": "1"})
    changed = settings.override(decode_backend="triton_mla", prefill_backend=None)
    assert (changed.decode_backend, changed.origin("decode_backend")) == ("triton_mla", "argument")
    assert (changed.prefill_backend, changed.origin("prefill_backend")) == ("auto", "default")
    assert changed.origin("batch_invariant") == "VLLM_BATCH_INVARIANT"
    assert settings.decode_backend == "flashmla"


def test_a_replaced_default_becomes_an_argument():
    changed = dataclasses.replace(Settings(), prefill_path="mha")
    assert changed.origin("prefill_path") == "argument"


def test_settings_are_frozen_and_survive_pickling():
    settings = Settings.from_env({"VLLM_BATCH_INVARIANT": "1"})
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.batch_invariant = False
    copy = pickle.loads(pickle.dumps(settings))
    assert copy == settings and copy.origins == settings.origins
    assert hash(copy) == hash(settings)


def test_describe():
    settings = Settings.from_env({"VLLM_BATCH_INVARIANT": "true"}, kv_split=4096)
    assert settings.describe("batch_invariant") == "VLLM_BATCH_INVARIANT=1"
    assert settings.describe("kv_split") == "kv_split=4096 (argument)"
    assert settings.describe("prefix_caching") == "prefix_caching=auto (default)"


def test_unknown_variables_are_logged_once_with_the_nearest_name(monkeypatch, caplog):
    monkeypatch.setattr(config, "_reported_unknown", set())
    env = {"TRITON_MLA_BATCH_INVARIENT": "1", "TRITON_MLA_KVSPLIT": "64", "TRITON_MLA": "x", "VLLM_OTHER": "x"}
    with caplog.at_level(logging.DEBUG):
        assert Settings.from_env(env) == Settings()
        Settings.from_env(env)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert "TRITON_MLA_BATCH_INVARIENT" in messages[0] and messages[0].endswith(" TRITON_MLA_BATCH_INVARIANT")
    assert "TRITON_MLA_KVSPLIT" in messages[1] and messages[1].endswith(" TRITON_MLA_KV_SPLIT")
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("triton_mla_batch_invariant", "TRITON_MLA_BATCH_INVARIANT"),
        ("Triton_MLA_KV_Split", "TRITON_MLA_KV_SPLIT"),
        ("TRITONMLA_BATCH_INVARIANT", "TRITON_MLA_BATCH_INVARIANT"),
        ("VLLM_BATCH_INVARIENT", "VLLM_BATCH_INVARIANT"),
        ("VLLM_BATCH_INVARIANCE", "VLLM_BATCH_INVARIANT"),
        ("VLLM_BATCHINVARIANT", "VLLM_BATCH_INVARIANT"),
        ("VLM_BATCH_INVARIANT", "VLLM_BATCH_INVARIANT"),
        ("vllm_batch_invariant", "VLLM_BATCH_INVARIANT"),
    ],
)
def test_a_misspelt_variable_is_logged_with_the_one_that_it_means(monkeypatch, caplog, name, meant):
    monkeypatch.setattr(config, "_reported_unknown", set())
    assert Settings.from_env({name: "1"}) == Settings()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == f"{name} is not a known variable and is ignored; the nearest known one is {meant}"


def test_variables_of_others_are_not_logged(monkeypatch, caplog):
    monkeypatch.setattr(config, "_reported_unknown", set())
    names = ("VLLM_LOG_BATCHSIZE_INTERVAL", "VLLM_KERNEL_OVERRIDE_BATCH_INVARIANT", "VLLM_ATTENTION_BACKEND", "VLLM_MLA_DISABLE", "TRITON_INTERPRET", "PATH")
    Settings.from_env(dict.fromkeys((*names, *(variable.name for variable in VARIABLES if variable.default == "0")), "1"))
    assert not caplog.records


@pytest.mark.parametrize("value", [1, None])
@pytest.mark.parametrize("name", ["foo", "origins", "batch_invarient"])
def test_an_unknown_setting_is_named_with_those_there_are(name, value):
    for make in (lambda **values: Settings.from_env({}, **values), Settings().override):
        with pytest.raises(ValueError) as caught:
            make(**{name: value})
        assert str(caught.value) == f"{name}: no such setting; allowed are {', '.join(FIELDS)}"


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("bf16", "bfloat16"),
        ("BFloat16", "bfloat16"),
        (torch.bfloat16, "bfloat16"),
        ("half", "float16"),
        ("fp16", "float16"),
        (torch.float16, "float16"),
        (torch.float32, "float32"),
        ("fp8", "fp8_e4m3"),
        ("fp8_e4m3", "fp8_e4m3"),
        (torch.float8_e4m3fn, "fp8_e4m3"),
        ("auto", "bfloat16"),
        (None, "bfloat16"),
    ],
)
def test_dtype_names(value, name):
    assert normalize_dtype(value) == name


def test_auto_dtype_follows_the_caller():
    assert normalize_dtype("AUTO", auto="float16") == "float16"
    assert normalize_dtype("bf16", auto="float16") == "bfloat16"


@pytest.mark.parametrize("value", ["fp8_e5m2", "int8", torch.float64, "", 16])
def test_unknown_dtypes_are_named(value):
    with pytest.raises(ValueError, match="^cache_dtype=.*: allowed are auto, "):
        normalize_dtype(value, argument="cache_dtype")


def test_an_environment_holds_strings():
    with pytest.raises(ValueError, match="TRITON_MLA_KV_SPLIT=256 must be a string"):
        Settings.from_env({"TRITON_MLA_KV_SPLIT": 256})
