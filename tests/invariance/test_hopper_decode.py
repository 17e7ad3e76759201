"""The Hopper forms of decode and extend have the bits of the portable one, whatever a tile holds, and whichever splits are folded and which merged."""

from dataclasses import replace

import pytest
import torch
from test_tiles import far_below, plain, rising, spiky

from triton_mla import hopper_decode, mla_decode
from triton_mla.kernels.hopper import available
from triton_mla.testing import Request, assert_bitwise_equal
from triton_mla.tuning import ARCHITECTURES, Schedule, arch_of

pytestmark = pytest.mark.gpu
MANY = ARCHITECTURES["sm_90"].hopper.many
SLICED = [replace(MANY, value_slices=2)]
FEW = [Schedule("hopper_few", 16, num_warps=8, pdl=True)]
FEW += [Schedule("hopper_two_phase", rows, num_warps=8, num_stages=2, pdl=True) for rows in (16, 32, 64)]
# Tiles of a split from none to all of a ring of three and more; empty rows; splits that end within a tile.
LENS = [1, 0, 63, 64, 65, 127, 128, 129, 192, 193, 257, 1000, 1023, 1024, 1025, 2047, 2048, 2049, 4100, 33, 700, 3000]
EXTEND = [(2, 2), (64, 2), (65, 4), (130, 7), (1024, 64), (1025, 70), (1030, 4), (2049, 70), (70, 70), (4100, 7), (63, 63), (700, 1), (0, 3), (20, 33)]
# A form, and how many times the requests: with eight most of them are folded, which the forms for few items do not do.
FORMS = [*[(form, times) for form in (MANY, *SLICED) for times in (1, 8)], *[(few, 1) for few in FEW]]


def named(form):
    return f"{form.form} {form.block_rows} rows" + (f" {form.value_slices} slices" if form.value_slices > 1 else "")


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=str)
def mla16(request, mla):
    if arch_of(mla.device) != "sm_90" or not available():
        pytest.skip("for sm_90 and triton 3.6")
    return mla.with_dtype(request.param)


@pytest.fixture(params=[MANY, *SLICED, *FEW], ids=named)
def form(request):
    return request.param


@pytest.fixture(params=FORMS, ids=lambda pair: f"{named(pair[0])} x {pair[1]}")
def form_and_times(request):
    return request.param


@pytest.fixture(autouse=True)
def prepared(monkeypatch):
    """One entry for each wave of each kind of call that a Hopper form was prepared for."""
    made = []

    def count(make):
        return lambda *args: (made.append(1), make(*args))[1]

    for steps in ("steps", "few_step", "two_phase_steps"):
        monkeypatch.setattr(hopper_decode, steps, count(getattr(hopper_decode, steps)))
    monkeypatch.setattr("triton_mla.calls._calls", {})
    return made


def requests(times=1):
    return [Request(n, key=i % len(LENS)) for i, n in enumerate(LENS * times)]


def extends(times=1):
    return [Request(n, q_len, key=i % len(EXTEND)) for i, (n, q_len) in enumerate(EXTEND * times)]


def both(mla, prepared, form, op, batch, what=""):
    """The rows of the form, which are those of the portable one; twice, since a second call takes a shorter way."""
    run = getattr(mla, op)
    expected = run(batch, plan=mla.plan(op, batch, replace(form, form="one_pass", num_stages=2, value_slices=1)))
    counts = [len(prepared)]
    plan = mla.plan(op, batch, form)
    for _ in range(2):
        rows = run(batch, plan=plan)
        rows.assert_same(expected, what)
        counts.append(len(prepared))
    assert counts[0] < counts[1] == counts[2]
    return rows


@pytest.mark.parametrize("num_heads", [8, 12, 16, 40, 64, 100, 128])
def test_heads(mla16, prepared, form_and_times, num_heads):
    form, times = form_and_times
    both(mla16, prepared, form, "decode", mla16.batch(requests(times), num_heads=num_heads))
    both(mla16, prepared, form, "extend", mla16.batch(extends(times), num_heads=num_heads))


