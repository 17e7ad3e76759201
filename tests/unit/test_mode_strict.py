"""batch_invariant_mode: what it has no kernels for, refused with strict, logged without."""

import logging

import pytest
import torch

from triton_mla import mode
from triton_mla.errors import UnsupportedError
from triton_mla.mode import batch_invariant_mode
from triton_mla.uncovered import UNCOVERED


def refusals(device):
    """op and what it is called with -> the words that the error must hold, and a call of it."""
    x, y = torch.randn(4, 16, device=device), torch.randn(16, 8, device=device)
    d = x.double()
    image, filters = torch.randn(1, 2, 8, device=device), torch.randn(2, 2, 3, device=device)
    plane, planes = image[:, :, None].expand(-1, -1, 8, -1), filters[:, :, None].expand(-1, -1, 3, -1)
    lstm, steps = torch.nn.LSTM(16, 4).to(device), torch.randn(3, 1, 16, device=device)
    return {
        "mm float64": (("aten::mm", "torch.float64"), lambda: d @ y.double()),
        "addmm float64": (("aten::addmm", "torch.float64"), lambda: torch.addmm(y[0].double(), d, y.double())),
        "linear float64": (("aten::addmm", "torch.float64"), lambda: torch.nn.functional.linear(d, d, d[:, 0])),
        "bmm float64": (("aten::bmm", "torch.float64"), lambda: torch.bmm(d[None], y[None].double())),
        "baddbmm float64": (("aten::baddbmm", "torch.float64"), lambda: torch.baddbmm(d[:1, None, :8], d[None], y[None].double())),
        "mv float64": (("aten::addmv", "torch.float64"), lambda: torch.mv(d, d[0])),
        "dot float64": (("aten::dot", "torch.float64"), lambda: torch.dot(d[0], d[0])),
        "mm complex": (("aten::mm", "torch.complex64"), lambda: x.cfloat() @ y.cfloat()),
        "mm int8": (("aten::mm", "torch.int8"), lambda: x.char() @ y.char()),
        "softmax float64": (("aten::_softmax", "torch.float64"), lambda: d.softmax(-1)),
        "log_softmax float64": (("aten::_log_softmax", "torch.float64"), lambda: d.log_softmax(-1)),
        "mean float64": (("aten::mean.dim", "torch.float64"), lambda: d.mean()),
        "mean to float64": (("aten::mean.dim", "torch.float64"), lambda: x.mean(0, dtype=torch.float64)),
        "mm sparse": (("aten::mm", "torch.sparse_coo", "torch.float32"), lambda: torch.mm(x.to_sparse(), y)),
        "mm sparse_csr": (("aten::mm", "torch.sparse_csr"), lambda: torch.mm(x.to_sparse_csr(), y)),
        "convolution": (("aten::convolution", "torch.float32"), lambda: torch.nn.functional.conv1d(image, filters)),
        "_convolution": (("aten::_convolution", "torch.float32"),
                         lambda: torch.ops.aten._convolution(image, filters, None, [1], [0], [1], False, [0], 1, False, True, True, False)),
        "transposed convolution": (("aten::convolution", "torch.float32"), lambda: torch.nn.functional.conv_transpose2d(plane, planes)),
        "slow_conv2d": (("conv2d_forward", "torch.float32"), lambda: torch.ops.aten._slow_conv2d_forward(plane, planes, [3, 3], None, [1, 1], [0, 0])),
        "conv_tbc": (("aten::conv_tbc", "torch.float32"), lambda: torch.conv_tbc(image, y[None, :8], y[0])),
        "cdist": (("aten::_cdist_forward", "torch.float32"), lambda: torch.cdist(x, x)),
        "cdist of many": (("aten::_euclidean_dist", "torch.float32"), lambda: torch.cdist(x.expand(30, 4, 16)[:, 0], x)),
        "bilinear": (("aten::_trilinear", "torch.float32"), lambda: torch.nn.functional.bilinear(x, x, y.T[:, :, None] * x[0])),
        "lstm": (("rnn", "torch.float32"), lambda: lstm(steps)[0].detach()),
        "attention": (("attention", "torch.bfloat16"), lambda: torch.nn.functional.scaled_dot_product_attention(*3 * [x[None, None].bfloat16()])),
    }


@pytest.mark.parametrize("what", refusals("cpu"))
def test_strict_refuses_what_would_fall_through(device, what, caplog, monkeypatch):
    monkeypatch.setattr(mode, "_logged", set())
    words, call = refusals(device)[what]
    with batch_invariant_mode(strict=True), pytest.raises(UnsupportedError) as error:
        call()
    assert all(word in str(error.value) for word in words), str(error.value)
    if what == "mm int8" and device.type == "cuda":
        return  # torch has no kernel for it either
    plain = call()
    with caplog.at_level(logging.WARNING, logger="triton_mla"), batch_invariant_mode():
        result = [call() for _ in range(2)]
    said = [record.getMessage() for record in caplog.records]
    assert len(set(said)) == len(said) and all(word in said[0] for word in words), said  # torch's sparse mm asks addmm in turn
    for value in result:  # torch makes some of them of products, which the mode answers; cuDNN's is without TF32 in the mode
        assert torch.equal(value, plain) if what not in ("bilinear", "cdist of many", "conv_tbc", "lstm") else torch.allclose(value, plain, atol=1e-2)


def test_a_traced_convolution_is_refused(device):
    """It asks for `_convolution`, which eager code never does first."""
    image = torch.randn(1, 2, 8, device=device)
    traced = torch.jit.trace(torch.nn.Conv1d(2, 3, 3).to(device), image)
    with batch_invariant_mode(strict=True), pytest.raises(Exception, match="aten::_convolution was called in batch_invariant_mode"):
        traced(image)


def test_every_convolution_is_on_the_list():
    assert {"convolution", "_convolution", "cudnn_convolution", "cudnn_convolution_relu", "_slow_conv2d_forward"} <= set(UNCOVERED)
    assert not [name for name in UNCOVERED if "convert" in name]
