"""Policy losses against hand-worked numbers: both signs of the advantage, both sides of the clip."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor

from grpo_engine.algo.loss import LossConfig, LossInputs, LossOutputs, policy_loss
from grpo_engine.algo.loss_config import Preset

torch.set_num_threads(1)
PRESETS = get_args(Preset)


def doubles(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def one_token(ratio: float, advantage: float, config: LossConfig) -> tuple[float, float, LossOutputs]:
    """Loss of a single token, its gradient by the log-probability, and all outputs."""
    logprobs = doubles([[math.log(ratio) - 2.0]]).requires_grad_()
    outputs = policy_loss(LossInputs(logprobs, doubles([[-2.0]]), doubles([advantage]), torch.tensor([[True]])), config)
    outputs.loss.backward()
    assert logprobs.grad is not None
    return outputs.loss.item(), logprobs.grad.item(), outputs


def random_inputs(rows: int = 4, width: int = 6, seed: int = 0, **changes: Tensor | float | None) -> LossInputs:
    """Ragged rows, each with 1 to `width` trained tokens at its start; ratios on both sides of the clip."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    lengths = torch.randint(1, width + 1, (rows, 1), generator=random)
    rollout = -1 - normal(rows, width).abs()
    fields: dict[str, object] = {
        "logprobs": (rollout + 0.4 * normal(rows, width)).requires_grad_(),
        "rollout_logprobs": rollout,
        "advantages": normal(rows),
        "mask": torch.arange(width) < lengths,
        "ref_logprobs": rollout + 0.3 * normal(rows, width),
        "entropy": (1 + normal(rows, width).abs()).requires_grad_(),
    }
    return LossInputs(**(fields | changes))  # type: ignore[arg-type]


def with_every_term(name: Preset) -> LossConfig:
    length = 6 if name == "dr_grpo" else None
    return replace(LossConfig.preset(name), constant_length=length, kl_coef=0.1, entropy_coef=0.01)


def loss_and_gradient(inputs: LossInputs, config: LossConfig) -> tuple[Tensor, Tensor]:
    loss = policy_loss(inputs, config).loss
    (gradient,) = torch.autograd.grad(loss, inputs.logprobs)
    return loss.detach(), gradient


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 1.0, -1.0, -1.0),
        (1.0, -1.0, 1.0, 1.0),
        (1.1, 2.0, -2.2, -2.2),
        (0.9, -2.0, 1.8, 1.8),
        (1.5, 1.0, -1.2, 0.0),  # above the clip, rewarded: far enough, no gradient
        (1.5, -1.0, 1.5, 1.5),  # above the clip, punished: must still come down
        (0.5, 1.0, -0.5, -0.5),  # below the clip, rewarded: must still come up
        (0.5, -1.0, 0.8, 0.0),  # below the clip, punished: far enough, no gradient
        (1.5, 0.0, 0.0, 0.0),
    ],
)
def test_the_surrogate_is_the_minimum_for_both_signs_of_the_advantage(
    ratio: float, advantage: float, loss: float, gradient: float
) -> None:
    measured_loss, measured_gradient, outputs = one_token(ratio, advantage, LossConfig())
    assert measured_loss == pytest.approx(loss)
    assert measured_gradient == pytest.approx(gradient)
    assert outputs.metrics["mean_ratio"].item() == pytest.approx(ratio)
    assert outputs.metrics["clipped_fraction"].item() == float(abs(ratio - 1) > 0.2)
    assert outputs.metrics["clipped_fraction_acting"].item() == float(gradient == 0.0 and advantage != 0.0)


def test_dapo_clips_higher_above_than_below() -> None:
    dapo = LossConfig.preset("dapo")
    assert one_token(1.25, 1.0, dapo)[:2] == pytest.approx((-1.25, -1.25))
    assert one_token(1.5, 1.0, dapo)[:2] == pytest.approx((-1.28, 0.0))
    assert one_token(0.5, -1.0, dapo)[:2] == pytest.approx((0.8, 0.0))


