"""The capability table and the choice of backends."""

import dataclasses
import logging

import pytest

from triton_mla import backends, capabilities
from triton_mla.backends import BACKENDS, Request, Sizes, backend_named, select
from triton_mla.capabilities import ABSORBED, DECODE, MHA, PHASES, PREFILL
from triton_mla.config import Settings
from triton_mla.dims import check_dims, check_head_dims, check_page_size
from triton_mla.errors import UnsupportedError
from triton_mla.tuning import ARCHITECTURES

NAMES = [row.name for row in BACKENDS]
PEERS = [name for name in NAMES if name not in ("triton_mla", "triton_mla_mha", "torch_reference")]


def request_for(**values):
    defaults = {"num_heads": 16, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "arch": "sm_90", "page_size": 64}
    return Request(**{**defaults, **values})


def choose(request=None, **settings):
    return select(request or request_for(), settings=Settings(**settings))


def reasons(name, phase=DECODE, **values):
    return backend_named(name).reasons(request_for(**values), phase)


@pytest.mark.parametrize(
    ("sizes", "inside", "outside", "text"),
    [
        (Sizes((1,), step=16), [1, 16, 480], [0, 8, -16, 17], "1 or a multiple of 16"),
        (Sizes((0,), step=16, limit=64), [0, 16, 64], [80, 7], "0 or a multiple of 16 up to 64"),
        (Sizes((32, 64)), [32, 64], [0, 16, 128], "32 or 64"),
        (Sizes(step=1), [1, 7], [0, -1], "any"),
        (Sizes(step=1, limit=128), [1, 128], [0, 129], "any up to 128"),
    ],
)
def test_sizes(sizes, inside, outside, text):
    assert all(size in sizes for size in inside)
    assert not any(size in sizes for size in outside)
    assert str(sizes) == text


def test_the_table_is_well_formed():
    assert len(set(NAMES)) == len(NAMES)
    for row in BACKENDS:
        assert row.phases and set(row.phases) <= set(PHASES)
        assert row.summary and row.invariance
        assert row.prefill_form in (MHA, ABSORBED)
        assert row.invariant or not row.keeps_prefix


def test_only_this_package_keeps_the_prefix_cache_and_peers_are_never_automatic():
    assert [row.name for row in BACKENDS if row.keeps_prefix] == ["triton_mla"]
    assert all(not backend_named(name).automatic for name in PEERS)
    assert set(backend_named("torch_reference").automatic) == {"cpu", "interpreter"}


@pytest.mark.parametrize("arch", list(ARCHITECTURES))
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_automatic_choice_on_every_architecture(arch, batch_invariant):
    selection = choose(request_for(arch=arch, batch_invariant=batch_invariant))
    assert (selection.prefill, selection.decode) == ("triton_mla", "triton_mla")
    assert selection.origins == {PREFILL: "automatic", DECODE: "automatic"}
    assert selection.prefill_form == ABSORBED and selection.page_size == 64 and not selection.adjustments


@pytest.mark.parametrize("page_size", [1, 16, 48, 64, 480, 528])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_triton_mla_takes_its_page_sizes_and_dtypes(page_size, dtype):
    values = {"page_size": page_size, "page_size_fixed": True, "dtype": dtype, "kv_cache_dtype": dtype}
    assert reasons("triton_mla", **values) == ()


def accepted(check, *values):
    try:
        check(*values)
    except ValueError:
        return False
    return True


def test_the_row_of_triton_mla_says_what_the_kernels_check():
    row = backend_named("triton_mla")
    for size in range(-1, 1100):
        assert (size in row.page_sizes) == accepted(check_page_size, size)
        assert (size in row.kv_lora_rank) == accepted(check_dims, size, 64)
        assert (size in row.qk_rope_head_dim) == accepted(check_dims, 512, size)
    mha = backend_named("triton_mla_mha")
    assert (mha.page_sizes, mha.kv_lora_rank, mha.qk_rope_head_dim) == (row.page_sizes, row.kv_lora_rank, row.qk_rope_head_dim)
    for size in range(-1, 300):
        assert (size in mha.qk_nope_head_dim) == accepted(check_head_dims, size, 64, 128)
        assert (size in mha.v_head_dim) == accepted(check_head_dims, 128, 64, size)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_heads": 129}, ["num_heads=129", "any up to 128"]),
        ({"num_heads": 0}, ["num_heads=0"]),
        ({"kv_lora_rank": 500}, ["kv_lora_rank=500", "a multiple of 16 up to 512"]),
        ({"kv_lora_rank": 1024}, ["kv_lora_rank=1024"]),
        ({"qk_rope_head_dim": 7}, ["qk_rope_head_dim=7", "0 or a multiple of 16 up to 64"]),
        ({"page_size": 8, "page_size_fixed": True}, ["page size=8", "1 or a multiple of 16", "explicitly"]),
        ({"arch": "sm_75"}, ["architecture sm_75", "sm_90"]),
        ({"arch": "cpu"}, ["architecture cpu", "TRITON_INTERPRET=1"]),
        ({"dtype": "fp8_e4m3", "kv_cache_dtype": "fp8_e4m3"}, ["dtype=fp8_e4m3"]),
        ({"kv_cache_dtype": "fp8_e4m3"}, ["kv_cache_dtype=fp8_e4m3", "not supported yet"]),
        ({"kv_cache_dtype": "float16"}, ["kv_cache_dtype=float16", "bfloat16"]),
    ],
)
def test_triton_mla_says_why_not(phase, values, words):
    (reason, *_) = reasons("triton_mla", phase, **values)
    assert all(word in reason for word in words), reason


