"""Asks a running server whether a completion's log-probabilities depend on what else it serves.

python -m determinism.online --url http://host:port/v1 --model NAME

Any OpenAI-compatible server (vLLM, SGLang) that gives log-probabilities in /v1/completions. Needle prompts are sent one by one, then
again, then at the same time as other prompts, then so in reversed order. Tokens and log-probabilities, as the server prints them, must
be those of the first time. Exit code 0: they are; 1: some differ; 2: the server could not be asked.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import random
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

TOP_LOGPROBS = 5
PROMPT_WORDS = (8, 400)
SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprst" for vowel in "aeiou"]


class ServerError(RuntimeError):
    """The server cannot be reached, refuses, or answers without what is needed."""


@dataclass(frozen=True)
class Token:
    """One token of a completion: its id where the server tells it, else its text; log-probabilities of it and of the likeliest ones."""

    token: int | str
    logprob: float
    top: dict[str, float] | None


@dataclass(frozen=True)
class Prompt:
    """A text to go on from, and how far."""

    text: str
    max_tokens: int


@dataclass(frozen=True)
class Row:
    """One line of the table. comparisons, differing: tokens; max_delta: of log-probabilities, up to where the tokens part."""

    name: str
    comparisons: int
    differing: int
    first_difference: str
    max_delta: float


@dataclass(frozen=True)
class Server:
    """``url`` ends with /v1. extra: more fields of each request, such as {"ignore_eos": true}. timeout: seconds of a request."""

    url: str
    model: str
    api_key: str | None = None
    timeout: float = 600.0
    extra: dict[str, Any] | None = None

    def complete(self, prompt: Prompt) -> list[Token]:
        """The greedy completion.

        Raises ServerError: with the server's own words where there are any.
        """
        url = f"{self.url.rstrip('/')}/completions"
        body = {"model": self.model, "prompt": prompt.text, "max_tokens": prompt.max_tokens, "temperature": 0, "logprobs": TOP_LOGPROBS, **(self.extra or {})}
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {self.api_key}"} if self.api_key else {})}
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # straight to the server: a proxy may buffer or cache
        try:
            with opener.open(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=self.timeout) as response:
                text = response.read().decode("utf-8", "replace")
        except urllib.error.HTTPError as error:
            raise ServerError(f"{url} answered {error.code} {error.reason}: {error.read().decode('utf-8', 'replace').strip()[:1000]}") from error
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{url} cannot be reached: {getattr(error, 'reason', None) or error!r}") from error
        try:
            choice = json.loads(text)["choices"][0]
            logprobs, ids = choice.get("logprobs"), choice.get("token_ids")
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ServerError(f"{url} answered something else than a completion: {text.strip()[:1000]}") from error
        try:
            tokens = ids or logprobs["tokens"]
            parts = zip(tokens, map(float, logprobs["token_logprobs"]), logprobs.get("top_logprobs") or [None] * len(tokens), strict=True)
            answer = [Token(*part) for part in parts]
            if answer and not any(math.isnan(token.logprob) for token in answer):  # NaN would be equal to itself
                return answer
        except (ValueError, LookupError, TypeError, AttributeError):
            pass
        raise ServerError(
            f"{url} answered without log-probabilities: choices[0].logprobs must have tokens and token_logprobs, a number for each generated token; "
            f"it is {json.dumps(logprobs)[:300]}"
        )


def random_prompt(chance: random.Random, max_tokens: int) -> Prompt:
    """Made-up words, a few or some hundreds."""
    words = ("".join(chance.choices(SYLLABLES, k=chance.randint(1, 3))) for _ in range(chance.randint(*PROMPT_WORDS)))
    return Prompt(" ".join(words), max_tokens)


def compare(name: str, expected: Sequence[Sequence[Token]], actual: Sequence[Sequence[Token]]) -> Row:
    """Each needle's tokens against those of the first time; a token that only one side has differs."""
    comparisons = differing = 0
    first, max_delta = "", 0.0
    for needle, (before, after) in enumerate(zip(expected, actual, strict=True)):
        together = True
        for position, (a, b) in enumerate(zip_longest(before, after)):
            comparisons += 1
            if together and a and b:
                max_delta = max(max_delta, abs(a.logprob - b.logprob))
            together = together and bool(a and b) and a.token == b.token
            if a != b:
                differing += 1
                first = first or f"needle {needle}, token {position}: {_brief(a)} against {_brief(b)}"
    return Row(name, comparisons, differing, first, max_delta)


