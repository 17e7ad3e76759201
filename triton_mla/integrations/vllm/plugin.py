"""`register`, which vLLM calls in every process through the entry-point group vllm.general_plugins."""

from __future__ import annotations

import logging

from triton_mla.config import Settings

from . import adapter, policy

logger = logging.getLogger(__name__)


def register() -> None:
    """Put the backend into vLLM's registry as CUSTOM, and apply the policy to engines that start in this process. May be called any number of
    times, in any process.

    Where vLLM is not installed, or its version is not supported, nothing is done but to log why. Raises ValueError for a variable with a value
    that is not allowed.
    """
    version = adapter.installed()
    if version is None:
        logger.info("vLLM is not installed, or tells no version: its backend of triton_mla is not registered")
        return
    if not adapter.supports(version):
        logger.warning("vLLM %s is not supported (supported: %s): triton_mla does nothing in it", version, adapter.supported_versions())
        return
    _log_as_vllm_does()
    Settings.from_env()  # refuses a bad variable in the process that has it, before an engine starts
    if adapter.register_backend(adapter.CUSTOM, policy.PATH):
        logger.debug("registered in vLLM %s as %s", version, adapter.CUSTOM)
    adapter.wrap_engine(policy.before_workers, policy.after_device)


def _log_as_vllm_does() -> None:
    """Where nobody has set up logging but vLLM, which does so for its own loggers alone, the package's lines go where vLLM's go."""
    ours, theirs = logging.getLogger("triton_mla"), logging.getLogger("vllm")
    if theirs.handlers and not ours.handlers and not logging.getLogger().handlers:
        ours.setLevel(theirs.level)
        for handler in theirs.handlers:
            ours.addHandler(handler)