@pytest.mark.parametrize(
    ("name", "good", "bad", "word"),
    [
        ("flashmla", {"page_size": 64}, {"page_size": 32}, "page size=32"),
        ("flashmla", {}, {"arch": "sm_100"}, "architecture sm_100"),
        ("flashmla", {}, {"dtype": "float32", "kv_cache_dtype": "float32"}, "dtype=float32"),
        ("flashmla", {}, {"kv_lora_rank": 256}, "kv_lora_rank=256"),
        ("flash_attn_mla", {"page_size": 16}, {"page_size": 1}, "page size=1"),
        ("flash_attn_mla", {}, {"arch": "sm_80"}, "architecture sm_80"),
        ("flashinfer_mla", {"qk_rope_head_dim": 0}, {"qk_rope_head_dim": 32}, "qk_rope_head_dim=32"),
        ("flashinfer_mla", {"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": "fp8_e4m3", "arch": "sm_80"}, "only on"),
        ("trtllm_mla", {"arch": "sm_100", "page_size": 32}, {"arch": "sm_100", "page_size": 16}, "page size=16"),
        (
            "trtllm_mla",
            {"arch": "sm_120"},
            {"arch": "sm_120", "dtype": "float16", "kv_cache_dtype": "float16"},
            "dtype",
        ),
        ("cutlass_mla", {"arch": "sm_100", "page_size": 128}, {"arch": "sm_100", "page_size": 64}, "page size=64"),
        (
            "aiter_mla",
            {"arch": "gfx942", "page_size": 1},
            {"arch": "gfx942", "page_size": 1, "num_heads": 12},
            "num_heads",
        ),
        ("vllm_triton_mla", {"page_size": 48}, {"page_size": 1}, "page size=1"),
        ("vllm_triton_mla", {"arch": "sm_89", "kv_cache_dtype": "fp8_e4m3"}, {"kv_lora_rank": 128}, "kv_lora_rank=128"),
        ("torch_reference", {"arch": "cpu", "kv_lora_rank": 500, "page_size": 7}, {"qk_rope_head_dim": -1}, "rope"),
    ],
)
def test_constraints_of_each_backend(name, good, bad, word):
    assert reasons(name, page_size_fixed=True, **good) == ()
    (reason,) = reasons(name, page_size_fixed=True, **bad)
    assert word in reason


@pytest.mark.parametrize("name", [n for n in PEERS if n != "flashinfer_mla"])
def test_decode_only_peers_have_no_prefill(name):
    assert any("it has no prefill (decode only)" in reason for reason in reasons(name, PREFILL))


def test_every_reason_is_given_not_only_the_first():
    found = reasons(
        "flashmla",
        PREFILL,
        arch="sm_100",
        dtype="float32",
        kv_cache_dtype="bfloat16",
        kv_lora_rank=256,
        qk_rope_head_dim=32,
        page_size=16,
        page_size_fixed=True,
        batch_invariant=True,
        keep_prefix=True,
    )
    words = [
        "no prefill",
        "not batch-invariant",
        "prefix caching",
        "sm_100",
        "dtype=float32",
        "kv_cache_dtype=bfloat16",
    ]
    words += ["kv_lora_rank=256", "qk_rope_head_dim=32", "page size=16"]
    assert len(found) == len(words)
    assert all(word in reason for word, reason in zip(words, found, strict=True))


@pytest.mark.parametrize("phase", PHASES)
def test_explicit_capable_backend_is_taken(phase, caplog):
    with caplog.at_level(logging.INFO):
        selection = choose(**{f"{phase}_backend": "flashinfer_mla"})
    assert getattr(selection, phase) == "flashinfer_mla"
    assert selection.origins[phase] == "argument"
    assert selection.reasons[phase] == f"named by {phase}_backend=flashinfer_mla (argument)"
    assert f"{phase} backend: flashinfer_mla, named by" in caplog.text


