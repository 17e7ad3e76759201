"""The form of attention that each query token takes: one rule, of the token's role and the configuration alone.

The mha form projects the latent up to keys and values, the absorbed form attends over the latent itself. They are different arithmetic
and have different bits, so a token must take the same form in every run. Chunks, cache hits, preemptions, query lengths and neighbours
differ between runs: none of them is an argument of the rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from triton_mla.config import AUTO, Settings
from triton_mla.errors import UnsupportedError

MHA, ABSORBED = "mha", "absorbed"
CHUNKED, REFUSED = "chunked", "refused"


@dataclass(frozen=True)
class PathRule:
    """The configuration's part of the rule.

    prompt: form of the tokens of a request's original prompt, "mha" or "absorbed". Generated tokens take the absorbed form, always.
    prefix: what becomes of prompt tokens of the mha form that arrive behind cached ones. "chunked": the cached ones are projected up
    chunk by chunk. "refused": an error, for engines that give prompts whole. "absorbed": they take the absorbed form in that call; the
    form of a token then follows the schedule, so this is not for batch-invariant mode.
    """

    prompt: str = ABSORBED
    prefix: str = CHUNKED

    def __post_init__(self) -> None:
        for name, allowed in (("prompt", (MHA, ABSORBED)), ("prefix", (CHUNKED, REFUSED, ABSORBED))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join(allowed)}")

    @property
    def batch_invariant(self) -> bool:
        """Whether no schedule can change the form of a token."""
        return self.prompt == ABSORBED or self.prefix != ABSORBED

    def __str__(self) -> str:
        if self.prompt == ABSORBED:
            return "every token takes the absorbed form"
        behind = {
            CHUNKED: "cached ones before it are projected up chunk by chunk",
            REFUSED: "a prompt that does not come whole is refused",
            ABSORBED: "but the absorbed form where cached ones come before it in a call",
        }[self.prefix]
        return f"a token before the end of its request's original prompt takes the mha form ({behind}), a later one the absorbed form"


def mha_tokens(prompt_len: int | None, rule: PathRule) -> int:
    """Positions below this one take the mha form, all others the absorbed form.

    prompt_len: tokens of the request's original prompt, unchanged by a preemption; None where it is not known.
    """
    return 0 if prompt_len is None or rule.prompt == ABSORBED else prompt_len


def token_path(position: int, prompt_len: int | None, rule: PathRule) -> str:
    """The form, "mha" or "absorbed", of the query token at a position (from 0 on) of its sequence."""
    return MHA if position < mha_tokens(prompt_len, rule) else ABSORBED


class Segment(NamedTuple):
    """Neighbouring query tokens of one request that take one form.

    request: its index in the batch. first: index of the first token among the query tokens of the batch. query_len: how many tokens.
    seq_len: tokens of the request up to and including the last of them; 0 in padding.
    """

    request: int
    first: int
    query_len: int
    seq_len: int


def split_batch(
    query_lens: Sequence[int], seq_lens: Sequence[int], prompt_lens: Sequence[int | None] | None, rule: PathRule
) -> tuple[tuple[Segment, ...], tuple[Segment, ...]]:
    """The query tokens of a batch as (segments of the mha form, segments of the absorbed form), each in batch order.

    query_lens, seq_lens: of each request, as in `BatchLayout`. prompt_lens: original prompt lengths; a request's must be the same in all
    of its calls, None (not known) included. A chunk with prompt and generated tokens, as a recompute brings it, gives one segment of each form.

    Raises ValueError: prompt_lens is missing though the rule needs it, or has a bad value; or a prompt is cut that the rule wants whole.
    """
    count = len(query_lens)
    if len(seq_lens) != count:
        raise ValueError(f"seq_lens has {len(seq_lens)} requests; it must have {count}, as query_lens")
    if prompt_lens is None:
        if rule.prompt == MHA:
            raise ValueError("prompt_lens=None: it must have the length of each request's original prompt, since the rule gives prompts the mha form")
        prompt_lens = [None] * count
    elif len(prompt_lens) != count:
        raise ValueError(f"prompt_lens has {len(prompt_lens)} requests; it must have {count}, as query_lens")
    mha: list[Segment] = []
    absorbed: list[Segment] = []
    first = 0
    for i, (query_len, seq_len, prompt_len) in enumerate(zip(query_lens, seq_lens, prompt_lens, strict=True)):
        if prompt_len is not None and (isinstance(prompt_len, bool) or not isinstance(prompt_len, int) or prompt_len < 0):
            raise ValueError(f"prompt_lens[{i}]={prompt_len!r} must be an int >= 0, or None")
        start = seq_len - query_len
        prompt = min(max(mha_tokens(prompt_len, rule) - start, 0), query_len) if seq_len else 0
        if prompt and rule.prefix == REFUSED and (start or prompt != prompt_len):
            raise ValueError(
                f"request {i} brings tokens {start} to {seq_len - 1} of a prompt of {prompt_len}; it must come whole: without chunked_prefix "
                "the mha form cannot go on from cached tokens"
            )
        if prompt and start and rule.prefix == ABSORBED:
            prompt = 0
        if prompt:
            mha.append(Segment(i, first, prompt, start + prompt))
        if prompt < query_len:
            absorbed.append(Segment(i, first + prompt, query_len - prompt, seq_len))
        first += query_len
    return tuple(mha), tuple(absorbed)


def prefix_path(settings: Settings) -> str:
    """`PathRule.prefix` of the settings."""
    if settings.chunked_prefix:
        return CHUNKED
    return REFUSED if settings.batch_invariant else ABSORBED


def keeps_prefix_cache(settings: Settings) -> bool:
    """Whether prefix caching stays on in batch-invariant mode."""
    return settings.batch_invariant and settings.prefix_caching == "keep"


def prompt_forms(settings: Settings, *, token_roles: bool, whole_prompts: bool = False) -> tuple[tuple[str, ...], str]:
    """The forms that prompt tokens may take, most wanted first, and why.

    token_roles: whether the engine supplies the lengths of original prompts. whole_prompts: whether it gives each prompt in one call.
    Raises UnsupportedError when the mha form is asked for and the settings or the engine make it unsound.
    """
    asked = settings.describe("prefill_path")
    if settings.prefill_path == ABSORBED:
        return (ABSORBED,), asked
    chunked = settings.describe("chunked_prefix")
    against = []
    if keeps_prefix_cache(settings):
        keep = settings.describe("prefix_caching")
        against.append(f"{keep}: only the absorbed form reproduces generated tokens that a cache holds")
    if not token_roles:
        against.append("the roles of tokens are not supplied, so recomputed generated tokens would pass for a prompt")
    if prefix_path(settings) == REFUSED and not whole_prompts:
        against.append(
            f"{chunked}: later chunks of a prompt would need the absorbed form, so its bits would follow where the batch has it cut; "
            "it takes an engine that gives prompts whole"
        )
    if against:
        if settings.prefill_path == MHA:
            raise UnsupportedError(f"{asked} is refused", {MHA: tuple(against)})
        return (ABSORBED,), "; ".join(against)
    reason = "the roles of tokens are supplied"
    if prefix_path(settings) == REFUSED:
        reason += f"; {chunked}: prompts come whole"
    elif prefix_path(settings) == ABSORBED:
        reason += f"; {chunked}: prompt tokens behind cached ones take the absorbed form, so bits follow the schedule"
    return ((MHA, ABSORBED), reason) if settings.prefill_path == AUTO else ((MHA,), f"{asked}; {reason}")
