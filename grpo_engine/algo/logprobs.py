"""Log-probability and entropy of tokens from hidden states, without materialising all logits.

N tokens, H hidden size, V vocabulary. For 8,192 tokens of a 128,000-word vocabulary the logits alone are 4 GB in fp32,
and a plain log-softmax keeps several such tensors. Here logits are computed in tiles, and recomputed in the backward
pass. Words are the outer loop: a block of the weight gets its whole gradient at once, so that no fp32 copy of all of it
is needed; only the gradient of `hidden` is summed over blocks, in fp32. Gradients reach `hidden`, `weight` and `bias`,
not the temperature, and not twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from grpo_engine.algo.head import Head, add_product, check_shapes, flat_temperature, logits_dtype, product
from grpo_engine.algo.tiles import Running, Softmax, VocabularyPart


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    chunk_size: int | None = None,
    soft_cap: float | None = None,
    part: VocabularyPart | None = None,
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
        part: which words `weight` and `bias` have, where each rank has some; None: all. Every rank calls this at the
            same time with the same other arguments, and gets the same results; gradients of `hidden` are summed.

    Returns:
        `(logprobs, entropy)`, both (...) in fp32, or float64 where an input is, with gradient.

    Raises:
        ValueError: shapes, dtypes or numbers that do not fit.
    """
    num_words = len(weight) if part is None else part.num_words
    check_shapes(hidden, weight, labels, bias, chunk_size, soft_cap, num_words)
    shape, first = labels.shape, 0 if part is None else part.first
    divisor = flat_temperature(temperature, labels, logits_dtype(hidden, weight))
    logprobs, entropy = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden.reshape(-1, hidden.shape[-1]),
        *(weight, bias, labels.reshape(-1).long() - first, divisor, chunk_size, soft_cap, part),
    )
    return logprobs.view(shape), entropy.view(shape)


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
        part: VocabularyPart | None,
    ) -> tuple[Tensor, Tensor]:
        head = Head(hidden, weight, bias, labels, temperature, chunk_size, soft_cap)
        running = Running.of_no_words(len(labels), head.dtype, hidden.device)
        for columns in head.blocks():
            block = head.block(columns)
            for rows in head.tokens():
                head.fold(head.tile(rows, columns, product(head.hidden[rows], block.T)), running.rows(rows))
        if part is not None:
            running = running.over_ranks(part)
        softmax = Softmax.of(running)
        ctx.save_for_backward(hidden, weight, bias, labels, temperature, *softmax)
        ctx.chunk_size, ctx.soft_cap, ctx.part = chunk_size, soft_cap, part
        ctx.set_materialize_grads(False)  # an output that the loss does not use then costs nothing
        return running.logprobs(), softmax.entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, temperature, *softmax = ctx.saved_tensors
        if grad_logprobs is None and grad_entropy is None:
            return (None,) * 8
        head = Head(hidden, weight, bias, labels, temperature, ctx.chunk_size, ctx.soft_cap)
        grad_logprobs, grad_entropy, unit = _in_range(grad_logprobs, grad_entropy, temperature, head)
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        # Sums over tiles are kept in fp32: bf16 would drop what later tiles add.
        grad_hidden = torch.zeros_like(hidden, dtype=head.dtype) if wants_hidden else None
        grad_weight = torch.empty_like(weight) if wants_weight else None
        grad_bias = torch.zeros_like(bias, dtype=head.dtype) if wants_bias else None
        for columns in head.blocks():
            block = head.block(columns)
            grad_block = torch.zeros_like(block, dtype=head.dtype) if wants_weight else None
            for rows in head.tokens():
                grad = head.gradient(
                    head.tile(rows, columns, product(head.hidden[rows], block.T)),
                    Softmax(*softmax).rows(rows),
                    None if grad_logprobs is None else grad_logprobs[rows],
                    None if grad_entropy is None else grad_entropy[rows],
                )
                if grad_bias is not None:
                    grad_bias[columns] += grad.sum(0, dtype=head.dtype)
                if grad_hidden is not None:
                    add_product(grad_hidden[rows], grad, block)
                if grad_block is not None:
                    add_product(grad_block, grad.T, head.hidden[rows])
                del grad  # before the next tile is made
            if grad_weight is not None and grad_block is not None:
                grad_weight[columns] = grad_block if unit is None else grad_block.mul_(unit)
        if grad_hidden is not None and ctx.part is not None:
            grad_hidden = ctx.part.sum(grad_hidden)
        if unit is not None:
            for total in (grad_hidden, grad_bias):
                if total is not None:
                    total.mul_(unit)
        return (
            None if grad_hidden is None else grad_hidden.to(hidden.dtype),
            grad_weight,
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *(None,) * 5,
        )


def _in_range(
    grad_logprobs: Tensor | None, grad_entropy: Tensor | None, temperature: Tensor | None, head: Head
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