@pytest.mark.parametrize("phase", PHASES)
def test_explicit_incapable_backend_is_refused_with_every_reason(phase):
    request = request_for(arch="sm_80", page_size=16, page_size_fixed=True, batch_invariant=True)
    with pytest.raises(UnsupportedError) as caught:
        choose(request, **{f"{phase}_backend": "flashmla"})
    assert caught.value.reasons == {"flashmla": backend_named("flashmla").reasons(request, phase)}
    assert len(caught.value.reasons["flashmla"]) == 4
    for reason in caught.value.reasons["flashmla"]:
        assert reason in str(caught.value)
    assert f"{phase}_backend=flashmla (argument)" in str(caught.value)


def test_refusal_names_the_variable():
    settings = Settings.from_env({"TRITON_MLA_DECODE_BACKEND": "cutlass_mla"})
    with pytest.raises(UnsupportedError, match="TRITON_MLA_DECODE_BACKEND=cutlass_mla: "):
        select(request_for(), settings=settings)


@pytest.mark.parametrize("name", [row.name for row in BACKENDS if not row.invariant])
def test_a_variant_backend_is_refused_in_invariant_mode(name):
    row = backend_named(name)
    arch = row.architectures[0] if row.architectures else "sm_90"
    request = request_for(arch=arch, page_size=None)
    assert choose(request, decode_backend=name).decode == name
    with pytest.raises(UnsupportedError, match="not batch-invariant"):
        choose(dataclasses.replace(request, batch_invariant=True), decode_backend=name)


@pytest.mark.parametrize("phase", PHASES)
def test_unknown_name_lists_the_known_ones(phase):
    with pytest.raises(ValueError) as caught:
        choose(**{f"{phase}_backend": "TRITON_MLA"})
    assert not isinstance(caught.value, UnsupportedError)
    assert "TRITON_MLA" in str(caught.value) and f"{phase}_backend" in str(caught.value)
    assert str(caught.value).startswith(f"{phase}_backend=TRITON_MLA: allowed are auto, ")
    assert all(name in str(caught.value) for name in NAMES)


def test_automatic_choice_logs_what_why_and_what_was_rejected(caplog):
    with caplog.at_level(logging.DEBUG):
        choose(request_for(page_size=16, page_size_fixed=True))
    assert [record.levelno for record in caplog.records] == [logging.INFO, logging.INFO]
    decode, prefill = (record.getMessage() for record in caplog.records)
    assert decode.startswith("decode backend: triton_mla, chosen automatically: the first capable backend")
    assert "flashmla: page size=16 is not supported" in decode
    assert "flash_attn_mla: it is capable, but only taken when named" in decode
    assert prefill.startswith("prefill backend: triton_mla, chosen automatically: the backend of decode can prefill")
    assert all(f"{name}: " in text for name in NAMES[1:] for text in (decode, prefill))


def test_decode_only_backend_leaves_prefill_to_a_capable_one(caplog):
    with caplog.at_level(logging.INFO):
        selection = choose(decode_backend="flashmla")
    assert (selection.prefill, selection.decode) == ("triton_mla", "flashmla")
    assert "decode's flashmla cannot prefill (it has no prefill (decode only))" in selection.reasons[PREFILL]
    assert selection.reasons[PREFILL] in caplog.text


def test_prefill_follows_a_named_decode_backend_that_can_prefill():
    selection = choose(decode_backend="flashinfer_mla")
    assert (selection.prefill, selection.decode) == ("flashinfer_mla", "flashinfer_mla")
    assert selection.origins == {PREFILL: "automatic", DECODE: "argument"}
    selection = choose(decode_backend="flashinfer_mla", prefill_backend="triton_mla")
    assert (selection.prefill, selection.decode) == ("triton_mla", "flashinfer_mla")


def test_reference_is_automatic_on_the_cpu_only():
    assert choose(request_for(arch="cpu")).decode == "torch_reference"
    unsupported = request_for(arch="sm_90", kv_lora_rank=500)
    with pytest.raises(UnsupportedError) as caught:
        choose(unsupported)
    assert set(caught.value.reasons) == set(NAMES)
    assert caught.value.reasons["torch_reference"] == ("it is capable, but only taken when named",)
    assert choose(unsupported, decode_backend="torch_reference").prefill == "torch_reference"


