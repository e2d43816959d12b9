"""A model split over tensor parallel ranks as vLLM splits it: each rank has some heads, MLP units and words.

Projections into heads and MLP units are rows of the whole matrix, so each rank computes its own heads and units; those
back are columns, and their products are summed over ranks. What lies between layers is the same on all ranks. The
gradient of a layer's input is summed over ranks, that of a summed output goes to each rank as it is (Shoeybi et al.
2019, arXiv 1909.08053, section 3). Embedding and output layer have a part of the vocabulary each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from grpo_engine.errors import ModelError
from grpo_engine.models.config import why_not_splittable
from grpo_engine.models.execution import decoder_layers
from grpo_engine.models.places import place_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from grpo_engine.ranks.group import RankGroup

Sum = Callable[[Tensor], Tensor]


def require_splittable(config: PreTrainedConfig, num_ranks: int) -> None:
    """Refuse a model that cannot be split over so many ranks.

    Raises:
        ModelError: another architecture, or heads that cannot be divided.
    """
    problem = why_not_splittable(config.to_dict(), num_ranks)
    if problem is not None:
        raise ModelError(problem)


def split_layers(model: PreTrainedModel, ranks: RankGroup) -> None:
    """Make a model whose parameters are the parts of this rank compute what the whole model does.

    Every rank must call it, and from then on compute the same rows.
    """
    for number, layer in enumerate(decoder_layers(model)):
        attention: Any = layer.self_attn
        attention.num_key_value_groups = len(attention.q_proj.weight) // len(attention.k_proj.weight)
        blocks: Any = (
            (layer.input_layernorm, attention, "o_proj", f"the attention of layer {number}"),
            (layer.post_attention_layernorm, layer.mlp, "down_proj", f"the MLP of layer {number}"),
        )
        for norm, block, name, what in blocks:
            whole_sum = _sum(ranks, what)
            setattr(block, name, _SummedLinear(getattr(block, name), whole_sum))
            norm.register_forward_hook(_summing_gradient(whole_sum))
    embedding = model.get_input_embeddings()
    model.set_input_embeddings(_PartOfEmbedding(embedding, _sum(ranks, "the embedding")))


class PartOfVocabulary:
    """The words of this rank, for `token_logprobs`."""

    def __init__(self, head: Tensor, ranks: RankGroup) -> None:
        """Read where the rows of the output layer's weight belong."""
        place = place_of(head)
        assert place is not None
        self.first, self.num_words = place.start[0], place.whole[0]
        self._ranks = ranks

    def largest(self, values: Tensor) -> Tensor:
        """The largest of each number over all ranks."""
        return self._ranks.largest(values, "the largest logits")

    def sum(self, values: Tensor) -> Tensor:
        """The sum of each number over all ranks."""
        return self._ranks.sum(values, "the output layer")


class _SummedLinear(nn.Module):
    """A linear layer of which each rank has some columns; the sum over ranks, and then the bias."""

    def __init__(self, linear: nn.Linear, whole_sum: Sum) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self._sum = whole_sum

    def forward(self, inputs: Tensor) -> Tensor:
        output = cast(Tensor, _summed(functional.linear(inputs, self.weight), self._sum))
        return output if self.bias is None else output + self.bias


class _PartOfEmbedding(nn.Module):
    """An embedding of which each rank has some words; those of other ranks come by the sum."""

    def __init__(self, embedding: nn.Module, whole_sum: Sum) -> None:
        super().__init__()
        assert isinstance(embedding, nn.Embedding)
        self.weight = embedding.weight
        place = place_of(self.weight)
        assert place is not None
        self._first, self._sum = place.start[0], whole_sum
        padding = -1 if embedding.padding_idx is None else embedding.padding_idx - self._first
        self._padding = padding if 0 <= padding < len(self.weight) else None

    def forward(self, tokens: Tensor) -> Tensor:
        own = tokens - self._first
        is_here = (own >= 0) & (own < len(self.weight))
        rows = functional.embedding(own.masked_fill(~is_here, 0), self.weight, self._padding)
        return cast(Tensor, _summed(rows.masked_fill(~is_here[..., None], 0), self._sum))


def _sum(ranks: RankGroup, what: str) -> Sum:
    return lambda values: ranks.sum(values, what)


def _summing_gradient(whole_sum: Sum) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    def hook(norm: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return cast(Tensor, _with_summed_gradient(output, whole_sum))

    return hook


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _summed(values: Tensor, whole_sum: Sum) -> Tensor:
    result: Tensor = _SumForward.apply(values, whole_sum)  # type: ignore[no-untyped-call]
    return result


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _with_summed_gradient(values: Tensor, whole_sum: Sum) -> Tensor:
    result: Tensor = _SumBackward.apply(values, whole_sum)  # type: ignore[no-untyped-call]
    return result


class _SumForward(torch.autograd.Function):
    """The sum over ranks; its gradient is the same on all of them, and that of each summand."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, whole_sum: Sum) -> Tensor:
        ctx.mark_dirty(values)
        return whole_sum(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _SumBackward(torch.autograd.Function):
    """The same values, of which each rank computes with its own parameters; the gradient is the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, whole_sum: Sum) -> Tensor:
        ctx.sum = whole_sum
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.sum(gradient.clone(memory_format=torch.contiguous_format)), None
