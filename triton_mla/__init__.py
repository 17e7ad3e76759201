"""Batch-invariant MLA attention in Triton. Importing this touches no GPU and no optional package."""

from . import compiled as _compiled  # noqa: F401  registers the torch.library operators
from .absorb import absorb_query, project_values, split_kv_b
from .attention import merge_attn_states, mla_decode, mla_extend, write_kv_cache
from .batch import BatchLayout
from .config import Settings
from .dims import MLADims
from .errors import UnsupportedError
from .fingerprint import numerics_fingerprint
from .mode import batch_invariant_mode, disable_batch_invariant_mode, enable_batch_invariant_mode, is_batch_invariant_mode
from .module import MLAAttention
from .paths import PathRule
from .plan import AttentionPlan, plan_attention
from .policy import resolve
from .prefill import PrefillState, mla_prefill, mla_prefill_paged, prefill_workspace_bytes, project_kv
from .step import StepPlan
from .tuning import DEFAULT_ORDER, DEFAULT_PREFILL_ORDER, PrefillOrder, PrefillSchedule, ReductionOrder, Schedule

__version__ = "0.1.0"

__all__ = [
    "DEFAULT_ORDER", "DEFAULT_PREFILL_ORDER", "AttentionPlan", "BatchLayout", "MLAAttention", "MLADims", "PathRule", "PrefillOrder", "PrefillSchedule",
    "PrefillState", "ReductionOrder", "Schedule", "Settings", "StepPlan", "UnsupportedError", "absorb_query", "batch_invariant_mode",
    "disable_batch_invariant_mode", "enable_batch_invariant_mode", "is_batch_invariant_mode", "merge_attn_states", "mla_decode", "mla_extend", "mla_prefill",
    "mla_prefill_paged", "numerics_fingerprint", "plan_attention", "prefill_workspace_bytes", "project_kv", "project_values", "resolve", "split_kv_b",
    "write_kv_cache",
]
