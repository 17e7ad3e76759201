"""Applies a selection to an engine's cache config: backends first, then prefix caching, with a log line for each.

Call `resolve` where the scheduler's own config object is at hand, in the engine's process and before workers start: a
worker's copy of the config is not what the scheduler reads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import torch

from triton_mla.backends import BACKENDS, Selection, backend_named, select
from triton_mla.capabilities import PHASES, Request
from triton_mla.config import Settings, normalize_dtype
from triton_mla.dims import MLADims
from triton_mla.launch import INTERPRETED
from triton_mla.paths import ABSORBED, keeps_prefix_cache, prefix_path, prompt_forms
from triton_mla.tuning import arch_of

logger = logging.getLogger(__name__)

_CACHING = "enable_prefix_caching"
_KEEP = "TRITON_MLA_PREFIX_CACHING=keep"
_MISSING = object()


def resolve(
    cache_config: Any,
    *,
    dims: MLADims,
    settings: Settings | None = None,
    device: torch.device | str | None = None,
    prefill_backend: str | None = None,
    decode_backend: str | None = None,
    dtype: torch.dtype | str | None = None,
    arch: str | None = None,
    token_roles: bool = False,
    whole_prompts: bool = False,
) -> Selection:
    """Selects the backends of prefill and decode and, in batch-invariant mode, turns prefix caching off.

    cache_config: any object with a writable `enable_prefix_caching` and a `block_size`, such as vLLM's own. Its page
    size may be changed where `block_size` is None or its `user_specified_block_size` is False. `cache_dtype`, if
    there, is the dtype of the cache. It is changed only after the selection has succeeded, and all at once or not at
    all. None will do when batch-invariant mode is off.
    dims: sizes of one rank. settings: by default those of the environment. device: by default the current accelerator,
    else the CPU. prefill_backend, decode_backend: names that win over the settings. dtype: of the model, by default
    that of the cache or bfloat16. arch: plans for this architecture instead of the device's, with no look at a device.
    token_roles: whether the caller supplies the lengths of original prompts, so that recomputed generated tokens are not
    taken for a prompt (see `paths`). whole_prompts: whether it gives every prompt in one call; matters only with chunked_prefix off.

    Raises UnsupportedError with the reasons per backend, and ValueError for an argument, a variable, or a cache config
    that cannot take the change.
    """
    settings = Settings.from_env() if settings is None else settings
    for name, value, kind in (("settings", settings, Settings), ("dims", dims, MLADims)):
        if not isinstance(value, kind):
            raise ValueError(f"{name}={value!r} must be of type {kind.__name__}")
    for name, flag in (("token_roles", token_roles), ("whole_prompts", whole_prompts)):
        if not isinstance(flag, bool):
            raise ValueError(f"{name}={flag!r} must be True or False")
    if arch is not None and not (isinstance(arch, str) and arch):
        raise ValueError(f"arch={arch!r} must be the name of an architecture, such as sm_90, or None")
    settings = settings.override(prefill_backend=prefill_backend, decode_backend=decode_backend)
    page_size, fixed = _page_size(cache_config)
    cache_name = _read(cache_config, "cache_dtype")
    cache_dtype = normalize_dtype(cache_name, auto=normalize_dtype(dtype), argument="cache_config.cache_dtype")
    forms, form_reason = prompt_forms(settings, token_roles=token_roles, whole_prompts=whole_prompts)
    request = Request(
        num_heads=dims.num_heads,
        kv_lora_rank=dims.kv_lora_rank,
        qk_rope_head_dim=dims.qk_rope_head_dim,
        qk_nope_head_dim=dims.qk_nope_head_dim,
        v_head_dim=dims.v_head_dim,
        arch=_arch(device) if arch is None else arch,
        dtype=normalize_dtype(dtype, auto="bfloat16" if cache_dtype.startswith("fp8") else cache_dtype),
        kv_cache_dtype=cache_dtype,
        page_size=page_size,
        page_size_fixed=fixed,
        batch_invariant=settings.batch_invariant,
        keep_prefix=keeps_prefix_cache(settings),
        prefill_forms=forms,
        form_reason=form_reason,
        prefix_path=prefix_path(settings),
    )
    selection = select(request, settings=settings)
    logger.info("prefill form: %s: %s", selection.prefill_form, form_reason)
    return _apply(cache_config, selection)


def explain(subject: Selection | Settings) -> dict[str, Any]:
    """Every decision as plain JSON values: settings with their origins and, of a selection, each backend's verdict,
    the chosen backends, the form of tokens, the page size and what became of prefix caching."""
    if isinstance(subject, Settings):
        return {"settings": subject.as_dict()}
    selection = subject
    request = selection.request
    return {
        "settings": selection.settings.as_dict(),
        "request": {**dataclasses.asdict(request), "prefill_forms": list(request.prefill_forms)},
        "backends": {
            row.name: {
                "summary": row.summary,
                "batch_invariant": row.invariant,
                "invariance": row.invariance,
                "reasons": {phase: list(selection.verdicts[phase][row.name]) for phase in PHASES},
            }
            for row in BACKENDS
        },
        "selection": {
            phase: {
                "backend": getattr(selection, phase),
                "origin": selection.origins[phase],
                "reason": selection.reasons[phase],
            }
            for phase in PHASES
        },
        "forms": {
            "prompt": selection.prefill_form,
            "generated": ABSORBED,
            "rule": str(selection.paths),
            "batch_invariant": selection.paths.batch_invariant,
            "reason": request.form_reason,
        },
        "page_size": selection.page_size,
        "adjustments": [dataclasses.asdict(change) for change in selection.adjustments],
        "prefix_caching": selection.prefix_caching,
    }


def explain_lines(subject: Selection | Settings) -> list[str]:
    """What `explain` says, as lines of text."""
    data = explain(subject)
    lines = ["settings"]
    lines += [f"  {name} = {item['value']}  ({item['origin']})" for name, item in data["settings"].items()]
    if isinstance(subject, Settings):
        return lines
    for phase in PHASES:
        lines.append(f"{phase} backends")
        for name, row in data["backends"].items():
            lines.append(f"  {name}: {'; '.join(row['reasons'][phase]) or 'capable'}")
        choice = data["selection"][phase]
        lines.append(f"  -> {choice['backend']} ({choice['origin']}): {choice['reason']}")
    forms = data["forms"]
    lines.append(f"forms: prompt tokens {forms['prompt']}, generated tokens {forms['generated']}: {forms['reason']}")
    lines.append(f"  {forms['rule']}")
    takes = {backend_named(name).page_sizes: name for name in (subject.prefill, subject.decode)}
    left = f"left to the engine; {'; '.join(f'{name} takes {sizes}' for sizes, name in takes.items())}"
    lines.append(f"page size: {data['page_size'] or left}")
    lines += [f"  {c['name']} {c['old']} -> {c['new']}: {c['why']}" for c in data["adjustments"]]
    lines.append(f"prefix caching: {data['prefix_caching']}")
    return lines


def _arch(device: torch.device | str | None) -> str:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
        if found.type == "cuda" or (found.type == "cpu" and INTERPRETED):
            return arch_of(found)
    except (AssertionError, RuntimeError, TypeError) as error:  # torch's, for a device that is none or is not there
        raise ValueError(f"device={device!r} must be a device of this machine: {str(error).partition(chr(10))[0]}") from error
    return found.type


def _read(config: Any, name: str, default: Any = None) -> Any:
    """An attribute of the engine's object, whose getters are not ours."""
    try:
        return getattr(config, name, default)
    except Exception as error:
        raise ValueError(f"cache_config.{name} of type {type(config).__name__} cannot be read: {error}") from error