def test_a_dual_clip_bounds_the_loss_of_a_punished_token_whose_ratio_ran_away() -> None:
    config = LossConfig.preset("ppo_dual_clip")
    assert one_token(5.0, -2.0, LossConfig())[:2] == pytest.approx((10.0, 10.0))
    loss, gradient, outputs = one_token(5.0, -2.0, config)
    assert (loss, gradient) == pytest.approx((6.0, 0.0))
    assert outputs.metrics["clipped_fraction_acting"].item() == 1.0
    assert one_token(2.0, -2.0, config)[:2] == pytest.approx((4.0, 4.0))
    assert one_token(5.0, 2.0, config)[:2] == pytest.approx((-2.4, 0.0))


@pytest.mark.parametrize(("ratio", "weight"), [(0.1, 0.1), (1.5, 1.5), (9.0, 5.0)])
@pytest.mark.parametrize("advantage", [1.5, -1.5])
def test_cispo_weighs_every_token_and_drops_none(ratio: float, weight: float, advantage: float) -> None:
    loss, gradient, outputs = one_token(ratio, advantage, LossConfig.preset("cispo"))
    assert loss == pytest.approx(-weight * advantage * (math.log(ratio) - 2.0))
    assert gradient == pytest.approx(-weight * advantage)
    assert outputs.metrics["clipped_fraction"].item() == float(ratio > 5)
    assert outputs.metrics["clipped_fraction_acting"].item() == float(ratio > 5)


def test_each_aggregation_divides_by_its_own_normaliser() -> None:
    # On policy the loss of a token is -A: row 0 has 1 token with A = 1, row 1 has 3 with A = -2.
    logprobs = torch.full((2, 3), -1.0, dtype=torch.float64)
    mask = torch.tensor([[True, False, False], [True, True, True]])
    inputs = LossInputs(logprobs, logprobs, doubles([1.0, -2.0]), mask)

    def loss(**settings: object) -> float:
        return policy_loss(inputs, LossConfig(**settings)).loss.item()  # type: ignore[arg-type]

    assert loss(aggregation="sequence_mean") == pytest.approx((-1 + 2) / 2)
    assert loss(aggregation="token_mean") == pytest.approx((-1 + 6) / 4)
    assert loss(aggregation="constant", constant_length=10) == pytest.approx((-1 + 6) / 20)
    assert loss(aggregation="constant") == pytest.approx((-1 + 6) / 6)
    given = replace(inputs, denominator=8.0)
    assert policy_loss(given, LossConfig(aggregation="token_mean")).loss.item() == pytest.approx(5 / 8)
    assert policy_loss(given, LossConfig()).loss.item() == pytest.approx(1 / 8)
    given = replace(inputs, denominator=torch.tensor(8))
    assert policy_loss(given, LossConfig(aggregation="constant")).loss.item() == pytest.approx(5 / 8)


def test_token_advantages_count_token_by_token() -> None:
    logprobs = torch.full((1, 2), -1.0, dtype=torch.float64)
    inputs = LossInputs(logprobs, logprobs, doubles([[3.0, -1.0]]), torch.tensor([[True, True]]))
    assert policy_loss(inputs, LossConfig()).loss.item() == pytest.approx(-1.0)


def test_gspo_uses_the_geometric_mean_of_the_token_ratios() -> None:
    # Log-ratios 0.3 and 0.1: the sequence's ratio is exp(0.2), inside a clip of 0.25 though one token is not.
    rollout = doubles([[-1.0, -1.0, -9.0]])
    logprobs = doubles([[-0.7, -0.9, 5.0]]).requires_grad_()
    mask = torch.tensor([[True, True, False]])
    config = LossConfig(ratio_level="sequence", clip_low=0.25, clip_high=0.25)
    outputs = policy_loss(LossInputs(logprobs, rollout, doubles([2.0]), mask), config)
    outputs.loss.backward()
    ratio = math.exp(0.2)
    assert outputs.loss.item() == pytest.approx(-2 * ratio)
    assert outputs.metrics["mean_ratio"].item() == pytest.approx(ratio)
    assert outputs.metrics["clipped_fraction"].item() == 0.0
    assert logprobs.grad is not None
    assert logprobs.grad.tolist()[0] == pytest.approx([-ratio, -ratio, 0.0])  # A s / |y| for both tokens


