"""What each backend can do: one table of capabilities with reasons.

Nothing here looks at a name. Entries that this package does not launch describe constraints of common peers, so that an
engine can name one and gets its rules applied, or every reason why not.
"""

from __future__ import annotations

from dataclasses import dataclass

from triton_mla.dims import MAX_HEAD_DIM, MAX_KV_LORA_RANK, MAX_NUM_HEADS, MAX_QK_ROPE_HEAD_DIM
from triton_mla.paths import ABSORBED, CHUNKED, MHA
from triton_mla.tuning import ARCHITECTURES

PREFILL, DECODE = "prefill", "decode"
PHASES = (PREFILL, DECODE)
FP8 = "fp8_e4m3"


@dataclass(frozen=True)
class Sizes:
    """A set of positive integers: `values`, and the multiples of `step` up to `limit` (no limit: None)."""

    values: tuple[int, ...] = ()
    step: int | None = None
    limit: int | None = None

    def __contains__(self, size: int) -> bool:
        stepped = self.step is not None and size > 0 and size % self.step == 0
        return size in self.values or (stepped and (self.limit is None or size <= self.limit))

    def __str__(self) -> str:
        words = [str(value) for value in self.values]
        if self.step is not None:
            limit = "" if self.limit is None else f" up to {self.limit}"
            words.append(f"any{limit}" if self.step == 1 else f"a multiple of {self.step}{limit}")
        return " or ".join(words)


ANY = Sizes(step=1)


@dataclass(frozen=True)
class Request:
    """What a model and an engine need of a backend.

    num_heads (of one rank) and the other sizes: as in `MLADims`. dtype, kv_cache_dtype: normalised names.
    arch: a key of `tuning.ARCHITECTURES`, "cpu" (without the interpreter), or the type of another device.
    page_size: tokens per page, or None where the engine has not decided. page_size_fixed: whether the user set it, so
    that nobody else may change it. prefill_forms: the forms a prompt token may take, most wanted first; form_reason:
    why these. prefix_path: `paths.PathRule.prefix`.
    """

    num_heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    arch: str
    qk_nope_head_dim: int = 128
    v_head_dim: int = 128
    dtype: str = "bfloat16"
    kv_cache_dtype: str = "bfloat16"
    page_size: int | None = None
    page_size_fixed: bool = False
    batch_invariant: bool = False
    keep_prefix: bool = False
    prefill_forms: tuple[str, ...] = (ABSORBED,)
    form_reason: str = ""
    prefix_path: str = CHUNKED


