"""All that a run consists of: the rows of the contract and the negative controls."""

from triton_mla.verification import accuracy, checks, controls, prefill_checks, prefill_controls, sequence_checks

CHECKS = [*checks.CHECKS, *prefill_checks.CHECKS, *sequence_checks.CHECKS, *accuracy.CHECKS]
CONTROLS = [*controls.CONTROLS, *prefill_controls.CONTROLS]