def test_gspo_clips_whole_sequences_at_the_papers_widths() -> None:
    gspo = LossConfig.preset("gspo")
    assert (gspo.clip_low, gspo.clip_high) == (3e-4, 4e-4)
    rollout = torch.full((2, 4), -1.0, dtype=torch.float64)
    logprobs = (rollout + doubles([[1e-3], [2e-4]])).requires_grad_()
    mask = torch.ones(2, 4, dtype=torch.bool)
    outputs = policy_loss(LossInputs(logprobs, rollout, doubles([1.0, 1.0]), mask), gspo)
    outputs.loss.backward()
    assert outputs.loss.item() == pytest.approx(-(1 + 4e-4 + math.exp(2e-4)) / 2, abs=1e-12)
    assert outputs.metrics["clipped_fraction_acting"].item() == 0.5
    assert logprobs.grad is not None
    assert logprobs.grad[0].abs().max().item() == 0.0
    assert (logprobs.grad[1] < 0).all()


def test_gspo_accepts_token_advantages() -> None:
    rollout = doubles([[-1.0, -1.0]])
    logprobs = doubles([[-0.9, -1.1]]).requires_grad_()  # the sequence's ratio is 1
    config = LossConfig(ratio_level="sequence")
    loss = policy_loss(
        LossInputs(logprobs, rollout, doubles([[3.0, -1.0]]), torch.ones(1, 2, dtype=torch.bool)), config
    )
    loss.loss.backward()
    assert loss.loss.item() == pytest.approx(-1.0)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist()[0] == pytest.approx([-1.5, 0.5])


@pytest.mark.parametrize(
    ("estimator", "kl", "gradient"),
    [("k1", -0.5, 1.0), ("k2", 0.125, -0.5), ("k3", math.exp(0.5) - 1.5, 1 - math.exp(0.5))],
)
def test_each_kl_estimator_has_schulmans_value_and_gradient(estimator: str, kl: float, gradient: float) -> None:
    # log(pi_ref / pi) = 0.5; an advantage of 0 leaves the KL term alone.
    logprobs = doubles([[-1.0]]).requires_grad_()
    inputs = LossInputs(
        logprobs, doubles([[-1.0]]), doubles([0.0]), torch.tensor([[True]]), ref_logprobs=doubles([[-0.5]])
    )
    outputs = policy_loss(inputs, LossConfig(kl_coef=0.5, kl_estimator=estimator))  # type: ignore[arg-type]
    outputs.loss.backward()
    assert outputs.metrics["kl"].item() == pytest.approx(kl)
    assert outputs.loss.item() == pytest.approx(0.5 * kl)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(0.5 * gradient)


def test_the_entropy_bonus_lowers_the_loss_and_reaches_the_entropy() -> None:
    entropy = doubles([[2.0, 4.0]]).requires_grad_()
    zeros = torch.zeros(1, 2, dtype=torch.float64)
    inputs = LossInputs(zeros, zeros, doubles([0.0]), torch.tensor([[True, True]]), entropy=entropy)
    outputs = policy_loss(inputs, LossConfig(entropy_coef=0.1))
    outputs.loss.backward()
    assert outputs.loss.item() == pytest.approx(-0.3)
    assert outputs.metrics["entropy"].item() == pytest.approx(3.0)
    assert entropy.grad is not None
    assert entropy.grad.tolist()[0] == pytest.approx([-0.05, -0.05])


