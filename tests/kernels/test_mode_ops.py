"""torch's ops in batch_invariant_mode: the bits of the companion ops, each row as if it were alone, right in every form."""

import threading

import pytest
import torch
import torch.nn.functional as F

from triton_mla import mode_kernels
from triton_mla.companion import products, rows
from triton_mla.mode import batch_invariant_mode
from triton_mla.testing import assert_bitwise_equal, assert_close, bitwise_equal

ATOL = {torch.float32: 2e-5, torch.float16: 8e-3, torch.bfloat16: 6e-2}


@pytest.fixture(scope="module")
def sizes(mla):
    """(rows, K, N); K a power of two, where another batch-invariant product failed"""
    return (300, 512, 384) if mla.device.type == "cuda" else (37, 64, 24)


@pytest.fixture
def data(mla_each, sizes):
    """x [M, K], w [N, K] and a bias [N] of unit size in the results."""
    M, K, N = sizes
    chance = torch.Generator().manual_seed(0)
    x, w, bias = torch.randn(M, K, generator=chance), torch.randn(N, K, generator=chance) * K**-0.5, torch.randn(N, generator=chance)
    return [t.to(mla_each.device, mla_each.dtype) for t in (x, w, bias)]


def fused_rms_norm(x, w):
    """What `rms_norm` is on a GPU; on a CPU torch composes it of a mean and elementwise ops."""
    kernel = torch.ops.aten._fused_rms_norm if x.is_cuda else mode_kernels._rms_norm
    return kernel(x, [x.shape[-1]], w[0], 1e-6)[0]


# op on x [M, K], w [N, K], bias [N] -> (by torch, by companion ops)
FORMS = {
    "linear": (F.linear, products.linear),
    "linear without bias": (lambda x, w, b: F.linear(x, w), lambda x, w, b: products.linear(x, w)),
    "linear of steps": (lambda x, w, b: F.linear(x[:, None], w, b).squeeze(1), products.linear),
    "linear of strided steps": (lambda x, w, b: F.linear(torch.stack((x, x), 0).transpose(0, 1), w, b)[:, 1], products.linear),
    "@": (lambda x, w, b: x @ w.t(), lambda x, w, b: products.matmul(x, w.t())),
    "matmul of a contiguous right operand": (lambda x, w, b: torch.matmul(x, w.t().contiguous()), lambda x, w, b: products.matmul(x, w.t())),
    "matmul of batches": (lambda x, w, b: (x[:, None] @ w.t()).squeeze(1), lambda x, w, b: products.matmul(x, w.t())),
    "bmm": (lambda x, w, b: torch.bmm(x[None], w.t()[None])[0], lambda x, w, b: products.matmul(x, w.t())),
    "einsum": (lambda x, w, b: torch.einsum("mk,nk->mn", x, w), lambda x, w, b: products.matmul(x, w.t())),
    "addmm": (lambda x, w, b: torch.addmm(b, x, w.t()), products.linear),
    "mv": (lambda x, w, b: torch.mv(x, w[0]), lambda x, w, b: products.matmul(x, w[0])),
    "softmax": (lambda x, w, b: x.softmax(-1), lambda x, w, b: rows.softmax(x)),
    "log_softmax": (lambda x, w, b: x.log_softmax(-1), lambda x, w, b: rows.log_softmax(x)),
    "softmax of columns": (lambda x, w, b: x.t().softmax(0).t(), lambda x, w, b: rows.softmax(x)),
    "mean": (lambda x, w, b: x.mean(-1), lambda x, w, b: rows.mean(x, -1)),
    "fused rms_norm": (lambda x, w, b: fused_rms_norm(x, w), lambda x, w, b: rows.rms_norm(x, w[0], 1e-6)),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_row_alone_and_among_others(data, calls, form):
    x, w, bias = data
    by_torch, by_companion = FORMS[form]
    plain = by_torch(x, w, bias)
    assert not calls or form == "fused rms_norm"
    with batch_invariant_mode(strict=True):
        whole = by_torch(x, w, bias)
        assert calls, "no companion op was called"
        for count, first in ((1, 0), (1, len(x) - 1), (2, 7), (17, 3), (len(x), 0)):
            assert_bitwise_equal(by_torch(x[first : first + count], w, bias), whole[first : first + count], f"{form}: {count} rows from {first}")
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1)).to(x.device)
        assert_bitwise_equal(by_torch(x[order], w, bias), whole[order], f"{form}, in another order")
        assert not bitwise_equal(whole[order], whole)
    assert_bitwise_equal(whole, by_companion(x, w, bias), form)
    assert_close(whole, plain.double(), 2 * ATOL[x.dtype], form)


