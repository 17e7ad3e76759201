"""Products of the companion operations: right, and each row as if it were alone."""

from dataclasses import replace

import pytest
import torch

from triton_mla.companion import bmm, grouped_linear, linear, matmul, moe_experts
from triton_mla.companion.multiply import multiply
from triton_mla.companion.products import split_length
from triton_mla.companion.tiles import TILES, Tile, tile_for, tiles_of
from triton_mla.testing import assert_bitwise_equal, assert_close, bitwise_equal

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
EPSILON = {torch.float16: 2**-10, torch.bfloat16: 2**-7}


@pytest.fixture(params=DTYPES)
def dtype(request):
    return DTYPES[request.param]


@pytest.fixture(scope="module")
def draw(device, interpreter):
    """A function of a shape and dtype: normal values, the same ones in every call with the same seed."""

    def draw(*shape, dtype=torch.float32, seed=0):
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)

    return draw


def check(actual, expected64, terms=None):
    """The error budget: one rounding of the result, and of sums whose terms are of unit scale.

    A sum in the order of k of K such terms is off by 0.4 * 2^-24 * K (rms) in fp32, and by more the larger the sum is (seven times that, of 2,310
    values of K = 77): twelve times.
    """
    terms = max(1.0, float(terms if terms is not None else 512))
    assert_close(actual, expected64, 2**-23 * max(16.0, 2.5 * terms) if actual.dtype == torch.float32 else EPSILON[actual.dtype] * 4 * terms**0.5)


