"""Log-probability and entropy of tokens, straight from hidden states: the logits are never all there at once.

N tokens, H hidden size, V vocabulary. For 8,192 tokens of a 128,000-word vocabulary the logits alone are 4 GB in fp32,
and a plain log-softmax keeps several such tensors. Here the (N, V) plane is walked in tiles of C tokens × W words: the
forward pass folds each tile into five numbers a token, the backward pass makes the tile anew and turns it into its
gradient. Words are the outer loop, so a block of the weight gets its whole gradient at once and no fp32 copy of all of
it is kept; only the gradient of `hidden` is summed over blocks, in fp32.

Logits are fp32 whatever the model's dtype (bf16 rounds a logit of 20 to the nearest 1/8), float64 stays float64.
Gradients reach `hidden`, `weight` and `bias`, not the temperature, and not twice. On CUDA a tile is read by the kernels
of `logprobs_kernels`, whose arithmetic is that of `fold_tile` and `tile_gradient` here.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

TILES = {"cpu": (2**12, 2**10), "cuda": (2**15, 2**12)}
"""The most tokens of a tile, and its words when it has so many; fewer tokens have more words. 16 MB of logits stay near
a CPU's caches; 512 MB let a GPU read and write the gradient of `hidden` seldom enough not to notice."""

NEVER = -1e4
"""Log-probabilities are held above this where they meet their own exponential: it is 0 in any dtype long before, and
0 × -1e4 is 0 where 0 × -inf is NaN. A bias of -inf so takes a word out of the vocabulary."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    chunk_size: int | None = None,
    soft_cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each label, and entropy of each next-token distribution.

    Both are of softmax(z) with z = cap(hidden @ weight.T + bias) / temperature. Only pass tokens that are trained
    (`hidden[mask]`): each costs 2 V H operations, four times that with the backward pass.

    Args:
        hidden: (..., H) of any float dtype.
        weight: (V, H), the output embedding.
        labels: (...) integers in 0..V-1; on a GPU, where looking would wait for it, others get NaN.
        bias: (V,).
        temperature: above 0; a number, or a tensor of as many dimensions as `labels` that broadcasts to them, as
            (B, 1) for one a row.
        chunk_size: the most tokens whose logits exist at a time; None: what suits the device.
        soft_cap: c of z = c tanh(z / c) before the temperature, as in Gemma 2.

    Returns:
        `(logprobs, entropy)`, both (...) in fp32, or float64 where an input is, with gradient.

    Raises:
        ValueError: shapes, dtypes or numbers that do not fit.
    """
    _check(hidden, weight, labels, bias, chunk_size, soft_cap)
    shape = labels.shape
    dtype = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
    divisor = _flat_temperature(temperature, labels, dtype)
    logprobs, entropy = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden.reshape(-1, hidden.shape[-1]), weight, bias, labels.reshape(-1).long(), divisor, chunk_size, soft_cap
    )
    return logprobs.view(shape), entropy.view(shape)


def _check(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, chunk_size: int | None, soft_cap: float | None
) -> None:
    if hidden.shape[:-1] != labels.shape:
        raise ValueError(
            f"labels {tuple(labels.shape)} must have the shape of hidden {tuple(hidden.shape)} less its last"
        )
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"weight {tuple(weight.shape)} must be (V, {hidden.shape[-1]}) for hidden {tuple(hidden.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {tuple(bias.shape)} must be {tuple(weight.shape[:1])}, one a row of weight")
    if labels.is_floating_point() or labels.dtype is torch.bool:
        raise ValueError(f"labels is {labels.dtype}: expected token ids of an integer dtype")
    if labels.device.type == "cpu" and labels.numel() > 0:
        lowest, highest = (int(bound) for bound in labels.aminmax())
        if lowest < 0 or highest >= len(weight):
            raise ValueError(
                f"labels go from {lowest} to {highest}, the vocabulary from 0 to {len(weight) - 1}: "
                "pass trained tokens only, as `labels[mask]`"
            )
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size = {chunk_size}: must be at least 1 token")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap = {soft_cap}: must be above 0; None switches it off")