def test_rms_norm(data, calls):
    """Also composed, as torch does on a CPU and where weight and input differ in dtype, its rows are their own."""
    x, w, _ = data
    for weight in (w[0], w[0].float(), None):
        with batch_invariant_mode(strict=True):
            calls.clear()
            whole = F.rms_norm(x, x.shape[-1:], weight, 1e-6)
            assert calls
            for first in (0, 5, len(x) - 1):
                assert_bitwise_equal(F.rms_norm(x[first : first + 1], x.shape[-1:], weight, 1e-6), whole[first : first + 1], "rms_norm")
        expected = F.rms_norm(x.double(), x.shape[-1:], None if weight is None else weight.double(), 1e-6)
        assert_close(whole, expected, ATOL[x.dtype], "rms_norm")


def test_fused_rms_norm_results(data):
    """Both results, over one dimension and two, with the default eps; the second one only where a gradient may be wanted."""
    x, w, _ = data
    x = x[:4].unflatten(-1, (2, -1))
    weight = w[0].unflatten(-1, (2, -1))
    for dims in (1, 2):
        shape, over = x.shape[-dims:], tuple(range(-dims, 0))
        out, inverse = mode_kernels._rms_norm(x, shape, weight[0] if dims == 1 else weight, None)
        square = x.double().square().mean(over, keepdim=True) + torch.finfo(torch.float32).eps
        assert inverse.dtype == torch.float32
        assert_close(inverse, square**-0.5, 1e-5, "1 / root")
        assert_close(out, x.double() * square**-0.5 * (weight[0] if dims == 1 else weight).double(), ATOL[x.dtype], "out")
        with torch.no_grad():
            again, none = mode_kernels._rms_norm(x, shape, weight[0] if dims == 1 else weight, None)
        assert_bitwise_equal(again, out)
        assert none.numel() == 0
    assert mode_kernels._rms_norm(x, (x.shape[-1] + 1,), None, None) is NotImplemented


def test_scaled_sums(data):
    """alpha, beta and addends of every shape; beta 0 does not read the addend."""
    x, w, bias = data
    matrix = w.t()
    full, column = F.linear(x, w).flip(0), x[:, :1]
    junk = torch.full_like(full, torch.nan)
    batch = x[None].expand(2, -1, -1), matrix[None].expand(2, -1, -1)
    forms = {
        "addmm of a matrix": lambda t: torch.addmm(t(full), t(x), t(matrix)),
        "addmm scaled": lambda t: torch.addmm(t(bias), t(x), t(matrix), beta=0.5, alpha=-2),
        "addmm of a column": lambda t: torch.addmm(t(column), t(x), t(matrix)),
        "addmm of one": lambda t: torch.addmm(t(bias[0]), t(x), t(matrix)),
        "addmm of junk": lambda t: torch.addmm(t(junk), t(x), t(matrix), beta=0),
        "baddbmm": lambda t: torch.baddbmm(t(bias), t(batch[0]), t(batch[1]), beta=0.5, alpha=2),
        "baddbmm_": lambda t: t(full).expand(2, -1, -1).clone().baddbmm_(t(batch[0]), t(batch[1])),
        "addmm_": lambda t: t(full).clone().addmm_(t(x), t(matrix)),
        "addmv": lambda t: torch.addmv(t(full[:, 0]), t(x), t(w[0]), beta=2),
        "addmv_": lambda t: t(full[:, 0]).clone().addmv_(t(x), t(w[0])),
        "addbmm": lambda t: torch.addbmm(t(full), t(batch[0]), t(batch[1])),
        "dot": lambda t: torch.dot(t(x[0]), t(w[0])),
        "vdot": lambda t: torch.vdot(t(x[0]), t(w[0])),
        "mean to fp32": lambda t: t(x).mean(dtype=torch.float32 if t is same else None),
        "mean of all": lambda t: t(x).mean(),
        "mean of both": lambda t: t(x).mean((0, 1), keepdim=True),
        "foreach": lambda t: torch.ops.aten._foreach_mm([t(x)], [t(matrix)])[0] if hasattr(torch.ops.aten, "_foreach_mm") else t(x) @ t(matrix),
    }
    for name, form in forms.items():
        with batch_invariant_mode(strict=True):
            actual = form(same)
        assert actual.dtype == (torch.float32 if name == "mean to fp32" else x.dtype)
        assert_close(actual, form(torch.Tensor.double), 4 * ATOL[x.dtype], name)
    with batch_invariant_mode():
        assert_bitwise_equal(torch.addmm(full, x, matrix)[5:6], torch.addmm(full[5:6], x[5:6], matrix), "one row of a sum")
        assert_bitwise_equal(torch.mv(x, w[0])[5:6], torch.mv(x[5:6], w[0]), "one row of mv")


