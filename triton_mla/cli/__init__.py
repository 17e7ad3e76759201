"""The command `triton-mla`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from triton_mla import __version__
from triton_mla.cli import bench, doctor, explain, verify
from triton_mla.errors import UnsupportedError

COMMANDS = (doctor, explain, verify, bench)

EPILOG = """\
exit codes:
  0  everything asked for is fine
  1  a check failed, or something is not supported here
  2  wrong usage: an option, or the value of an option or of a variable, that is not allowed (doctor has 1 for a variable, among its findings)

with --json an error is a JSON object too: {"error": ...}

examples:
  triton-mla doctor
  triton-mla explain --heads 128 --prefix-caching keep
  triton-mla verify --record evidence.json
  triton-mla bench --suite decode
"""


class _Parser(argparse.ArgumentParser):
    """argparse's, with errors that `main` may print in another form. Its subcommands have parsers of the same class."""

    def error(self, message: str) -> NoReturn:
        raise _UsageError(self, message)


class _UsageError(Exception):
    def __init__(self, parser: argparse.ArgumentParser, message: str) -> None:
        super().__init__(message)
        self.parser = parser


def build_parser() -> argparse.ArgumentParser:
    """The argument parser with all subcommands."""
    parser = _Parser(
        prog="triton-mla",
        description="Batch-invariant MLA attention in Triton: look at a machine, explain settings, prove invariance, measure times.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"triton_mla {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in COMMANDS:
        module.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. Wrong usage raises SystemExit(2), as argparse does."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        code = _run(argv)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains of the rest at exit
        return 141
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    return code


def _run(argv: Sequence[str]) -> int:
    as_json = "--json" in argv
    try:
        args = build_parser().parse_args(argv)
    except _UsageError as error:
        if not as_json:
            argparse.ArgumentParser.error(error.parser, str(error))
        print(json.dumps({"error": str(error)}))
        raise SystemExit(2) from None
    try:
        return int(args.run(args))
    except ValueError as error:
        if as_json:
            print(json.dumps({"error": str(error)}))
        else:
            print(f"triton-mla {args.command}: {error}", file=sys.stderr)
        return 1 if isinstance(error, UnsupportedError) else 2