@pytest.mark.parametrize("num_heads", [16, 40])
def test_many_requests(mla16, prepared, num_heads):
    """More than the 256 that a warp looks at together, and several items for each program."""
    both(mla16, prepared, FEW[0], "decode", mla16.batch(requests(16), num_heads=num_heads))
    both(mla16, prepared, FEW[0], "extend", mla16.batch(extends(24), num_heads=num_heads))


@pytest.mark.parametrize("page_size", [16, 32, 48, 64, 128])
@pytest.mark.parametrize("num_heads", [16, 128])
def test_pages(mla16, prepared, form, page_size, num_heads):
    mla16 = replace(mla16, page_size=page_size)
    both(mla16, prepared, form, "decode", mla16.batch(requests(), num_heads=num_heads))
    both(mla16, prepared, form, "extend", mla16.batch(extends(), num_heads=num_heads))


@pytest.mark.parametrize("kv_split", [64, 128, 192, 512, 1024, 2048])
def test_splits(mla16, prepared, form_and_times, kv_split):
    form, times = form_and_times
    mla16 = mla16.with_order(kv_split=kv_split)
    both(mla16, prepared, form, "decode", mla16.batch(requests(times), num_heads=128))
    both(mla16, prepared, form, "extend", mla16.batch(extends(), num_heads=16))


@pytest.mark.parametrize("change", [plain, rising, spiky, far_below], ids=lambda change: change.__name__)
def test_maxima_that_move(mla16, prepared, form_and_times, change):
    form, times = form_and_times
    for num_heads in (16, 128):
        both(mla16, prepared, form, "decode", change(mla16.batch(requests(times), num_heads=num_heads)), f"{num_heads} heads:")
        both(mla16, prepared, form, "extend", change(mla16.batch(extends(), num_heads=num_heads)), f"{num_heads} heads:")


def test_rows_of_an_extend_are_decode_rows(mla16, prepared, form):
    batch = mla16.batch([Request(2049, 70, key=7)], num_heads=128)
    rows = both(mla16, prepared, form, "extend", batch)
    lens = torch.arange(1980, 2050, dtype=torch.int32, device=mla16.device)
    alone = replace(batch, block_table=batch.block_table.expand(70, -1).contiguous(), seq_lens=lens)
    mla16.decode(alone, plan=mla16.plan("decode", alone, form)).assert_same(rows)


def test_a_shuffled_batch_and_a_row_alone(mla16, form):
    batch = mla16.batch(requests(2), num_heads=128)

    def decode(batch):
        return mla16.decode(batch, plan=mla16.plan("decode", batch, form))

    rows = decode(batch)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1)).tolist()
    decode(mla16.pick(batch, order)).assert_same(rows[order])
    for i in (0, 11, 15):
        decode(mla16.pick(batch, [i])).assert_same(rows[i : i + 1])


@pytest.mark.parametrize("value_rows", [16, 32, 64])
def test_parts_of_row_tiles(mla16, value_rows):
    """The second phase takes a row tile whole or in parts, by the number of programs."""
    form = FEW[-1]
    for num_heads, op, batch in ((100, "decode", requests()), (128, "decode", requests()), (16, "extend", extends())):
        batch = mla16.batch(batch, num_heads=num_heads)
        run = getattr(mla16, op)
        expected = run(batch, plan=mla16.plan(op, batch, replace(form, form="one_pass", num_stages=2)))
        run(batch, plan=replace(mla16.plan(op, batch, form), value_rows=value_rows)).assert_same(expected)


@pytest.mark.parametrize("form", FEW, ids=named)
def test_waves(mla16, form, monkeypatch):
    batch = mla16.batch(requests(), num_heads=128)
    expected = mla16.decode(batch, plan=mla16.plan("decode", batch, form))
    monkeypatch.setattr("triton_mla.plan.MAX_WORKSPACE_BYTES", 1 << 22)
    plan = mla16.plan("decode", batch, form)
    assert plan.wave_row_tiles < plan.num_row_tiles
    mla16.decode(batch, plan=plan).assert_same(expected)