@pytest.mark.parametrize("chain", ["multi_dot", "multi_dot, out=", "chain_matmul", "einsum"])
def test_chains_begin_at_the_left(data, chain):
    """Of 1 row and of many: the cheapest order of these is another one for each, and torch takes it."""
    x, w, _ = data
    thin = w.t()[:, :3].contiguous()
    by_torch = {
        "multi_dot": lambda *m: torch.linalg.multi_dot(m),
        "multi_dot, out=": lambda *m: torch.linalg.multi_dot(m, out=m[0].new_empty(0)),
        "chain_matmul": lambda *m: torch.chain_matmul(*m),
        "einsum": lambda *m: torch.einsum("ab,bc,cd->ad", *m),
    }[chain]
    with batch_invariant_mode(strict=True):
        whole = by_torch(x, thin, thin.t())
        for count in (1, 2, 17):
            assert_bitwise_equal(by_torch(x[:count], thin, thin.t()), whole[:count], f"{count} rows")
        assert_bitwise_equal(whole, products.matmul(products.matmul(x, thin), thin.t()))
        wide = by_torch(x, x.t().contiguous(), x)
        assert_bitwise_equal(wide, products.matmul(products.matmul(x, x.t().contiguous()), x))
        if chain.startswith("multi"):
            assert_bitwise_equal(by_torch(x[0], thin, thin[0]), products.matmul(products.matmul(x[0], thin), thin[0]))


def test_gradients_of_a_chain(mla):
    a, b, c = (torch.randn(4, 4, device=mla.device, requires_grad=True) for _ in range(3))
    with batch_invariant_mode(strict=True):
        torch.linalg.multi_dot((a, b, c)).sum().backward()
    expected = torch.autograd.grad((a @ b @ c).sum(), (a, b, c))
    for given, grad in zip((a, b, c), expected, strict=True):
        assert_close(given.grad, grad.double(), 1e-5)


def test_alpha_follows_the_rounding(mla):
    """What docs/numerics.md says of fp16: a scaled operand stays finite, a scaled product need not."""
    x = torch.full((1, 4, 128), 32.0, dtype=torch.float16, device=mla.device)
    c = x.new_zeros(1, 4, 4)
    with batch_invariant_mode(strict=True):
        assert bool(torch.baddbmm(c, x, x.mT, beta=0, alpha=128**-0.5).isinf().all())
        assert_bitwise_equal(torch.baddbmm(c, x * 128**-0.5, x.mT), torch.full_like(c, 11584))


def same(t):
    return t


def test_out(data):
    """Into tensors of any strides, of the right shape or of none."""
    x, w, bias = data
    matrix = w.t()
    batch = x[None], matrix[None]
    forms = {
        "mm": lambda **o: torch.mm(x, matrix, **o),
        "addmm": lambda **o: torch.addmm(bias, x, matrix, **o),
        "bmm": lambda **o: torch.bmm(*batch, **o),
        "baddbmm": lambda **o: torch.baddbmm(bias, *batch, **o),
        "addmv": lambda **o: torch.addmv(x[:, 0], x, w[0], **o),
        "mv": lambda **o: torch.mv(x, w[0], **o),
        "dot": lambda **o: torch.dot(x[0], w[0], **o),
        "matmul": lambda **o: torch.matmul(x, matrix, **o),
        "softmax": lambda **o: torch.softmax(x, -1, **o),
        "log_softmax": lambda **o: torch.log_softmax(x, -1, **o),
        "mean": lambda **o: torch.mean(x, -1, **o),
    }
    with batch_invariant_mode(strict=True):
        for name, form in forms.items():
            expected = form()
            for out in (torch.empty_like(expected), x.new_empty(0), x.new_empty((*expected.shape, 2))[..., 1]):
                assert form(out=out) is out
                assert_bitwise_equal(out, expected, name)
        out = torch.empty(len(x), dtype=torch.float32, device=x.device)
        assert_bitwise_equal(torch.mean(x, -1, out=out, dtype=torch.float32), x.mean(-1, dtype=torch.float32))


