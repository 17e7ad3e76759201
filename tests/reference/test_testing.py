"""The comparisons see single bits and no NaN passes; a made batch has contents by key and is hostile elsewhere."""

import math

import pytest
import torch

from triton_mla.testing import (
    Request,
    assert_bitwise_equal,
    assert_close,
    bitwise_equal,
    make_paged_batch,
    mismatches,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
INTEGERS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}
NAN, INF = math.nan, math.inf


def small(requests, **options):
    sizes = {"num_heads": 2, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "page_size": 16, "dtype": torch.float16}
    return make_paged_batch(requests, **{**sizes, **options})


def flip_last_bit(tensor, index):
    changed = tensor.clone()
    changed.view(INTEGERS[tensor.dtype])[index] ^= 1
    return changed


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_one_flipped_bit_is_seen(dtype):
    a = torch.randn(3, 5).to(dtype)
    b = flip_last_bit(a, (2, 3))
    assert bitwise_equal(a, a.clone()) and mismatches(a, a.clone()) == 0
    assert not bitwise_equal(a, b) and mismatches(a, b) == 1
    assert_bitwise_equal(a, a.clone())
    with pytest.raises(AssertionError, match=r"victim: 1 of 15 elements differ, first at \(2, 3\): .* \(0x[0-9a-f]+\)"):
        assert_bitwise_equal(a, b, "victim")


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_not_values(dtype):
    zero, nan = torch.zeros(4, dtype=dtype), torch.full((4,), NAN, dtype=dtype)
    assert not bitwise_equal(zero, -zero)
    assert not bitwise_equal(zero, nan) and mismatches(zero, nan) == 4
    assert bitwise_equal(nan, nan.clone())
    assert not bitwise_equal(nan, flip_last_bit(nan, 1))


def test_nan_does_not_pass_the_assertion_unless_allowed():
    nan = torch.tensor([1.0, NAN])
    with pytest.raises(AssertionError, match=r"NaN at \(1,\)"):
        assert_bitwise_equal(nan, nan.clone())
    assert_bitwise_equal(nan, nan.clone(), allow_nan=True)


def test_shape_and_dtype_count():
    a = torch.zeros(4)
    for other in (torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32), torch.zeros(5)):
        assert not bitwise_equal(a, other)
        with pytest.raises(AssertionError, match="float32"):
            assert_bitwise_equal(a, other)
        with pytest.raises(ValueError, match="shapes and dtypes"):
            mismatches(a, other)


def test_strides_do_not_count():
    a = torch.randn(6, 8)
    assert bitwise_equal(a.t(), a.t().contiguous())
    assert bitwise_equal(torch.tensor(1.0), torch.tensor(1.0))
    assert bitwise_equal(torch.empty(0, 3), torch.empty(0, 3))


def test_sign_bit_is_reported_as_unsigned_bits():
    with pytest.raises(AssertionError, match="0x80000000.*0x00000000"):
        assert_bitwise_equal(torch.tensor([-0.0]), torch.tensor([0.0]))


def test_assert_close():
    want = torch.tensor([1.0, -INF], dtype=torch.float64)
    assert_close(torch.tensor([1.001, -INF]), want, 2e-3)
    with pytest.raises(AssertionError, match=r"lse: off by 1.0\d*e-02 at \(0,\).*1 of 2 are off"):
        assert_close(torch.tensor([1.01, -INF]), want, 2e-3, "lse")


@pytest.mark.parametrize("actual", [[NAN, 0.0], [1.0, 0.0], [1.0, INF], [1.0, NAN], [-INF, -INF]])
def test_assert_close_refuses(actual):
    want = torch.tensor([1.0, -INF], dtype=torch.float64)
    with pytest.raises(AssertionError):
        assert_close(torch.tensor(actual), want, 1e3)


def test_assert_close_refuses_nan_for_nan_and_other_shapes():
    nan = torch.tensor([NAN])
    with pytest.raises(AssertionError, match="NaN"):
        assert_close(nan, nan.double(), 1.0)
    with pytest.raises(AssertionError):
        assert_close(torch.zeros(1, 2), torch.zeros(2), 1.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_order", ["random", "sequential", "reversed"])
def test_contents_follow_from_the_key_alone(dtype, page_order):
    victim = Request(37, 3, key=5)
    alone = small([victim], dtype=dtype)
    crowd = [Request(70, key=9), victim, Request(0, key=5), Request(3, 2, key=4)]
    batch = small(crowd, dtype=dtype, page_size=32, page_order=page_order, extra_pages=0, extra_width=7)
    assert_bitwise_equal(batch.q[batch.rows(1)], alone.q)
    assert_bitwise_equal(batch.kv(1), alone.kv(0))
    assert not bitwise_equal(small([Request(37, 3, key=6)], dtype=dtype).kv(0), alone.kv(0))
    assert not bitwise_equal(small([victim], dtype=dtype, seed=1).q, alone.q)


def test_contents_of_a_position_do_not_follow_from_the_lengths():
    long = small([Request(3000, 3000, key=5)])
    for seq_len, q_len in ((1, 1), (683, 1), (1365, 700), (2999, 2)):
        short = small([Request(seq_len, q_len, key=5)])
        assert_bitwise_equal(short.kv(0), long.kv(0)[:seq_len])
        assert_bitwise_equal(short.q, long.q[seq_len - q_len : seq_len])


def test_everything_that_no_token_owns_is_hostile():
    batch = small([Request(17, key=1), Request(0, key=2), Request(16, key=3)], extra_pages=2, extra_width=1)
    assert batch.kv_cache.shape == (5, 16, 48) and batch.block_table.shape == (3, 3)
    assert int(batch.kv_cache.isnan().sum()) == (5 * 16 - 33) * 48
    own = [batch.block_table[0, :2], batch.block_table[2, :1]]
    assert len(set(torch.cat(own).tolist())) == 3
    assert bool((batch.block_table[1] == 2**31 - 1).all()) and bool((batch.block_table[2, 1:] == 2**31 - 1).all())
    assert batch.cu_seqlens_q.tolist() == [0, 1, 2, 3] and batch.seq_lens.tolist() == [17, 0, 16]
    assert batch.cu_seqlens_q.dtype == batch.seq_lens.dtype == batch.block_table.dtype == torch.int32
    assert bool(torch.isinf(small([Request(1)], stale=INF).kv_cache).any())
    assert small([Request(1)], table_tail=-1).block_table[0, -1] == -1


def test_slots_name_the_tokens():
    batch = small([Request(5, key=1), Request(40, key=2)])
    for i in range(2):
        assert_bitwise_equal(batch.kv_cache.view(-1, 48)[batch.slots(i)], batch.kv(i))


def test_edges():
    assert small([]).q.shape == (0, 2, 48) and small([]).cu_seqlens_q.tolist() == [0]
    nothing = small([Request(0)], extra_pages=0, extra_width=0)
    assert nothing.kv_cache.shape[0] == 0 and nothing.block_table.shape == (1, 0) and nothing.q.shape[0] == 1
    assert small([Request(9, 0)]).q.shape[0] == 0
    with pytest.raises(ValueError, match="page_order is 'sorted'"):
        small([Request(1)], page_order="sorted")


def test_moving_a_batch_keeps_its_bytes():
    batch = small([Request(5, key=1)])
    moved = batch.to("cpu")
    assert_bitwise_equal(moved.q, batch.q)
    assert_bitwise_equal(moved.kv_cache, batch.kv_cache, allow_nan=True)
    assert moved.requests == batch.requests
