"""A layer's sizes, and the scale that follows from them."""

import math

import pytest

from triton_mla.dims import DEEPSEEK_V2_LITE, DEEPSEEK_V3, KIMI_K2, MLADims


def test_scale_without_yarn():
    assert MLADims(16).softmax_scale == 192**-0.5
    assert MLADims(16, qk_nope_head_dim=64, qk_rope_head_dim=32).softmax_scale == 96**-0.5
    assert MLADims(16, mscale_all_dim=1.0).softmax_scale == 192**-0.5  # of a factor of 1


@pytest.mark.parametrize("mscale, scale", [(0.0, 0.07217), (0.707, 0.11472), (1.0, 0.13523)])
def test_scale_with_yarn(mscale, scale):
    assert MLADims(16, rope_factor=40.0, mscale_all_dim=mscale).softmax_scale == pytest.approx(scale, abs=1e-5)


def test_scale_does_not_follow_the_latent_width():
    assert MLADims(16, kv_lora_rank=256).softmax_scale == MLADims(16, kv_lora_rank=512).softmax_scale


def test_a_given_scale_is_taken():
    assert MLADims(16, softmax_scale=0.1, rope_factor=40.0, mscale_all_dim=1.0).softmax_scale == 0.1


def test_presets():
    assert DEEPSEEK_V3.softmax_scale == pytest.approx(0.13523, abs=1e-5)
    assert DEEPSEEK_V2_LITE.softmax_scale == pytest.approx(0.11472, abs=1e-5)
    assert KIMI_K2.softmax_scale == pytest.approx(192**-0.5 * (0.1 * math.log(32) + 1) ** 2)
    for dims in (DEEPSEEK_V3, DEEPSEEK_V2_LITE, KIMI_K2):
        assert (dims.qk_head_dim, dims.latent_dim) == (192, 576)


@pytest.mark.parametrize(
    "name, value",
    [
        ("num_heads", 0),
        ("num_heads", 129),
        ("num_heads", True),
        ("kv_lora_rank", 0),
        ("qk_rope_head_dim", -1),
        ("qk_nope_head_dim", 128.0),
        ("v_head_dim", "128"),
        ("softmax_scale", 0.0),
        ("softmax_scale", math.nan),
        ("softmax_scale", math.inf),
        ("softmax_scale", True),
        ("rope_factor", 0.5),
        ("rope_factor", math.inf),
        ("mscale_all_dim", -1.0),
        ("mscale_all_dim", None),
    ],
)
def test_wrong_sizes_are_named(name, value):
    with pytest.raises(ValueError, match=f"{name}={value!r} must be"):
        MLADims(**{"num_heads": 16, name: value})
