"""Policy losses: log-probabilities and advantages in, one scalar with its gradient and detached measurements out.

B rows, T tokens. Knows no model and no padding value: the mask alone says what is trained, and a position outside it
may hold anything, NaN and infinities included, without changing value or gradient. Half-precision inputs are computed
in fp32, float64 stays float64. Sequences without a trained token count nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from grpo_engine.algo.loss_config import CorrectionLevel, KlEstimator, LossConfig, RatioLevel

__all__ = ["MAX_LOG_RATIO", "LossConfig", "LossInputs", "LossOutputs", "drift_metrics", "policy_loss", "token_weights"]

MAX_LOG_RATIO = 20.0
"""Log-ratios are held to ±20: exp(89) is infinite in fp32, and infinity times a zero gradient or advantage is NaN.
A token that became e^20 times as likely has no gradient."""


@dataclass(frozen=True, slots=True, eq=False)
class LossInputs:
    """What a loss needs of one (micro-)batch.

    Raises:
        ValueError: a shape or dtype that does not fit.
    """

    logprobs: Tensor
    """(B, T) of the policy in training, with its graph."""
    rollout_logprobs: Tensor
    """(B, T) as inference reported them while sampling."""
    advantages: Tensor
    """(B,) or (B, T)."""
    mask: Tensor
    """(B, T) bool: which tokens are trained."""
    old_logprobs: Tensor | None = None
    """(B, T) of the trainer's own policy before the first update on this batch; None: the ratio is against
    `rollout_logprobs`, and no correction applies."""
    ref_logprobs: Tensor | None = None
    """(B, T) of the reference policy."""
    entropy: Tensor | None = None
    """(B, T) of the policy's next-token distribution, with its graph."""
    denominator: float | Tensor | None = None
    """Takes the place of the normaliser, so that the losses of micro-batches add up to the whole batch's: sequences
    for `sequence_mean`, tokens for `token_mean`, sequences times `constant_length` for `constant`; all of the whole
    batch. `LossConfig.denominator` makes it. None: counted here."""

    def __post_init__(self) -> None:
        shape = tuple(self.logprobs.shape)
        if len(shape) != 2:
            raise ValueError(f"logprobs has shape {shape}: expected (rows, tokens); unsqueeze a single sequence")
        if not self.logprobs.is_floating_point():
            raise ValueError(f"logprobs is {self.logprobs.dtype}: expected a float dtype")
        for name in ("rollout_logprobs", "mask", "old_logprobs", "ref_logprobs", "entropy"):
            value = getattr(self, name)
            if value is not None and tuple(value.shape) != shape:
                raise ValueError(
                    f"{name} has shape {tuple(value.shape)}, logprobs has {shape}: align them to the labels"
                )
        if tuple(self.advantages.shape) not in (shape, shape[:1]):
            raise ValueError(
                f"advantages has shape {tuple(self.advantages.shape)}: expected {shape[:1]}, one a row, or {shape}"
            )
        if self.mask.dtype is not torch.bool:
            raise ValueError(f"mask is {self.mask.dtype}: expected torch.bool; compare it, as in `labels != ignored`")
        if isinstance(self.denominator, int | float) and not self.denominator > 0:
            raise ValueError(f"denominator = {self.denominator}: must be above 0; None counts the batch itself")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossOutputs:
    """A loss and what was measured on the way."""

    loss: Tensor
    """Scalar with gradient."""
    metrics: dict[str, Tensor]
    """Detached scalars, means over the trained tokens; weigh those of micro-batches by `num_tokens`.

    - `mean_ratio`: of the ratio at `ratio_level`, before clipping
    - `clipped_fraction`: ratios outside [1 - clip_low, 1 + clip_high], or above `cispo_max`, whatever the advantage
    - `clipped_fraction_acting`: only where the bound changes the gradient
    - `ess`: effective sample size of the weights pi / pi_rollout as a fraction, (sum w)² / (n sum w²), in (0, 1]
    - `kl`: from the reference by `kl_estimator` where there is one, else `kl_rollout`
    - `kl_rollout`: KL(pi_rollout ‖ pi) by k3, how far the policy went from the one that sampled
    - `entropy`: mean of the given entropies, else the estimate -mean(logprobs), unbiased on policy
    - `correction_mean`, `correction_fraction`: applied weight, and the share of tokens where a bound changed it;
      there only with a correction
    - `num_tokens`: trained tokens; with 0 the others are neutral: ratio and ess 1, the rest 0
    """


