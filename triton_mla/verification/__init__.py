"""Proof of the contract on the user's own machine: checks that must be equal, controls that must differ."""

from triton_mla.verification.report import CheckResult, ControlResult, Report
from triton_mla.verification.runner import run

__all__ = ["CheckResult", "ControlResult", "Report", "run"]
