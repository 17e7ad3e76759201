"""Costs on the CPU's side: the time one eager call keeps the host, and how many kernels a varying batch compiles."""

from __future__ import annotations

import importlib
import multiprocessing
import pkgutil
import random
from collections.abc import Sequence

import torch
from triton.runtime.jit import JITFunction

import triton_mla.kernels
from benchmarks.implementation import Call
from benchmarks.peers import Peers
from benchmarks.registry import REGISTRY
from benchmarks.runner import reason
from benchmarks.timing import Timing, host_time
from benchmarks.workloads import RANK, ROPE, SOFTMAX_SCALE, Inputs, decode
from triton_mla import mla_decode, mla_prefill_paged, prefill

HOST_WORKLOAD = decode(16, 8, 1024)
"""Small, so that the device always waits for the host."""
PAGE = 64


def plain_call(inputs: Inputs) -> Call:
    """The op as a first user writes it: nothing reused."""
    return lambda: mla_decode(
        inputs.q, inputs.kv_cache, inputs.block_table, inputs.seq_lens, softmax_scale=SOFTMAX_SCALE
    )


def measure_host_times(
    peers: Peers, names: Sequence[str] = ("flashmla", "fa3_mla_auto", "vllm_triton_1")
) -> tuple[dict[str, Timing], dict[str, str]]:
    """Host time of one asynchronous decode call: this package, plain and with everything reused, and peers; and why some have none."""
    inputs, decodes = HOST_WORKLOAD.make_inputs("cuda"), REGISTRY["decode"]
    times = {"triton_mla": host_time(plain_call(inputs))}
    times["triton_mla reused"] = host_time(decodes["triton_mla"].prepare(inputs, peers))
    failed = {}
    for name in names:
        if decodes[name].available(peers):
            continue
        try:
            times[name] = host_time(decodes[name].prepare(inputs, peers))
        except Exception as error:
            failed[name] = reason(error)
    return times, failed


def measure_prefill_host_times() -> dict[str, Timing]:
    """Host time of one asynchronous paged prefill: where a call before had its sizes, and where none had."""
    tokens, heads, page = 256, 16, PAGE
    generator = torch.Generator(device="cuda").manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    q, cache, weight = random(tokens, heads, 192), random(8, page, RANK + ROPE), random(heads * 256, RANK)
    table, starts, lens = (torch.tensor(values, dtype=torch.int32, device="cuda") for values in ([list(range(8))], [0, tokens], [2 * tokens]))

    def call() -> None:
        mla_prefill_paged(q, cache, weight, table, starts, lens, softmax_scale=SOFTMAX_SCALE)

    def first_call() -> None:
        prefill._repeats.clear()
        call()

    return {"known sizes": host_time(call), "new sizes": host_time(first_call)}


def kernel_functions() -> dict[str, JITFunction]:
    """Every jit function of the package's kernel modules, by name; one that others import is listed once."""
    prefix = f"{triton_mla.kernels.__name__}."
    modules = [importlib.import_module(info.name) for info in pkgutil.walk_packages(triton_mla.kernels.__path__, prefix)]
    found = {
        id(value): value for module in modules for value in vars(module).values() if isinstance(value, JITFunction)
    }
    return {f"{value.__module__.rsplit('.', 1)[-1]}.{value.__name__}": value for value in found.values()}


def varying_batches(seed: int = 0) -> list[tuple[list[int], int]]:
    """(lengths, table width) of calls that cover batch 1..33, table width 1..65 and lengths 1..5000 (pages of 64)."""
    rng = random.Random(seed)
    edges = [1, 15, 16, 17, 63, 64, 65, 127, 128, 1000, 1024, 1025, 2047, 2048, 2049, 4095, 4096, 4097, 4999, 5000]
    batches = [([rng.randint(1, 5000) for _ in range(b)], 79) for b in range(1, 34)]
    batches += [([n] * rng.randint(1, 33), -(-n // PAGE)) for n in edges]
    batches += [([rng.randint(1, PAGE * width) for _ in range(rng.randint(1, 33))], width) for width in range(1, 66)]
    return batches


def _count(heads: int) -> dict[str, int]:
    generator = torch.Generator(device="cuda").manual_seed(0)
    cache = torch.randn(80, PAGE, RANK + ROPE, generator=generator, device="cuda", dtype=torch.bfloat16)
    for lengths, width in varying_batches():
        batch = len(lengths)
        q = torch.randn(batch, heads, RANK + ROPE, generator=generator, device="cuda", dtype=torch.bfloat16)
        table = torch.randint(80, (batch, width), generator=generator, device="cuda", dtype=torch.int32)
        seq_lens = torch.tensor(lengths, device="cuda", dtype=torch.int32)
        mla_decode(q, cache, table, seq_lens, softmax_scale=SOFTMAX_SCALE)
    torch.cuda.synchronize()
    counts = {
        name: sum(len(entry[0]) for entry in function.device_caches.values())
        for name, function in kernel_functions().items()
    }
    return {name: count for name, count in counts.items() if count}


def count_variants(heads: Sequence[int]) -> dict[int, dict[str, int]]:
    """Kernels that `mla_decode` compiles over `varying_batches()`, by head count and name, each in a fresh process."""
    with multiprocessing.get_context("spawn").Pool(len(heads), maxtasksperchild=1) as pool:
        return dict(zip(heads, pool.map(_count, heads, chunksize=1), strict=True))
