"""Which policy loss: the settings of `loss.policy_loss`, and the published ones by name.

Imports no torch, so that settings and screens may read it. Numbers that the papers give are kept as they stand there;
bounds on a ratio (`dual_clip`, `cispo_max`, `correction_*`) are the ratio itself, clip widths its distance from 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Aggregation = Literal["sequence_mean", "token_mean", "constant"]
RatioLevel = Literal["token", "sequence"]
Objective = Literal["clip", "cispo"]
KlEstimator = Literal["k1", "k2", "k3"]
Correction = Literal["none", "truncate", "mask"]
CorrectionLevel = Literal["token", "sequence", "geometric"]
Preset = Literal["grpo", "dr_grpo", "dapo", "bnpo", "gspo", "cispo", "ppo_dual_clip"]

PRESETS_WITH_BANDS: frozenset[Preset] = frozenset({"dapo", "gspo"})
"""Presets whose paper gives a band: `clip_eps` does not change it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """Settings of one policy loss; the defaults are those of GRPO.

    Raises:
        ValueError: an unknown choice, a number out of bounds, or a setting without effect beside another.
    """

    aggregation: Aggregation = "sequence_mean"
    """`sequence_mean`: mean over a sequence's tokens, then over sequences. `token_mean`: mean over all tokens.
    `constant`: sum over all tokens, divided by sequences times `constant_length`."""
    constant_length: int | None = None
    """Tokens by which `constant` divides each sequence: the longest completion allowed. None: the width T of the
    tensors, which is the same from batch to batch only where all are padded alike."""
    clip_low: float = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: float = 0.2
    """The ratio is clipped above 1 + clip_high."""
    dual_clip: float | None = None
    """Bound c > 1 of the ratio where the advantage is negative; None: unbounded, as in PPO."""
    ratio_level: RatioLevel = "token"
    """`sequence`: one length-normalised ratio a sequence, its gradient spread over the tokens (GSPO-token)."""
    objective: Objective = "clip"
    """`cispo`: the ratio is a capped weight without gradient, and no token is left out."""
    cispo_max: float = 5.0
    """Cap of that weight; 5 is what ScaleRL (arXiv 2510.13786) found to be stable."""
    kl_coef: float = 0.0
    """Weight of the divergence from the reference policy."""
    kl_estimator: KlEstimator = "k3"
    """Schulman's estimators. Their expected gradients on policy: of `k1` zero, so it only serves for measuring; of `k2`
    that of KL(pi ‖ pi_ref); of `k3` that of KL(pi_ref ‖ pi)."""
    kl_unbiased: bool = False
    """Multiply the estimate by the ratio and its gradient, which is then that of KL(pi ‖ pi_ref) for `k1` and `k3`,
    also off policy (DeepSeek-V3.2, arXiv 2512.02556)."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus; it needs the entropies."""
    correction: Correction = "none"
    """Treatment of the weight pi_old / pi_rollout: not used, clamped to its bounds, or set to zero outside them."""
    correction_level: CorrectionLevel = "token"
    """`sequence`: the product over the sequence's tokens weighs all of them; `geometric`: its root of their number, so
    that bounds do not depend on the length."""
    correction_max: float = 2.0
    correction_min: float = 0.0

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"{name} = {value!r}: choose one of {', '.join(choices)}")
        for name in ("clip_low", "clip_high", "kl_coef", "entropy_coef", "correction_min"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} = {value!r}: must be a finite number of at least 0")
        for name in ("cispo_max", "correction_max"):
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(f"{name} = {value!r}: bounds a ratio, so it must be above 0")
        if self.constant_length is not None and not self.constant_length > 0:
            raise ValueError(f"constant_length = {self.constant_length!r}: must be a number of tokens above 0")
        if self.constant_length is not None and self.aggregation != "constant":
            raise ValueError(
                f"constant_length = {self.constant_length} has no effect with aggregation = {self.aggregation!r}: "
                "leave it out, or set aggregation = 'constant'"
            )
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ValueError(f"dual_clip = {self.dual_clip!r}: bounds the ratio from above, so it must exceed 1")
        if self.dual_clip is not None and self.objective == "cispo":
            raise ValueError(f"dual_clip = {self.dual_clip} has no effect with objective = 'cispo': use cispo_max")
        if self.kl_unbiased and (self.ratio_level == "sequence" or self.kl_estimator == "k2"):
            raise ValueError(
                f"kl_unbiased with ratio_level = {self.ratio_level!r} and kl_estimator = {self.kl_estimator!r}: only "
                "k1 and k3 times the ratio of a token are unbiased; set ratio_level = 'token' and kl_estimator = 'k3'"
            )
        if self.correction_min > self.correction_max:
            raise ValueError(
                f"correction_min = {self.correction_min} lies above correction_max = {self.correction_max}: swap them"
            )

    @classmethod
    def preset(cls, name: Preset) -> LossConfig:
        """The published loss of that name; change single settings with `dataclasses.replace`.

        - `grpo`: DeepSeekMath, arXiv 2402.03300, eq. 3 (without its KL term: set `kl_coef`).
        - `dr_grpo`: arXiv 2503.20783, with advantages from `group_advantages(scale="none")`.
        - `dapo`: arXiv 2503.14476, eq. 8: clip-higher 0.28, mean over tokens.
        - `bnpo`: mean over the tokens of the batch with GRPO's symmetric clip and group advantages.
        - `gspo`: arXiv 2507.18071, eq. 5-7, clip widths of its section 5.1.
        - `cispo`: MiniMax-M1, arXiv 2506.13585, eq. 4-5, without a lower bound as there.
        - `ppo_dual_clip`: arXiv 1912.09729, eq. 5, with its c = 3.

        How TRL 1.16 maps onto these (`tests/engine/algo/test_against_trl.py` compares value and gradient). Its
        advantages are `group_advantages` with its defaults (unbiased standard deviation, plus 1e-4), for each of its
        loss types:

        - `grpo`: TRL takes the mean over the sequences of a micro-batch, those without a trained token included, and
          divides by the accumulation steps. That is ours where every sequence trains a token; else pass `denominator`
          = all sequences of the whole batch.
        - `bnpo`: TRL divides by the tokens of each micro-batch on each process, then by the accumulation steps, so
          that its value depends on the split. Ours divides by the tokens of the whole batch, and does not; pass
          `denominator` = tokens of the micro-batch times accumulation steps for TRL's number.
        - `dr_grpo`: TRL divides by sequences times `max_completion_length`: set that as `constant_length`. TRL leaves
          `scale_rewards` as it is; the paper wants it off.
        - `dapo` (its default): TRL divides by the trained tokens of the whole batch over all processes, as ours does.
          TRL's `epsilon_high` is 0.2 unless set to 0.28.
        - `cispo`: divided as `dapo`. TRL's `epsilon_high` is our `cispo_max`; it is `epsilon` unless set, a cap of 0.2.
        - `importance_sampling_level="sequence"` is `ratio_level`, `delta` is `dual_clip`, `beta` is `kl_coef`, with
          `kl_unbiased` unless `use_bias_correction_kl=False`.
        - `vllm_importance_sampling_mode` (`sequence_mask` unless set) is `correction_level` and `correction`;
          `…_clip_max` (3 unless set) and `…_clip_min` are `correction_max` and `correction_min`.
        - `entropy_coef` weighs the mean over a micro-batch's tokens whatever the loss type; ours goes by `aggregation`.

        Raises:
            ValueError: no such preset.
        """
        match name:
            case "grpo":
                return cls()
            case "dr_grpo":
                return cls(aggregation="constant")
            case "dapo":
                return cls(aggregation="token_mean", clip_high=0.28)
            case "bnpo":
                return cls(aggregation="token_mean")
            case "gspo":
                return cls(ratio_level="sequence", clip_low=3e-4, clip_high=4e-4)
            case "cispo":
                return cls(aggregation="token_mean", objective="cispo")
            case "ppo_dual_clip":
                return cls(aggregation="token_mean", dual_clip=3.0)
        raise ValueError(f"no preset {name!r}: choose one of {', '.join(get_args(Preset))}")

    def denominator(self, *, num_sequences: int, num_tokens: int) -> int:
        """The normaliser of a whole batch, for `LossInputs.denominator`, so that its micro-batches add up.

        Args:
            num_sequences: those with at least one trained token.
            num_tokens: trained tokens.

        Raises:
            ValueError: `constant` without a `constant_length`: widths differ between micro-batches.
        """
        match self.aggregation:
            case "sequence_mean":
                return max(num_sequences, 1)
            case "token_mean":
                return max(num_tokens, 1)
            case "constant":
                if self.constant_length is None:
                    raise ValueError(
                        "aggregation = 'constant' without constant_length: set it to the longest completion allowed"
                    )
                return max(num_sequences, 1) * self.constant_length


_CHOICES: dict[str, tuple[str, ...]] = {
    "aggregation": get_args(Aggregation),
    "ratio_level": get_args(RatioLevel),
    "objective": get_args(Objective),
    "kl_estimator": get_args(KlEstimator),
    "correction": get_args(Correction),
    "correction_level": get_args(CorrectionLevel),
}