def test_groups(data, calls):
    """`_grouped_mm`, which mixtures of experts call: each row times its group's matrix, an empty group among them."""
    x, w, _ = data
    experts = torch.stack((w, 2 * w, -w))
    ends = torch.tensor([9, 9, len(x)], dtype=torch.int32, device=x.device)
    with batch_invariant_mode(strict=True):
        out = torch.ops.aten._grouped_mm(x, experts.transpose(1, 2), ends)
        assert [name for _, name in calls] == ["grouped_linear"]
        assert_bitwise_equal(torch.ops.aten._grouped_mm(x[:10], experts.transpose(1, 2), ends.clamp(max=10)), out[:10], "fewer rows")
        assert_bitwise_equal(torch.ops.aten._grouped_mm(x[None], w.t()[None]), torch.bmm(x[None], w.t()[None]))
        with pytest.raises(ValueError, match="groups of 2-dimensional by 2"):
            torch.ops.aten._grouped_mm(x.t(), x, ends)
    expected = torch.cat((x[:9].double() @ w.double().t(), -(x[9:].double() @ w.double().t())))
    assert_close(out, expected, 2 * ATOL[x.dtype], "grouped")


def test_nothing_to_multiply(data):
    x, w, bias = data
    with batch_invariant_mode(strict=True):
        assert F.linear(x[:0], w, bias).shape == (0, len(w))
        assert_bitwise_equal(F.linear(x[:2, :0], w[:, :0], bias), bias.expand(2, -1).contiguous())
        assert torch.equal(x[:2, :0] @ w[:, :0].t(), x.new_zeros(2, len(w)))
        assert x[:0].softmax(-1).shape == x[:0].shape and bool(x[:0].mean().isnan())
        assert float(x[0, 0].softmax(0)) == 1


def test_cast_to_float_in_a_softmax(data):
    """softmax with dtype=float32, which on a GPU torch does in one kernel."""
    x, _, _ = data
    with batch_invariant_mode(strict=True):
        for by_torch, by_companion in ((torch.softmax, rows.softmax), (torch.log_softmax, rows.log_softmax)):
            assert_bitwise_equal(by_torch(x, -1, dtype=torch.float32), by_companion(x.float()))


def test_autocast(mla, sizes, calls):
    x = torch.randn(3, sizes[1], device=mla.device)
    w = torch.randn(sizes[2], sizes[1], device=mla.device)
    with batch_invariant_mode(strict=True), torch.autocast(mla.device.type, torch.bfloat16):
        out = F.linear(x, w)
    assert calls and out.dtype == torch.bfloat16
    assert_bitwise_equal(out, products.linear(x.bfloat16(), w.bfloat16()))


@pytest.mark.gpu
def test_torchs_own_rows_differ(device):
    """The control: without the mode a product of one row has other bits than among 300, where cuBLAS splits a long K."""
    x = torch.randn(300, 7168, device=device, dtype=torch.bfloat16)
    w = torch.randn(2048, 7168, device=device, dtype=torch.bfloat16)
    assert not bitwise_equal(F.linear(x[:1], w), F.linear(x, w)[:1])
    with batch_invariant_mode(strict=True):
        assert_bitwise_equal(F.linear(x[:1], w), F.linear(x, w)[:1])


@pytest.mark.gpu
def test_cuda_graph(device):
    """A capture in the mode keeps its kernels when it is replayed outside of it."""
    x = torch.randn(8, 256, device=device, dtype=torch.bfloat16)
    w = torch.randn(128, 256, device=device, dtype=torch.bfloat16)

    def step():
        return F.rms_norm(F.linear(x, w), (128,)).softmax(-1).mean(-1)

    with batch_invariant_mode(strict=True), torch.no_grad():
        expected = step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
    captured.zero_()
    graph.replay()
    assert_bitwise_equal(captured, expected)


