"""Settings of the package, and the only place where the environment is read.

Every value carries its origin, so that `explain` and each log line can say where a decision came from.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from triton_mla.tuning import DEFAULT_ORDER, ReductionOrder

logger = logging.getLogger(__name__)

PREFIX = "TRITON_MLA_"
AUTO = "auto"


@dataclass(frozen=True)
class Variable:
    """One environment variable.

    name: its name; field: the field of `Settings` that it sets; type: what it may hold, in words;
    default: the value when it is unset, as one would write it; meaning: one sentence.
    """

    name: str
    field: str
    type: str
    default: str
    meaning: str


_FLAG = "1, 0, true or false"
_BACKEND = "auto or the name of a backend"

#: In order of precedence: of two variables for one field the first that is set counts.
VARIABLES: tuple[Variable, ...] = (
    Variable(
        "TRITON_MLA_BATCH_INVARIANT",
        "batch_invariant",
        _FLAG,
        "0",
        "Batch-invariant mode: only invariant backends are selected, and prefix caching is turned off unless kept.",
    ),
    Variable(
        "VLLM_BATCH_INVARIANT",
        "batch_invariant",
        _FLAG,
        "0",
        "The same switch under vLLM's name; counts when TRITON_MLA_BATCH_INVARIANT is unset.",
    ),
    Variable(
        "TRITON_MLA_PREFIX_CACHING",
        "prefix_caching",
        "auto or keep",
        AUTO,
        "keep leaves prefix caching on in batch-invariant mode, which takes the absorbed form for every token.",
    ),
    Variable("TRITON_MLA_PREFILL_BACKEND", "prefill_backend", _BACKEND, AUTO, "Backend of the tokens of prompts."),
    Variable("TRITON_MLA_DECODE_BACKEND", "decode_backend", _BACKEND, AUTO, "Backend of generated tokens."),
    Variable(
        "TRITON_MLA_PREFILL_PATH",
        "prefill_path",
        "auto, mha or absorbed",
        AUTO,
        "Form of the attention of prompt tokens; auto takes mha only where the engine supplies the roles of tokens.",
    ),
    Variable(
        "TRITON_MLA_CHUNKED_PREFIX",
        "chunked_prefix",
        _FLAG,
        "1",
        "Lets the mha form read cached tokens, chunk by chunk; without it the absorbed form takes the tokens behind them.",
    ),
    Variable(
        "TRITON_MLA_KV_SPLIT",
        "kv_split",
        "a multiple of the KV tile, 64, up to 65536",
        str(DEFAULT_ORDER.kv_split),
        "Tokens between two cuts of a KV sequence. It is part of the reduction order: another value gives other bits.",
    ),
)

_FLAGS = {"1": True, "true": True, "0": False, "false": False}


def _one_of(choices: Mapping[str, Any]) -> Callable[[Any], Any]:
    def parse(value: Any) -> Any:
        try:
            return choices[str(value).lower()]
        except KeyError:
            raise ValueError(f"allowed are {', '.join(choices)}") from None

    return parse


def _backend(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"allowed are {_BACKEND}")
    return AUTO if value.lower() == AUTO else value


def _kv_split(value: Any) -> int:
    try:
        return ReductionOrder(kv_split=value).kv_split
    except ValueError as error:  # which begins with the field's name, as the caller's message does
        raise ValueError(str(error).removeprefix(f"kv_split={value!r} ")) from None


_PARSERS: dict[str, Callable[[Any], Any]] = {
    "batch_invariant": _one_of(_FLAGS),
    "prefix_caching": _one_of({v: v for v in (AUTO, "keep")}),
    "prefill_backend": _backend,
    "decode_backend": _backend,
    "prefill_path": _one_of({v: v for v in (AUTO, "mha", "absorbed")}),
    "chunked_prefix": _one_of(_FLAGS),
    "kv_split": _kv_split,
}


def _parse(name: str, where: str, value: Any) -> Any:
    try:
        return _PARSERS[name](value)
    except ValueError as error:
        raise ValueError(f"{where}={_shown(value)}: {error}") from None


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


class _Default:
    """In place of a value that was not given: one that equals the default is an argument all the same."""

    def __repr__(self) -> str:
        return "<default>"


_DEFAULT: Any = _Default()
_DEFAULTS: dict[str, Any] = {
    "batch_invariant": False,
    "prefix_caching": AUTO,
    "prefill_backend": AUTO,
    "decode_backend": AUTO,
    "prefill_path": AUTO,
    "chunked_prefix": True,
    "kv_split": DEFAULT_ORDER.kv_split,
}


@dataclass(frozen=True)
class Settings:
    """What the user asked for. Values given here count as arguments; `from_env` adds the environment below them.

    batch_invariant: only backends whose bits do not depend on the batch, and prefix caching off unless kept.
    prefix_caching: "auto" | "keep". prefill_backend, decode_backend: "auto" or a name in `backends.BACKENDS`.
    prefill_path: "auto" | "mha" | "absorbed". chunked_prefix: whether the mha form may read a cached prefix in chunks.
    kv_split: tokens between two cuts of a KV sequence. origins: field -> "argument", "default" or the variable's name.
    Defaults: those of `VARIABLES`.

    Raises ValueError naming the field, the value and what is allowed.
    """

    batch_invariant: bool = _DEFAULT
    prefix_caching: str = _DEFAULT
    prefill_backend: str = _DEFAULT
    decode_backend: str = _DEFAULT
    prefill_path: str = _DEFAULT
    chunked_prefix: bool = _DEFAULT
    kv_split: int = _DEFAULT
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.origins, Mapping):
            raise ValueError(f"origins={self.origins!r} must be a mapping from fields to where their values came from")
        origins = {}
        for name, default in _DEFAULTS.items():
            given = getattr(self, name)
            value = default if given is _DEFAULT else _parse(name, name, given)
            object.__setattr__(self, name, value)
            stated = self.origins.get(name, "default" if given is _DEFAULT else "argument")
            origins[name] = "argument" if stated == "default" and value != default else stated
        object.__setattr__(self, "origins", origins)

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None, **overrides: Any) -> Settings:
        """Settings of an environment: for each field the override if it is not None, else the first variable that is
        set, else the default.

        env: the environment, by default the process's. Raises ValueError naming the variable, its value and what is
        allowed. A variable that is not known is logged once with the nearest known name, if it starts with TRITON_MLA_
        in any case or is almost VLLM_BATCH_INVARIANT.
        """
        env = os.environ if env is None else env
        _warn_unknown(env)
        values = _given(overrides)
        origins = dict.fromkeys(values, "argument")
        for variable in VARIABLES:
            if variable.name not in env or variable.field in values:
                continue
            raw: Any = env[variable.name]
            if not isinstance(raw, str):
                raise ValueError(f"{variable.name}={raw!r} must be a string, as the environment's are")
            # No more digits than an int64 has: Python refuses thousands of them with an error that names nothing.
            if variable.field == "kv_split" and raw.isascii() and raw.isdecimal() and len(raw) < 20:
                raw = int(raw)
            values[variable.field] = _parse(variable.field, variable.name, raw)
            origins[variable.field] = variable.name
        return cls(**values, origins=origins)

    def override(self, **overrides: Any) -> Settings:
        """A copy in which the values that are not None replace those here, with "argument" as their origin."""
        given = _given(overrides)
        origins = {**self.origins, **dict.fromkeys(given, "argument")}
        return dataclasses.replace(self, **given, origins=origins)

    def origin(self, name: str) -> str:
        """Where the value of a field came from: "argument", "default" or the name of a variable."""
        return self.origins[name]

    def describe(self, name: str) -> str:
        """A field and its origin in one phrase: "TRITON_MLA_PREFIX_CACHING=keep" or "kv_split=64 (argument)"."""
        value, origin = getattr(self, name), self.origins[name]
        text = str(int(value)) if isinstance(value, bool) else str(value)
        return f"{name}={text} ({origin})" if origin in ("argument", "default") else f"{origin}={text}"

    @property
    def order(self) -> ReductionOrder:
        """The reduction order that these settings ask for."""
        return dataclasses.replace(DEFAULT_ORDER, kv_split=self.kv_split)

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """field -> {"value", "origin"}, of plain JSON values."""
        return {name: {"value": getattr(self, name), "origin": self.origins[name]} for name in _DEFAULTS}


def _given(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The overrides that are not None. Raises ValueError for a name that is no field."""
    for name in overrides:
        if name not in _DEFAULTS:
            raise ValueError(f"{name}: no such setting; allowed are {', '.join(_DEFAULTS)}")
    return {name: value for name, value in overrides.items() if value is not None}


