"""Definitions of the operations in plain torch, in float64 unless told otherwise: what the kernels are judged by.

Nothing here imports triton, is fast, or has a fixed reduction order. Results are right to the precision of `dtype`.
"""

from triton_mla.reference.attention import absorb_q, apply_w_uv, merge_states, mla_absorbed, mla_unabsorbed
from triton_mla.reference.paging import gather_kv, write_kv_cache
from triton_mla.reference.prefill import mha_prefill

__all__ = [
    "absorb_q",
    "apply_w_uv",
    "gather_kv",
    "merge_states",
    "mha_prefill",
    "mla_absorbed",
    "mla_unabsorbed",
    "write_kv_cache",
]
