"""`python -m benchmarks.prefill`: the MHA form against FlashAttention-3 and cuDNN, streamed through its state, and beside the absorbed form.

Needs a CUDA device. Rows go to benchmarks/results/<gpu>_prefill.json.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.correctness import TOLERANCE
from benchmarks.implementations import Call
from benchmarks.peers import Peers, Unavailable
from benchmarks.run import default_path
from benchmarks.runner import reason
from benchmarks.timing import Replay, Timing, interleaved, measure_ceilings
from triton_mla import mla_extend, mla_prefill, mla_prefill_paged

log = logging.getLogger(__name__)

RANK, NOPE, ROPE, VALUE = 512, 128, 64, 128
SCALE = (NOPE + ROPE) ** -0.5
PAGE = 64


@dataclass(frozen=True)
class Prompt:
    """Equal requests: `new` query tokens each, the last of `length` tokens; causal, bf16."""

    heads: int
    batch: int
    new: int
    length: int

    @property
    def name(self) -> str:
        context = f" over {self.length - self.new}" if self.length > self.new else ""
        return f"prefill H={self.heads} {self.batch}x{self.new}{context}"

    @property
    def pairs(self) -> int:
        """(query token, visible token) pairs."""
        return self.batch * (self.new * self.length - self.new * (self.new - 1) // 2)

    @property
    def flops(self) -> int:
        return 2 * self.heads * (NOPE + ROPE + VALUE) * self.pairs

    @property
    def bytes(self) -> int:
        """q, K, V and the rope key read once, out written once."""
        per_query, per_key = self.heads * (NOPE + ROPE + VALUE), self.heads * (NOPE + VALUE) + ROPE
        return 2 * self.batch * (self.new * per_query + self.length * per_key)


PROMPTS = (Prompt(128, 1, 8192, 8192), Prompt(128, 4, 2048, 2048), Prompt(16, 1, 32768, 32768), Prompt(16, 8, 4096, 4096))
STREAMED = (Prompt(128, 1, 2048, 32768), Prompt(16, 1, 2048, 32768))
STREAM_CHUNK = 8192
ABSORBED = (Prompt(128, 1, 4096, 4096), Prompt(16, 1, 4096, 4096))


@dataclass(frozen=True)
class Inputs:
    """q [T, H, 192], k_nope and v as halves of kv [S, H, 256], k_pe [S, 64], starts of queries and keys [B + 1] int32."""

    prompt: Prompt
    q: torch.Tensor
    kv: torch.Tensor
    k_pe: torch.Tensor
    starts: torch.Tensor
    key_starts: torch.Tensor

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        return (self.q, self.kv[..., :NOPE], self.k_pe, self.kv[..., NOPE:], self.starts, self.key_starts)


def starts(count: int, length: int) -> torch.Tensor:
    return torch.arange(count + 1, dtype=torch.int32, device="cuda") * length


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def make_inputs(p: Prompt) -> Inputs:
    torch.manual_seed(0)
    tokens, keys = p.batch * p.new, p.batch * p.length
    return Inputs(p, normal(tokens, p.heads, NOPE + ROPE), normal(keys, p.heads, NOPE + VALUE), normal(keys, ROPE),
                  starts(p.batch, p.new), starts(p.batch, p.length))


def whole_keys(i: Inputs) -> torch.Tensor:
    return torch.cat([i.kv[..., :NOPE], i.k_pe[:, None].expand(-1, i.prompt.heads, -1)], -1)


def ours(i: Inputs, peers: Peers) -> Call:
    out = torch.full((*i.q.shape[:2], VALUE), float("nan"), dtype=i.q.dtype, device=i.q.device)
    return lambda: mla_prefill(*i.arguments, softmax_scale=SCALE, out=out)


def fa3(concatenate: bool) -> Callable[[Inputs, Peers], Call]:
    """FlashAttention-3; K with the rope key of every head beforehand, or within the time, as a model would have to."""

    def prepare(i: Inputs, peers: Peers) -> Call:
        op, p = peers.fa3.fwd, i.prompt
        k, v = whole_keys(i), i.kv[..., NOPE:].contiguous()

        def call() -> torch.Tensor:
            keys = whole_keys(i) if concatenate else k
            return op(
                i.q, keys, v, None, None, None, None, i.starts, i.key_starts, None, None, None, p.new, p.length, *[None] * 9, SCALE,
                True, -1, -1, 0.0, True, None, 1, None, 0, None, 1, 0, None,
            )[0]  # fmt: skip

        return call

    return prepare


def cudnn(i: Inputs, peers: Peers) -> Call:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    p = i.prompt
    if p.new != p.length:
        raise Unavailable("its causal mask is top-left")

    def batched(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(0, (p.batch, p.length)).transpose(1, 2).contiguous()

    q, k, v = batched(i.q), batched(whole_keys(i)), batched(i.kv[..., NOPE:])

    def call() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE)
        return out.transpose(1, 2).flatten(0, 1)

    return call


def streamed(i: Inputs, peers: Peers) -> Call:
    """The same rows, the keys in chunks of STREAM_CHUNK through the resumable state."""
    p, (q, k, pe, v, first, _) = i.prompt, i.arguments
    cuts = list(range(0, p.length, STREAM_CHUNK))
    positions = {at: torch.tensor([p.length - p.new - at], dtype=torch.int32, device="cuda") for at in cuts}
    chunk = starts(1, STREAM_CHUNK)

    def call() -> torch.Tensor:
        state: Any = None
        for at in cuts:
            part = slice(at, at + STREAM_CHUNK)
            state = mla_prefill(q, k[part], pe[part], v[part], first, chunk, softmax_scale=SCALE, positions=positions[at], state=state,
                                return_state=part.stop < p.length)
        return state

    return call


def latent(p: Prompt) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A cache of the prompt's tokens, its block table and lengths."""
    pages = p.batch * p.length // PAGE
    table = torch.randperm(pages, device="cuda").to(torch.int32).view(p.batch, -1)
    return normal(pages, PAGE, RANK + ROPE), table, torch.full((p.batch,), p.length, dtype=torch.int32, device="cuda")


