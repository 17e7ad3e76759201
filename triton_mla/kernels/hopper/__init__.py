"""Warp-specialised kernels for sm_90a in Gluon. Written for the Gluon of triton 3.6: `hopper_prefill.available` says whether they may be imported."""
