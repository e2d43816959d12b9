"""A model with vLLM's layout (fused projections, a padded vocabulary), its log-probabilities, and a tokenizer."""

from __future__ import annotations

from itertools import accumulate
from types import SimpleNamespace

import torch
from torch import nn


class Projection(nn.Module):
    """Like vLLM's fused linear layers: rows of several projections, and their counts."""

    def __init__(self) -> None:
        super().__init__()
        self.output_sizes = [4, 2, 2]
        self.weight = nn.Parameter(torch.arange(32.0).reshape(8, 4))
        self.bias = nn.Parameter(torch.arange(8.0))


class Vocabulary(nn.Module):
    """Like vLLM's embeddings: rows beyond the vocabulary are padding."""

    def __init__(self) -> None:
        super().__init__()
        self.org_vocab_size = 5
        self.weight = nn.Parameter(torch.randn(8, 4))


class Served(nn.Module):
    """The parts of a vLLM model that define its layout."""

    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    def __init__(self, *, has_adapters: bool = False) -> None:
        super().__init__()
        self.embed = Vocabulary()
        self.head = self.embed
        projection = Projection()
        self.attn = nn.Module()
        self.attn.qkv_proj = nn.ModuleDict({"base_layer": projection}) if has_adapters else projection
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.ones(4))


def flat(*positions: dict[int, float]) -> SimpleNamespace:
    """vLLM's `FlatLogprobs`."""
    ends = list(accumulate(map(len, positions)))
    return SimpleNamespace(
        token_ids=[token for position in positions for token in position],
        logprobs=[value for position in positions for value in position.values()],
        start_indices=[0, *ends[:-1]],
        end_indices=ends,
    )


class Letters:
    """A tokenizer of one letter a token; token 0 is special, and 1 the half of a character."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        letters = ("<0>" if token == 0 else "\ufffd" if token == 1 else chr(96 + token) for token in token_ids)
        return "".join(letters).replace("<0>", "" if skip_special_tokens else "<0>")
