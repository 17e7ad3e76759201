"""The command `triton-mla`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from triton_mla.cli import doctor, explain, verify

COMMANDS = (doctor, explain, verify)

EPILOG = """\
exit codes:
  0  everything asked for is fine
  1  a check failed, or something is not supported here
  2  wrong usage

examples:
  triton-mla doctor
  triton-mla explain --heads 128 --prefix-caching keep
  triton-mla verify --record evidence.json
"""


def build_parser() -> argparse.ArgumentParser:
    """The argument parser with all subcommands."""
    parser = argparse.ArgumentParser(
        prog="triton-mla",
        description="Batch-invariant MLA attention in Triton: look at a machine, explain settings, prove invariance.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in COMMANDS:
        module.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. Wrong usage raises SystemExit(2), as argparse does."""
    args = build_parser().parse_args(argv)
    try:
        return int(args.run(args))
    except ValueError as error:
        print(f"triton-mla {args.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
