"""The choice of one backend for prefill and one for decode, from capabilities and what the user asked for."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from triton_mla.capabilities import BACKENDS, DECODE, PHASES, PREFILL, Backend, Request, Sizes
from triton_mla.config import AUTO, Settings
from triton_mla.errors import UnsupportedError
from triton_mla.paths import ABSORBED, PathRule

__all__ = ["BACKENDS", "Adjustment", "Backend", "Request", "Selection", "Sizes", "backend_named", "select"]

logger = logging.getLogger(__name__)

AUTOMATIC = "automatic"

# Tried in this order where a page size has to be found; 64 is what the kernels are tuned for.
_PAGE_SIZES = (64, 32, 128, 16, 1)


@dataclass(frozen=True)
class Adjustment:
    """A change that a selection needs on the engine's config: attribute name, old and new value, and why."""

    name: str
    old: object
    new: object
    why: str


@dataclass(frozen=True)
class Selection:
    """The backends of both phases and why.

    prefill, decode: names. prefill_form: "mha" or "absorbed". page_size: tokens per page, or None where the engine may
    take any. origins: phase -> "automatic", "argument" or a variable's name. reasons: phase -> why this one.
    verdicts: phase -> backend -> every reason against it (empty: capable). adjustments: changes on the engine's config.
    prefix_caching: what became of it, in one sentence.
    """

    prefill: str
    decode: str
    prefill_form: str
    page_size: int | None
    request: Request
    settings: Settings
    origins: Mapping[str, str]
    reasons: Mapping[str, str]
    verdicts: Mapping[str, Mapping[str, tuple[str, ...]]] = field(repr=False)
    adjustments: tuple[Adjustment, ...] = ()
    prefix_caching: str = "not touched: the selection was not applied to a cache config"

    @property
    def paths(self) -> PathRule:
        """The form that each token takes."""
        return PathRule(prompt=self.prefill_form, prefix=self.request.prefix_path)


def backend_named(name: str, argument: str = "name") -> Backend:
    """The table's row of that name. Raises ValueError naming `argument`, the value and the known names."""
    for backend in BACKENDS:
        if backend.name == name:
            return backend
    raise ValueError(f"{argument}={name}: allowed are auto, {', '.join(row.name for row in BACKENDS)}")


def select(request: Request, *, settings: Settings) -> Selection:
    """Chooses the backends of both phases; changes nothing and depends on nothing but its arguments.

    A backend that the settings name is taken or refused, never replaced. Otherwise the first capable row of the table
    that may be chosen unnamed is taken; for prefill the backend of decode comes first, if it can. Each choice is
    logged at INFO with what was rejected and why.

    Raises UnsupportedError with every reason per backend, and ValueError for an unknown name.
    """
    verdicts = {phase: {row.name: row.reasons(request, phase) for row in BACKENDS} for phase in PHASES}
    decode, decode_reason = _choose(DECODE, request, settings, verdicts[DECODE], None)
    if request.batch_invariant:
        verdicts[PREFILL] = {row.name: verdicts[PREFILL][row.name] + _reasons_beside(row, decode) for row in BACKENDS}
    prefill, prefill_reason = _choose(PREFILL, request, settings, verdicts[PREFILL], decode)
    page_size, adjustments = _fit_page_size(request, (prefill, decode))
    named = {phase: _named(settings, phase) is not None for phase in PHASES}
    return Selection(
        prefill=prefill.name,
        decode=decode.name,
        prefill_form=prefill.prefill_form,
        page_size=page_size,
        request=request,
        settings=settings,
        origins={phase: settings.origin(f"{phase}_backend") if named[phase] else AUTOMATIC for phase in PHASES},
        reasons={PREFILL: prefill_reason, DECODE: decode_reason},
        verdicts=verdicts,
        adjustments=adjustments,
    )


def _reasons_beside(row: Backend, decode: Backend) -> tuple[str, ...]:
    """What speaks, in batch-invariant mode, against a backend of prefill beside that of decode."""
    if row is decode or row.prefill_form != ABSORBED or PREFILL not in row.phases:
        return ()
    return (f"its prefill has decode's form, but it is not decode's {decode.name}: recomputed generated tokens would change backend and bits",)


def _named(settings: Settings, phase: str) -> str | None:
    name = getattr(settings, f"{phase}_backend")
    return None if name == AUTO else name


def _choose(
    phase: str, request: Request, settings: Settings, verdicts: Mapping[str, tuple[str, ...]], decode: Backend | None
) -> tuple[Backend, str]:
    name = _named(settings, phase)
    if name is None:
        return _choose_automatically(phase, request, verdicts, decode)
    where = settings.describe(f"{phase}_backend")
    backend = backend_named(name, where.partition("=")[0])
    if verdicts[name]:
        raise UnsupportedError(f"{where}: the backend cannot serve {phase}", {name: verdicts[name]})
    logger.info("%s backend: %s, named by %s", phase, name, where)
    return backend, f"named by {where}"


def _choose_automatically(
    phase: str, request: Request, verdicts: Mapping[str, tuple[str, ...]], decode: Backend | None
) -> tuple[Backend, str]:
    def candidate(row: Backend) -> bool:
        return not verdicts[row.name] and (request.arch in row.automatic or row is decode)

    def rank(row: Backend) -> tuple[int, bool]:
        return (request.prefill_forms.index(row.prefill_form) if phase == PREFILL else 0, row is not decode)

    ranked = sorted(filter(candidate, BACKENDS), key=rank)
    against = {
        row.name: verdicts[row.name] or ("it is capable, but only taken when named",)
        for row in BACKENDS
        if row not in ranked
    }
    if not ranked:
        raise UnsupportedError(f"no backend can serve {phase} on {request.arch}", against)
    chosen = ranked[0]
    reason = "the first capable backend in order of preference"
    if phase == PREFILL and decode is not None:
        if chosen is decode:
            reason = "the backend of decode can prefill too"
        elif verdicts[decode.name]:
            reason = f"decode's {decode.name} cannot prefill ({'; '.join(verdicts[decode.name])})"
        wanted = request.prefill_forms[0]
        if chosen.prefill_form != wanted:
            reason += f"; no capable backend has the {wanted} form"
    against.update((row.name, ("it comes later in order of preference",)) for row in ranked[1:])
    rejected = "; ".join(f"{name}: {', '.join(why)}" for name, why in against.items())
    logger.info("%s backend: %s, chosen automatically: %s. Rejected: %s", phase, chosen.name, reason, rejected)
    return chosen, reason


def _fit_page_size(request: Request, chosen: Iterable[Backend]) -> tuple[int | None, tuple[Adjustment, ...]]:
    """The page size that both backends take, and the change of `block_size` that it needs."""
    rows = {row.name: row for row in chosen}.values()
    old = request.page_size

    def takes(row: Backend) -> bool:
        return row.page_sizes.step is not None if old is None else old in row.page_sizes

    why = "; ".join(f"{row.name} takes pages of {row.page_sizes} tokens" for row in rows if not takes(row))
    if not why:
        return old, ()
    for new in _PAGE_SIZES:
        if all(new in row.page_sizes for row in rows):
            return new, (Adjustment("block_size", old, new, why),)
    reasons = {row.name: (f"it takes pages of {row.page_sizes} tokens",) for row in rows}
    raise UnsupportedError("no page size suits both backends", reasons)
