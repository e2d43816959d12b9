"""Policy losses against hand-worked numbers: both signs of the advantage, both sides of the clip."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_engine.algo.loss import LossConfig, LossInputs, LossOutputs, policy_loss, token_weights
from grpo_engine.algo.loss_config import (
    Aggregation,
    Correction,
    CorrectionLevel,
    KlEstimator,
    Objective,
    Preset,
    RatioLevel,
)

torch.set_num_threads(1)
PRESETS = get_args(Preset)
TENSORS = ("logprobs", "rollout_logprobs", "advantages", "mask", "old_logprobs", "ref_logprobs", "entropy")


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
    ("preset", "ratio", "advantage", "loss", "gradient"),
    [
        ("grpo", 1.0, 1.0, -1.0, -1.0),
        ("grpo", 1.0, -1.0, 1.0, 1.0),
        ("grpo", 1.1, 2.0, -2.2, -2.2),
        ("grpo", 0.9, -2.0, 1.8, 1.8),
        ("grpo", 1.5, 1.0, -1.2, 0.0),  # above the clip, rewarded: far enough, no gradient
        ("grpo", 1.5, -1.0, 1.5, 1.5),  # above the clip, punished: must still come down
        ("grpo", 0.5, 1.0, -0.5, -0.5),  # below the clip, rewarded: must still come up
        ("grpo", 0.5, -1.0, 0.8, 0.0),  # below the clip, punished: far enough, no gradient
        ("grpo", 5.0, -2.0, 10.0, 10.0),
        ("grpo", 1.5, 0.0, 0.0, 0.0),
        ("dapo", 1.25, 1.0, -1.25, -1.25),  # clips higher above than below
        ("dapo", 1.5, 1.0, -1.28, 0.0),
        ("dapo", 1.5, -1.0, 1.5, 1.5),
        ("dapo", 0.5, 1.0, -0.5, -0.5),
        ("dapo", 0.5, -1.0, 0.8, 0.0),
        ("ppo_dual_clip", 1.5, 1.0, -1.2, 0.0),
        ("ppo_dual_clip", 1.5, -1.0, 1.5, 1.5),
        ("ppo_dual_clip", 0.5, 1.0, -0.5, -0.5),
        ("ppo_dual_clip", 0.5, -1.0, 0.8, 0.0),
        ("ppo_dual_clip", 2.0, -2.0, 4.0, 4.0),
        ("ppo_dual_clip", 5.0, -2.0, 6.0, 0.0),  # punished and run away: at most 3 |A|
        ("ppo_dual_clip", 5.0, 2.0, -2.4, 0.0),
        ("gspo", 1.5, 1.0, -1.0004, 0.0),  # a sequence of one token; the paper's widths
        ("gspo", 1.5, -1.0, 1.5, 1.5),
        ("gspo", 0.5, 1.0, -0.5, -0.5),
        ("gspo", 0.5, -1.0, 0.9997, 0.0),
        ("gspo", 1.0003, 1.0, -1.0003, -1.0003),
        ("gspo", 0.9998, -1.0, 0.9998, 0.9998),
    ],
)
def test_the_surrogate_is_the_minimum_for_both_signs_of_the_advantage(
    preset: Preset, ratio: float, advantage: float, loss: float, gradient: float
) -> None:
    config = LossConfig.preset(preset)
    measured_loss, measured_gradient, outputs = one_token(ratio, advantage, config)
    assert measured_loss == pytest.approx(loss)
    assert measured_gradient == pytest.approx(gradient)
    is_outside = ratio < 1 - config.clip_low or ratio > 1 + config.clip_high
    assert outputs.metrics["mean_ratio"].item() == pytest.approx(ratio)
    assert outputs.metrics["clipped_fraction"].item() == float(is_outside)
    assert outputs.metrics["clipped_fraction_acting"].item() == float(gradient == 0.0 and advantage != 0.0)


def test_presets_have_the_numbers_of_their_papers() -> None:
    assert LossConfig.preset("grpo") == LossConfig(aggregation="sequence_mean", clip_low=0.2, clip_high=0.2)
    assert LossConfig.preset("dr_grpo") == LossConfig(aggregation="constant")
    assert LossConfig.preset("dapo") == LossConfig(aggregation="token_mean", clip_high=0.28)
    assert LossConfig.preset("bnpo") == LossConfig(aggregation="token_mean")
    assert LossConfig.preset("gspo") == LossConfig(ratio_level="sequence", clip_low=3e-4, clip_high=4e-4)
    assert LossConfig.preset("cispo") == LossConfig(aggregation="token_mean", objective="cispo", cispo_max=5.0)
    assert LossConfig.preset("ppo_dual_clip") == LossConfig(aggregation="token_mean", dual_clip=3.0)


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
    rollout = torch.full((2, 4), -1.0, dtype=torch.float64)
    logprobs = (rollout + doubles([[1e-3], [2e-4]])).requires_grad_()
    mask = torch.ones(2, 4, dtype=torch.bool)
    outputs = policy_loss(LossInputs(logprobs, rollout, doubles([1.0, 1.0]), mask), LossConfig.preset("gspo"))
    outputs.loss.backward()
    assert outputs.loss.item() == pytest.approx(-(1 + 4e-4 + math.exp(2e-4)) / 2, abs=1e-12)
    assert outputs.metrics["clipped_fraction_acting"].item() == 0.5
    assert logprobs.grad is not None
    assert logprobs.grad[0].abs().max().item() == 0.0
    assert (logprobs.grad[1] < 0).all()


@pytest.mark.parametrize(("ratio_level", "log_ratio"), [("token", 0.0), ("sequence", 0.1)])
def test_token_advantages_count_token_by_token(ratio_level: RatioLevel, log_ratio: float) -> None:
    rollout = doubles([[-1.0, -1.0]])
    logprobs = (rollout + doubles([[log_ratio, -log_ratio]])).requires_grad_()  # the sequence's ratio is 1
    inputs = LossInputs(logprobs, rollout, doubles([[3.0, -1.0]]), torch.ones(1, 2, dtype=torch.bool))
    loss, gradient = loss_and_gradient(inputs, LossConfig(ratio_level=ratio_level))
    assert loss.item() == pytest.approx(-1.0)
    assert gradient.tolist()[0] == pytest.approx([-1.5, 0.5])


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
        ({"correction": "truncate", "correction_level": "geometric", "correction_max": 0.5}, [0.5, 0.5, 0.5]),
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


@pytest.mark.parametrize(("level", "weight"), [("sequence", math.exp(0.3)), ("geometric", math.exp(0.15))])
def test_a_mask_over_sequences_drops_the_whole_sequence(level: CorrectionLevel, weight: float) -> None:
    # Log-weights 2 and 1 of the first sequence: product e³, geometric mean e^1.5. The third tokens are not trained.
    rollout = torch.full((2, 3), -3.0, dtype=torch.float64)
    old = rollout + doubles([[2.0, 1.0, 9.0], [0.1, 0.2, -9.0]])
    mask = torch.tensor([[True, True, False]]).expand(2, 3)
    inputs = LossInputs(old, rollout, doubles([1.0, 1.0]), mask, old_logprobs=old)
    outputs = policy_loss(inputs, LossConfig(correction="mask", correction_level=level, correction_max=4.0))
    assert outputs.loss.item() == pytest.approx(-weight / 2)
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


def looped_loss(inputs: LossInputs, config: LossConfig, logprobs: list[list[float]]) -> float:
    """The published formulas in plain Python, a token at a time, at `logprobs`.

    What has no gradient by definition (the weight of CISPO, the sequence's ratio of GSPO-token) is taken at
    `inputs.logprobs`, so that differences of this function are the gradient.
    """
    assert inputs.ref_logprobs is not None
    assert inputs.entropy is not None
    assert inputs.old_logprobs is not None
    rows: list[list[float]] = []
    for row in range(len(inputs.mask)):
        places = [t for t in range(inputs.mask.shape[1]) if inputs.mask[row, t]]
        if not places:
            continue
        new = [logprobs[row][t] for t in places]
        held, rollout, old, ref, entropy = (
            [values[row, t].item() for t in places]
            for values in (
                inputs.logprobs, inputs.rollout_logprobs, inputs.old_logprobs, inputs.ref_logprobs, inputs.entropy
            )
        )  # fmt: skip
        gaps = [o - r for o, r in zip(old, rollout, strict=True)]
        of_sequence = {"sequence": sum(gaps), "geometric": sum(gaps) / len(gaps)}.get(config.correction_level)
        mean_log_ratio = sum(h - o for h, o in zip(held, old, strict=True)) / len(places)
        losses = []
        for t in range(len(places)):
            if config.ratio_level == "token":
                ratio, held_ratio = math.exp(new[t] - old[t]), math.exp(held[t] - old[t])
            else:
                held_ratio = math.exp(mean_log_ratio)
                ratio = held_ratio * math.exp(new[t] - held[t])
            advantage = inputs.advantages[row].item()
            if config.objective == "cispo":
                gain = min(held_ratio, config.cispo_max) * advantage * new[t]
            else:
                clipped = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
                gain = min(ratio * advantage, clipped * advantage)
                if config.dual_clip is not None and advantage < 0:
                    gain = max(gain, config.dual_clip * advantage)
            weight = math.exp(gaps[t] if of_sequence is None else of_sequence)
            if config.correction == "none":
                weight = 1.0
            elif config.correction == "truncate":
                weight = min(max(weight, config.correction_min), config.correction_max)
            elif not config.correction_min <= weight <= config.correction_max:
                weight = 0.0
            distance = ref[t] - new[t]
            kl = {"k1": -distance, "k2": distance**2 / 2, "k3": math.exp(distance) - distance - 1}[config.kl_estimator]
            kl *= ratio if config.kl_unbiased else 1
            losses.append(-gain * weight + config.kl_coef * kl - config.entropy_coef * entropy[t])
        rows.append(losses)
    if config.aggregation == "sequence_mean":
        return sum(sum(losses) / len(losses) for losses in rows) / len(rows)
    total = sum(map(sum, rows))
    if config.aggregation == "token_mean":
        return total / sum(map(len, rows))
    return total / (len(rows) * (config.constant_length or inputs.mask.shape[1]))


@st.composite
def configs(draw: st.DrawFn) -> LossConfig:
    """Any settings that are accepted."""
    aggregation = draw(st.sampled_from(get_args(Aggregation)))
    objective = draw(st.sampled_from(get_args(Objective)))
    ratio_level = draw(st.sampled_from(get_args(RatioLevel)))
    kl_estimator = draw(st.sampled_from(get_args(KlEstimator)))
    width = st.floats(0, 0.7)
    coefficient = st.sampled_from([0.0, 0.3])
    low, high = sorted(draw(st.lists(st.floats(0.1, 4), min_size=2, max_size=2)))
    return LossConfig(
        aggregation=aggregation,
        constant_length=draw(st.sampled_from([None, 9])) if aggregation == "constant" else None,
        clip_low=draw(width),
        clip_high=draw(width),
        dual_clip=draw(st.none() | st.floats(1.01, 4)) if objective == "clip" else None,
        ratio_level=ratio_level,
        objective=objective,
        cispo_max=draw(st.floats(0.1, 5)),
        kl_coef=draw(coefficient),
        kl_estimator=kl_estimator,
        kl_unbiased=draw(st.booleans()) and ratio_level == "token" and kl_estimator != "k2",
        entropy_coef=draw(coefficient),
        correction=draw(st.sampled_from(get_args(Correction))),
        correction_level=draw(st.sampled_from(get_args(CorrectionLevel))),
        correction_max=high,
        correction_min=low,
    )


@pytest.mark.slow
@settings(max_examples=150, deadline=None, derandomize=True)
@given(config=configs(), seed=st.integers(0, 2**31))
def test_value_and_gradient_are_those_of_the_published_formulas_for_any_settings(config: LossConfig, seed: int) -> None:
    inputs = random_inputs(rows=3, width=4, seed=seed)
    inputs = replace(inputs, old_logprobs=inputs.rollout_logprobs + inputs.advantages[:, None] * 0.3)
    loss, gradient = loss_and_gradient(inputs, config)
    here = inputs.logprobs.tolist()
    assert loss.item() == pytest.approx(looped_loss(inputs, config, here), rel=1e-10, abs=1e-12)
    step = 1e-6
    differences = torch.zeros_like(gradient)
    for row, t in inputs.mask.nonzero().tolist():
        around = []
        for shift in (step, -step):
            moved = [list(values) for values in here]
            moved[row][t] += shift
            around.append(looped_loss(inputs, config, moved))
        differences[row, t] = (around[0] - around[1]) / (2 * step)
    torch.testing.assert_close(gradient, differences, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "cispo"])
def test_gradcheck_holds_for_every_preset_in_float64(name: Preset) -> None:
    # CISPO's weight has no gradient by definition, which gradcheck cannot hold still; the test above does.
    config = with_every_term(name)
    inputs = random_inputs()
    assert inputs.entropy is not None
    assert torch.autograd.gradcheck(
        lambda logprobs, entropy: policy_loss(replace(inputs, logprobs=logprobs, entropy=entropy), config).loss,
        (inputs.logprobs, inputs.entropy),
    )


@pytest.mark.parametrize(
    ("estimator", "unbiased", "divergence"),
    [("k1", False, None), ("k2", False, "reverse"), ("k3", False, "forward"), ("k1", True, "reverse"),
     ("k3", True, "reverse")],
)  # fmt: skip
def test_the_expected_gradient_of_each_estimator_is_that_of_its_divergence(
    estimator: KlEstimator, unbiased: bool, divergence: str | None
) -> None:
    # A vocabulary of four, every token in its own column, weighed by its probability: the expectation is exact.
    scores = doubles([0.3, -0.8, 1.1, 0.0]).requires_grad_()
    ref = doubles([-0.2, 0.5, 0.4, -1.0]).log_softmax(0)
    logprobs = scores.log_softmax(0)
    probabilities = logprobs.detach().exp()
    mask = torch.ones(4, 1, dtype=torch.bool)
    rows = [
        LossInputs(
            logprobs[a : a + 1, None], logprobs.detach()[a : a + 1, None], doubles([0.0]), mask[:1],
            ref_logprobs=ref[a : a + 1, None],
        )
        for a in range(4)
    ]  # fmt: skip
    config = LossConfig(kl_coef=1.0, kl_estimator=estimator, kl_unbiased=unbiased)
    expected_loss = torch.stack([policy_loss(row, config).loss for row in rows]) @ probabilities
    (gradient,) = torch.autograd.grad(expected_loss, scores, retain_graph=True)
    exact = {
        "reverse": (logprobs.exp() * (logprobs - ref)).sum(),
        "forward": (ref.exp() * (ref - logprobs)).sum(),
        None: scores.sum() * 0,
    }[divergence]
    torch.testing.assert_close(gradient, torch.autograd.grad(exact, scores)[0])


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(config=configs(), garbage=st.sampled_from([math.nan, math.inf, -math.inf, 1e30]))
def test_what_masked_positions_hold_changes_nothing(config: LossConfig, garbage: float) -> None:
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


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    config=configs(), seed=st.integers(0, 2**31), micro_batch_of_row=st.lists(st.integers(0, 4), min_size=6, max_size=6)
)
def test_any_split_into_micro_batches_adds_up_to_the_whole(
    config: LossConfig, seed: int, micro_batch_of_row: list[int]
) -> None:
    if config.aggregation == "constant":
        config = replace(config, constant_length=9)
    inputs = random_inputs(rows=6, seed=seed)
    inputs = replace(inputs, old_logprobs=inputs.rollout_logprobs + inputs.advantages[:, None] * 0.3)
    mask = inputs.mask & (torch.arange(6) != seed % 6)[:, None]  # a row without a trained token counts nowhere
    inputs = replace(inputs, mask=mask)
    whole_loss, whole_gradient = loss_and_gradient(inputs, config)
    denominator = config.denominator(num_sequences=5, num_tokens=int(mask.sum()))
    total, gradient = doubles(0.0), torch.zeros_like(whole_gradient)
    for number in set(micro_batch_of_row):
        rows = torch.tensor([row for row, of in enumerate(micro_batch_of_row) if of == number])
        micro = LossInputs(**{field: getattr(inputs, field)[rows] for field in TENSORS}, denominator=denominator)
        loss = policy_loss(micro, config).loss
        total += loss.detach()
        gradient += torch.autograd.grad(loss, inputs.logprobs)[0]
    torch.testing.assert_close(total, whole_loss)
    torch.testing.assert_close(gradient, whole_gradient)


def test_token_weights_say_what_each_token_counts() -> None:
    mask = torch.tensor([[True, False, False], [True, True, False], [False, False, False]])
    expected = {
        "sequence_mean": [[1 / 2, 0, 0], [1 / 4, 1 / 4, 0], [0, 0, 0]],
        "token_mean": [[1 / 3, 0, 0], [1 / 3, 1 / 3, 0], [0, 0, 0]],
        "constant": [[1 / 20, 0, 0], [1 / 20, 1 / 20, 0], [0, 0, 0]],
    }
    for aggregation, weights in expected.items():
        length = 10 if aggregation == "constant" else None
        config = LossConfig(aggregation=aggregation, constant_length=length)  # type: ignore[arg-type]
        assert token_weights(mask, config, dtype=torch.float64).tolist() == [pytest.approx(row) for row in weights]
    assert token_weights(mask, LossConfig(), 8.0).tolist()[1] == [1 / 16, 1 / 16, 0]
    assert token_weights(mask, LossConfig(aggregation="token_mean"), 8.0).tolist()[1] == [1 / 8, 1 / 8, 0]


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
        ({"kl_unbiased": True, "ratio_level": "sequence"}, "set ratio_level = 'token'"),
        ({"kl_unbiased": True, "kl_estimator": "k2"}, "only k1 and k3"),
        ({"correction_level": "row"}, "choose one of token, sequence, geometric"),
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


def test_constant_aggregation_without_length_has_no_denominator() -> None:
    with pytest.raises(ValueError, match="set it to the longest completion allowed"):
        LossConfig.preset("dr_grpo").denominator(num_sequences=4, num_tokens=9)
    assert LossConfig(aggregation="constant", constant_length=8).denominator(num_sequences=4, num_tokens=9) == 32
    assert LossConfig().denominator(num_sequences=4, num_tokens=9) == 4
    assert LossConfig.preset("dapo").denominator(num_sequences=4, num_tokens=9) == 9