def _flat_temperature(temperature: float | Tensor, labels: Tensor, dtype: torch.dtype) -> Tensor | None:
    """(N,) temperatures, or None where all are 1."""
    if not isinstance(temperature, Tensor):
        if not 0 < temperature < float("inf"):
            raise ValueError(f"temperature = {temperature}: must be a finite number above 0")
        if temperature == 1.0:
            return None
        return torch.full((labels.numel(),), temperature, dtype=dtype, device=labels.device)
    if temperature.ndim not in (0, labels.ndim):
        raise ValueError(
            f"temperature {tuple(temperature.shape)} must have {labels.ndim} dimensions as labels "
            f"{tuple(labels.shape)}: unsqueeze it, as (B, 1) for one a row"
        )
    return temperature.detach().to(labels.device, dtype).broadcast_to(labels.shape).reshape(-1).contiguous()


class Running(NamedTuple):
    """What is known of each token's softmax after some of its words, (N,) or (C,) each, and updated in place."""

    maximum: Tensor
    """m, the highest logit z so far, or the lowest finite number."""
    total: Tensor
    """Sum of exp(z - m)."""
    weighted: Tensor
    """Sum of (z - m) exp(z - m), so that the entropy is a sum of two numbers that are not negative."""
    chosen: Tensor
    """Logit of the label; NaN before its word came."""

    @classmethod
    def of_no_words(cls, num_tokens: int, dtype: torch.dtype, device: torch.device) -> Running:
        def filled(value: float) -> Tensor:
            return torch.full((num_tokens,), value, dtype=dtype, device=device)

        return cls(filled(torch.finfo(dtype).min), filled(0.0), filled(0.0), filled(float("nan")))

    def rows(self, rows: slice) -> Running:
        return Running(*(each[rows] for each in self))


class Softmax(NamedTuple):
    """A token's softmax, (N,) or (C,) each: log p = (z - maximum) - log_total keeps its digits however far z is."""

    maximum: Tensor
    log_total: Tensor
    entropy: Tensor

    def rows(self, rows: slice) -> Softmax:
        return Softmax(*(each[rows] for each in self))


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """C tokens × W words."""

    rows: slice
    products: Tensor
    """(C, W) hidden @ weight.T in fp32 (float64); whoever gets it may overwrite it."""
    labels: Tensor
    """(C,) from the tile's first word: outside 0..W-1 where the label is a word of another tile."""
    bias: Tensor | None
    """(W,)."""
    temperature: Tensor | None
    """(C,)."""
    soft_cap: float | None


def fold_tile(tile: Tile, running: Running) -> None:
    """Take the tile's words into its tokens' softmax."""
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


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        temperature: Tensor | None,
        chunk_size: int | None,
        soft_cap: float | None,
    ) -> tuple[Tensor, Tensor]:
        head = _Head(hidden, weight, bias, labels, temperature, chunk_size, soft_cap)
        fold = _kernels().fold_tile if head.has_kernels else fold_tile
        running = Running.of_no_words(len(labels), head.dtype, hidden.device)
        for columns in head.blocks():
            for tile in head.tiles(columns, head.block(columns)):
                fold(tile, running.rows(tile.rows))
        log_total = running.total.log()
        logprobs = (running.chosen - running.maximum) - log_total
        entropy = log_total - running.weighted / running.total
        ctx.save_for_backward(hidden, weight, bias, labels, temperature, running.maximum, log_total, entropy)
        ctx.chunk_size, ctx.soft_cap = chunk_size, soft_cap
        ctx.set_materialize_grads(False)  # an output that the loss does not use then costs nothing
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, temperature, *softmax = ctx.saved_tensors
        if grad_logprobs is None and grad_entropy is None:
            return (None,) * 7
        head = _Head(hidden, weight, bias, labels, temperature, ctx.chunk_size, ctx.soft_cap)
        gradient = _kernels().tile_gradient if head.has_kernels else tile_gradient
        grad_logprobs, grad_entropy, unit = _in_range(grad_logprobs, grad_entropy, temperature, head)
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        # Sums over tiles are kept in fp32: bf16 would drop what later tiles add.
        grad_hidden = torch.zeros_like(hidden, dtype=head.dtype) if wants_hidden else None
        grad_weight = torch.empty_like(weight) if wants_weight else None
        grad_bias = torch.zeros_like(bias, dtype=head.dtype) if wants_bias else None
        for columns in head.blocks():
            block = head.block(columns)
            grad_block = torch.zeros_like(block, dtype=head.dtype) if wants_weight else None
            for tile in head.tiles(columns, block):
                rows = tile.rows
                grad = gradient(
                    tile,
                    Softmax(*softmax).rows(rows),
                    None if grad_logprobs is None else grad_logprobs[rows],
                    None if grad_entropy is None else grad_entropy[rows],
                    head.operand,
                )
                if grad_bias is not None:
                    grad_bias[columns] += grad.sum(0, dtype=head.dtype)
                if grad_hidden is not None:
                    _add_product(grad_hidden[rows], grad, block)
                if grad_block is not None:
                    _add_product(grad_block, grad.T, head.hidden[rows])
            if grad_weight is not None and grad_block is not None:
                grad_weight[columns] = grad_block if unit is None else grad_block.mul_(unit)
        if unit is not None:
            for total in (grad_hidden, grad_bias):
                if total is not None:
                    total.mul_(unit)
        return (
            None if grad_hidden is None else grad_hidden.to(hidden.dtype),
            grad_weight,
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
            None,
        )