@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        ({"correction": "truncate", "correction_max": 2.0}, [0.25, 1.0, 2.0]),
        ({"correction": "truncate", "correction_max": 2.0, "correction_min": 0.5}, [0.5, 1.0, 2.0]),
        ({"correction": "mask", "correction_max": 2.0}, [0.25, 1.0, 0.0]),
        ({"correction": "mask", "correction_max": 5.0, "correction_min": 0.5}, [0.0, 1.0, 4.0]),
        ({"correction": "truncate", "correction_level": "sequence", "correction_max": 2.0}, [1.0, 1.0, 1.0]),
    ],
)
def test_a_correction_weighs_old_against_rollout(settings: dict[str, object], weights: list[float]) -> None:
    # pi_old / pi_rollout is 1/4, 1 and 4; their product is 1. The policy is pi_old itself.
    rollout = doubles([[-3.0, -3.0, -3.0]])
    old = rollout + doubles([[math.log(0.25), 0.0, math.log(4.0)]])
    logprobs = old.clone().requires_grad_()
    inputs = LossInputs(logprobs, rollout, doubles([1.0]), torch.ones(1, 3, dtype=torch.bool), old_logprobs=old)
    outputs = policy_loss(inputs, LossConfig(aggregation="token_mean", **settings))  # type: ignore[arg-type]
    outputs.loss.backward()
    assert outputs.loss.item() == pytest.approx(-sum(weights) / 3)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist()[0] == pytest.approx([-weight / 3 for weight in weights])
    assert outputs.metrics["mean_ratio"].item() == pytest.approx(1.0)
    assert outputs.metrics["correction_mean"].item() == pytest.approx(sum(weights) / 3)


def test_a_sequence_level_mask_drops_the_whole_sequence() -> None:
    rollout = torch.full((2, 2), -3.0, dtype=torch.float64)
    old = rollout + doubles([[1.0, 1.0], [0.0, 0.1]])
    inputs = LossInputs(old, rollout, doubles([1.0, 1.0]), torch.ones(2, 2, dtype=torch.bool), old_logprobs=old)
    outputs = policy_loss(inputs, LossConfig(correction="mask", correction_level="sequence", correction_max=5.0))
    assert outputs.loss.item() == pytest.approx(-math.exp(0.1) / 2)
    assert outputs.metrics["correction_fraction"].item() == 0.5


def test_metrics_are_the_hand_worked_ones_and_detached() -> None:
    ratios = doubles([[1.0, 2.0, 0.5, 1.1]])
    logprobs = (ratios.log() - 1).requires_grad_()
    rollout = torch.full_like(ratios, -1.0)
    outputs = policy_loss(
        LossInputs(logprobs, rollout, doubles([1.0]), torch.ones(1, 4, dtype=torch.bool)), LossConfig()
    )
    expected = {
        "mean_ratio": 4.6 / 4,
        "clipped_fraction": 0.5,
        "clipped_fraction_acting": 0.25,
        "ess": 4.6**2 / (4 * (1 + 4 + 0.25 + 1.21)),
        "kl": sum(r - 1 - math.log(r) for r in (1.0, 2.0, 0.5, 1.1)) / 4,
        "entropy": 1 - math.log(1.1) / 4,
        "num_tokens": 4,
    }
    for name, value in expected.items():
        assert outputs.metrics[name].item() == pytest.approx(value), name
    assert not any(metric.requires_grad for metric in outputs.metrics.values())
    assert outputs.loss.requires_grad


