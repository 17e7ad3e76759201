"""One engine of vLLM in a process of its own, for `determinism.vllm`: which engines there are, what each compares, and a small model for them."""

from __future__ import annotations

import copy
import json
import os
import random
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import Mock

from determinism.vllm_throughput import Requests, prompts, serve

OURS, CONTROL = "ours", "control"
MAX_LEN = 34816
NO_GRAPHS = {"compilation_config": {"cudagraph_mode": "NONE"}}


@dataclass(frozen=True)
class Engine:
    """One engine: its backend, what it compares, whether vLLM's flag is on, and how else it differs from the default."""

    name: str
    backend: str
    phases: tuple[str, ...]
    kind: str = OURS
    invariant: bool = True
    model: str = "small"
    seeds: int = 1
    throughput: bool = False
    forced_caching: bool = False
    own_process: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


KEEP = {"TRITON_MLA_PREFIX_CACHING": "keep"}
DRAFTS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}}
SMALL_CACHE = {"num_gpu_blocks_override": 200, "max_model_len": 8192}
ENGINES = (
    Engine("ours", "CUSTOM", ("short", "long", "schedule"), seeds=3, throughput=True),
    Engine("ours_keep", "CUSTOM", ("short", "long", "prefix", "turns"), seeds=3, throughput=True, variables=KEEP),
    Engine("ours_no_graphs", "CUSTOM", ("long", "cache_off"), own_process=True, options=NO_GRAPHS),
    Engine("ours_small_cache", "CUSTOM", ("preemption",), options=SMALL_CACHE),
    Engine("ours_keep_small_cache", "CUSTOM", ("preemption",), options=SMALL_CACHE, variables=KEEP),
    Engine("ours_drafts", "CUSTOM", ("drafts",), options=DRAFTS),
    Engine("ours_v3_shape", "CUSTOM", ("short",), model="v3_shape", seeds=2),
    # The attention alone is invariant: what the throughput of the others owes to vLLM's invariant products.
    Engine("ours_flag_off", "CUSTOM", (), invariant=False, throughput=True, variables={"TRITON_MLA_BATCH_INVARIANT": "1"}),
    Engine("triton_mla", "TRITON_MLA", ("long", "prefix"), kind=CONTROL, seeds=3, throughput=True, forced_caching=True),
    Engine("triton_mla_v3_shape", "TRITON_MLA", ("short",), kind=CONTROL, model="v3_shape"),
    Engine("triton_mla_flag_off", "TRITON_MLA", ("long",), kind=CONTROL, invariant=False, throughput=True),
    Engine("flash_attn_mla", "FLASH_ATTN_MLA", ("long",), kind=CONTROL, throughput=True),
)

Result = list[list[tuple[int, float]]]


def compare(a: Result, b: Result) -> dict[str, Any]:
    """Mismatching (request, token) pairs, where the token or a bit of its logprob differs, and max |difference| over the same history."""
    row = {"pairs": 0, "mismatches": 0, "requests": len(a), "requests_hit": 0, "max_difference": 0.0}
    for x, y in zip(a, b, strict=True):
        same_history, hit = True, 0
        for (token, logprob), (other, other_logprob) in zip(x, y, strict=True):
            row["pairs"] += 1
            hit += token != other or struct.pack("d", logprob) != struct.pack("d", other_logprob)
            if same_history and token == other:
                row["max_difference"] = max(row["max_difference"], abs(logprob - other_logprob))
            same_history = same_history and token == other
        row["mismatches"] += hit
        row["requests_hit"] += hit > 0
    return row


