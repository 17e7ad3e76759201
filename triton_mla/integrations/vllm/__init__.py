"""A backend for vLLM, found through its entry points: docs/vllm.md. Importing this does not import vLLM."""

from .plugin import register

__all__ = ["register"]
