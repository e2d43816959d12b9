"""Log-probability and entropy of tokens, straight from hidden states: the logits are never all there at once.

N tokens, H hidden size, V vocabulary, C tokens a chunk. For 8,192 tokens of a 128,000-word vocabulary the logits alone
are 4 GB in fp32, and a plain log-softmax keeps several such tensors; here the largest is (C, V), made anew in the
backward pass. Logits are fp32 whatever the model's dtype (bf16 rounds a logit of 20 to the nearest 1/8), float64 stays
float64. Gradients reach `hidden`, `weight` and `bias`, not the temperature, and not twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS = {"cpu": 2**22, "cuda": 2**26}
"""Logits a chunk, where the caller does not say how many tokens. 16 MB stay near a CPU's caches; a GPU needs 256 MB
for its matrix products to be worth the pass over the weight, at 128,000 words 512 tokens."""


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
    (`hidden[mask]`): each costs 2 V H operations, thrice with the backward pass.

    Args:
        hidden: (..., H) of any float dtype.
        weight: (V, H), the output embedding.
        labels: (...) integers in 0..V-1.
        bias: (V,).
        temperature: above 0; a number, or a tensor of as many dimensions as `labels` that broadcasts to them, as
            (B, 1) for one a row.
        chunk_size: tokens whose logits exist at a time; None: what suits the device.
        soft_cap: c of z = c tanh(z / c) before the temperature, as in Gemma 2.

    Returns:
        `(logprobs, entropy)`, both (...) in fp32, or float64 where an input is, with gradient.

    Raises:
        ValueError: shapes, dtypes or numbers that do not fit.
    """
    _check(hidden, weight, labels, bias, chunk_size, soft_cap)
    shape = labels.shape
    scale = _flat_temperature(temperature, labels)
    chunk_size = chunk_size or max(CHUNK_ELEMENTS.get(hidden.device.type, CHUNK_ELEMENTS["cpu"]) // len(weight), 1)
    logprobs, entropy = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden.reshape(-1, hidden.shape[-1]), weight, bias, labels.reshape(-1).long(), scale, chunk_size, soft_cap
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
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size = {chunk_size}: must be at least 1 token")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap = {soft_cap}: must be above 0; None switches it off")


def _flat_temperature(temperature: float | Tensor, labels: Tensor) -> Tensor | None:
    """(N, 1) temperatures, or None where all are 1."""
    if not isinstance(temperature, Tensor):
        if not 0 < temperature < float("inf"):
            raise ValueError(f"temperature = {temperature}: must be a finite number above 0")
        if temperature == 1.0:
            return None
        temperature = torch.tensor(temperature, dtype=torch.float64)
    elif temperature.ndim not in (0, labels.ndim):
        raise ValueError(
            f"temperature {tuple(temperature.shape)} must have {labels.ndim} dimensions as labels "
            f"{tuple(labels.shape)}: unsqueeze it, as (B, 1) for one a row"
        )
    return temperature.to(labels.device).broadcast_to(labels.shape).reshape(-1, 1)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        temperature: Tensor | None,
        chunk_size: int,
        soft_cap: float | None,
    ) -> tuple[Tensor, Tensor]:
        head = _Head(hidden, weight, bias, temperature, soft_cap)
        logprobs = head.hidden.new_empty(len(labels), dtype=head.dtype)
        log_normalizers, entropy = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for start in range(0, len(labels), chunk_size):
            rows = slice(start, start + chunk_size)
            logits, _ = head.logits(rows)  # (C, V)
            log_normalizers[rows] = logits.logsumexp(-1)
            chosen = logits.gather(-1, labels[rows, None]).squeeze(-1)
            logprobs[rows] = chosen - log_normalizers[rows]
            log_probabilities = logits.sub_(log_normalizers[rows, None])
            entropy[rows] = -(log_probabilities.exp().mul_(log_probabilities)).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, labels, temperature, log_normalizers, entropy)
        ctx.chunk_size, ctx.soft_cap = chunk_size, soft_cap
        ctx.set_materialize_grads(False)  # an output that the loss does not use then costs nothing
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, temperature, log_normalizers, entropy = ctx.saved_tensors
        if grad_logprobs is None and grad_entropy is None:
            return (None,) * 7
        head = _Head(hidden, weight, bias, temperature, ctx.soft_cap)
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        # Sums over chunks are kept in fp32: bf16 would drop what later chunks add.
        grad_weight = torch.zeros_like(weight, dtype=head.dtype) if wants_weight else None
        grad_bias = torch.zeros_like(bias, dtype=head.dtype) if wants_bias else None
        for start in range(0, len(labels), ctx.chunk_size):
            rows = slice(start, start + ctx.chunk_size)
            logits, slope = head.logits(rows)
            log_probabilities = logits.sub_(log_normalizers[rows, None])
            # d logp(label) / dz = onehot(label) - p;  d entropy / dz = -p (log p + entropy)
            grad = log_probabilities.exp()  # (C, V)
            if grad_entropy is not None:
                pull = log_probabilities.add_(entropy[rows, None]).mul_(grad_entropy[rows, None])
                if grad_logprobs is not None:
                    pull.add_(grad_logprobs[rows, None])
                grad.mul_(pull).neg_()
            elif grad_logprobs is not None:
                grad.mul_(-grad_logprobs[rows, None])
            if grad_logprobs is not None:
                grad.scatter_add_(-1, labels[rows, None], grad_logprobs[rows, None].to(grad.dtype))
            if temperature is not None:
                grad.div_(temperature[rows])
            if slope is not None:
                grad.mul_(slope)
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(head.weight.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = _product(grad, head.weight).to(hidden.dtype)
            if grad_weight is not None:
                grad_weight += _product(grad.T, head.hidden[rows])
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
            None,
        )


class _Head:
    """The output layer, its operands in the dtype in which they are multiplied."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: Tensor | None, soft_cap: float | None
    ) -> None:
        common = torch.promote_types(hidden.dtype, weight.dtype)
        self.dtype = torch.promote_types(common, torch.float32)
        # A GPU multiplies halves with an fp32 result; elsewhere that takes fp32 operands.
        operand = common if hidden.is_cuda else self.dtype
        self.hidden, self.weight = hidden.detach().to(operand), weight.detach().to(operand)
        self.bias, self.temperature, self.soft_cap = bias, temperature, soft_cap

    def logits(self, rows: slice) -> tuple[Tensor, Tensor | None]:
        """(C, V) scaled logits, and the slope of the soft cap where there is one."""
        logits = _product(self.hidden[rows], self.weight.T)
        if self.bias is not None:
            logits += self.bias
        slope = None
        if self.soft_cap is not None:
            squashed = logits.div_(self.soft_cap).tanh_()
            slope = 1 - squashed.square()
            logits = squashed.mul_(self.soft_cap)
        if self.temperature is not None:
            logits.div_(self.temperature[rows])
        return logits, slope


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Matrix product with an fp32 (float64) result; autocast would make it bf16 again."""
    with torch.autocast(left.device.type, enabled=False):
        if left.dtype in (torch.bfloat16, torch.float16):
            return torch.mm(left, right, out_dtype=torch.float32)
        return torch.mm(left, right)