def rows_alone(op, x, whole, counts):
    """Each of ``counts`` first rows and of as many last ones, and all in another order, against the same rows of the whole."""
    total = x.shape[0]
    for count in counts:
        for first in {0, total - count, (total - count) // 2}:
            assert_bitwise_equal(op(x[first : first + count]), whole[first : first + count], f"{count} rows from {first}:")
    order = torch.randperm(total, generator=torch.Generator().manual_seed(1)).to(x.device)
    assert_bitwise_equal(op(x[order]), whole[order], "in another order:")
    assert not bitwise_equal(whole[order], whole)


@pytest.mark.parametrize(("M", "N", "K"), [(5, 48, 512), (70, 33, 77), (1, 1, 1), (3, 130, 16), (17, 7, 300)])
def test_matmul_against_the_reference(draw, dtype, M, N, K):
    a, b = draw(M, K, dtype=dtype), draw(K, N, dtype=dtype, seed=1)
    result = matmul(a, b)
    assert result.dtype == dtype and result.shape == (M, N)
    check(result, a.double() @ b.double(), K)


SHAPES = [
    ((40,), (40,)), ((40,), (40, 9)), ((5, 40), (40,)), ((2, 5, 40), (40, 9)), ((2, 5, 40), (2, 40, 9)), ((2, 5, 40), (40,)), ((40,), (2, 40, 9)),
    ((3, 1, 5, 40), (2, 40, 9)), ((5, 40), (2, 3, 40, 9)), ((1, 5, 40), (4, 40, 9)), ((2, 3, 5, 40), (2, 3, 40, 9)),
]


@pytest.mark.parametrize(("left", "right"), SHAPES, ids=str)
def test_shapes_of_torch(draw, left, right):
    a, b = draw(*left), draw(*right, seed=1)
    expected = torch.matmul(a.double(), b.double())
    assert matmul(a, b).shape == expected.shape
    check(matmul(a, b), expected, 40)
    out = torch.empty(expected.shape, device=a.device)
    assert matmul(a, b, out=out) is out and bitwise_equal(out, matmul(a, b))


@pytest.mark.parametrize("K", [512, 77])
def test_a_row_alone_and_among_others(draw, device, dtype, K):
    a, b = draw(300, K, dtype=dtype), draw(K, 40, dtype=dtype, seed=1)
    counts = (1, 2, 3, 8, 15, 16, 17, 31, 33, 63, 64, 65, 128, 129, 256, 299) if device.type == "cuda" else (1, 17, 65)
    rows_alone(lambda x: matmul(x, b), a, matmul(a, b), counts)


@pytest.mark.parametrize("K", [77, 64])
def test_every_count_of_rows(draw, device, K):
    """From 1 to 300 rows, whose tiles may be of any kind."""
    a, b = draw(300, K, dtype=torch.bfloat16), draw(K, 24, dtype=torch.bfloat16, seed=1)
    whole = matmul(a, b)
    for count in range(1, 301, 1 if device.type == "cuda" else 37):
        assert_bitwise_equal(matmul(a[:count], b), whole[:count], f"{count} rows:")


@pytest.mark.gpu
@pytest.mark.parametrize(("N", "K"), [(2112, 7168), (7168, 2048), (576, 2048), (512, 7169), (2048, 10944)])
def test_rows_of_real_sizes(draw, N, K):
    x, w = draw(4096, K, dtype=torch.bfloat16), draw(N, K, dtype=torch.bfloat16, seed=1)
    rows_alone(lambda x: linear(x, w), x, linear(x, w), (1, 8, 16, 17, 32, 33, 64, 100, 128, 129, 300, 512, 513, 1000, 2048))


def test_strides_do_not_matter(draw, dtype):
    a, b = draw(37, 70, dtype=dtype), draw(70, 50, dtype=dtype, seed=1)
    expected = matmul(a, b)
    sparse = draw(37, 140, dtype=dtype)
    sparse[:, ::2] = a
    for x in (a, a.t().contiguous().t(), sparse[:, ::2], torch.cat([a, a], 1)[:, :70]):
        for w in (b, b.t().contiguous().t(), torch.cat([b, b], 1)[:, :50], torch.stack([b, b], 2)[..., 0]):
            assert_bitwise_equal(matmul(x, w), expected)
    assert_bitwise_equal(linear(a, b.t()), expected)
    assert_bitwise_equal(linear(a, b.t().contiguous()), expected)
    wide = torch.full((37, 60), torch.nan, dtype=dtype, device=a.device)
    assert_bitwise_equal(matmul(a, b, out=wide[:, 5:55]), expected)
    assert bool(wide[:, :5].isnan().all() and wide[:, 55:].isnan().all())
    assert_bitwise_equal(linear(a, b.t(), out=torch.empty(50, 37, dtype=dtype, device=a.device).t()), expected)


def test_linear_adds_the_bias_before_it_rounds(draw, dtype):
    x, w, bias = draw(2, 9, 64, dtype=dtype), draw(24, 64, dtype=dtype, seed=1), draw(24, dtype=dtype, seed=2)
    result = linear(x, w, bias)
    check(result, x.double() @ w.double().t() + bias.double(), 64)
    assert_bitwise_equal(linear(x[1, 3:4], w, bias), result[1, 3:4])
    out = torch.empty_like(result)
    assert linear(x, w, bias, out=out) is out and bitwise_equal(out, result)
    if dtype != torch.float32:
        assert not bitwise_equal(linear(x, w) + bias, result)


def test_bmm(draw, dtype):
    a, b = draw(4, 19, 48, dtype=dtype), draw(4, 48, 20, dtype=dtype, seed=1)
    whole = bmm(a, b)
    check(whole, a.double() @ b.double(), 48)
    for i in range(4):
        assert_bitwise_equal(matmul(a[i], b[i]), whole[i])
    heads = a.transpose(0, 1).contiguous().transpose(0, 1)
    out = torch.empty(19, 4, 20, dtype=dtype, device=a.device).transpose(0, 1)
    assert bmm(heads, b.transpose(1, 2).contiguous().transpose(1, 2), out=out) is out
    assert_bitwise_equal(out.contiguous(), whole)
    assert_bitwise_equal(bmm(a[:, 7:8], b), whole[:, 7:8])


@pytest.mark.parametrize(("M", "N", "K"), [(0, 5, 7), (4, 0, 7), (4, 5, 0), (0, 0, 0)])
def test_nothing_to_add(draw, M, N, K):
    a, b, bias = draw(M, K), draw(K, N, seed=1), draw(N, seed=2)
    for result in (matmul(a, b), linear(a, b.t()), bmm(a[None], b[None])[0]):
        assert result.shape == (M, N) and bool((result == 0).all())
    assert bool((linear(a, b.t(), bias) == bias).all())
    assert matmul(draw(0, M, K), draw(0, K, N)).shape == (0, M, N)
    for groups in (0, 2):
        grouped = grouped_linear(a, draw(groups, N, K), torch.zeros(groups + 1, dtype=torch.int32, device=a.device))
        assert grouped.shape == (M, N) and bool((grouped == 0).all())


def test_nan_stays_in_its_row(draw):
    a, b = draw(20, 40), draw(40, 30, seed=1)
    clean = matmul(a, b)
    a[7] = torch.nan
    dirty = matmul(a, b)
    assert bool(dirty[7].isnan().all())
    assert bitwise_equal(dirty[:7], clean[:7]) and bitwise_equal(dirty[8:], clean[8:])


def test_split_length():
    assert split_length(2112, 7168) == 1792 and split_length(2048, 10944) == 2816
    assert split_length(7168, 18432) == 18432 and split_length(2560, 6143) == 6143 and split_length(5, 0) == 0
    for K in range(6144, 30000, 333):
        length = split_length(2560, K)
        assert length % 256 == 0 and -(-K // length) in (3, 4)


SPLIT_TILES = [Tile(64, 64, 32, 4, 1), Tile(64, 64, 64, 4, 2, across=True), Tile(16, 32, 64, 4, 1, swap=True), Tile(16, 64, 32, 4, 3, across=True, group_m=1)]
TMA_TILES = [
    Tile(64, 64, 32, 4, 1, tma=True), Tile(64, 32, 64, 4, 2, swap=True, tma=True, per_sm=1),
    Tile(32, 64, 32, 4, 2, across=True, tma=True, per_sm=1, subtiles=2),
]


def has_tma(device):
    """Under the interpreter too, but its products in bf16 are wrong there."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device)[0] == 9


@pytest.mark.parametrize("split_k", [64, 1000])
@pytest.mark.parametrize("kind", [torch.float16, torch.float32], ids=str)
def test_descriptors_read_and_write_what_pointers_do(draw, device, kind, split_k):
    """Batches, whatever dimension is contiguous, and sizes that fill no tile."""
    if not has_tma(device) or (device.type == "cuda" and kind == torch.float32):
        pytest.skip("descriptors need sm_90, and fp32 products of these tiles take minutes to compile")
    a, b, bias = draw(3, 70, 136, dtype=kind), draw(3, 136, 72, dtype=kind, seed=1), draw(72, dtype=kind, seed=2)
    for x in (a, a.transpose(0, 1).contiguous().transpose(0, 1), draw(3, 136, 72, dtype=kind).transpose(1, 2)[:, :70]):
        for w in (b, b.transpose(1, 2).contiguous().transpose(1, 2)):
            expected = multiply(x, w, bias, None, SPLIT_TILES[0], split_k)
            for tile in TMA_TILES:
                around = torch.full((73, 3, 80), torch.nan, dtype=kind, device=device)
                out = around[:70, :, :72].transpose(0, 1)
                assert_bitwise_equal(multiply(x, w, bias, out, tile, split_k).contiguous(), expected, str(tile))
                assert bool(around[70:].isnan().all() and around[..., 72:].isnan().all())


@pytest.mark.parametrize("K", [300, 256, 65, 64])
def test_a_split_has_one_order_in_all_forms(draw, dtype, K):
    a, b, bias = draw(1, 40, K, dtype=dtype), draw(1, K, 48, dtype=dtype, seed=1), draw(48, dtype=dtype, seed=2)
    results = [multiply(a, b, bias, None, tile, 64) for tile in SPLIT_TILES]
    check(results[0], a.double() @ b.double() + bias.double(), K)
    for tile, result in zip(SPLIT_TILES[1:], results[1:], strict=True):
        assert_bitwise_equal(result, results[0], str(tile))
        assert_bitwise_equal(multiply(a[:, 11:12], b, bias, None, tile, 64), results[0][:, 11:12], f"{tile}, a row:")


def test_control_another_split_differs(draw):
    """In fp32: of 2000 results in bf16 none may show it."""
    a, b = draw(1, 40, 512), draw(1, 512, 48, seed=1)
    tile = SPLIT_TILES[0]
    whole = multiply(a, b, None, None, tile, 512)
    assert_bitwise_equal(whole, matmul(a[0], b[0])[None])
    assert not bitwise_equal(multiply(a, b, None, None, tile, 128), whole)
    assert not bitwise_equal(multiply(a, b, None, None, tile, 128), multiply(a, b, None, None, tile, 256))


def test_tiles_under_the_interpreter(draw):
    """With products that add as a tensor core does, on a GPU too."""
    a, b = draw(1, 50, 100), draw(1, 100, 70, seed=1)
    (tile,) = tiles_of("interpreter")
    whole = multiply(a, b, None, None, tile, 100)
    for other in (replace(tile, block_m=16), replace(tile, block_n=16, group_m=2), replace(tile, block_k=32), replace(tile, block_m=32, swap=True)):
        if a.device.type == "cpu" or max(other.block_m, other.block_n) <= 64:
            assert_bitwise_equal(multiply(a, b, None, None, other, 100), whole, str(other))


def test_tables_serve_every_size():
    for arch in ("sm_90", "sm_80", "gfx942", "interpreter"):
        for M in (1, 16, 17, 300, 2**20):
            for kind in DTYPES.values():
                for batch, split in ((1, False), (1, True), (128, False)):
                    assert tile_for(M, 129280, kind, arch, batch=batch, split=split) in tiles_of(arch) + tiles_of("fp32")
    assert {tile for name in TILES for tile in tiles_of(name.split()[0])} == {tile for table in TILES.values() for *_, options in table for tile in options}


def test_the_tile_of_a_product_fills_the_machine():
    """Two waves of small tiles against one of large ones, and 132 multiprocessors against half of them."""
    def shape(*args, **options):
        tile = tile_for(*args, torch.bfloat16, "sm_90", **options)
        return tile.block_m, tile.block_n

    assert shape(2048, 2048) == (128, 256) and shape(2048, 3072) == (128, 128)
    assert shape(64, 4096) == (64, 32) and shape(64, 4096, num_sms=66) == (64, 64)
    assert shape(128, 512, batch=2) == (64, 32) and shape(2048, 128, batch=16) == (256, 128)


ALL_TILES = [*tiles_of("sm_90"), *tiles_of("sm_80")]
OTHER_TILES = [
    Tile(16, 64, 64, 4, 3, swap=True), Tile(16, 16, 512, 4, 3, across=True), Tile(64, 16, 128, 4, 3),
    Tile(128, 128, 64, 4, 3, group_m=1), Tile(64, 128, 128, 8, 2, swap=True),
]


@pytest.mark.gpu
@pytest.mark.parametrize("tile", ALL_TILES + OTHER_TILES, ids=str)
def test_no_tile_changes_a_bit(draw, device, tile):
    if tile.tma and not has_tma(device):
        pytest.skip("descriptors need sm_90")
    for kind in (torch.bfloat16, torch.float16):
        for M, N, K in ((1, 2112, 7168), (300, 576, 2048), (130, 520, 1000))[: 3 if kind == torch.bfloat16 else 1]:  # each is code of its own
            for split_k in (K, 512):
                a, w, bias = draw(1, M, K, dtype=kind), draw(1, N, K, dtype=kind, seed=1), draw(N, dtype=kind, seed=2)
                for b in (w.transpose(1, 2), w.transpose(1, 2).contiguous()):
                    expected = multiply(a, b, bias, None, OTHER_TILES[0], split_k)
                    assert_bitwise_equal(multiply(a, b, bias, None, tile, split_k), expected, f"{kind} {M}x{N}x{K} split {split_k}:")
                    assert_bitwise_equal(multiply(a.transpose(1, 2).contiguous().transpose(1, 2), b, bias, None, tile, split_k), expected, "a by columns:")
        a, b = draw(5, 300, 512, dtype=kind), draw(5, 512, 136, dtype=kind, seed=1)
        out = torch.empty(300, 5, 136, dtype=kind, device=device).transpose(0, 1)
        assert_bitwise_equal(multiply(a, b, None, out, tile, 512).contiguous(), multiply(a, b, None, None, OTHER_TILES[0], 512), f"{kind} batch:")


def grouped_reference(x, weight, starts):
    result = torch.zeros(x.shape[0], weight.shape[1], dtype=torch.float64, device=x.device)
    for e, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):
        result[start:end] = x[start:end].double() @ weight[e].double().t()
    return result


@pytest.mark.parametrize("starts", [[0, 20, 20, 21, 60, 90], [0, 0, 0, 0, 0, 90], [0, 1, 2, 3, 4, 5], [0, 0, 0, 0, 0, 0], [0, 64, 64, 64, 64, 64]], ids=str)
def test_grouped_linear(draw, device, dtype, starts):
    x, weight = draw(90, 40, dtype=dtype), draw(5, 24, 40, dtype=dtype, seed=1)
    on_device = torch.tensor(starts, dtype=torch.int32, device=device)
    result = grouped_linear(x, weight, on_device)
    check(result, grouped_reference(x, weight, starts), 40)
    by_columns = weight.transpose(1, 2).contiguous().transpose(1, 2)
    out = torch.full((90, 24), torch.nan, dtype=dtype, device=device)
    assert grouped_linear(x, by_columns, on_device, out=out) is out
    assert_bitwise_equal(out, result)


def test_wrong_starts_write_nothing_around_the_result(draw, device):
    """Only the device sees them: those that fall, and are negative."""
    starts = torch.cat([torch.zeros(1), torch.full((59,), 40), torch.full((42,), -6400)]).to(device, torch.int32)
    memory = torch.full((4000, 4), 7.0, device=device)
    grouped_linear(draw(40, 8), draw(101, 4, 8), starts, out=memory[3900:3940])
    memory[3900:3940] = 7.0
    assert (memory == 7.0).all()


def test_rows_of_groups_do_not_depend_on_the_spread(draw, device):
    x, weight = draw(150, 64, dtype=torch.bfloat16), draw(7, 40, 64, dtype=torch.bfloat16, seed=1)
    alone = torch.stack([linear(x, matrix) for matrix in weight])
    for seed in range(4):
        chance = torch.Generator().manual_seed(seed)
        group = torch.sort(torch.randint(0, 7, (150,), generator=chance) ** 2 // 6 % 7).values
        order = torch.randperm(150, generator=chance).to(device)
        starts = torch.searchsorted(group, torch.arange(8)).int().to(device)
        result = grouped_linear(x[order], weight, starts)
        assert_bitwise_equal(result, alone[group.to(device), order], f"spread {seed}:")
        assert not bitwise_equal(result, alone[(group.to(device) + 1) % 7, order])


def moe(draw, dtype, tokens, experts=6, slots=3):
    x, gate_up, down = draw(tokens, 40, dtype=dtype), draw(experts, 48, 40, dtype=dtype, seed=1) / 6, draw(experts, 40, 24, dtype=dtype, seed=2) / 5
    ids = torch.stack([torch.randperm(experts, generator=torch.Generator().manual_seed(t))[:slots] for t in range(tokens)]).int().to(x.device)
    return x, gate_up, down, ids, draw(tokens, slots, seed=3).abs()


def test_moe_experts(draw, dtype):
    x, gate_up, down, ids, weights = moe(draw, dtype, 21)
    ids[4, 1], ids[5, 0] = -1, 6
    expected = torch.zeros(21, 40, dtype=torch.float64, device=x.device)
    for t in range(21):
        for j, e in enumerate(ids[t].tolist()):
            if 0 <= e < 6:
                gate, up = (gate_up[e].double() @ x[t].double()).chunk(2)
                expected[t] += weights[t, j].double() * (down[e].double() @ (torch.nn.functional.silu(gate) * up))
    result = moe_experts(x, gate_up, down, ids, weights)
    assert result.dtype == dtype
    check(result, expected, 4)


def test_a_slot_of_no_expert_has_no_weight(draw):
    x, gate_up, down, ids, weights = moe(draw, torch.float32, 6)
    ids[1, 0], ids[2, 1], ids[3, 0] = -1, 6, 2**31 - 1
    plain = moe_experts(x, gate_up, down, ids, weights)
    weights[1, 0], weights[2, 1], weights[3, 0] = torch.inf, torch.nan, -torch.inf
    assert_bitwise_equal(moe_experts(x, gate_up, down, ids, weights), plain)
    weights[4, 0] = torch.nan
    assert bool(moe_experts(x, gate_up, down, ids, weights)[4].isnan().all()), "an expert's"


def test_a_token_of_a_mixture_alone_and_among_others(draw, dtype):
    x, gate_up, down, ids, weights = moe(draw, dtype, 40)
    whole = moe_experts(x, gate_up, down, ids, weights)
    for some in ([7], [39, 3, 3, 8], list(range(10, 30))):
        assert_bitwise_equal(moe_experts(x[some], gate_up, down, ids[some], weights[some]), whole[some], f"{len(some)} tokens:")
    if dtype == torch.float32:  # of a few results in 16 bits none may show it
        assert not bitwise_equal(moe_experts(x, gate_up, down, ids.flip(1), weights.flip(1)), whole), "slots in another order"
    assert moe_experts(x[:0], gate_up, down, ids[:0], weights[:0]).shape == (0, 40)


BAD = [
    (lambda a, b: matmul(None, b), "a=None"),
    (lambda a, b: matmul(a, 3), "b=3"),
    (lambda a, b: matmul(a.double(), b.double()), "a has dtype"),
    (lambda a, b: matmul(a, b.half()), "b is torch.float16"),
    (lambda a, b: matmul(a, b[:-1]), "b has shape"),
    (lambda a, b: matmul(a.sum(), b), "a has shape"),
    (lambda a, b: matmul(a.expand(2, 4, 8), b.expand(3, 8, 6)), "b has shape"),
    (lambda a, b: matmul(a, b, out=a), "out has shape"),
    (lambda a, b: matmul(a, b, out=a.new_empty(1, 6).expand(4, 6)), "out has shape"),
    (lambda a, b: linear(a, b), "x has shape"),
    (lambda a, b: linear(a, b.t(), b), "bias has shape"),
    (lambda a, b: linear(a, b.t(), b[0, :5]), "bias has shape"),
    (lambda a, b: linear(a, b.t()[None]), "weight has shape"),
    (lambda a, b: bmm(a, b), "a has shape"),
    (lambda a, b: bmm(a[None], b.expand(2, 8, 6)), "b has shape"),
    (lambda a, b: grouped_linear(a, b.t()[None], torch.tensor([0, 4], device=a.device)), "group_starts=torch.int64"),
    (lambda a, b: grouped_linear(a, b.t()[None], torch.zeros(3, dtype=torch.int32, device=a.device)), "group_starts has shape"),
    (lambda a, b: grouped_linear(a, b[None], torch.zeros(2, dtype=torch.int32, device=a.device)), "weight has shape"),
    (lambda a, b: grouped_linear(a[:, ::2], b[None], torch.zeros(2, dtype=torch.int32, device=a.device)), "x has strides"),
    (lambda a, b: moe_experts(a, b.t()[None, :5], b[None], a[:, :1].int(), a[:, :1]), "gate_up has shape"),
    (lambda a, b: moe_experts(a, b.t()[None], b[None], a[:, :1].int(), a[:, :1]), "down has shape"),
    (lambda a, b: moe_experts(a, b.t()[None], b[None, :, :3], a[:, :1], a[:, :1]), "topk_ids=torch.float32"),
    (lambda a, b: moe_experts(a, b.t()[None], b[None, :, :3], a[:3, :1].int(), a[:, :1]), "topk_ids has shape"),
    (lambda a, b: moe_experts(a, b.t()[None], b[None, :, :3], a[:, :1].int(), a[:, :2]), "topk_weights has shape"),
]


@pytest.mark.parametrize(("call", "word"), BAD)
def test_bad_input(draw, call, word):
    with pytest.raises(ValueError, match=word):
        call(draw(4, 8), draw(8, 6, seed=1))


@pytest.mark.gpu
def test_a_call_like_one_before(draw):
    """With other addresses, aligned or not, into an out of the caller's and without the bias."""
    for N, K, biased in ((2112, 7168, True), (520, 1024, False)):
        x, w, bias = draw(70, K, dtype=torch.bfloat16), draw(N, K, dtype=torch.bfloat16, seed=1), draw(N, dtype=torch.bfloat16, seed=2) if biased else None
        expected = linear(x, w, bias)
        for _ in range(2):
            assert_bitwise_equal(linear(x.clone(), w.clone(), bias), expected)
            assert_bitwise_equal(linear(torch.cat([x.flatten()[:1], x.flatten()])[1:].view_as(x), w, bias), expected, "not aligned:")
            out = torch.empty_like(expected)
            assert linear(x, w, bias, out=out) is out and bitwise_equal(out, expected)


@pytest.mark.gpu
def test_graphs_and_torch_compile(draw, device):
    def all_of_them(x, w, gate_up, down, ids, weights):
        return linear(x, w), matmul(x, w.t()), moe_experts(x, gate_up, down, ids, weights)

    x, gate_up, down, ids, weights = moe(draw, torch.bfloat16, 40)
    arguments = (x, draw(64, 40, dtype=torch.bfloat16, seed=5), gate_up, down, ids, weights)
    expected = all_of_them(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = all_of_them(*arguments)
    graph.replay()
    for got in (captured, torch.compile(all_of_them)(*arguments)):
        for one, other in zip(got, expected, strict=True):
            assert_bitwise_equal(one, other)
