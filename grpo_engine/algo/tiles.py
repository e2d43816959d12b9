"""Arithmetic on one tile of logits, C tokens × W words.

The forward pass folds each tile into a few numbers per token (`fold_tile`), the backward pass turns a tile into its
gradient (`tile_gradient`). `logprobs_kernels` has the same arithmetic as Triton kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

NEVER = -1e4
"""Log-probabilities are held above this where they meet their own exponential: it is 0 in any dtype long before, and
0 × -1e4 is 0 where 0 × -inf is NaN. A bias of -inf so takes a word out of the vocabulary."""


class VocabularyPart(Protocol):
    """The words that this rank has where the vocabulary is divided among ranks, all of which have the same tokens."""

    first: int
    """Their first."""
    num_words: int
    """In the whole vocabulary."""

    def largest(self, values: Tensor) -> Tensor:
        """The largest of each number over all ranks; may overwrite its argument."""

    def sum(self, values: Tensor) -> Tensor:
        """The sum of each number over all ranks; may overwrite its argument."""


class Running(NamedTuple):
    """State of each token's softmax after some of its words, (N,) or (C,) each; updated in place."""

    maximum: Tensor
    """m, the highest logit z so far, or the lowest finite number."""
    total: Tensor
    """Sum of exp(z - m)."""
    weighted: Tensor
    """Sum of (z - m) exp(z - m), so that the entropy is a sum of two numbers that are not negative."""
    chosen: Tensor
    """Logit of the label; NaN before its word."""

    @classmethod
    def of_no_words(cls, num_tokens: int, dtype: torch.dtype, device: torch.device) -> Running:
        def filled(value: float) -> Tensor:
            return torch.full((num_tokens,), value, dtype=dtype, device=device)

        return cls(filled(torch.finfo(dtype).min), filled(0.0), filled(0.0), filled(float("nan")))

    def rows(self, rows: slice) -> Running:
        """Of some tokens, for updating in place."""
        return Running(*(each[rows] for each in self))

    def over_ranks(self, part: VocabularyPart) -> Running:
        """After the last word of each rank, the state after the words of all ranks, on every rank."""
        maximum = part.largest(self.maximum.clone())
        shift = (self.maximum - maximum).clamp_(min=NEVER)
        weighted = (self.weighted + shift * self.total) * shift.exp()
        is_here = ~self.chosen.isnan()
        chosen = torch.where(is_here, self.chosen, 0.0)
        total, weighted, chosen, num_found = part.sum(
            torch.stack([self.total * shift.exp(), weighted, chosen, is_here.to(weighted.dtype)])
        )
        return Running(maximum, total, weighted, torch.where(num_found > 0, chosen, torch.nan))

    def logprobs(self) -> Tensor:
        """Of the labels, after the last word."""
        return (self.chosen - self.maximum) - self.total.log()


class Softmax(NamedTuple):
    """A token's softmax, (N,) or (C,) each: log p = (z - maximum) - log_total keeps its digits however far z is."""

    maximum: Tensor
    log_total: Tensor
    entropy: Tensor

    @classmethod
    def of(cls, running: Running) -> Softmax:
        """After the last word."""
        log_total = running.total.log()
        return cls(running.maximum, log_total, log_total - running.weighted / running.total)

    def rows(self, rows: slice) -> Softmax:
        """Of some tokens."""
        return Softmax(*(each[rows] for each in self))


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """C tokens × W words."""

    products: Tensor
    """(C, W) hidden @ weight.T in fp32 (float64); the receiver may overwrite it."""
    labels: Tensor
    """(C,) from the tile's first word: outside 0..W-1 where the label is a word of another tile."""
    bias: Tensor | None
    """(W,)."""
    temperature: Tensor | None
    """(C,)."""
    soft_cap: float | None


def fold_tile(tile: Tile, running: Running) -> None:
    """Add the tile's words to its tokens' softmax."""
    logits, _ = _scaled(tile)
    is_here = (tile.labels >= 0) & (tile.labels < logits.shape[1])
    own = logits.gather(-1, tile.labels.clamp(0, logits.shape[1] - 1)[:, None]).squeeze(-1)
    running.chosen.copy_(torch.where(is_here, own, running.chosen))
    maximum = torch.maximum(running.maximum, logits.amax(-1))
    depth = logits.sub_(maximum[:, None]).clamp_(min=NEVER)  # z - m
    share = depth.exp()
    shift = (running.maximum - maximum).clamp_(min=NEVER)
    running.weighted.addcmul_(shift, running.total).mul_(shift.exp())
    running.total.mul_(shift.exp()).add_(share.sum(-1))
    running.weighted.add_(share.mul_(depth).sum(-1))
    running.maximum.copy_(maximum)


def tile_gradient(
    tile: Tile, softmax: Softmax, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """(C, W) gradient for `tile.products`, in the dtype in which it will be multiplied."""
    logits, slope = _scaled(tile)
    log_p = logits.sub_(softmax.maximum[:, None]).sub_(softmax.log_total[:, None]).clamp_(min=NEVER)
    # d logp(label) / dz = onehot(label) - p;  d entropy / dz = -p (log p + entropy)
    grad = log_p.exp()
    if grad_entropy is not None:
        pull = log_p.add_(softmax.entropy[:, None]).mul_(grad_entropy[:, None])
        if grad_logprobs is not None:
            pull.add_(grad_logprobs[:, None])
        grad.mul_(pull).neg_()
    elif grad_logprobs is not None:
        grad.mul_(-grad_logprobs[:, None])
    if grad_logprobs is not None:
        is_here = (tile.labels >= 0) & (tile.labels < grad.shape[1])
        own = torch.where(is_here, grad_logprobs, 0.0)
        grad.scatter_add_(-1, tile.labels.clamp(0, grad.shape[1] - 1)[:, None], own[:, None])
    if tile.temperature is not None:
        grad.div_(tile.temperature[:, None])
    if slope is not None:
        grad.mul_(slope)
    return grad.to(dtype)


def _scaled(tile: Tile) -> tuple[Tensor, Tensor | None]:
    """(C, W) logits z, in place of the products, and the slope of the soft cap where there is one."""
    logits = tile.products
    if tile.bias is not None:
        logits += tile.bias
    slope = None
    if tile.soft_cap is not None:
        squashed = logits.div_(tile.soft_cap).tanh_()
        slope = 1 - squashed.square()
        logits = squashed.mul_(tile.soft_cap)
    if tile.temperature is not None:
        logits.div_(tile.temperature[:, None])
    return logits, slope