class _Head:
    """The output layer, walked in tiles, its operands in the dtype in which they are multiplied."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        temperature: Tensor | None,
        chunk_size: int | None,
        soft_cap: float | None,
    ) -> None:
        common = torch.promote_types(hidden.dtype, weight.dtype)
        self.dtype = torch.promote_types(common, torch.float32)
        # A GPU multiplies halves with an fp32 result; elsewhere that takes fp32 operands.
        self.operand = common if hidden.is_cuda else self.dtype
        self.has_kernels = _has_kernels(hidden.device, self.dtype)
        self.hidden = hidden.detach().to(self.operand)
        self._weight, self._bias = weight.detach(), bias
        self._labels, self._temperature, self._soft_cap = labels, temperature, soft_cap
        most_rows, fewest_columns = TILES.get(hidden.device.type, TILES["cpu"])
        self._num_rows = max(min(chunk_size or most_rows, len(labels)), 1)
        num_columns = most_rows * fewest_columns // self._num_rows
        self._num_columns = max(num_columns // 64 * 64, 64)  # rows of a tile then start where a GPU likes them to

    def blocks(self) -> Iterator[slice]:
        """The vocabulary, block by block."""
        for start in range(0, len(self._weight), self._num_columns):
            yield slice(start, min(start + self._num_columns, len(self._weight)))

    def block(self, columns: slice) -> Tensor:
        """(W, H) of the weight."""
        return self._weight[columns].to(self.operand)

    def tiles(self, columns: slice, block: Tensor) -> Iterator[Tile]:
        """All tokens × one block of words."""
        bias = None if self._bias is None else self._bias[columns]
        for start in range(0, len(self._labels), self._num_rows):
            rows = slice(start, start + self._num_rows)
            yield Tile(
                rows=rows,
                products=_product(self.hidden[rows], block.T),
                labels=self._labels[rows] - columns.start,
                bias=bias,
                temperature=None if self._temperature is None else self._temperature[rows],
                soft_cap=self._soft_cap,
            )


def _in_range(
    grad_logprobs: Tensor | None, grad_entropy: Tensor | None, temperature: Tensor | None, head: _Head
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Incoming gradients as the tiles take them, and the unit they are in, where it is not 1.

    fp16 has no numbers below 6e-8, which is more than the gradient of an unlikely word in a batch of thousands of
    tokens. A power of two brings the largest to about 2^10; results are multiplied by the unit in fp32.
    """
    given = [each for each in (grad_logprobs, grad_entropy) if each is not None]
    unit = None
    if head.operand is torch.float16 and len(head.hidden) > 0:
        largest = torch.stack([each.abs() for each in given]).amax(0)
        largest = (largest if temperature is None else largest / temperature).amax()
        unit = torch.exp2(largest.clamp(min=1e-30).log2().floor() - 10)

    def ready(gradient: Tensor | None) -> Tensor | None:
        if gradient is None:
            return None
        return (gradient if unit is None else gradient / unit).contiguous()

    return ready(grad_logprobs), ready(grad_entropy), unit


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Matrix product with an fp32 (float64) result; autocast would make it bf16 again."""
    with torch.autocast(left.device.type, enabled=False):
        if left.dtype in (torch.bfloat16, torch.float16):
            return torch.mm(left, right, out_dtype=torch.float32)
        return torch.mm(left, right)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """`total += left @ right`, summed by the product itself: no second tensor of the size of `total`."""
    with torch.autocast(left.device.type, enabled=False):
        if left.dtype in (torch.bfloat16, torch.float16):
            torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
        else:
            total.addmm_(left, right)


@cache
def _has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and dtype is torch.float32 and importlib.util.find_spec("triton") is not None


def _kernels() -> Any:
    """The Triton kernels: imported only where they run."""
    from grpo_engine.algo import logprobs_kernels

    return logprobs_kernels
