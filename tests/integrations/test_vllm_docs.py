"""The support matrix of docs/vllm.md is made from what the backend declares."""

from pathlib import Path

from triton_mla.capabilities import BACKENDS
from triton_mla.integrations.vllm import adapter
from triton_mla.integrations.vllm.backend import PREFERRED_PAGE_SIZE, Capabilities

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "vllm.md"


def matrix():
    own = next(row for row in BACKENDS if row.name == "triton_mla")
    dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in Capabilities.supported_dtypes)
    *most, last = Capabilities.supported_kv_cache_dtypes
    rows = {
        "vLLM": adapter.supported_versions(),
        "GPUs": ", ".join(arch for arch in own.architectures if arch.startswith("sm_")),
        "model and cache dtype": f"{dtypes}; cache dtype {', '.join(most)} or {last}",
        "page size": f"multiples of {own.page_sizes.step}; {PREFERRED_PAGE_SIZE} unless one is set",
        "query heads of a rank": str(own.num_heads),
        "`kv_lora_rank`, `qk_rope_head_dim`": f"{own.kv_lora_rank}, {own.qk_rope_head_dim}",
        "CUDA graphs": "full for uniform batches of decodes, verification of drafts included; piecewise else",
    }
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())]


def test_the_matrix_is_of_the_present_capabilities():
    text = DOCUMENT.read_text(encoding="utf-8")
    written = text.partition("<!-- generated: matrix -->\n")[2].partition("\n<!-- end of generated: matrix -->")[0]
    assert written.splitlines() == matrix(), "\n".join(matrix())


def test_the_versions_are_told_in_the_text():
    ranges = adapter.supported_versions().replace(", ", ", and ")
    assert f"Supported versions: {ranges}." in " ".join(DOCUMENT.read_text(encoding="utf-8").split())
