"""Rotary embedding in both layouts: right, and each token as if it were alone."""

import pytest
import torch
from lanes import DTYPES, dirty_memory

from triton_mla.companion.rotary import rotary_embedding
from triton_mla.testing import assert_bitwise_equal, bitwise_equal

pytestmark = pytest.mark.usefixtures("interpreter")


def data(device, dtype, tokens, heads, P):
    chance = torch.Generator().manual_seed(tokens)
    x, angle = torch.randn(tokens, heads, P, generator=chance), 7 * torch.randn(tokens, P // 2, generator=chance)
    return x.to(device, dtype), angle.cos().to(device), angle.sin().to(device)


def by_hand(x, cos, sin, interleaved):
    """In the dtype of cos: for fp32 the definition, bit for bit."""
    wide = x.to(cos.dtype)
    a, b = (wide[..., ::2], wide[..., 1::2]) if interleaved else wide.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    a, b = a * cos - b * sin, b * cos + a * sin
    return torch.stack((a, b), -1).flatten(2) if interleaved else torch.cat((a, b), -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(5, 3, 64), (1, 1, 2), (3, 17, 24), (2, 128, 64)], ids=str)
def test_the_definition_bit_for_bit(device, name, shape, interleaved):
    x, cos, sin = data(device, DTYPES[name], *shape)
    with dirty_memory():
        got = rotary_embedding(x, cos, sin, interleaved=interleaved)
    assert got.is_contiguous()
    assert_bitwise_equal(got, by_hand(x, cos, sin, interleaved).to(x.dtype))


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_token_alone_and_views(device, interleaved):
    x, cos, sin = data(device, torch.bfloat16, 9, 3, 16)
    whole = rotary_embedding(x, cos, sin, interleaved=interleaved)
    for i in (0, 8):
        assert_bitwise_equal(rotary_embedding(x[i : i + 1], cos[i : i + 1], sin[i : i + 1], interleaved=interleaved), whole[i : i + 1])
    wide = torch.full((9, 5, 40), float("nan"), dtype=x.dtype, device=device)
    wide[:, 1:4, 20:36] = x
    assert_bitwise_equal(rotary_embedding(wide[:, 1:4, 20:36], cos.T.contiguous().T, sin, interleaved=interleaved), whole)
    assert_bitwise_equal(rotary_embedding(x.transpose(1, 2).contiguous().transpose(1, 2), cos, sin, interleaved=interleaved), whole)
    assert not bitwise_equal(rotary_embedding(x, cos, sin, interleaved=not interleaved), whole)
    low = cos.to(x.dtype), sin.to(x.dtype)
    assert_bitwise_equal(rotary_embedding(x, *low, interleaved=interleaved), rotary_embedding(x, *(t.float() for t in low), interleaved=interleaved))


def test_nothing(device):
    for shape in ((0, 3, 8), (3, 0, 8), (3, 2, 0)):
        x, cos, sin = data(device, torch.float32, *shape)
        assert rotary_embedding(x, cos, sin, interleaved=True).shape == shape


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x, c, s: (x[0], c, s), "x has shape"),
        (lambda x, c, s: (x[..., :7], c, s), "even P"),
        (lambda x, c, s: (x.double(), c, s), "x has dtype"),
        (lambda x, c, s: (x, c[:2], s), "cos has shape"),
        (lambda x, c, s: (x, c, s[:, :3]), "sin has shape"),
        (lambda x, c, s: (x, c, s.double()), "sin has dtype"),
        (lambda x, c, s: (x, None, s), "cos=None"),
    ],
)
def test_bad_input(device, change, words):
    with pytest.raises(ValueError, match=words):
        rotary_embedding(*change(*data(device, torch.float32, 3, 2, 8)), interleaved=True)


@pytest.mark.parametrize("interleaved", [None, "no", 1])
def test_bad_layout(device, interleaved):
    with pytest.raises(ValueError, match=f"interleaved={interleaved!r} must be True or False"):
        rotary_embedding(*data(device, torch.float32, 3, 2, 8), interleaved=interleaved)


@pytest.mark.gpu
def test_inside_torch_compile(device):
    args = data(device, torch.bfloat16, 5, 3, 64)
    assert_bitwise_equal(torch.compile(rotary_embedding)(*args, interleaved=True), rotary_embedding(*args, interleaved=True))
