"""Writing new latent rows into the paged cache."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["page_size", "num_slots"], do_not_specialize_on_alignment=["SLOT_MAPPING"])
def write_kv_cache_kernel(
    KV_C, K_PE, KV, SLOT_MAPPING, stride_c, stride_pe, stride_page, stride_slot, page_size, num_slots,
    R: tl.constexpr, BLOCK_R: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr,
):
    """Grid (tokens). A token whose slot is negative or past the pool is not written."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(SLOT_MAPPING + token)
    there = (slot >= 0) & (slot < num_slots)
    at = KV + slot // page_size * stride_page + slot % page_size * stride_slot
    lat = tl.arange(0, BLOCK_R)
    tl.store(at + lat, tl.load(KV_C + token * stride_c + lat, mask=there & (lat < R)), mask=there & (lat < R))
    if P > 0:
        rope = tl.arange(0, BLOCK_P)
        tl.store(at + R + rope, tl.load(K_PE + token * stride_pe + rope, mask=there & (rope < P)), mask=there & (rope < P))
