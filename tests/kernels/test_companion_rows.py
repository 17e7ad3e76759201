"""Norms, softmax, means and the gated activation: right, each row as if it were alone, and added in the written order."""

import pytest
import torch
from lanes import DTYPES, INTERPRETED, ON_GPU, dirty_memory

from triton_mla.companion import rows
from triton_mla.companion.rows import RowOrder, RowTile, log_softmax, mean, rms_norm, row_order, silu_and_mul, softmax
from triton_mla.testing import assert_bitwise_equal, bitwise_equal

pytestmark = [pytest.mark.usefixtures("interpreter"), pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")]
UNIT = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}
LEAST = {torch.float32: 2**-126, torch.float16: 2**-25, torch.bfloat16: 2**-126}  # fp32 subnormals may be flushed
INF, NAN = float("inf"), float("nan")
LENGTHS = [1, 5, 128, 300, 1536, 5000, 17000]
SIZES = [(n, count) for n in (128, 256, 512, 1024, 1536, 2048, 4096, 7168, 8192) for count in (1, 2, 7, 32, 64, 65, 256)]


@pytest.fixture(params=list(DTYPES))
def dtype(request):
    return DTYPES[request.param]


def data(device, dtype, *shape, seed=0, gain=1.0):
    return (gain * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(device, dtype)


def residual_norm(x, w):
    return rms_norm(x, w, residual=x.flip(-1).contiguous())[0]


OPS = {
    "rms_norm": lambda x, w: rms_norm(x, w),
    "rms_norm_residual": residual_norm,
    "softmax": lambda x, w: softmax(x),
    "log_softmax": lambda x, w: log_softmax(x, dtype=torch.float32),
    "mean": lambda x, w: mean(x, -1),
}


def check(actual, expected, extra, dtype):
    """Within one rounding to the dtype and ``extra``, relative to the value; for values below 1 of what has differences, to 1."""
    error = (actual.double() - expected).abs()
    allowed = (1.001 * UNIT[dtype] + extra[0]) * expected.abs() + extra[1] + LEAST[dtype]
    assert bool((error <= allowed).all()), f"{float((error - allowed).max()):.2e} too much"


def check_all(x, w, dtype):
    exact = x.double()
    with dirty_memory():
        norm, exps, logs, means, (added, total) = rms_norm(x, w), softmax(x), log_softmax(x), mean(x, -1), rms_norm(x, w, residual=x.flip(0))
    assert norm.dtype == exps.dtype == logs.dtype == means.dtype == added.dtype == total.dtype == dtype
    check(norm, exact / (exact.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * w.double(), (1e-6, 0), dtype)
    check(exps, exact.softmax(-1), (5e-6, 0), dtype)
    check(logs, exact.log_softmax(-1), (1e-6, 2e-6), dtype)
    check(means, exact.mean(-1), (0, 1e-6), dtype)
    assert_bitwise_equal(total, x + x.flip(0))
    assert_bitwise_equal(added, rms_norm(total, w))


@pytest.mark.parametrize("N", LENGTHS)
def test_against_the_reference(device, dtype, N):
    check_all(data(device, dtype, 3, N), data(device, dtype, N, seed=1), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(("N", "count"), SIZES)
def test_sizes_against_the_reference(device, dtype, N, count):
    check_all(data(device, dtype, count, N), data(device, dtype, N, seed=1), dtype)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("N", [300, 5000, 17000] if INTERPRETED else [128, 300, 512, 2048, 7168, 8192, 17000, 129280])
def test_a_row_alone_and_among_others(device, dtype, op, N):
    count = 70 if N <= 300 or ON_GPU else 9
    x, w = data(device, dtype, count, N), data(device, dtype, N, seed=1)
    whole = OPS[op](x, w)
    for first, some in ((0, 1), (count - 1, 1), (3, 2), (1, count - 2)):
        assert_bitwise_equal(OPS[op](x[first : first + some], w), whole[first : first + some], f"{some} rows from {first}")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(2)).to(device)
    assert_bitwise_equal(OPS[op](x[order], w), whole[order], "in another order")
    assert not bitwise_equal(whole[order], whole)


@pytest.mark.gpu
@pytest.mark.parametrize(("N", "count"), SIZES)
def test_each_row_alone(device, dtype, N, count):
    x, w = data(device, dtype, count, N), data(device, dtype, N, seed=1)
    for op in OPS.values():
        alone = torch.cat([op(x[i : i + 1], w) for i in range(count)])
        assert_bitwise_equal(op(x, w), alone)


TILES = [RowTile(1, 1), RowTile(2, 4), RowTile(8, 8), RowTile(1, 2, split=True), RowTile(1, 4, split=True)]


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("N", [300, 2000] if INTERPRETED else [16, 100, 512, 1536, 7168, 129280])
def test_no_tile_changes_a_bit(device, dtype, N, tile):
    if N > 2000 and tile in TILES[:3]:
        pytest.skip("a minute to compile, and no table has it")
    x, w = data(device, dtype, 5, N), data(device, dtype, N, seed=1)
    for op in (softmax, log_softmax):
        assert_bitwise_equal(op(x, tile=tile), op(x))
    if not tile.split:
        assert_bitwise_equal(rms_norm(x, w, tile=tile), rms_norm(x, w))
        assert_bitwise_equal(mean(x, -1, tile=tile), mean(x, -1))


def by_hand(x):
    """The mean of fp32 rows [rows, N] by additions of whole tensors, in the order that `RowOrder` words."""
    order = row_order(x.shape[1])
    padded = torch.zeros(len(x), order.parts * order.length, device=x.device)
    padded[:, : x.shape[1]] = x
    chunks = padded.view(len(x), order.parts, -1, order.width)
    total = torch.zeros_like(chunks[:, :, 0])
    for i in range(chunks.shape[2]):
        total = total + chunks[:, :, i]
    for _ in range(2):
        while total.shape[-1] > 1:
            total = total[..., ::2] + total[..., 1::2]
        total = total.squeeze(-1)
        if total.dim() == 1:
            break
    return total / torch.full_like(total, x.shape[1])  # a GPU multiplies by the inverse of a number


@pytest.mark.parametrize("N", [*LENGTHS, 1024, 1025, 16384, 16385, 40000])
def test_the_order_is_the_written_one(device, N):
    x = data(device, torch.float32, 3, N)
    assert_bitwise_equal(mean(x, -1), by_hand(x))


@pytest.mark.parametrize("op", OPS)
def test_control_another_order_differs(device, monkeypatch, op):
    x, w = data(device, torch.float32, 64, 5000), data(device, torch.float32, 5000, seed=1)
    plain = OPS[op](x, w)
    perm = torch.randperm(5000, generator=torch.Generator().manual_seed(3)).to(device)
    shuffled = OPS[op](x[:, perm], w[perm])
    assert not bitwise_equal(shuffled, plain[:, perm] if plain.dim() == 2 else plain)
    monkeypatch.setattr(rows, "row_order", lambda N: RowOrder(16, 1, 1, 5008))
    assert not bitwise_equal(OPS[op](x, w), plain)


def test_order_is_of_the_length_alone():
    for N in (0, 1, 16, 17, 256, 257, 1024, 1025, 7168, 16384, 16385, 129280, 10**6):
        order = row_order(N)
        assert order.parts * order.length >= N and order.length % (order.width * order.chunks) == 0
        assert all(n & (n - 1) == 0 for n in (order.parts, order.width))
    assert row_order(129280) == RowOrder(256, 4, 16, 8192)


@pytest.mark.parametrize("N", [9, 1500] if INTERPRETED else [9, 1500, 17000])
@pytest.mark.parametrize("split", [False, True])
def test_softmax_of_hostile_rows(device, dtype, N, split):
    x = data(device, dtype, 7, N)
    x[0, ::2] = -INF
    x[1] = -INF
    x[2, 3] = NAN
    x[3, 4] = INF
    x[4] *= 1000
    x[5, : N - 1] = -INF
    x[6] = torch.finfo(dtype).max
    x[6, ::3] = torch.finfo(dtype).min
    for op, expected, extra in ((softmax, x.double().softmax(-1), (5e-6, 0)), (log_softmax, x.double().log_softmax(-1), (1e-6, 2e-6))):
        got = op(x, tile=RowTile(1, 1, split=split))
        assert bool(got[1:4].isnan().all())
        finite = expected.isfinite()
        # fp32 differences of fp32 extremes are infinite
        infinite = got.isinf() & (expected.abs() > torch.finfo(dtype).max)
        kept = torch.tensor([0, 4, 5, 6], device=device)
        assert bool((got.isfinite() | infinite)[kept][finite[kept]].all())
        assert bool((got[kept][~finite[kept]].double() == expected[kept][~finite[kept]]).all())
        check(torch.where(finite & ~infinite, got, 0)[kept], torch.where(finite & ~infinite, expected, 0)[kept], extra, dtype)
        alone = torch.cat([op(x[i : i + 1]) for i in range(7)])
        assert_bitwise_equal(got, alone, allow_nan=True)


def test_any_dim_and_stride(device, dtype):
    x = data(device, dtype, 4, 5, 6)
    for dim in (0, 1, -1):
        moved = x.movedim(dim, -1).contiguous()
        assert_bitwise_equal(softmax(x, dim), softmax(moved).movedim(-1, dim).contiguous())
        assert softmax(x, dim).is_contiguous()
    wide = torch.full((9, 700), NAN, dtype=dtype, device=device)
    wide[::2, 3:303] = data(device, dtype, 5, 300)
    view, w = wide[::2, 3:303], data(device, dtype, 600, seed=1)[::2]
    for op in OPS.values():
        assert_bitwise_equal(op(view, w), op(view.contiguous(), w.contiguous()))
    assert_bitwise_equal(rms_norm(x.transpose(0, 2), None), rms_norm(x.transpose(0, 2).contiguous(), torch.ones(4, device=device)))
    assert_bitwise_equal(silu_and_mul(view), silu_and_mul(view.contiguous()))
    assert_bitwise_equal(log_softmax(x[:1, :1].expand(3, 4, 6)), log_softmax(x[:1, :1]).expand(3, 4, 6).contiguous())


@pytest.mark.parametrize("dim", [None, [], 0, 1, -1, (0, 2), (2, 0), (1, 2), (-1, -2, -3)], ids=str)
@pytest.mark.parametrize("keepdim", [False, True])
def test_mean_over_any_dims(device, dtype, dim, keepdim):
    x = data(device, dtype, 4, 50, 6)
    got = mean(x, dim, keepdim)
    expected = x.double().mean(dim, keepdim)
    assert got.shape == expected.shape and got.dtype == dtype
    check(got, expected, (0, 1e-6), dtype)
    if dim == (2, 0):
        assert_bitwise_equal(got.flatten(), mean(x.transpose(0, 1).reshape(50, 24), 1))


def test_gated_activation(device, dtype):
    for shape in ((3, 2, 20), (2, 5000), (70, 64)):
        x = data(device, dtype, *shape, gain=4.0)
        gate, up = x.double().chunk(2, -1)
        got = silu_and_mul(x)
        check(got, torch.nn.functional.silu(gate) * up, (2e-6, 0), dtype)
        assert_bitwise_equal(silu_and_mul(x[1:2]), got[1:2])
    extreme = torch.tensor([[INF, -1000.0, NAN, 1.0, 1.0, 2.0]], dtype=dtype, device=device)
    assert torch.equal(silu_and_mul(extreme).isnan(), torch.tensor([[False, False, True]], device=device))


def test_other_dtypes_of_weight_and_result(device):
    x, w = data(device, torch.bfloat16, 3, 300), data(device, torch.float32, 300, seed=1)
    exact = x.double()
    check(rms_norm(x, w), exact / (exact.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * w.double(), (1e-6, 0), torch.bfloat16)
    for op in (softmax, log_softmax):
        assert_bitwise_equal(op(x, dtype=torch.float32), op(x.float()))


def test_nothing(device, dtype):
    x = torch.empty(0, 8, dtype=dtype, device=device)
    for op in OPS.values():
        assert op(x, torch.ones(8, device=device)).shape[0] == 0
    assert silu_and_mul(x).shape == (0, 4) and softmax(x, 0).shape == (0, 8)
    assert mean(x, 0).shape == (8,) and bool(mean(x, 0).isnan().all()) and bool(mean(x).isnan())
    assert rms_norm(x.T, torch.ones(0, device=device)).shape == softmax(x.T).shape == (8, 0)


BAD = {
    "list": (lambda x: softmax([1.0]), "x="),
    "dtype": (lambda x: softmax(x.double()), "x has dtype torch.float64"),
    "int": (lambda x: mean(x.int()), "x has dtype torch.int32"),
    "scalar": (lambda x: softmax(x[0, 0]), "x has shape"),
    "dim": (lambda x: softmax(x, 2), "dim=2"),
    "dim type": (lambda x: log_softmax(x, True), "dim=True"),
    "result": (lambda x: softmax(x, dtype=torch.float16), "dtype=torch.float16"),
    "mean twice": (lambda x: mean(x, (1, -1)), r"dim=\(1, -1\)"),
    "mean range": (lambda x: mean(x, 3), "dim=3"),
    "mean type": (lambda x: mean(x, "a"), "dim='a'"),
    "keepdim": (lambda x: mean(x, 0, "no"), "keepdim='no'"),
    "odd": (lambda x: silu_and_mul(x[:, :3]), "x has shape"),
    "weight": (lambda x: rms_norm(x, x[0, :3]), "weight has shape"),
    "eps": (lambda x: rms_norm(x, x[0], -1.0), "eps=-1.0"),
    "eps range": (lambda x: rms_norm(x, x[0], 10**400), "eps=1000"),
    "eps type": (lambda x: rms_norm(x, x[0], None), "eps=None"),
    "residual": (lambda x: rms_norm(x, x[0], residual=x[:1]), "residual has shape"),
    "residual dtype": (lambda x: rms_norm(x, x[0], residual=x.half()), "residual has dtype"),
    "meta": (lambda x: rms_norm(x, x[0].to("meta")), "weight is on meta"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(device, case):
    call, words = BAD[case]
    with pytest.raises(ValueError, match=words):
        call(data(device, torch.float32, 2, 4))


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_inside_torch_compile(device, dtype, op):
    x, w = data(device, dtype, 5, 2048), data(device, dtype, 2048, seed=1)
    assert_bitwise_equal(torch.compile(OPS[op])(x + 0, w), OPS[op](x, w))