def _brief(token: Token | None) -> str:
    return f"{token.token!r} {token.logprob!r}" if token else "nothing"


def check(
    server: Server, *, needles: int = 4, batch: int = 32, max_tokens: int = 64, seed: int = 0, progress: Callable[[str], None] = lambda name: None
) -> list[Row]:
    """Sends everything and compares; ``batch`` requests at a time, ``needles`` among them.

    Raises ServerError: a request failed.
    """
    chance = random.Random(seed)
    wanted = [random_prompt(chance, max_tokens) for _ in range(needles)]
    company = wanted + [random_prompt(chance, chance.randint(1, max_tokens)) for _ in range(batch - needles)]
    order = list(range(batch))
    chance.shuffle(order)

    def together(order: Sequence[int]) -> list[list[Token]]:
        with ThreadPoolExecutor(batch) as pool:
            sent = {i: pool.submit(server.complete, company[i]) for i in order}
            answers = {i: future.result() for i, future in sent.items()}
        return [answers[i] for i in range(needles)]

    progress("alone")
    expected = [server.complete(prompt) for prompt in wanted]
    scenarios: dict[str, Callable[[], list[list[Token]]]] = {
        "alone again": lambda: [server.complete(prompt) for prompt in wanted],
        f"in a batch of {batch}": lambda: together(order),
        "in reversed order": lambda: together(order[::-1]),
    }
    rows = []
    for name, send in scenarios.items():
        progress(name)
        rows.append(compare(name, expected, send()))
    return rows


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned lines."""
    cells = [("scenario", "comparisons", "differing", "max |delta|", "first difference")]
    cells += [(row.name, str(row.comparisons), str(row.differing), f"{row.max_delta:.3g}", row.first_difference) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) if 1 <= i <= 3 else cell.ljust(width) for i, (cell, width) in enumerate(zip(line, widths, strict=True))).rstrip()
        for line in cells
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m determinism.online", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="address of the API, such as http://localhost:8000/v1")
    parser.add_argument("--model", required=True, help="name under which the server knows its model")
    parser.add_argument("--needles", type=int, default=4, help="prompts whose results are compared (default 4)")
    parser.add_argument("--batch", type=int, default=32, help="requests at a time, the needles among them (default 32)")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens to generate for each needle (default 64)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts and their order (default 0)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that a request may take (default 600)")
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="file that holds the API key")
    parser.add_argument("--extra", type=json.loads, metavar="JSON", help='more fields of each request, such as \'{"ignore_eos": true}\'')
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    args = parser.parse_args(argv)
    if args.needles < 1 or args.max_tokens < 1:
        parser.error(f"--needles {args.needles} and --max-tokens {args.max_tokens} must be at least 1")
    if args.batch <= args.needles:
        parser.error(f"--batch {args.batch} must be more than --needles {args.needles}, so that needles have company")
    if args.json is not None and (args.json.is_dir() or not args.json.absolute().parent.is_dir()):
        parser.error(f"--json {args.json} must be a file in a folder that exists")
    if args.extra is not None and not isinstance(args.extra, dict):
        parser.error(f"--extra {args.extra!r} must be a JSON object")

    def progress(name: str) -> None:
        if sys.stderr.isatty():
            print(f"{name} ...", file=sys.stderr)

    options = {"needles": args.needles, "batch": args.batch, "max_tokens": args.max_tokens, "seed": args.seed}
    try:
        api_key = args.api_key_file.read_text(encoding="utf-8").strip() if args.api_key_file else None
        rows = check(Server(args.url, args.model, api_key, args.timeout, args.extra), **options, progress=progress)
    except (ServerError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    differing = sum(row.differing for row in rows)
    print(table(rows))
    print(f"{'FAILED' if differing else 'passed'}: {differing} of {sum(row.comparisons for row in rows)} tokens differ from those of the needles alone")
    if args.json:
        result = {"url": args.url, "model": args.model, **options, "passed": not differing, "rows": [asdict(row) for row in rows]}
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