def test_no_invariant_backend_on_a_cpu_without_the_interpreter():
    with pytest.raises(UnsupportedError) as caught:
        choose(request_for(arch="cpu", batch_invariant=True))
    assert any("TRITON_INTERPRET=1" in reason for reason in caught.value.reasons["triton_mla"])
    assert any("not batch-invariant" in reason for reason in caught.value.reasons["torch_reference"])


@pytest.mark.parametrize(("old", "new"), [(None, 64), (16, 64), (32, 64)])
def test_page_size_follows_a_named_backend(old, new):
    selection = choose(request_for(page_size=old), decode_backend="flashmla")
    (change,) = selection.adjustments
    assert (change.name, change.old, change.new) == ("block_size", old, new)
    assert change.why == "flashmla takes pages of 64 tokens"
    assert selection.page_size == new


@pytest.mark.parametrize(
    ("name", "arch", "new"), [("trtllm_mla", "sm_100", 64), ("cutlass_mla", "sm_100", 128), ("aiter_mla", "gfx942", 1)]
)
def test_page_size_of_other_peers(name, arch, new):
    assert choose(request_for(arch=arch, page_size=48), decode_backend=name).page_size == new


def test_fitting_or_open_page_sizes_are_left_alone():
    for page_size in (None, 16, 64):
        selection = choose(request_for(page_size=page_size))
        assert selection.page_size == page_size and not selection.adjustments
    assert not choose(request_for(page_size=64, page_size_fixed=True), decode_backend="flashmla").adjustments
    assert not choose(request_for(arch="sm_100", page_size=32), decode_backend="trtllm_mla").adjustments


def test_page_size_set_by_the_user_is_not_changed():
    with pytest.raises(UnsupportedError, match="page size=16 .*explicitly"):
        choose(request_for(page_size=16, page_size_fixed=True), decode_backend="flashmla")


def test_backends_without_a_common_page_size_are_refused(monkeypatch):
    paged = dataclasses.replace(backend_named("flashinfer_mla"), page_sizes=Sizes((128,)))
    monkeypatch.setattr(backends, "BACKENDS", (paged, backend_named("flashmla")))
    with pytest.raises(UnsupportedError, match="no page size suits both") as caught:
        choose(request_for(page_size=16), prefill_backend="flashinfer_mla", decode_backend="flashmla")
    assert set(caught.value.reasons) == {"flashinfer_mla", "flashmla"}


def test_the_form_decides_between_this_packages_prefills():
    both = request_for(batch_invariant=True, prefill_forms=(MHA, ABSORBED), form_reason="roles")
    assert (choose(both).prefill, choose(both).decode) == ("triton_mla_mha", "triton_mla")
    assert choose(both).prefill_form == MHA
    assert choose(both, prefill_backend="triton_mla").prefill_form == ABSORBED
    absorbed = request_for(prefill_forms=(ABSORBED,), form_reason="kept")
    assert choose(absorbed).prefill == "triton_mla"
    with pytest.raises(UnsupportedError, match="its prefill has the mha form, absorbed is needed: kept"):
        choose(absorbed, prefill_backend="triton_mla_mha")
    with pytest.raises(UnsupportedError, match="its prefill has the absorbed form, mha is needed: asked"):
        choose(request_for(prefill_forms=(MHA,), form_reason="asked"), prefill_backend="triton_mla")


def test_the_mha_prefill_is_no_decode_and_keeps_no_cache():
    assert reasons("triton_mla_mha", DECODE) == ("it has no decode (prefill only)",)
    (reason,) = reasons("triton_mla_mha", PREFILL, batch_invariant=True, keep_prefix=True, prefill_forms=(MHA,))
    assert "prefix caching cannot be kept" in reason


@pytest.mark.parametrize("name", ["qk_nope_head_dim", "v_head_dim"])
def test_head_dims_concern_the_mha_form_alone(name):
    (reason,) = reasons("triton_mla_mha", PREFILL, prefill_forms=(MHA,), **{name: 40})
    assert f"{name}=40" in reason
    assert reasons("triton_mla", PREFILL, **{name: 40}) == ()


def test_the_absorbed_form_where_no_backend_has_the_mha_form():
    selection = choose(request_for(prefill_forms=(MHA, ABSORBED), v_head_dim=40))
    assert selection.prefill_form == ABSORBED
    assert "no capable backend has the mha form" in selection.reasons[PREFILL]


def test_selection_does_not_look_at_names():
    renamed = tuple(dataclasses.replace(row, name=f"x{i}") for i, row in enumerate(capabilities.BACKENDS))
    assert [row.reasons(request_for(), DECODE) for row in renamed] == [
        row.reasons(request_for(), DECODE) for row in BACKENDS
    ]