def _page_size(cache_config: Any) -> tuple[int | None, bool]:
    size = _read(cache_config, "block_size")
    if size is not None and (type(size) is not int or size <= 0):
        raise ValueError(f"cache_config.block_size={size!r}: allowed are None and positive integers")
    return size, size is not None and _read(cache_config, "user_specified_block_size", True) is not False


def _apply(cache_config: Any, selection: Selection) -> Selection:
    changes: dict[str, object] = {change.name: change.new for change in selection.adjustments}
    caching, level = _caching_action(cache_config, selection)
    if level == logging.WARNING:
        changes[_CACHING] = False
    _write(cache_config, changes)
    for change in selection.adjustments:
        logger.info("%s changed from %s to %s: %s", change.name, change.old, change.new, change.why)
    logger.log(level, "prefix caching: %s", caching)
    return dataclasses.replace(selection, prefix_caching=caching)


def _caching_action(cache_config: Any, selection: Selection) -> tuple[str, int]:
    """What becomes of prefix caching, in words, and the level to log it at: WARNING where it is turned off."""
    settings = selection.settings
    flag = settings.describe("batch_invariant")
    if not settings.batch_invariant:
        return f"not touched: batch-invariant mode is off, {flag}", logging.DEBUG
    if keeps_prefix_cache(settings):
        keep = settings.describe("prefix_caching")
        return f"left as it is: {keep}; sound because every token takes the absorbed form", logging.INFO
    current = _read(cache_config, _CACHING, _MISSING)
    if current is _MISSING:
        raise ValueError(
            f"cache_config of type {type(cache_config).__name__} has no {_CACHING}: batch-invariant mode ({flag}) "
            "needs the object that the scheduler reads"
        )
    if not current and current is not None:
        return f"already off; batch-invariant mode, {flag}", logging.DEBUG
    backends = f"prefill backend {selection.prefill} and decode backend {selection.decode}"
    return (
        f"turned off: batch-invariant mode, {flag}, with {backends}; {_KEEP} keeps it on, with triton_mla's absorbed "
        "form for every token",
        logging.WARNING,
    )


def _write(config: Any, changes: Mapping[str, object]) -> None:
    """Sets the attributes and reads each back; on a failure all of them are restored."""
    previous: dict[str, object] = {}
    for name, value in changes.items():
        try:
            previous[name] = getattr(config, name)
            setattr(config, name, value)
            if getattr(config, name) != value:
                raise AttributeError("the write had no effect")
        except Exception as error:
            for earlier, old in previous.items():
                with contextlib.suppress(Exception):
                    setattr(config, earlier, old)
            raise ValueError(
                f"cache_config.{name} of type {type(config).__name__} must be writable, to become {value}: {error}"
            ) from error