class Run:
    """A started engine, its rows and the results that other engines are compared with."""

    def __init__(self, engine: Engine, folder: Path, model: str, tensor_parallel: int, checkpoint: bool) -> None:
        from vllm import LLM

        if engine.forced_caching:
            _force_caching()
        self.engine, self.folder, started = engine, folder, time.monotonic()
        options: dict[str, Any] = {"max_model_len": MAX_LEN, "max_num_batched_tokens": 2048, "max_num_seqs": 32, "seed": 0, "dtype": "bfloat16",
                                   "skip_tokenizer_init": True, "tensor_parallel_size": tensor_parallel}
        if checkpoint:
            options["gpu_memory_utilization"] = 0.85
        else:
            options.update(kv_cache_memory_bytes=(8 if engine.throughput else 2) << 30, gpu_memory_utilization=0.15)
        self.llm = LLM(model=model, attention_config={"backend": engine.backend}, **{**options, **copy.deepcopy(engine.options)})
        self.config = self.llm.llm_engine.vllm_config
        self.vocabulary = min(self.config.model_config.get_vocab_size(), 1 << 15)
        self.data: dict[str, Any] = {"engine": asdict(engine), "rows": [], "results": {}, "seconds_to_start": round(time.monotonic() - started, 1),
                                     "info": self._info()}

    def _info(self) -> dict[str, Any]:
        import torch
        import triton
        import vllm

        backends = [getattr(layer, "attn_backend", None) for layer in self.config.compilation_config.static_forward_context.values()]
        return {"gpu": torch.cuda.get_device_name(), "vllm": vllm.__version__, "torch": torch.__version__, "triton": triton.__version__,
                "backends": sorted({backend.__name__ for backend in backends if backend is not None}),
                "page_size": self.config.cache_config.block_size, "graphs": str(self.config.compilation_config.cudagraph_mode),
                "prefix_caching": None if self.engine.own_process else self.config.cache_config.enable_prefix_caching}

    def generate(self, batch: Sequence[list[int]], tokens: int, *, reset: bool = True) -> tuple[Result, int]:
        """(token, logprob) of each new token of each prompt, and how many prompt tokens came from the prefix cache."""
        from vllm import SamplingParams

        if reset:
            self.llm.reset_prefix_cache()
        sampling = SamplingParams(temperature=0, max_tokens=tokens, logprobs=1, ignore_eos=True, detokenize=False)
        outputs = self.llm.generate([{"prompt_token_ids": prompt} for prompt in batch], sampling, use_tqdm=False)
        result = [
            [(token, steps[token].logprob) for token, steps in zip(o.outputs[0].token_ids, o.outputs[0].logprobs, strict=True)] for o in outputs
        ]
        return result, sum(o.num_cached_tokens or 0 for o in outputs)

    def alone(self, batch: Sequence[list[int]], tokens: int) -> Result:
        return [self.generate([prompt], tokens)[0][0] for prompt in batch]

    def add(self, name: str, row: dict[str, Any], **needs: int) -> None:
        """`needs`: counts that must not be 0 for the row to show anything."""
        self.data["rows"].append({"engine": self.engine.name, "kind": self.engine.kind, "row": name, **row, "needs": needs})
        self.save("partial")

    def save(self, state: str) -> None:
        path = self.folder / f"{self.engine.name}.json"
        path.with_suffix(".tmp").write_text(json.dumps({**self.data, "state": state}), encoding="utf-8")
        path.with_suffix(".tmp").replace(path)

    def short(self) -> None:
        for seed in range(self.engine.seeds):
            batch = prompts(seed, 32, 10, 50, self.vocabulary)
            self.add(f"prompts of 10-50, alone and 32 together, seed {seed}", compare(self.alone(batch, 32), self.generate(batch, 32)[0]))

    def long(self) -> None:
        for seed in range(self.engine.seeds):
            batch = prompts(seed, 32, 200, 6000, self.vocabulary)
            one, together = self.alone(batch, 16), self.generate(batch, 16)[0]
            self.add(f"prompts of 200-6000, alone and 32 together, seed {seed}", compare(one, together))
            if seed == 0:
                self.data["results"]["long"] = together

    def schedule(self) -> None:
        batch = prompts(0, 32, 200, 6000, self.vocabulary)
        together = self.generate(batch, 16)[0]
        self.add("the same in reversed order", compare(together, self.generate(batch[::-1], 16)[0][::-1]))
        # Of 1, 2049 and 4097 the last chunk is one token, which looks like a decode; behind a short prompt, which then decodes, of 2047 and 4094.
        lengths = (1, 2, 2047, 2048, 2049, 4094, 4096, 4097)
        batch = [prompt[:length] for prompt, length in zip(prompts(5, 8, 4200, 4300, self.vocabulary), lengths, strict=True)]
        one = self.alone(batch, 16)
        self.add("last chunks of one token, alone and together", compare(one, self.generate(batch, 16)[0]))
        beside = [self.generate([batch[1], prompt], 16)[0][1] for prompt in batch]
        self.add("last chunks of one token, each beside a decode", compare(one, beside))

    def prefix(self) -> None:
        draw = random.Random(99)
        cold, warm, shared_cold, shared_warm, cached, shared = [], [], [], [], 0, 0
        for prompt in prompts(7, 16, 200, 6000, self.vocabulary):
            cold += self.generate([prompt], 16)[0]
            again, hits = self.generate([prompt], 16, reset=False)
            warm, cached = warm + again, cached + hits
            suffix = [draw.randrange(2, self.vocabulary) for _ in range(draw.randint(20, 600))]
            other = prompt[: draw.randint(len(prompt) // 3, len(prompt) - 1)] + suffix
            again, hits = self.generate([other], 16, reset=False)
            shared_warm, shared = shared_warm + again, shared + hits
            shared_cold += self.generate([other], 16)[0]
        self.add("prefix cache cold and warm, the same prompt", compare(cold, warm), cached=cached)
        self.add("prefix cache cold and warm, a shared prefix", compare(shared_cold, shared_warm), cached=shared)

    def turns(self) -> None:
        draw = random.Random(3)
        warm, cold, generated = [], [], 0
        for prompt in prompts(11, 8, 200, 3000, self.vocabulary):
            answer, _ = self.generate([prompt], 150)
            turn = [*prompt, *(token for token, _ in answer[0]), *(draw.randrange(2, self.vocabulary) for _ in range(40))]
            again, hits = self.generate([turn], 16, reset=False)
            generated += max(hits - len(prompt), 0)
            warm += again
            cold += self.generate([turn], 16)[0]
        self.add("a second turn over generated text, cold and warm", compare(cold, warm), cached_generated=generated)

    def preemption(self) -> None:
        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        # Prompts that all find room at first, in 200 pages of 64, and outgrow it by what they generate.
        batch = prompts(4, 24, 200, 800, self.vocabulary)
        one = self.alone(batch, 320)
        counted = scheduler._preempt_request = Mock(wraps=scheduler._preempt_request)
        together, _ = self.generate(batch, 320)
        self.add("preempted and recomputed, against alone", compare(one, together), preemptions=counted.call_count)

    def drafts(self) -> None:
        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        counted = scheduler.make_spec_decoding_stats = Mock(wraps=scheduler.make_spec_decoding_stats)
        for name, batch, tokens in (("200-6000", prompts(0, 32, 200, 6000, self.vocabulary), 16), ("200-800", prompts(4, 24, 200, 800, self.vocabulary), 160)):
            counted.reset_mock()
            one, together = self.alone(batch, tokens), self.generate(batch, tokens)[0]
            drafted, accepted = (sum(call.kwargs[f"num_{kind}_tokens"] for call in counted.call_args_list) for kind in ("draft", "accepted"))
            needs = {"drafted": drafted, "accepted": accepted} if tokens > 16 else {"drafted": drafted}
            self.add(f"drafts verified, prompts of {name}, alone and {len(batch)} together", compare(one, together), **needs)
            self.data["results"].setdefault("long", together)

    def cache_off(self) -> None:
        batch = prompts(9, 4, 1000, 2000, self.vocabulary)
        self.generate(batch, 4)
        _, hits = self.generate(batch, 4, reset=False)
        empty = {"pairs": sum(map(len, batch)), "mismatches": hits, "requests": 4, "requests_hit": int(hits > 0), "max_difference": 0.0}
        self.add("prefix caching off in the engine's process: tokens cached", empty)


def _force_caching() -> None:
    """For a control: prefix caching back on after vLLM has turned it off, before its scheduler reads it."""
    from vllm.v1.engine.core import EngineCore

    initialize = EngineCore._initialize_kv_caches

    def forced(self: Any, vllm_config: Any) -> Any:
        vllm_config.cache_config.enable_prefix_caching = True
        return initialize(self, vllm_config)

    EngineCore._initialize_kv_caches = forced


def child(name: str, folder: Path, model: str, tensor_parallel: int, checkpoint: bool, compare: bool, channel: Connection | None) -> None:
    """What the process of an engine does; with a channel its throughput is asked for there."""
    engine = next(engine for engine in ENGINES if engine.name == name)
    run = Run(engine, folder, model, tensor_parallel, checkpoint)
    for phase in engine.phases if compare else ():
        getattr(run, phase)()
    if channel is not None:
        run.save("compared")
        serve(Requests(run.llm, run.vocabulary), channel)
    run.save("done")
    if engine.own_process or tensor_parallel > 1:
        run.llm.llm_engine.engine_core.shutdown()
    os._exit(0)  # an engine's threads are not waited for


def make_model(folder: Path, v3_shape: bool) -> None:
    """A DeepSeek-V3-like model with seeded Gaussian weights; `v3_shape` has the real a-projection, 2112 x 7168, and gate of a router, 256 x 7168."""
    import torch
    from safetensors.torch import save_file

    hidden, q_rank, layers, dense, experts, expert, top, groups = (7168, 1536, 2, 1, 256, 64, 8, 8) if v3_shape else (1024, 512, 4, 2, 16, 512, 4, 1)
    heads, rank, rope, nope, value, vocabulary = 16, 512, 64, 128, 128, 8192
    config = {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "torch_dtype": "bfloat16", "hidden_size": hidden,
        "intermediate_size": 2048, "moe_intermediate_size": expert, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": heads, "n_shared_experts": 1, "n_routed_experts": experts, "num_experts_per_tok": top, "n_group": groups,
        "topk_group": -(-groups // 2), "norm_topk_prob": True, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "routed_scaling_factor": 1.0,
        "first_k_dense_replace": dense,
        "moe_layer_freq": 1, "kv_lora_rank": rank, "q_lora_rank": q_rank, "qk_rope_head_dim": rope, "qk_nope_head_dim": nope, "v_head_dim": value,
        "vocab_size": vocabulary, "max_position_embeddings": 65536, "rope_theta": 10000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "tie_word_embeddings": False, "attention_bias": False, "bos_token_id": 0, "eos_token_id": 1, "initializer_range": 0.02, "use_cache": True,
    }
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device=device).manual_seed(1234)
    weights: dict[str, Any] = {}

    def linear(name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        weights[f"{name}.weight"] = (torch.randn(rows, columns, generator=generator, device=device) * (gain / columns**0.5)).bfloat16().cpu()

    def norm(name: str, size: int) -> None:
        weights[f"{name}.weight"] = (1 + 0.1 * torch.randn(size, generator=generator, device=device)).bfloat16().cpu()

    def mlp(name: str, inner: int) -> None:
        for part, rows, columns in (("gate_proj", inner, hidden), ("up_proj", inner, hidden), ("down_proj", hidden, inner)):
            linear(f"{name}.{part}", rows, columns)

    weights["model.embed_tokens.weight"] = torch.randn(vocabulary, hidden, generator=generator, device=device).bfloat16().cpu()
    for layer in (f"model.layers.{i}" for i in range(layers)):
        for name, size in (("input_layernorm", hidden), ("post_attention_layernorm", hidden)):
            norm(f"{layer}.{name}", size)
        own = f"{layer}.self_attn"
        linear(f"{own}.q_a_proj", q_rank, hidden)
        norm(f"{own}.q_a_layernorm", q_rank)
        linear(f"{own}.q_b_proj", heads * (nope + rope), q_rank, 1.5)
        linear(f"{own}.kv_a_proj_with_mqa", rank + rope, hidden)
        norm(f"{own}.kv_a_layernorm", rank)
        linear(f"{own}.kv_b_proj", heads * (nope + value), rank, 1.5)
        linear(f"{own}.o_proj", hidden, heads * value, 2.0)
        if int(layer.rpartition(".")[2]) < dense:
            mlp(f"{layer}.mlp", 2048)
            continue
        linear(f"{layer}.mlp.gate", experts, hidden)
        weights[f"{layer}.mlp.gate.e_score_correction_bias"] = torch.zeros(experts)
        for i in range(experts):
            mlp(f"{layer}.mlp.experts.{i}", expert)
        mlp(f"{layer}.mlp.shared_experts", expert)
    norm("model.norm", hidden)
    linear("lm_head", vocabulary, hidden, 3.0)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