def looped_loss(name: Preset, inputs: LossInputs, *, kl_coef: float, entropy_coef: float) -> float:
    """The preset's published formula in plain Python, a token at a time."""
    low, high = {"dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4)}.get(name, (0.2, 0.2))
    assert inputs.ref_logprobs is not None
    assert inputs.entropy is not None
    rows: list[list[float]] = []
    for row in range(len(inputs.mask)):
        places = [t for t in range(inputs.mask.shape[1]) if inputs.mask[row, t]]
        advantage = inputs.advantages[row].item()
        new, rollout, ref = (
            [values[row, t].item() for t in places]
            for values in (inputs.logprobs, inputs.rollout_logprobs, inputs.ref_logprobs)
        )
        log_ratios = [a - b for a, b in zip(new, rollout, strict=True)]
        if name == "gspo":
            log_ratios = [sum(log_ratios) / len(log_ratios)] * len(log_ratios)
        losses = []
        for t, log_ratio in enumerate(log_ratios):
            ratio = math.exp(log_ratio)
            if name == "cispo":
                gain = min(ratio, 5.0) * advantage * new[t]
            else:
                gain = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
            if name == "ppo_dual_clip" and advantage < 0:
                gain = max(gain, 3.0 * advantage)
            kl = math.exp(ref[t] - new[t]) - (ref[t] - new[t]) - 1
            losses.append(-gain + kl_coef * kl - entropy_coef * inputs.entropy[row, places[t]].item())
        rows.append(losses)
    if name in ("grpo", "gspo"):
        return sum(sum(losses) / len(losses) for losses in rows) / len(rows)
    total = sum(map(sum, rows))
    return total / (len(rows) * 6) if name == "dr_grpo" else total / sum(map(len, rows))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_the_value_of_its_published_formula(name: Preset, seed: int) -> None:
    inputs = random_inputs(rows=6, seed=seed)
    expected = looped_loss(name, inputs, kl_coef=0.1, entropy_coef=0.01)
    assert policy_loss(inputs, with_every_term(name)).loss.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", PRESETS)
def test_gradients_are_right_in_float64(name: Preset) -> None:
    config = with_every_term(name)
    inputs = random_inputs()
    weight = None
    if config.objective == "cispo":  # its weight has no gradient by definition: hold it still while differencing
        weight = (inputs.logprobs - inputs.rollout_logprobs).detach().exp().clamp(max=config.cispo_max)

    def loss(logprobs: Tensor, entropy: Tensor) -> Tensor:
        if weight is None:
            return policy_loss(replace(inputs, logprobs=logprobs, entropy=entropy), config).loss
        policy_term = -(weight * inputs.advantages[:, None] * logprobs)[inputs.mask].sum() / inputs.mask.sum()
        rest = replace(inputs, logprobs=logprobs, entropy=entropy, advantages=torch.zeros_like(inputs.advantages))
        return policy_term + policy_loss(rest, config).loss

    assert inputs.entropy is not None
    assert torch.autograd.gradcheck(loss, (inputs.logprobs, inputs.entropy))
    expected = torch.autograd.grad(loss(inputs.logprobs, inputs.entropy), inputs.logprobs)[0]
    torch.testing.assert_close(loss_and_gradient(inputs, config)[1], expected)


@pytest.mark.parametrize("correction", ["truncate", "mask"])
def test_gradients_are_right_with_a_correction(correction: str) -> None:
    inputs = random_inputs()
    inputs = replace(inputs, old_logprobs=inputs.rollout_logprobs + 0.7 * torch.randn(4, 6).double())
    config = LossConfig(correction=correction, correction_max=1.5, correction_min=0.5)  # type: ignore[arg-type]
    assert torch.autograd.gradcheck(
        lambda logprobs: policy_loss(replace(inputs, logprobs=logprobs), config).loss, (inputs.logprobs,)
    )


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("name", PRESETS)
def test_what_masked_positions_hold_changes_nothing(name: Preset, garbage: float) -> None:
    config = replace(with_every_term(name), correction="truncate")
    clean = random_inputs()
    clean = replace(
        clean,
        advantages=clean.advantages[:, None].expand(4, 6).clone(),
        old_logprobs=clean.rollout_logprobs + 0.1,
    )
    assert not clean.mask.all()

    def spoiled(values: Tensor | None) -> Tensor:
        assert values is not None
        return torch.where(clean.mask, values.detach(), garbage).requires_grad_(values.requires_grad)

    dirty = LossInputs(
        logprobs=spoiled(clean.logprobs),
        rollout_logprobs=spoiled(clean.rollout_logprobs),
        advantages=spoiled(clean.advantages),
        mask=clean.mask,
        old_logprobs=spoiled(clean.old_logprobs),
        ref_logprobs=spoiled(clean.ref_logprobs),
        entropy=spoiled(clean.entropy),
    )
    for expected, measured in zip(loss_and_gradient(clean, config), loss_and_gradient(dirty, config), strict=True):
        torch.testing.assert_close(measured, expected, rtol=0, atol=0)
    clean_metrics, dirty_metrics = policy_loss(clean, config).metrics, policy_loss(dirty, config).metrics
    assert {k: v.item() for k, v in clean_metrics.items()} == {k: v.item() for k, v in dirty_metrics.items()}


@pytest.mark.parametrize("name", PRESETS)
def test_padding_columns_and_padding_rows_change_nothing(name: Preset) -> None:
    config = with_every_term(name)
    inputs = random_inputs()

    def padded(values: Tensor | None) -> Tensor:
        assert values is not None
        return torch.nn.functional.pad(values.detach(), (0, 3, 0, 2), value=0).requires_grad_(values.requires_grad)

    wide = LossInputs(
        logprobs=padded(inputs.logprobs),
        rollout_logprobs=padded(inputs.rollout_logprobs),
        advantages=torch.cat([inputs.advantages, doubles([7.0, -7.0])]),
        mask=padded(inputs.mask),
        ref_logprobs=padded(inputs.ref_logprobs),
        entropy=padded(inputs.entropy),
    )
    loss, gradient = loss_and_gradient(inputs, config)
    wide_loss, wide_gradient = loss_and_gradient(wide, config)
    torch.testing.assert_close(wide_loss, loss)
    torch.testing.assert_close(wide_gradient[:4, :6], gradient)


@pytest.mark.parametrize("name", PRESETS)
def test_the_order_of_the_rows_does_not_matter(name: Preset) -> None:
    config = with_every_term(name)
    inputs = random_inputs()
    order = torch.tensor([2, 0, 3, 1])
    shuffled = LossInputs(
        **{
            field: value[order].detach().requires_grad_(value.requires_grad)
            for field in ("logprobs", "rollout_logprobs", "advantages", "mask", "ref_logprobs", "entropy")
            if (value := getattr(inputs, field)) is not None
        }
    )
    loss, gradient = loss_and_gradient(inputs, config)
    shuffled_loss, shuffled_gradient = loss_and_gradient(shuffled, config)
    torch.testing.assert_close(shuffled_loss, loss)
    torch.testing.assert_close(shuffled_gradient, gradient[order])


@pytest.mark.parametrize("name", PRESETS)
def test_micro_batches_with_the_true_denominator_add_up_to_the_whole(name: Preset) -> None:
    config = with_every_term(name)
    inputs = random_inputs()
    whole_loss, whole_gradient = loss_and_gradient(inputs, config)
    denominator = config.denominator(num_sequences=4, num_tokens=int(inputs.mask.sum()))
    total = doubles(0.0)
    gradient = torch.zeros_like(whole_gradient)
    for rows in (slice(0, 1), slice(1, 4)):
        micro = LossInputs(
            **{
                field: getattr(inputs, field)[rows]
                for field in ("logprobs", "rollout_logprobs", "advantages", "mask", "ref_logprobs", "entropy")
            },
            denominator=denominator,
        )
        loss = policy_loss(micro, config).loss
        total = total + loss.detach()
        gradient += torch.autograd.grad(loss, inputs.logprobs)[0]
    torch.testing.assert_close(total, whole_loss)
    torch.testing.assert_close(gradient, whole_gradient)


@pytest.mark.parametrize("name", PRESETS)
def test_a_batch_without_trained_tokens_has_loss_zero_a_graph_and_finite_metrics(name: Preset) -> None:
    inputs = random_inputs(mask=torch.zeros(4, 6, dtype=torch.bool))
    outputs = policy_loss(inputs, with_every_term(name))
    outputs.loss.backward()
    assert outputs.loss.item() == 0.0
    assert inputs.logprobs.grad is not None
    assert inputs.logprobs.grad.abs().max().item() == 0.0
    assert {k: v.item() for k, v in outputs.metrics.items()} == {
        "mean_ratio": 1, "ess": 1, "clipped_fraction": 0, "clipped_fraction_acting": 0, "kl": 0, "kl_rollout": 0,
        "entropy": 0, "num_tokens": 0,
    }  # fmt: skip


@pytest.mark.parametrize("distance", [100.0, -100.0])
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
def test_a_ratio_that_would_overflow_gives_no_nan(distance: float, advantage: float) -> None:
    logprobs = torch.tensor([[-200.0 + distance]]).requires_grad_()
    inputs = LossInputs(logprobs, torch.tensor([[-200.0]]), torch.tensor([advantage]), torch.tensor([[True]]))
    outputs = policy_loss(inputs, LossConfig())
    outputs.loss.backward()
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()
    assert all(torch.isfinite(value) for value in (outputs.loss, *outputs.metrics.values()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_halves_are_computed_in_fp32_and_doubles_stay_doubles(dtype: torch.dtype) -> None:
    logprobs = torch.full((1, 3), -1.0, dtype=dtype, requires_grad=True)
    inputs = LossInputs(logprobs, logprobs.detach(), torch.ones(1, dtype=dtype), torch.ones(1, 3, dtype=torch.bool))
    outputs = policy_loss(inputs, LossConfig())
    outputs.loss.backward()
    assert outputs.loss.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    assert logprobs.grad is not None
    assert logprobs.grad.dtype is dtype


@pytest.mark.parametrize("name", PRESETS)
def test_on_policy_every_preset_has_the_plain_policy_gradient(name: Preset) -> None:
    logprobs = torch.full((2, 3), -1.5, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(2, 3, dtype=torch.bool)
    inputs = LossInputs(logprobs, logprobs.detach(), doubles([1.0, -0.5]), mask)
    _, gradient = loss_and_gradient(inputs, LossConfig.preset(name))
    torch.testing.assert_close(gradient, doubles([[-1.0], [0.5]]).expand(2, 3) / 6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"aggregation": "mean"}, "aggregation = 'mean': choose one of sequence_mean, token_mean, constant"),
        ({"clip_low": -0.1}, "clip_low = -0.1"),
        ({"clip_high": math.nan}, "clip_high = nan"),
        ({"dual_clip": 0.9}, "dual_clip = 0.9"),
        ({"dual_clip": 3.0, "objective": "cispo"}, "use cispo_max"),
        ({"constant_length": 5}, "set aggregation = 'constant'"),
        ({"aggregation": "constant", "constant_length": 0}, "constant_length = 0"),
        ({"correction_min": 3.0}, "swap them"),
        ({"kl_estimator": "k4"}, "choose one of k1, k2, k3"),
        ({"kl_coef": -1.0}, "kl_coef = -1.0"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LossConfig(**settings)  # type: ignore[arg-type]


def test_an_unknown_preset_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="no preset 'reinforce': choose one of grpo, dr_grpo, dapo"):
        LossConfig.preset("reinforce")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "missing"),
    [
        ({"kl_coef": 0.1}, "ref_logprobs"),
        ({"entropy_coef": 0.1}, "entropy"),
        ({"correction": "truncate"}, "old_logprobs"),
    ],
)
def test_a_term_without_its_input_is_refused(settings: dict[str, object], missing: str) -> None:
    with pytest.raises(ValueError, match=f"needs {missing}"):
        policy_loss(random_inputs(ref_logprobs=None, entropy=None), LossConfig(**settings))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask": torch.ones(4, 6)}, "expected torch.bool"),
        ({"mask": torch.ones(4, 5, dtype=torch.bool)}, r"mask has shape \(4, 5\), logprobs has \(4, 6\)"),
        ({"advantages": torch.ones(6)}, r"expected \(4,\), one a row, or \(4, 6\)"),
        ({"denominator": 0.0}, "denominator = 0.0"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(changes: dict[str, Tensor | float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        random_inputs(**changes)


def test_a_constant_without_length_has_no_denominator_to_pass_on() -> None:
    with pytest.raises(ValueError, match="set it to the longest completion allowed"):
        LossConfig.preset("dr_grpo").denominator(num_sequences=4, num_tokens=9)
    assert LossConfig(aggregation="constant", constant_length=8).denominator(num_sequences=4, num_tokens=9) == 32
    assert LossConfig().denominator(num_sequences=4, num_tokens=9) == 4
    assert LossConfig.preset("dapo").denominator(num_sequences=4, num_tokens=9) == 9
