"""What was decided once in the engine's process, as its workers read it: it travels in the config that they are given."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from triton_mla.backends import Selection
from triton_mla.paths import PathRule
from triton_mla.tuning import DEFAULT_ORDER, ReductionOrder

KEY = "triton_mla"


@dataclass(frozen=True)
class Decision:
    """The form of tokens and the arithmetic of one engine.

    prompt, prefix: of its `PathRule`. kv_split: of its `ReductionOrder`. batch_invariant: whether the mode is on.
    """

    prompt: str
    prefix: str
    kv_split: int
    batch_invariant: bool

    @classmethod
    def of(cls, selection: Selection) -> Decision:
        paths, settings = selection.paths, selection.settings
        return cls(paths.prompt, paths.prefix, settings.kv_split, settings.batch_invariant)

    @classmethod
    def read(cls, vllm_config: Any) -> Decision | None:
        """The decision that a config carries; None where this package serves no layer of the engine."""
        carried = vllm_config.additional_config
        found = carried.get(KEY) if isinstance(carried, dict) else None
        return None if found is None else cls(**found)

    def write(self, vllm_config: Any) -> None:
        vllm_config.additional_config[KEY] = dataclasses.asdict(self)

    @property
    def paths(self) -> PathRule:
        return PathRule(prompt=self.prompt, prefix=self.prefix)

    @property
    def order(self) -> ReductionOrder:
        return dataclasses.replace(DEFAULT_ORDER, kv_split=self.kv_split)