def absorbed(i: Inputs, peers: Peers) -> Call:
    """The absorbed form of as many tokens: attention alone, its q already in the latent space."""
    p = i.prompt
    cache, table, lens = latent(p)
    q = normal(p.batch * p.new, p.heads, RANK + ROPE)
    return lambda: mla_extend(q, cache, table, i.starts, lens, softmax_scale=SCALE)


def paged(i: Inputs, peers: Peers) -> Call:
    """Keys and values up-projected from the paged cache, chunk by chunk, then attended."""
    p = i.prompt
    cache, table, lens = latent(p)
    weight = normal(p.heads * (NOPE + VALUE), RANK) / RANK**0.5
    return lambda: mla_prefill_paged(i.q, cache, weight, table, i.starts, lens, softmax_scale=SCALE, max_seq_len=p.length)


def relative_error(i: Inputs, out: torch.Tensor, rows: int = 8) -> float:
    """Against float64, over some query rows of the first request."""
    p = i.prompt
    picked = [round(n * (p.new - 1) / (rows - 1)) for n in range(rows)]
    k, v = whole_keys(i)[: p.length].double(), i.kv[: p.length, :, NOPE:].double()
    want = []
    for t in picked:
        n = p.length - p.new + t + 1
        scores = torch.einsum("hd,nhd->hn", i.q[t].double(), k[:n]) * SCALE
        want.append(torch.einsum("hn,nhd->hd", scores.softmax(-1), v[:n]))
    expected = torch.stack(want)
    return float((out[picked].double() - expected).norm() / expected.norm())