def test_a_matrix_that_requires_grad_by_a_batch(mla):
    """torch multiplies the transposed ones; here rows of the matrix stay rows, whose bits neither their number nor the gradient changes."""
    K = 6144  # cut in parts where there are few columns, which the rows would be
    chance = torch.Generator().manual_seed(3)
    x, w = (torch.randn(*shape, generator=chance).to(mla.device) for shape in ((2600, K), (2, K, 3)))
    if mla.device.type == "cpu":
        x = x[:40]  # bits of one interpreted product; the form of it is what is seen here
    with batch_invariant_mode(strict=True):
        plain = x @ w
        learned = torch.nn.Parameter(x.clone())
        assert_bitwise_equal((learned @ w).detach(), plain)
        with torch.no_grad():
            assert_bitwise_equal(learned @ w, plain)
            assert_bitwise_equal(learned[:2] @ w, plain[:, :2])
        (learned @ w).sum().backward()
    if mla.device.type == "cuda":  # what torch would have multiplied: rows as so many columns that K is not cut
        assert not bitwise_equal(products.matmul(w[0].t(), x.t()).t().contiguous(), plain[0])
    torch.testing.assert_close(learned.grad, w.sum((0, 2)).expand_as(x), rtol=1e-4, atol=1e-4)


def test_a_batch_is_no_column(mla, monkeypatch):
    seen = []
    monkeypatch.setattr(products, "matmul", lambda a, b, real=products.matmul: (seen.append((a.shape[-2], b.shape[-1])), real(a, b))[1])
    with batch_invariant_mode(strict=True), torch.no_grad():
        torch.nn.Parameter(torch.ones(7, 16, device=mla.device)) @ torch.ones(2, 16, 3, device=mla.device)
    assert seen == [(7, 3)]


@pytest.mark.parametrize("factor", ["alpha", "beta"])
def test_complex_factors_are_torchs_error(mla, factor):
    a, b, c = (torch.ones(4, 4, device=mla.device) for _ in range(3))
    for strict in (False, True):
        with batch_invariant_mode(strict=strict), pytest.raises(RuntimeError):
            torch.addmm(c, a, b, **{factor: 1j})


@pytest.mark.parametrize("chain", [torch.linalg.multi_dot, lambda matrices, out: torch.chain_matmul(*matrices, out=out)], ids=["multi_dot", "chain_matmul"])
def test_chains_into_out_lose_no_gradient(mla, chain):
    a, b, c = (torch.ones(4, 4, device=mla.device) for _ in range(3))
    with batch_invariant_mode(strict=True):
        chain([a, b, c], out=torch.empty(4, 4, device=mla.device))
        with pytest.raises(RuntimeError, match="out=.*automatic differentiation"):
            chain([a.requires_grad_(), b, c], out=torch.empty(4, 4, device=mla.device))


@pytest.mark.parametrize("shape", [(3, 16), (2, 3, 16)])
def test_linear_gives_no_view(mla, shape):
    """So that it may be changed in place where torch's may."""
    x, w, parameter = torch.ones(shape, device=mla.device), torch.ones(8, 16, device=mla.device), torch.ones(8, device=mla.device, requires_grad=True)
    with batch_invariant_mode(strict=True):
        with torch.no_grad():
            hidden = F.linear(x, w)
        assert not hidden._is_view()
        hidden += parameter
        F.linear(x, w.requires_grad_()).detach_()


def test_a_thread_without_the_mode_has_torchs_gradients(mla):
    """torch's own composed ops, whatever another thread has put in their place."""
    a, b = (torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(mla.device) for shape in ((5, 32), (32, 7)))
    results = []

    def work():
        for op in (torch.nn.functional.linear, lambda x, w: w @ x.t().expand(2, -1, -1), lambda x, w: torch.linalg.multi_dot([x, w.t(), w])):
            w = b.t().clone().requires_grad_()
            op(a, w).sum().backward()
            results.append(w.grad)

    with batch_invariant_mode(strict=True):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    other, results = results, []
    work()
    assert len(other) == len(results) == 3
    for got, expected in zip(other, results, strict=True):
        torch.testing.assert_close(got, expected)
