"""Compiling a kernel for a GPU that is not there, with the launches of `triton_mla.launch.attend` for one plan as they would be."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from triton_mla.kernels.cache import write_kv_cache_kernel
from triton_mla.kernels.merge import merge_attn_states_kernel
from triton_mla.kernels.one_pass import one_pass_kernel
from triton_mla.kernels.partials import combine_kernel
from triton_mla.kernels.two_phase import scores_kernel, values_kernel
from triton_mla.launch import COMBINE_AHEAD, COMBINE_WIDTH
from triton_mla.tuning import DEFAULT_ORDER, Schedule

R, P = 512, 64
POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
INTS = {**dict.fromkeys(("BLOCK_TABLE", "CU_SEQLENS_Q", "SEQ_LENS", "KV_LENGTHS", "POSITIONS"), "*i32"), "SLOT_MAPPING": "*i64"}
FLOATS = {"LSE", "LSE_A", "LSE_B", "PARTIALS", "SCORES", "REFERENCE", "TOTAL", "ACC"}


@dataclass(frozen=True)
class Launch:
    """A kernel with its constants and options, but for `launch_pdl`, which changes how it is launched and not its code. ``types``: of arguments
    that are no pointers to the dtype."""

    kernel: Any
    constants: dict[str, Any]
    options: dict[str, Any]
    types: dict[str, str] = field(default_factory=dict)

    def compile(self, arch: str, dtype: torch.dtype) -> Any:
        """The compiled kernel: every pointer and stride aligned to 16, as with the sizes of DeepSeek-V3."""
        unaligned = {*self.kernel.do_not_specialize, *self.kernel.do_not_specialize_on_alignment}
        signature, attributes = {}, {}
        for i, name in enumerate(self.kernel.arg_names):
            signature[name] = self._type(name, dtype)
            if signature[name][0] in "*i" and name not in unaligned:
                attributes[(i,)] = [["tt.divisibility", 16]]
        target = GPUTarget("cuda", int(arch[3:]), 32) if arch.startswith("sm_") else GPUTarget("hip", arch, 64)
        source = ASTSource(fn=self.kernel, signature=signature, constexprs=self.constants, attrs=attributes)
        return triton.compile(source, target=target, options={**self.options, "enable_fp_fusion": False})

    def _type(self, name: str, dtype: torch.dtype) -> str:
        if name in self.constants:
            return "constexpr"
        if name.isupper():
            return self.types.get(name) or INTS.get(name) or ("*fp32" if name in FLOATS else POINTERS[dtype])
        return "fp32" if name == "scale_log2" else "i32"


def attention(schedule: Schedule, decode: bool, page_size: int, with_lse: bool = True) -> list[Launch]:
    """The attention kernels of a schedule, without the combine."""
    order = DEFAULT_ORDER
    tiling = {"ROWS": schedule.block_rows, "BLOCK_N": order.block_n}
    flags = {"PRECISION": order.input_precision, "DECODE": decode, "PAGE_SIZE": page_size}
    ends = {"PDL": schedule.pdl, "EMULATE_BF16": False}
    rope = {"P": P, "BLOCK_P": P}
    walk = {"SPLIT_TILES": triton.next_power_of_2(order.kv_split // order.block_n), "R": R, "STEP": order.reference_step, "STAGES": schedule.num_stages,
            "WITH_LSE": with_lse}
    first = {"num_warps": schedule.num_warps}
    if schedule.form == "one_pass":
        return [Launch(one_pass_kernel, {**tiling, **walk, "BLOCK_R": R, **rope, **flags, **ends}, first)]
    return [
        Launch(scores_kernel, {**tiling, "R": R, "BLOCK_K": min(schedule.block_k, R), **rope, **flags, **ends}, {"num_warps": schedule.score_warps}),
        Launch(values_kernel, {**tiling, **walk, "BLOCK_V": schedule.block_v, **flags, **ends}, first),
    ]


def others(pdl: bool) -> list[Launch]:
    """The kernels that no schedule changes but for ``pdl``."""
    combine = {"R": R, "WIDTH": COMBINE_WIDTH, "AHEAD": COMBINE_AHEAD, "WITH_LSE": True, "PDL": pdl, "EMULATE_BF16": False}
    return [
        Launch(combine_kernel, combine, {"num_warps": 1}),
        Launch(merge_attn_states_kernel, {"V": R, "BLOCK_V": R, "EMULATE_BF16": False}, {"num_warps": 1}),
        Launch(write_kv_cache_kernel, {"R": R, "BLOCK_R": R, "P": P, "BLOCK_P": P}, {"num_warps": 1}),
    ]


def assembly(compiled: Any) -> str:
    """PTX, or the assembly of an AMD GPU."""
    return str(compiled.asm["ptx" if "ptx" in compiled.asm else "amdgcn"])


def machine_code(compiled: Any) -> str:
    """Disassembly of a CUDA kernel."""
    disassembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
        binary.write(compiled.asm["cubin"])
        binary.flush()
        return subprocess.run([disassembler, "-c", binary.name], capture_output=True, text=True, check=True).stdout


def loops(compiled: Any) -> list[str]:
    """Texts of the loops of a CUDA kernel's machine code, from a label to a later branch back to it."""
    return list(_loops(machine_code(compiled).splitlines()))


def loop_spills(compiled: Any, product: str) -> tuple[int, int]:
    """(products, spill instructions) of the innermost machine-code loop of a CUDA kernel that has the most instructions ``product``."""
    with_product = [body for body in loops(compiled) if product in body]
    assert with_product, f"no loop with {product}"
    body = max(with_product, key=lambda body: body.count(product))
    return body.count(product), len(re.findall(r"\b(?:STL|LDL)\b", body))


def _loops(lines: list[str]) -> Iterator[str]:
    labels: dict[str, int] = {}
    for i, line in enumerate(lines):
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = i
        branch = re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", line)
        if branch and branch[1] in labels:
            yield "\n".join(lines[labels[branch[1]] : i + 1])
