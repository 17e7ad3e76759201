"""Warp-specialised kernels for sm_90a in Gluon. Written for the Gluon of triton 3.6: `available` says whether they may be imported."""

from functools import lru_cache

import triton
from triton import knobs


@lru_cache(maxsize=1)
def available() -> bool:
    """Whether the kernels can be compiled here: they have no interpreter."""
    return not knobs.runtime.interpret and triton.__version__.startswith("3.6.")