COMPARED = {"triton_mla": ours, "fa3": fa3(False), "fa3_concatenating": fa3(True), "cudnn": cudnn}
SECTIONS: dict[str, tuple[tuple[Prompt, ...], dict[str, Callable[[Inputs, Peers], Call]]]] = {
    "prefill": (PROMPTS, COMPARED),
    "stream": (STREAMED, {"triton_mla": ours, "triton_mla_streamed": streamed, "triton_mla_paged": paged, "fa3": fa3(False)}),
    "absorbed": (ABSORBED, {"triton_mla": ours, "triton_mla_absorbed": absorbed}),
}
OTHER_INPUTS = ("triton_mla_absorbed", "triton_mla_paged")
"""Not the function of the other implementations' inputs: timed, not compared."""


def measure(p: Prompt, implementations: Mapping[str, Callable[[Inputs, Peers], Call]], peers: Peers, repeats: int) -> tuple[dict[str, Timing], dict[str, str]]:
    """(timings, reasons why others are left out)"""
    inputs, runs, left_out = make_inputs(p), {}, {}
    for name, prepare in implementations.items():
        try:
            call = prepare(inputs, peers)
            out = call()
            if name not in OTHER_INPUTS and not (error := relative_error(inputs, out)) < TOLERANCE["bfloat16"]:
                raise Unavailable(f"wrong result: relative error {error:.2e}")
            runs[name] = Replay(call)
        except Exception as error:
            left_out[name] = reason(error)
            log.warning("%s: %s left out: %s", p.name, name, left_out[name])
    return (interleaved(runs, repeats) if runs else {}), left_out


def main(argv: list[str] | None = None) -> int:
    """Run the command; exit status 0 when this package's op was right on every prompt, else 1."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefill", description=__doc__)
    parser.add_argument("--peers", type=Path, help="folder that holds FlashAttention-3's file (see benchmarks/peers.py)")
    parser.add_argument("--repeats", type=int, default=11, help="timed turns a prompt (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="JSON file (default: benchmarks/results/<gpu>_prefill.json)")
    args = parser.parse_args(argv)
    if args.repeats < 1:
        parser.error(f"--repeats {args.repeats}: allowed is a positive integer")
    if not torch.cuda.is_available():
        log.error("the benchmarks need a CUDA device")
        return 2
    peers = Peers(args.peers)
    ceilings = measure_ceilings(args.repeats)
    content: dict[str, Any] = {"header": report.header(peers, ceilings, args.repeats, "write"), "rows": [], "left_out": []}
    default = default_path(content["header"]["gpu"])
    path = args.out or default.with_name(f"{default.stem}_prefill.json")
    for section, (prompts, implementations) in SECTIONS.items():
        for p in prompts:
            timings, left_out = measure(p, implementations, peers, args.repeats)
            floor = max(p.bytes / ceilings["hbm_bytes_per_s"], p.flops / ceilings["bf16_flops_per_s"]) * 1e6
            timings["floor"] = Timing(floor, floor, floor)
            row = {"op": section, "heads": p.heads, "batch": p.batch, "seq_len": p.length, "q_len": p.new, "dtype": "bfloat16", "page_size": PAGE}
            content["rows"] += [{**row, "impl": n, "us_median": round(t.median, 2), "us_spread": round(t.spread, 2)} for n, t in timings.items()]
            content["left_out"] += [{"prompt": p.name, "impl": n, "reason": text} for n, text in left_out.items()]
            base = timings["triton_mla"].median if "triton_mla" in timings else float("nan")
            log.info("%s %s: %s | %.0f TFLOP/s", section, p.name,
                     " | ".join(f"{n} {t.median:.0f} ({t.median / base:.2f}x)" for n, t in timings.items()), p.flops / base / 1e6)
            report.write(path, content)
            del timings
            torch.cuda.empty_cache()
    log.info("wrote %s", path)
    return int(any(entry["impl"].startswith("triton_mla") for entry in content["left_out"]))


if __name__ == "__main__":
    sys.exit(main())