_reported_unknown: set[str] = set()


def _nearest(name: str) -> str | None:
    """The known variable that an unknown one seems to mean; None for one that belongs to others."""
    # A misspelt VLLM_BATCH_INVARIANT is closer to it than 0.85; vLLM's own other variables are farther than 0.75.
    cutoff = 0.0 if name.upper().startswith(PREFIX) else 0.85
    return next(iter(difflib.get_close_matches(name.upper(), [variable.name for variable in VARIABLES], n=1, cutoff=cutoff)), None)


def _warn_unknown(env: Mapping[str, str]) -> None:
    known = {variable.name for variable in VARIABLES}
    for name in sorted(env.keys() - known - _reported_unknown):
        nearest = _nearest(name)
        if nearest is not None:
            _reported_unknown.add(name)
            logger.warning("%s is not a known variable and is ignored; the nearest known one is %s", name, nearest)


_DTYPES = {
    "half": "float16",
    "fp16": "float16",
    "float16": "float16",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp32": "float32",
    "float": "float32",
    "float32": "float32",
    "fp8": "fp8_e4m3",
    "fp8_e4m3": "fp8_e4m3",
    "float8_e4m3fn": "fp8_e4m3",
}


def normalize_dtype(value: object, *, auto: str = "bfloat16", argument: str = "dtype") -> str:
    """The one name of a dtype: "float16", "bfloat16", "float32" or "fp8_e4m3".

    value: a torch.dtype or a name in any common spelling and case; "auto" and None give `auto`.
    Raises ValueError naming `argument`, the value and what is allowed.
    """
    name = str(value).lower().removeprefix("torch.")
    if value is None or name == AUTO:
        return auto
    if name not in _DTYPES:
        raise ValueError(f"{argument}={value}: allowed are auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]