@dataclass(frozen=True)
class Backend:
    """One row of the capability table.

    name, summary: for people. phases: what it computes. prefill_form: the arithmetic of its prefill.
    num_heads and the other sizes: what it takes; nope and value dims concern a prefill of the mha form alone.
    invariant: whether a row's bits are independent of the batch; invariance: why, or why not.
    keeps_prefix: whether a token has the same bits however it arrives (decoded, prefilled, recomputed, read from a
    cache), so that prefix caching may stay on. dtypes: of query and cache alike; fp8_architectures: where the cache may
    hold fp8_e4m3 instead. architectures: empty means any. automatic: the architectures on which it may be chosen
    without being named.
    """

    name: str
    summary: str
    phases: tuple[str, ...]
    invariant: bool
    invariance: str
    dtypes: tuple[str, ...] = ("bfloat16", "float16")
    fp8_architectures: tuple[str, ...] = ()
    page_sizes: Sizes = ANY
    num_heads: Sizes = ANY
    kv_lora_rank: Sizes = Sizes((512,))
    qk_rope_head_dim: Sizes = Sizes((64,))
    qk_nope_head_dim: Sizes = ANY
    v_head_dim: Sizes = ANY
    architectures: tuple[str, ...] = ()
    prefill_form: str = ABSORBED
    keeps_prefix: bool = False
    automatic: tuple[str, ...] = ()

    def reasons(self, request: Request, phase: str) -> tuple[str, ...]:
        """Every reason why this backend cannot serve a phase of a request; empty when it can."""
        found: list[str] = []

        def require(condition: bool, reason: str) -> None:
            if not condition:
                found.append(reason)

        def require_size(name: str, value: int, allowed: Sizes, note: str = "") -> None:
            require(value in allowed, f"{name}={value} is not supported (allowed: {allowed}){note}")

        require(phase in self.phases, f"it has no {phase} ({' and '.join(self.phases)} only)")
        if phase == PREFILL and phase in self.phases:
            asked = " or ".join(request.prefill_forms)
            require(
                self.prefill_form in request.prefill_forms,
                f"its prefill has the {self.prefill_form} form, {asked} is needed: {request.form_reason}",
            )
        if request.batch_invariant:
            require(self.invariant, f"it is not batch-invariant: {self.invariance}")
            if phase == DECODE:
                reason = "it has no prefill, so generated tokens recomputed after a preemption would change backend and bits"
                require(PREFILL in self.phases, reason)
            if request.keep_prefix:
                reason = "prefix caching cannot be kept: a cached or recomputed token would not have its decoded bits"
                require(self.keeps_prefix, reason)
        known = not self.architectures or request.arch in self.architectures
        note = "; CPU tensors need TRITON_INTERPRET=1 before triton is imported" if request.arch == "cpu" else ""
        require(known, f"architecture {request.arch} is not supported (allowed: {', '.join(self.architectures)}){note}")
        require(
            request.dtype in self.dtypes,
            f"dtype={request.dtype} is not supported (allowed: {', '.join(self.dtypes)})",
        )
        if request.kv_cache_dtype == FP8:
            where = f"only on {', '.join(self.fp8_architectures)}" if self.fp8_architectures else "not supported yet"
            require(request.arch in self.fp8_architectures, f"kv_cache_dtype={FP8} is {where}")
        else:
            same = f"kv_cache_dtype={request.kv_cache_dtype} is not the query's dtype, {request.dtype}"
            require(request.kv_cache_dtype == request.dtype, same)
        require_size("num_heads", request.num_heads, self.num_heads)
        require_size("kv_lora_rank", request.kv_lora_rank, self.kv_lora_rank)
        require_size("qk_rope_head_dim", request.qk_rope_head_dim, self.qk_rope_head_dim)
        if phase == PREFILL and self.prefill_form == MHA:
            require_size("qk_nope_head_dim", request.qk_nope_head_dim, self.qk_nope_head_dim)
            require_size("v_head_dim", request.v_head_dim, self.v_head_dim)
        if request.page_size is not None and request.page_size_fixed:
            fixed = "; it was set explicitly, so it is not changed"
            require_size("page size", request.page_size, self.page_sizes, fixed)
        return tuple(found)


_ALL = tuple(ARCHITECTURES)
_CUDA = tuple(arch for arch in _ALL if arch.startswith("sm_"))

