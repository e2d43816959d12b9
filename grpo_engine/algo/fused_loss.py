"""Policy losses whose gradient is taken while the logits are there: three products of the output layer instead of four.

`token_logprobs` computes the logits twice, since what a token's log-probability is to be multiplied with is only known
once the loss is. Where a loss is a sum over tokens, each with nothing but its own log-probability and entropy (every
published one but those with a sequence's ratio or correction), it is known at once: the tokens go by in chunks of C
with their whole vocabulary, and the backward pass has nothing to do but to multiply by what comes in. In return an
fp32 gradient of the weight (V, H) is kept from the forward pass on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from grpo_engine.algo.head import (
    Head,
    Running,
    Softmax,
    add_product,
    check_shapes,
    flat_temperature,
    logits_dtype,
    product,
)
from grpo_engine.algo.loss import LossConfig, LossInputs, LossOutputs, policy_loss, token_weights

CHUNK_ELEMENTS = {"cpu": 2**24, "cuda": 2**28}
"""Logits of a chunk: 64 MB on a CPU, 1 GB on a GPU. Each chunk reads and writes the weight's gradient once."""

LossOf = Callable[[slice, Tensor, Tensor], Tensor]
"""From the numbers of some tokens, with their log-probabilities and entropies (C,), to the sum of their losses."""


@dataclass(frozen=True, slots=True, eq=False)
class FusedOutputs:
    """What `policy_loss` gives, and what it was given."""

    outputs: LossOutputs
    logprobs: Tensor
    """(B, T), 0 where not trained, without a graph."""
    entropy: Tensor
    """(B, T), as `logprobs`."""


def is_sum_over_tokens(config: LossConfig) -> bool:
    """Whether each token's loss depends on its own log-probability and entropy alone, as `fused_policy_loss` needs."""
    return config.ratio_level == "token" and (config.correction == "none" or config.correction_level == "token")


def fused_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    inputs: LossInputs,
    config: LossConfig,
    *,
    is_first_update: bool = False,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    chunk_size: int | None = None,
    soft_cap: float | None = None,
) -> FusedOutputs:
    """`policy_loss` of `token_logprobs`, to rounding, with the gradient at the cost of the logits' once.

    Args:
        hidden: (N, H) states that predict the trained tokens, in the order of `inputs.mask`.
        weight: (V, H), and `bias`, `temperature`, `chunk_size`, `soft_cap` as in `token_logprobs`.
        labels: (N,) of the trained tokens.
        inputs: its `logprobs` and `entropy` are put in here; what stands there is not read.
        config: one for which `is_sum_over_tokens` holds.
        is_first_update: the old policy is the present one, so `old_logprobs` are put in here too.

    Raises:
        ValueError: shapes, dtypes or numbers that do not fit, or a loss that is no sum over tokens.
    """
    if not is_sum_over_tokens(config):
        raise ValueError(
            f"ratio_level = {config.ratio_level!r}, correction_level = {config.correction_level!r}: a token's loss "
            "depends on its whole sequence then, which is not there yet; use token_logprobs and policy_loss"
        )
    mask = inputs.mask
    trained = mask.flatten().nonzero()[:, 0]  # (N,), the only time that a GPU is waited for
    by_token = replace(config, aggregation="token_mean", constant_length=None)

    def of_trained(values: Tensor) -> Tensor:
        return values.detach().expand_as(mask).flatten()[trained][None]  # (1, N)

    weights = of_trained(token_weights(mask, config, inputs.denominator, dtype=logits_dtype(hidden, weight)))
    advantages = of_trained(inputs.advantages if inputs.advantages.ndim == 2 else inputs.advantages[:, None])
    rollout = of_trained(inputs.rollout_logprobs)
    old = None if inputs.old_logprobs is None else of_trained(inputs.old_logprobs)
    reference = None if inputs.ref_logprobs is None else of_trained(inputs.ref_logprobs)

    def loss_of(rows: slice, logprobs: Tensor, entropy: Tensor) -> Tensor:
        earlier = None if old is None else old[:, rows]
        part = LossInputs(
            logprobs=logprobs[None],
            rollout_logprobs=rollout[:, rows],
            advantages=advantages[:, rows],
            mask=torch.ones_like(rollout[:, rows], dtype=torch.bool),
            old_logprobs=logprobs[None].detach() if is_first_update else earlier,
            ref_logprobs=None if reference is None else reference[:, rows],
            entropy=entropy[None],
            denominator=1 / weights[:, rows],
        )
        return policy_loss(part, by_token).loss

    total, chosen, entropies = token_loss(
        hidden,
        weight,
        labels,
        loss_of,
        bias=bias,
        temperature=temperature,
        chunk_size=chunk_size,
        soft_cap=soft_cap,
    )

    def in_place(values: Tensor) -> Tensor:
        return values.new_zeros(mask.numel()).index_copy(0, trained, values).view_as(mask)

    logprobs, entropy = in_place(chosen), in_place(entropies)
    whole = replace(inputs, logprobs=logprobs, entropy=entropy)
    with torch.no_grad():
        outputs = policy_loss(replace(whole, old_logprobs=logprobs) if is_first_update else whole, config)
    return FusedOutputs(replace(outputs, loss=total), logprobs, entropy)


