"""The ops of torch that multiply as they like, for which `batch_invariant_mode` has no kernel: with ``strict`` it refuses them."""

from __future__ import annotations

import re

import torch

UNCOVERED = (
    *[f"{op}.{overload}" for op in ("mm", "addmm", "bmm", "baddbmm") for overload in ("dtype", "dtype_out")],
    "_addmm_activation", "_addmm_activation.out", "_scaled_mm", "_scaled_mm.out", "_scaled_mm_v2", "_scaled_mm_v2.out", "_scaled_grouped_mm",
    "_scaled_grouped_mm_v2", "_mixed_dtypes_linear", "_weight_int4pack_mm", "_weight_int4pack_mm_for_cpu", "_weight_int4pack_mm_with_scales_and_zeros",
    "_weight_int8pack_mm", "_dyn_quant_matmul_4bit", "_cslt_sparse_mm", "_sparse_semi_structured_linear", "_sparse_semi_structured_mm",
    "_sparse_semi_structured_addmm", "_sparse_softmax", "_sparse_log_softmax", "_sparse_sparse_matmul", "_sparse_mm_reduce_impl", "hspmm", "smm", "sspaddmm",
    "sspaddmm.out",
    "sparse_sampled_addmm", "_masked_softmax", "_trilinear", "_cdist_forward", "_euclidean_dist", "_cudnn_rnn", "miopen_rnn", "mkldnn_rnn_layer",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention.quantized", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward", "_flash_attention_forward.quantized", "_flash_attention_forward_no_dropout_inplace", "_efficient_attention_forward",
    "_cudnn_attention_forward", "_triton_scaled_dot_attention", "_triton_multi_head_attention", "_native_multi_head_attention",
    "_transformer_encoder_layer_fwd",
    # Convolutions have a name for each library, form and number of dimensions.
    *sorted(name for op in torch._C._dispatch_get_all_op_names() if re.search("conv(?!ert)", name := op.removeprefix("aten::")) and op != name),
)