def test_padding_and_bad_starts(mla16, prepared, form):
    batch = mla16.batch(extends(), num_heads=16)
    padded = replace(batch, q=torch.cat([batch.q, torch.full_like(batch.q[:70], float("nan"))]))
    both(mla16, prepared, form, "extend", padded)[len(batch.q) :].assert_empty()
    two = mla16.batch([Request(300, 40, key=1), Request(90, 30, key=2)], num_heads=16)
    for starts in ([-4, 40, 70], [0, 40, 200], [5, 3, 70]):  # nothing is read or written outside, and the next call is right
        bad = replace(two, cu_seqlens_q=torch.tensor(starts, dtype=torch.int32, device=mla16.device))
        mla16.extend(bad, plan=mla16.plan("extend", bad, form))
    both(mla16, prepared, form, "extend", two)


def test_a_length_past_the_limit_is_loud(mla16, form):
    batch = mla16.batch(requests(), num_heads=128)
    plan = mla16.plan("decode", batch, form)
    expected = mla16.decode(batch, plan=plan)
    lens = batch.seq_lens.clone()
    lens[3] = batch.block_table.shape[1] * batch.page_size + 1
    rows = mla16.decode(replace(batch, seq_lens=lens), plan=plan)
    assert bool(rows.out[3].isnan().all() and rows.lse[3].isnan().all())
    rows[:3].assert_same(expected[:3])
    rows[4:].assert_same(expected[4:])


def test_without_lse_and_what_tma_cannot_read(mla16, form):
    batch = mla16.batch(requests(), num_heads=128)
    plan = mla16.plan("decode", batch, form)
    expected = mla16.decode(batch, plan=plan)
    options = {"softmax_scale": batch.softmax_scale, "plan": plan}
    for _ in range(2):
        assert_bitwise_equal(mla_decode(batch.q, batch.kv_cache, batch.block_table, batch.seq_lens, **options), expected.out)
        shifted = torch.empty(batch.q.numel() + 1, dtype=batch.q.dtype, device=mla16.device)[1:].view(batch.q.shape)
        mla16.decode(replace(batch, q=shifted.copy_(batch.q)), plan=plan).assert_same(expected)
        nope, rope = batch.q[..., :512].contiguous(), batch.q[..., 512:].contiguous()
        mla16.decode(batch, q=(nope, rope), plan=plan).assert_same(expected)


def test_repeats(mla16, form):
    batch = mla16.batch(requests(3), num_heads=128)
    plan = mla16.plan("decode", batch, form)
    rows = mla16.decode(batch, plan=plan)
    for _ in range(50):
        mla16.decode(batch, plan=plan).assert_same(rows)


def test_in_a_graph(mla16, form):
    """What is planned by lengths is planned on the device: a captured call serves every batch of its shape."""
    batch = mla16.batch(requests(2), num_heads=128)
    static = replace(batch, q=batch.q.clone(), block_table=batch.block_table.clone(), seq_lens=batch.seq_lens.clone())
    plan = mla16.plan("decode", batch, form)
    expected = mla16.decode(batch, plan=plan)
    mla16.decode(static, plan=plan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows = mla16.decode(static, plan=plan)
    for seed in range(4):
        order = torch.randperm(len(batch.q), generator=torch.Generator().manual_seed(seed)).tolist()
        picked = mla16.pick(batch, order)
        for name in ("q", "block_table", "seq_lens"):
            getattr(static, name).copy_(getattr(picked, name))
        served = len(order) if seed % 2 else 5
        static.seq_lens[served:] = 0
        graph.replay()
        rows[:served].assert_same(expected[order[:served]])
        rows[served:].assert_empty()


def test_control_another_order_differs(mla16, form):
    batch = mla16.batch(requests(), num_heads=128)
    rows = mla16.decode(batch, plan=mla16.plan("decode", batch, form))
    other = mla16.recut()
    other.decode(batch, plan=other.plan("decode", batch, form)).assert_differs(rows)