def token_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    loss_of: LossOf,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    chunk_size: int | None = None,
    soft_cap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """A sum over tokens of a loss of their log-probability and entropy, with gradient; and these two without.

    Args:
        hidden: (N, H).
        weight: (V, H), and the others as in `token_logprobs`.
        labels: (N,).
        loss_of: called for one chunk after another; what it says of a token must not depend on the others.

    Returns:
        The scalar loss, log-probabilities (N,) and entropies (N,).

    Raises:
        ValueError: shapes, dtypes or numbers that do not fit.
    """
    check_shapes(hidden, weight, labels, bias, chunk_size, soft_cap)
    if hidden.is_cuda and torch.promote_types(hidden.dtype, weight.dtype) is torch.float16:
        raise ValueError(
            "hidden and weight are fp16: gradients of single words are too small for it, and the scale that "
            "token_logprobs gives them is not known here yet; use token_logprobs, or bf16"
        )
    divisor = flat_temperature(temperature, labels, logits_dtype(hidden, weight))
    most_elements = CHUNK_ELEMENTS.get(hidden.device.type, CHUNK_ELEMENTS["cpu"])
    most_tokens = min(max(most_elements // len(weight), 1), chunk_size or len(labels))
    loss, logprobs, entropy = _TokenLoss.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, labels.long(), divisor, loss_of, max(most_tokens, 1), soft_cap, torch.is_grad_enabled()
    )
    return loss, logprobs, entropy


class _TokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        temperature: Tensor | None,
        loss_of: LossOf,
        chunk_size: int,
        soft_cap: float | None,
        has_graph: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        head = Head(hidden, weight, bias, labels, temperature, chunk_size, soft_cap)
        wants_hidden, wants_weight, wants_bias = (has_graph and each for each in ctx.needs_input_grad[:3])
        # Sums over tiles are kept in fp32: bf16 would drop what later tiles add.
        grad_hidden = torch.zeros_like(hidden, dtype=head.dtype) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=head.dtype) if wants_weight else None
        grad_bias = torch.zeros_like(bias, dtype=head.dtype) if bias is not None and wants_bias else None
        total = hidden.new_zeros((), dtype=head.dtype)
        all_logprobs = hidden.new_empty(len(labels), dtype=head.dtype)
        all_entropy = torch.empty_like(all_logprobs)
        width = -(-len(weight) // 64) * 64  # so that rows start where a GPU likes them to
        products = hidden.new_empty(chunk_size, width, dtype=head.dtype)[:, : len(weight)]
        for rows in head.tokens():
            here = products[: rows.stop - rows.start]  # (C, V)
            running = Running.of_no_words(len(here), head.dtype, hidden.device)
            for columns in head.blocks():
                product(head.hidden[rows], head.block(columns).T, out=here[:, columns])
                head.fold(head.tile(rows, columns, here[:, columns]), running, keeps_products=True)
            softmax, logprobs = Softmax.of(running), running.logprobs()
            all_logprobs[rows], all_entropy[rows] = logprobs, softmax.entropy
            with torch.enable_grad():
                leaves = [logprobs.requires_grad_(), softmax.entropy.clone().requires_grad_()]
                loss = loss_of(rows, leaves[0], leaves[1])
                grad_logprobs, grad_entropy = torch.autograd.grad(loss, leaves, allow_unused=True)
            total += loss.detach()
            if not (wants_hidden or wants_weight or wants_bias):
                continue
            for columns in head.blocks():
                tile = head.tile(rows, columns, here[:, columns])
                grad = head.gradient(tile, softmax, grad_logprobs, grad_entropy)
                if grad_bias is not None:
                    grad_bias[columns] += grad.sum(0, dtype=head.dtype)
                if grad_hidden is not None:
                    add_product(grad_hidden[rows], grad, head.block(columns))
                if grad_weight is not None:
                    add_product(grad_weight[columns], grad.T, head.hidden[rows])
                del tile, grad  # before the next tile is made
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(all_logprobs, all_entropy)
        return total, all_logprobs, all_entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        # In place, since a second weight would not fit; a second backward pass is then refused by autograd.
        gradients = [
            None if each is None else each.mul_(grad_loss).to(dtype)
            for each, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*gradients, None, None, None, None, None, None)
