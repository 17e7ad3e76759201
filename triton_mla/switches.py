"""The switches of torch.backends that `batch_invariant_mode` sets for the process while it is on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


@contextmanager
def switches() -> Iterator[None]:
    """Set them, and give back what was before. A precision of "none" follows that of torch.backends, which is out of the way while they are read."""
    backends: Any = torch.backends
    matmul, cudnn = backends.cuda.matmul, backends.cudnn
    precisions = [(holder, "fp32_precision", "ieee") for holder in (matmul, backends.mkldnn.matmul, cudnn.conv, cudnn.rnn)]
    reductions = [(matmul, f"allow_{kind}_reduced_precision_reduction", (False, False)) for kind in ("fp16", "bf16")]
    others = [(matmul, "allow_fp16_accumulation", False), (cudnn, "benchmark", False), (cudnn, "deterministic", True),
              (backends.opt_einsum, "enabled", False)]  # its order of contractions follows the sizes, that of the batch included
    # Older switches, which torch keeps beside the precisions and refuses to read where the two disagree.
    older: list[tuple[Callable[..., Any], Callable[..., Any], Any]] = [
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest"),
        (lambda: cudnn.allow_tf32, lambda allow: setattr(cudnn, "allow_tf32", allow), False),
    ]
    with ExitStack() as stack:
        parent, backends.fp32_precision = backends.fp32_precision, "none"
        try:
            for holder, name, _ in (*precisions, *others):
                stack.callback(setattr, holder, name, getattr(holder, name))
            for holder, name, _ in reductions:
                stack.callback(setattr, holder, name, (getattr(holder, name), getattr(holder, f"{name}_split_k")))
        finally:
            backends.fp32_precision = parent
        for get, put, value in older:
            try:
                stack.callback(put, get())
            except RuntimeError:
                continue
            put(value)
        for setting in (*precisions, *reductions, *others):
            setattr(*setting)
        yield
