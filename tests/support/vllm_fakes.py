"""A model with vLLM's layout: fused projections, a padded vocabulary."""

from __future__ import annotations

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
