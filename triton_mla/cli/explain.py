"""`triton-mla explain`: every setting with its origin, and every decision with its reason."""

from __future__ import annotations

import argparse
import json
from types import SimpleNamespace
from typing import Any

from triton_mla.cli.text import positive

DESCRIPTION = """\
Shows every setting with its value and where it came from (argument, environment variable, default),
and what they decide for a model on a machine: the backends of prefill and decode with every reason,
the form of each token, the page size, and what becomes of prefix caching. Nothing is changed.
"""

EPILOG = """\
examples:
  triton-mla explain
  triton-mla explain --batch-invariant 1 --prefix-caching keep
  TRITON_MLA_KV_SPLIT=1024 triton-mla explain --model kimi-k2 --arch sm_100 --page-size 64
  triton-mla explain --variables
"""

PRESETS = {"deepseek-v3": "DEEPSEEK_V3", "deepseek-v2-lite": "DEEPSEEK_V2_LITE", "kimi-k2": "KIMI_K2"}


def add_parser(subparsers: Any) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "explain",
        help="settings with their origin, and what they decide",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", choices=PRESETS, default="deepseek-v3", help="sizes of a model (default: deepseek-v3)")
    add("--heads", type=int, metavar="N", help="query heads of one rank, instead of the model's")
    add("--rank", type=int, metavar="N", help="kv_lora_rank, instead of the model's")
    add("--rope", type=int, metavar="N", help="qk_rope_head_dim, instead of the model's")
    add("--dtype", default="auto", help="dtype of the model (default: auto)")
    add("--kv-cache-dtype", default="auto", metavar="DTYPE", help="dtype of the cache (default: the model's)")
    add("--page-size", type=positive, metavar="N", help="tokens of a page, fixed by the user")
    add("--arch", metavar="ARCH", help="plan for this architecture (sm_90, gfx942, ...) instead of this machine's")
    add("--batch-invariant", metavar="FLAG", help="1 or 0, instead of the environment's")
    add("--prefix-caching", metavar="MODE", help="auto or keep")
    add("--prefill-path", metavar="PATH", help="auto, mha or absorbed")
    add("--chunked-prefix", metavar="FLAG", help="1 or 0: whether the mha form may read a cached prefix")
    add("--prefill-backend", metavar="NAME", help="a backend by name")
    add("--decode-backend", metavar="NAME", help="a backend by name")
    add("--kv-split", type=int, metavar="N", help="tokens between two cuts of a KV sequence")
    add("--token-roles", action="store_true", help="the engine supplies the lengths of original prompts")
    add("--whole-prompts", action="store_true", help="the engine never cuts a prompt")
    add("--variables", action="store_true", help="list the environment variables and stop")
    add("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the decisions; 1 when no backend can do what is asked, with every reason."""
    from triton_mla import policy
    from triton_mla.config import VARIABLES
    from triton_mla.errors import UnsupportedError

    if args.variables:
        table = [{name: getattr(v, name) for name in ("name", "type", "default", "meaning")} for v in VARIABLES]
        lines = [f"{v['name']} ({v['type']}; default {v['default']})\n    {v['meaning']}" for v in table]
        print(json.dumps(table, indent=1) if args.json else "\n".join(lines))
        return 0
    settings = _settings(args)
    try:
        selection = _resolve(args, settings)
    except UnsupportedError as error:
        reasons = {name: list(texts) for name, texts in error.reasons.items()}
        if args.json:
            print(json.dumps({**policy.explain(settings), "unsupported": str(error), "reasons": reasons}, indent=1))
        else:
            print("\n".join([*policy.explain_lines(settings), f"unsupported: {error}"]))
        return 1
    print(json.dumps(policy.explain(selection), indent=1) if args.json else "\n".join(policy.explain_lines(selection)))
    return 0


def _settings(args: argparse.Namespace) -> Any:
    from triton_mla.config import Settings

    names = ("batch_invariant", "prefix_caching", "prefill_path", "chunked_prefix", "prefill_backend", "decode_backend", "kv_split")
    return Settings.from_env(**{name: getattr(args, name) for name in names})


def _resolve(args: argparse.Namespace, settings: Any) -> Any:
    """The selection on a stand-in for an engine's cache config, so that what would be changed shows."""
    import dataclasses

    from triton_mla import dims, policy

    model = getattr(dims, PRESETS[args.model])
    for option, name in (("heads", "num_heads"), ("rank", "kv_lora_rank"), ("rope", "qk_rope_head_dim")):
        if (value := getattr(args, option)) is not None:
            try:
                model = dataclasses.replace(model, **{name: value})
            except ValueError as error:
                raise ValueError(f"argument --{option}: {error}") from None
    config = SimpleNamespace(block_size=args.page_size, enable_prefix_caching=True, cache_dtype=args.kv_cache_dtype)
    return policy.resolve(
        config,
        dims=model,
        settings=settings,
        dtype=args.dtype,
        arch=args.arch,
        token_roles=args.token_roles,
        whole_prompts=args.whole_prompts,
    )
