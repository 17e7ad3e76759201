"""A model without kernels, whose log-probabilities follow from what its cache holds: the tokens so far, and the form that each one took."""

from __future__ import annotations

import hashlib
import random

import torch

from triton_mla.dims import MLADims
from triton_mla.paths import PathRule
from triton_mla.step import StepPlan

FORMS = {"absorbed": 0.0, "mha": 0.5}


class FakeModel:
    """Two layers that both write (token + form) into their slots; a row is a hash of what the request's pages hold up to its position."""

    vocab_size, num_layers, dims, dtype, device = 11, 2, MLADims(1), torch.float64, torch.device("cpu")

    def __init__(self, paths: PathRule) -> None:
        self.paths = paths
        self.attention = []
        self.steps = []

    def new_caches(self, num_pages, page_size):
        return [torch.zeros(num_pages, page_size, dtype=self.dtype) for _ in range(self.num_layers)]

    def plan(self, layout):
        return StepPlan.from_layout(layout, paths=self.paths, device=self.device)

    def __call__(self, tokens, positions, plan, caches, rows):
        self.steps.append(len(tokens))
        seen = {}
        for form, part in (("mha", plan.mha), ("absorbed", plan.absorbed)):
            if part is None:
                continue
            index = part.take(torch.arange(len(tokens)))
            slots = plan.slot_mapping[index]
            for cache in caches:
                cache.view(-1)[slots[slots >= 0]] = tokens[index][slots >= 0].to(self.dtype) + FORMS[form]
            starts = part.cu_seqlens_q.tolist()
            for request, (first, end, length) in enumerate(zip(starts, starts[1:], part.seq_lens.tolist(), strict=False)):
                for token in range(first, end):
                    seen[int(index[token])] = (part.block_table[request], length - (end - 1 - token))
        return torch.stack([self.row(int(tokens[i]), int(positions[i]), *seen[i], caches) for i in rows.tolist()] or [torch.zeros(0, self.vocab_size)])

    def row(self, token, position, table, length, caches):
        if length <= 0:
            return torch.full((self.vocab_size,), float("nan"))  # padding
        page_size = caches[0].shape[1]
        contents = [cache[table[: -(-length // page_size)].long()].flatten()[:length].tolist() for cache in caches]
        assert length == position + 1, "a token sees those up to itself"
        assert contents[0] == contents[1], "the layers' caches hold the same"
        assert int(contents[0][-1]) == token
        chance = random.Random(hashlib.sha256(repr(contents[0]).encode()).digest())
        return torch.tensor([chance.random() for _ in range(self.vocab_size)]).log_softmax(-1)