def policy_loss(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """The policy loss, to be minimised.

    Per token, with r the ratio and A the advantage, and for both signs of A:

    - `clip`: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), PPO's surrogate and eq. 3 of DeepSeekMath (arXiv
      2402.03300); with `dual_clip` c, at most -c A where A < 0 (arXiv 1912.09729, eq. 5)
    - `cispo`: -sg(min(r, cispo_max)) A log pi (MiniMax-M1, arXiv 2506.13585, eq. 4-5)

    times the correction's weight (truncated importance sampling, Yao et al. 2025, "Your efficient RL framework
    secretly brings you off-policy RL training"), plus `kl_coef` KL (DeepSeekMath, eq. 4, for k3), minus `entropy_coef`
    entropy; then aggregated. Tokens that a correction masks stay in the normaliser, so that it is known beforehand.

    Raises:
        ValueError: a term is switched on whose input is missing.
    """
    _check_terms(inputs, config)
    mask = inputs.mask
    dtype = torch.promote_types(inputs.logprobs.dtype, torch.float32)
    logprobs = _trained(inputs.logprobs, mask, dtype)  # (B, T), 0 outside the mask, as all below
    rollout = _trained(inputs.rollout_logprobs, mask, dtype).detach()
    old = rollout if inputs.old_logprobs is None else _trained(inputs.old_logprobs, mask, dtype).detach()
    advantages = inputs.advantages if inputs.advantages.ndim == 2 else inputs.advantages[:, None].expand_as(mask)
    advantages = _trained(advantages, mask, dtype).detach()

    ratio = _ratio(logprobs, old, mask, config.ratio_level)
    per_token = _policy_term(ratio, logprobs, advantages, config)
    metrics: dict[str, Tensor] = {}
    if config.correction != "none":
        raw_weight = _correction_weight(old - rollout, mask, config.correction_level)
        weight = _bounded(raw_weight, config)
        per_token = weight * per_token
        metrics["correction_mean"] = _token_mean(weight, mask)
        metrics["correction_fraction"] = _token_mean((weight != raw_weight).to(dtype), mask)
    kl = None
    if inputs.ref_logprobs is not None:
        kl = _kl(_trained(inputs.ref_logprobs, mask, dtype).detach() - logprobs, config.kl_estimator)
        if config.kl_coef:
            per_token = per_token + config.kl_coef * (kl * ratio if config.kl_unbiased else kl)
    entropy = None if inputs.entropy is None else _trained(inputs.entropy, mask, dtype)
    if entropy is not None and config.entropy_coef:
        per_token = per_token - config.entropy_coef * entropy

    with torch.no_grad():
        metrics |= _ratio_metrics(ratio, advantages, mask, config)
        metrics |= drift_metrics(logprobs - rollout, mask)
        metrics["kl"] = metrics["kl_rollout"] if kl is None else _token_mean(kl, mask)
        metrics["entropy"] = _token_mean(-logprobs if entropy is None else entropy, mask)
        metrics["num_tokens"] = mask.sum()
    return LossOutputs(
        loss=(per_token * token_weights(mask, config, inputs.denominator, dtype=dtype)).sum(),
        metrics={name: value.detach() for name, value in metrics.items()},
    )


def _check_terms(inputs: LossInputs, config: LossConfig) -> None:
    if config.kl_coef and inputs.ref_logprobs is None:
        raise ValueError(f"kl_coef = {config.kl_coef} needs ref_logprobs: pass them, or set kl_coef = 0")
    if config.entropy_coef and inputs.entropy is None:
        raise ValueError(f"entropy_coef = {config.entropy_coef} needs entropy: pass it, or set entropy_coef = 0")
    if config.correction != "none" and inputs.old_logprobs is None:
        raise ValueError(
            f"correction = {config.correction!r} needs old_logprobs: without them the ratio itself is against the "
            "rollout policy; pass old_logprobs (logprobs.detach() for a single update), or set correction = 'none'"
        )


def _trained(values: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """`values` where trained and 0 elsewhere; `where` before any arithmetic keeps NaN out of the gradient too."""
    return torch.where(mask, values.to(dtype), 0.0)


def _ratio(logprobs: Tensor, old: Tensor, mask: Tensor, level: RatioLevel) -> Tensor:
    """(B, T) importance ratio."""
    log_ratio = logprobs - old
    match level:
        case "token":
            return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        case "sequence":
            # GSPO-token (arXiv 2507.18071, eq. 13-14): the sequence's ratio as a value, each token's own gradient.
            # With one advantage a sequence its gradient is that of eq. 5; it holds for token advantages as well.
            mean_log_ratio = log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)  # (B, 1)
            held = mean_log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
            return (held + logprobs - logprobs.detach()).exp()
        case _:
            assert_never(level)


def _policy_term(ratio: Tensor, logprobs: Tensor, advantages: Tensor, config: LossConfig) -> Tensor:
    """(B, T) loss of each token, before correction."""
    match config.objective:
        case "clip":
            clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
            surrogate = torch.minimum(ratio * advantages, clipped * advantages)
            if config.dual_clip is not None:
                bounded = torch.maximum(surrogate, config.dual_clip * advantages)
                surrogate = torch.where(advantages < 0, bounded, surrogate)
            return -surrogate
        case "cispo":
            return -ratio.detach().clamp(max=config.cispo_max) * advantages * logprobs
        case _:
            assert_never(config.objective)


def _correction_weight(log_weight: Tensor, mask: Tensor, level: CorrectionLevel) -> Tensor:
    """(B, T) pi_old / pi_rollout of the token, of its whole sequence, or of the sequence by geometric mean."""
    if level != "token":
        of_sequence = log_weight.sum(-1, keepdim=True)  # (B, 1)
        if level == "geometric":
            of_sequence = of_sequence / mask.sum(-1, keepdim=True).clamp(min=1)
        log_weight = of_sequence.expand_as(log_weight)
    return log_weight.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _bounded(weight: Tensor, config: LossConfig) -> Tensor:
    if config.correction == "truncate":
        return weight.clamp(config.correction_min, config.correction_max)
    inside = (weight >= config.correction_min) & (weight <= config.correction_max)
    return torch.where(inside, weight, 0.0)


def _kl(log_ref_ratio: Tensor, estimator: KlEstimator) -> Tensor:
    """(B, T) estimates of KL(pi ‖ pi_ref) from log(pi_ref / pi) (Schulman, "Approximating KL Divergence", 2020)."""
    match estimator:
        case "k1":
            return -log_ref_ratio
        case "k2":
            return log_ref_ratio.square() / 2
        case "k3":
            held = log_ref_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
            return held.expm1() - held
        case _:
            assert_never(estimator)


def token_weights(
    mask: Tensor,
    config: LossConfig,
    denominator: float | Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """(B, T) what each token's loss counts in the whole: the loss is `(per_token * token_weights(...)).sum()`.

    Args:
        mask: (B, T) bool: which tokens are trained; one sequence a row.
        config: its `aggregation` decides.
        denominator: as `LossInputs.denominator`; None: counted here.
    """
    num_tokens = mask.sum(-1, keepdim=True)  # (B, 1)
    num_sequences = (num_tokens > 0).sum()
    in_sequence: Tensor | int = 1
    match config.aggregation:
        case "sequence_mean":
            in_sequence, normalizer = num_tokens.clamp(min=1), num_sequences
        case "token_mean":
            normalizer = num_tokens.sum()
        case "constant":
            normalizer = num_sequences * (config.constant_length or mask.shape[-1])
        case _:
            assert_never(config.aggregation)
    return mask.to(dtype) / in_sequence / (normalizer.clamp(min=1) if denominator is None else denominator)


def _ratio_metrics(ratio: Tensor, advantages: Tensor, mask: Tensor, config: LossConfig) -> dict[str, Tensor]:
    if config.objective == "cispo":
        outside = ratio > config.cispo_max
        acting = outside & (advantages != 0)
    else:
        below, above = ratio < 1 - config.clip_low, ratio > 1 + config.clip_high
        outside = below | above
        acting = (below & (advantages < 0)) | (above & (advantages > 0))
        if config.dual_clip is not None:
            acting = acting | ((ratio > config.dual_clip) & (advantages < 0))
    return {
        "mean_ratio": torch.where(mask.any(), _token_mean(ratio, mask), 1.0),
        "clipped_fraction": _token_mean(outside.to(ratio.dtype), mask),
        "clipped_fraction_acting": _token_mean(acting.to(ratio.dtype), mask),
    }


def drift_metrics(log_ratio: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """`ess` and `kl_rollout` of `LossOutputs.metrics`: how far the policy is from the one that sampled.

    Of micro-batches only `kl_rollout` can be averaged; for the `ess` of a whole batch call this with all of it.

    Args:
        log_ratio: log(pi / pi_rollout), any shape; finite also outside the mask.
        mask: bool, same shape: which tokens count.
    """
    held = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    weights = torch.where(mask, held.exp(), 0.0)
    ess = weights.sum().square() / (mask.sum() * weights.square().sum())
    return {"ess": torch.where(mask.any(), ess, 1.0), "kl_rollout": _token_mean(held.expm1() - held, mask)}


def _token_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the trained tokens, 0 where there are none."""
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)