#: In order of preference: an automatic choice is the first row that can do it. A further kernel of this package is one
#: more row.
BACKENDS: tuple[Backend, ...] = (
    Backend(
        name="triton_mla",
        summary="this package's absorbed kernels over the paged latent cache",
        phases=PHASES,
        invariant=True,
        invariance="tiles and splits at absolute positions, exact rescale, sums through the dot in ascending order",
        keeps_prefix=True,
        dtypes=("float16", "bfloat16", "float32"),
        page_sizes=Sizes((1,), step=16),
        num_heads=Sizes(step=1, limit=MAX_NUM_HEADS),
        kv_lora_rank=Sizes(step=16, limit=MAX_KV_LORA_RANK),
        qk_rope_head_dim=Sizes((0,), step=16, limit=MAX_QK_ROPE_HEAD_DIM),
        architectures=_ALL,
        automatic=_ALL,
    ),
    Backend(
        name="triton_mla_mha",
        summary="this package's prefill of the mha form, up-projected from the paged latent cache",
        phases=(PREFILL,),
        invariant=True,
        invariance="tiles and chunks at absolute positions, exact rescale; a cut prompt has the bits of an uncut one",
        dtypes=("float16", "bfloat16", "float32"),
        page_sizes=Sizes((1,), step=16),
        num_heads=Sizes(step=1, limit=MAX_NUM_HEADS),
        kv_lora_rank=Sizes(step=16, limit=MAX_KV_LORA_RANK),
        qk_rope_head_dim=Sizes((0,), step=16, limit=MAX_QK_ROPE_HEAD_DIM),
        qk_nope_head_dim=Sizes(step=16, limit=MAX_HEAD_DIM),
        v_head_dim=Sizes(step=16, limit=MAX_HEAD_DIM),
        architectures=_ALL,
        prefill_form=MHA,
        automatic=_ALL,
    ),
    Backend(
        name="torch_reference",
        summary="the definition in float64 torch operations, slow",
        phases=PHASES,
        invariant=False,
        invariance="the order of torch's matrix products may follow the number of rows computed together",
        dtypes=("float16", "bfloat16", "float32"),
        kv_lora_rank=ANY,
        qk_rope_head_dim=Sizes((0,), step=1),
        automatic=("cpu", "interpreter"),
    ),
    Backend(
        name="vllm_triton_mla",
        summary="vLLM's TRITON_MLA (peer)",
        phases=(DECODE,),
        invariant=True,
        invariance="one KV split for every row under the flag; prefix hits and prefill chunks still change bits",
        fp8_architectures=("sm_89", "sm_90", "sm_100", "sm_120"),
        page_sizes=Sizes(step=16),
        kv_lora_rank=Sizes((256, 512)),
        qk_rope_head_dim=Sizes((0, 64)),
    ),
    Backend(
        name="flash_attn_mla",
        summary="FlashAttention-3 with a latent V (peer)",
        phases=(DECODE,),
        invariant=False,
        invariance="one split under vLLM's flag, but its tiles are reported to follow the longest query of the batch",
        page_sizes=Sizes(step=16),
        architectures=("sm_90",),
    ),
    Backend(
        name="flashmla",
        summary="FlashMLA, dense (peer)",
        phases=(DECODE,),
        invariant=False,
        invariance="its splits follow the sum of the batch's lengths",
        page_sizes=Sizes((64,)),
        architectures=("sm_90",),
    ),
    Backend(
        name="flashinfer_mla",
        summary="FlashInfer's MLA wrapper, fa2 and fa3 (peer)",
        phases=PHASES,
        invariant=False,
        invariance="its cluster size and KV limit follow averages and sums over the batch",
        fp8_architectures=("sm_90",),
        qk_rope_head_dim=Sizes((0, 64)),
        architectures=_CUDA,
    ),
    Backend(
        name="trtllm_mla",
        summary="TensorRT-LLM's MLA decode (peer)",
        phases=(DECODE,),
        invariant=False,
        invariance="it offers no batch-invariant mode",
        dtypes=("bfloat16",),
        fp8_architectures=("sm_100", "sm_120"),
        page_sizes=Sizes((32, 64)),
        architectures=("sm_100", "sm_120"),
    ),
    Backend(
        name="cutlass_mla",
        summary="CUTLASS MLA decode (peer)",
        phases=(DECODE,),
        invariant=False,
        invariance="it offers no batch-invariant mode",
        page_sizes=Sizes((128,)),
        architectures=("sm_100",),
    ),
    Backend(
        name="aiter_mla",
        summary="AITER's MLA decode in assembly (peer)",
        phases=(DECODE,),
        invariant=False,
        invariance="its splits follow the occupancy of the device and the average length",
        dtypes=("bfloat16",),
        fp8_architectures=("gfx942",),
        page_sizes=Sizes((1,)),
        num_heads=Sizes((8, 16, 32, 64, 128)),
        architectures=("gfx942",),
    ),
)
