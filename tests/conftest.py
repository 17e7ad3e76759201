"""One body of tests for a GPU and for the interpreter: without a CUDA device the kernels run on CPU tensors."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

# triton reads this variable when it is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from lanes import DTYPES, INTERPRETED, ON_GPU, dirty_memory  # noqa: E402
from prefill_cases import Mha  # noqa: E402

from triton_mla.reference import mla_absorbed  # noqa: E402
from triton_mla.testing import (  # noqa: E402
    PagedBatch,
    Request,
    assert_bitwise_equal,
    assert_close,
    bitwise_equal,
    make_paged_batch,
)

OUT_ATOL = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
LSE_ATOL = 1e-4


def pytest_configure(config: pytest.Config) -> None:
    """With `-n` a process takes tests in their order, so that what those of a module share is computed once."""
    if config.getoption("dist", "no") == "load":
        config.option.dist = "worksteal"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not ON_GPU:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@dataclass(frozen=True)
class Rows:
    """`out` [T, H, R] and `lse` [T, H] of some query rows."""

    out: torch.Tensor
    lse: torch.Tensor

    def __getitem__(self, index: Any) -> Rows:
        return Rows(self.out[index], self.lse[index])

    def __len__(self) -> int:
        return len(self.out)

    def assert_same(self, other: Rows, what: str = "") -> None:
        assert_bitwise_equal(self.out, other.out, f"{what} out")
        assert_bitwise_equal(self.lse, other.lse, f"{what} lse")

    def assert_differs(self, other: Rows) -> None:
        """For negative controls: each set is free of NaN, and some bit differs."""
        self.assert_same(self)
        other.assert_same(other)
        equal = bitwise_equal(self.out, other.out) and bitwise_equal(self.lse, other.lse)
        assert not equal, "no bit differs"

    def assert_close(self, expected: Rows, out_atol: float, lse_atol: float = LSE_ATOL) -> None:
        assert_close(self.out, expected.out, out_atol, "out")
        assert_close(self.lse, expected.lse, lse_atol, "lse")

    def assert_empty(self) -> None:
        """What a row gets that sees no token."""
        zero, nothing = torch.zeros_like(self.out), torch.full_like(self.lse, -torch.inf)
        assert bool((self.out == zero).all()), "out is not 0"
        assert_bitwise_equal(self.lse, nothing, "lse")


@dataclass(frozen=True)
class Mla:
    """The operations with sizes that the device can afford. Lengths of tests are told in units of `order.kv_split`."""

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    page_size: int
    order: Any

    def batch(self, requests: Sequence[Request], **options: Any) -> PagedBatch:
        sizes = {
            "num_heads": self.num_heads,
            "kv_lora_rank": self.kv_lora_rank,
            "qk_rope_head_dim": self.qk_rope_head_dim,
            "page_size": self.page_size,
            "dtype": self.dtype,
            "device": self.device,
        }
        return make_paged_batch(requests, **{**sizes, **options})

    def decode(self, batch: PagedBatch, **options: Any) -> Rows:
        from triton_mla import mla_decode

        return self._call(mla_decode, batch, options, (batch.seq_lens,))

    def extend(self, batch: PagedBatch, **options: Any) -> Rows:
        from triton_mla import mla_extend

        return self._call(mla_extend, batch, options, (batch.cu_seqlens_q, batch.seq_lens))

    def _call(self, op: Any, batch: PagedBatch, options: dict[str, Any], layout: tuple[torch.Tensor, ...]) -> Rows:
        arguments = {
            "softmax_scale": batch.softmax_scale,
            "kv_lora_rank": batch.kv_lora_rank,
            "order": self.order,
            "return_lse": True,
            **options,
        }
        q = arguments.pop("q", batch.q)
        with dirty_memory():
            return Rows(*op(q, batch.kv_cache, batch.block_table, *layout, **arguments))

    def plan(self, op: str, batch: PagedBatch, schedule: Any = None) -> Any:
        """The plan of `decode` or `extend` for this batch, or that of a given schedule."""
        from triton_mla import plan_attention
        from triton_mla.tuning import arch_of

        gpu = torch.cuda.get_device_properties(self.device) if self.device.type == "cuda" else None
        return plan_attention(
            num_tokens=len(batch.q),
            batch_size=len(batch.seq_lens),
            num_heads=batch.q.shape[1],
            max_seq_len=batch.block_table.shape[1] * batch.page_size,
            kv_lora_rank=batch.kv_lora_rank,
            qk_rope_head_dim=batch.q.shape[2] - batch.kv_lora_rank,
            dtype=self.dtype,
            page_size=batch.page_size,
            decode=op == "decode",
            arch=arch_of(self.device),
            num_sms=gpu.multi_processor_count if gpu else 1,
            order=self.order,
            schedule=schedule,
        )

    def reference(self, batch: PagedBatch) -> Rows:
        """The float64 result of `extend` (and of `decode`, where every request has one query token)."""
        layout = (batch.kv_cache, batch.block_table, batch.cu_seqlens_q, batch.seq_lens)
        return Rows(*mla_absorbed(batch.q, *layout, softmax_scale=batch.softmax_scale, kv_lora_rank=batch.kv_lora_rank))

    def check(self, rows: Rows, batch: PagedBatch) -> None:
        """Assert that rows of `decode` or `extend` agree with the reference."""
        assert rows.out.dtype == self.dtype and rows.lse.dtype == torch.float32
        rows.assert_close(self.reference(batch), OUT_ATOL[self.dtype])

    def pick(self, batch: PagedBatch, rows: Sequence[int]) -> PagedBatch:
        """Requests of a batch of decode rows, in this order and over the same cache; repeats allowed."""
        index = torch.tensor(rows, device=self.device)
        return replace(
            batch,
            q=batch.q[index],
            block_table=batch.block_table[index],
            seq_lens=batch.seq_lens[index],
            cu_seqlens_q=torch.arange(len(rows) + 1, dtype=torch.int32, device=self.device),
            requests=[batch.requests[i] for i in rows],
        )

    def with_dtype(self, dtype: torch.dtype) -> Mla:
        return replace(self, dtype=dtype)

    def with_order(self, **changes: Any) -> Mla:
        return replace(self, order=replace(self.order, **changes))

    def recut(self) -> Mla:
        """The negative control of every comparison: another reduction order, whose bits must differ."""
        return self.with_order(kv_split=2 * self.order.kv_split)


@pytest.fixture(scope="session")
def interpreter() -> Iterator[None]:
    """The interpreter with a matrix product that means something for bits, and without its repeated work.

    Its own product is BLAS, where a row's bits depend on its place in the matrix (16 x 64 by 64 x 64: of 16384 elements
    5322 differ when the rows are rotated).
    """
    if not INTERPRETED:
        yield
        return
    from triton_mla.verification.interpreter import patched_once, tensor_core_dot

    with tensor_core_dot(), patched_once():
        yield


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if ON_GPU else "cpu")


@pytest.fixture(scope="session")
def mla(device: torch.device, interpreter: None) -> Mla:
    """Real dims in bf16 on a GPU; under the interpreter small ones in fp32, whose few values show every rounding."""
    from triton_mla.tuning import ReductionOrder

    if ON_GPU:
        return Mla(device, torch.bfloat16, 16, 512, 64, 64, ReductionOrder(kv_split=512))
    return Mla(device, torch.float32, 4, 64, 16, 16, ReductionOrder(kv_split=64))


@pytest.fixture(params=list(DTYPES), scope="session")
def mla_each(request: pytest.FixtureRequest, mla: Mla) -> Mla:
    """`mla` in each dtype."""
    return mla.with_dtype(DTYPES[request.param])


@pytest.fixture(scope="session")
def mha(mla: Mla) -> Mha:
    """The prefill with real dims in bf16 on a GPU; under the interpreter with small ones, and narrow tiles, in fp32."""
    from triton_mla.tuning import PrefillOrder

    if ON_GPU:
        return Mha(Rows, mla.device, torch.bfloat16, 4, 128, 64, 128, PrefillOrder(), rank=512, page_size=64)
    return Mha(Rows, mla.device, torch.float32, 2, 32, 16, 32, PrefillOrder(block_n=32))


@pytest.fixture(params=list(DTYPES), scope="session")
def mha_each(request: pytest.FixtureRequest, mha: Mha) -> Mha:
    """`mha` in each dtype."""
    return mha.with_(dtype=DTYPES[request.param])


@pytest.fixture(autouse=True)
def no_prefill_is_known() -> None:
    """Each test makes its first paged prefills in the ordinary way, whatever ran before it."""
    from triton_mla import prefill

    prefill._repeats.clear()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """The calls of companion ops, by thread and name."""
    from triton_mla.companion import products, rows

    seen: list[tuple[int, str]] = []

    def count(module: Any, name: str) -> None:
        op = getattr(module, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            seen.append((threading.get_ident(), name))
            return op(*args, **kwargs)

        monkeypatch.setattr(module, name, counted)

    for name in ("matmul", "linear", "grouped_linear"):
        count(products, name)
    for name in ("softmax", "log_softmax", "mean", "rms_norm"):
        count(rows, name)
    return seen
