"""Our mathematics against TRL's own code, on the same arrays: `GRPOTrainer._compute_loss` and what prepares its inputs.

TRL generates nothing here: its `_generate` is given fixed completions, and `_compute_loss` a model that returns fixed
log-probabilities, of which both sides then give the gradient. All else is TRL's code as it trains with it. Where it
divides by something else than we do, our `denominator` says so, and the case says why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_engine.algo.advantages import Scale, equal_groups, group_advantages, overlong_penalty
from grpo_engine.algo.logprobs import token_logprobs
from grpo_engine.algo.loss import LossConfig, LossInputs, policy_loss
from grpo_engine.algo.loss_config import Correction, CorrectionLevel
from grpo_engine.models.tiny_tokenizer import END_ID, tiny_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.extended("test_algo_loss.py and its siblings have the same formulas with numbers worked out by hand"),
    pytest.mark.filterwarnings("ignore:TRL currently supports vLLM versions:UserWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
]

ROWS, MICRO_ROWS, WIDTH = 8, 2, 6
ACCUMULATION = ROWS // MICRO_ROWS
MakeTrainer = Callable[..., Any]


@pytest.fixture(scope="module")
def make_trainer(tmp_path_factory: pytest.TempPathFactory) -> MakeTrainer:
    """A function that makes a GRPOTrainer of a random model with the given settings."""
    trl = pytest.importorskip("trl", reason="the peers extra is not installed")
    from datasets import Dataset
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder: Path = tmp_path_factory.mktemp("trl")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = Qwen2Config(vocab_size=128, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3, **shape)
    Qwen2ForCausalLM(config).save_pretrained(folder / "model")

    def make(rewards: Sequence[float] = (), **settings: Any) -> Any:
        trainer = trl.GRPOTrainer(
            model=str(folder / "model"),
            processing_class=tiny_tokenizer(),
            reward_funcs=lambda completions, **_: list(rewards),
            train_dataset=Dataset.from_list([{"prompt": "a"}] * ROWS),
            args=trl.GRPOConfig(
                output_dir=str(folder / "out"),
                per_device_train_batch_size=MICRO_ROWS,
                gradient_accumulation_steps=ACCUMULATION,
                num_generations=4,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                report_to=[],
                **({"max_completion_length": WIDTH} | settings),
            ),
        )
        trainer.current_gradient_accumulation_steps = ACCUMULATION
        trainer.model.train()
        return trainer

    return make


@dataclass(frozen=True, kw_only=True)
class Arrays:
    """What both sides are given, in float64, 0 where not trained; ratios on both sides of every bound."""

    logprobs: Tensor
    old: Tensor
    ref: Tensor
    entropy: Tensor
    advantages: Tensor
    mask: Tensor


def random_arrays(seed: int = 0) -> Arrays:
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    mask = torch.arange(WIDTH) < torch.randint(1, WIDTH + 1, (ROWS, 1), generator=random)
    old = (-1 - normal(ROWS, WIDTH).abs()) * mask
    return Arrays(
        logprobs=((old + 0.7 * normal(ROWS, WIDTH)) * mask).requires_grad_(),
        old=old,
        ref=(old + 0.3 * normal(ROWS, WIDTH)) * mask,
        entropy=((1 + normal(ROWS, WIDTH).abs()) * mask).requires_grad_(),
        advantages=normal(ROWS),
        mask=mask,
    )


def trl_loss(trainer: Any, arrays: Arrays, rows: slice, **more: Tensor) -> Tensor:
    """TRL's loss of a micro-batch, whose model says `arrays.logprobs`."""
    model = lambda **_: SimpleNamespace(log_probs=arrays.logprobs[rows], entropy=arrays.entropy[rows])  # noqa: E731
    ids = torch.ones(ROWS, WIDTH, dtype=torch.long)[rows]
    inputs = {
        "prompt_ids": ids,
        "prompt_mask": ids,
        "completion_ids": ids,
        "completion_mask": arrays.mask[rows].long(),
        "advantages": arrays.advantages[rows],
        "old_per_token_logps": arrays.old[rows],
        "ref_per_token_logps": arrays.ref[rows],
        "num_items_in_batch": arrays.mask.sum(),
        **{name: value[rows] for name, value in more.items()},
    }
    loss: Tensor = trainer._compute_loss(model, inputs)
    return loss


def our_inputs(arrays: Arrays, rows: slice = slice(None), denominator: float | None = None) -> LossInputs:
    return LossInputs(
        arrays.logprobs[rows],
        arrays.old[rows],
        arrays.advantages[rows],
        arrays.mask[rows],
        ref_logprobs=arrays.ref[rows],
        entropy=arrays.entropy[rows],
        denominator=denominator,
    )


def assert_same(theirs: Tensor, ours: Tensor, *leaves: Tensor) -> None:
    """The same value, and the same gradient by each leaf."""
    torch.testing.assert_close(ours, theirs)
    expected = torch.autograd.grad(theirs, leaves, retain_graph=True, allow_unused=True)
    measured = torch.autograd.grad(ours, leaves, retain_graph=True, allow_unused=True)
    assert expected[0] is not None
    assert expected[0].abs().max() > 0
    torch.testing.assert_close(measured, expected)


@dataclass(frozen=True)
class Case:
    """Settings of TRL and ours that say the same."""

    theirs: dict[str, Any]
    ours: LossConfig


CASES = {
    "grpo": Case({"loss_type": "grpo"}, LossConfig.preset("grpo")),
    "dr_grpo": Case({"loss_type": "dr_grpo"}, replace(LossConfig.preset("dr_grpo"), constant_length=WIDTH)),
    "dapo": Case({"loss_type": "dapo", "epsilon_high": 0.28}, LossConfig.preset("dapo")),
    "bnpo": Case({"loss_type": "bnpo"}, LossConfig.preset("bnpo")),
    "gspo": Case(
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
        LossConfig.preset("gspo"),
    ),
    "gspo, mean over tokens": Case(
        {"loss_type": "dapo", "importance_sampling_level": "sequence"},
        LossConfig(aggregation="token_mean", ratio_level="sequence"),
    ),
    "cispo": Case({"loss_type": "cispo", "epsilon_high": 5.0}, LossConfig.preset("cispo")),
    "cispo, tight": Case(
        {"loss_type": "cispo", "epsilon_high": 1.1}, replace(LossConfig.preset("cispo"), cispo_max=1.1)
    ),
    "ppo_dual_clip": Case({"loss_type": "dapo", "delta": 3.0}, LossConfig.preset("ppo_dual_clip")),
    "dual clip, tight": Case({"loss_type": "grpo", "delta": 1.4}, LossConfig(dual_clip=1.4)),
    "divergence": Case(
        {"loss_type": "grpo", "beta": 0.3, "use_bias_correction_kl": False}, LossConfig(kl_coef=0.3, kl_estimator="k3")
    ),
    "divergence times ratio": Case(
        {"loss_type": "dapo", "beta": 0.3}, LossConfig(aggregation="token_mean", kl_coef=0.3, kl_unbiased=True)
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_whole_batch_in_micro_batches_has_trls_loss_and_gradient(make_trainer: MakeTrainer, name: str) -> None:
    case, arrays = CASES[name], random_arrays()
    trainer = make_trainer(**case.theirs)
    slices = [slice(start, start + MICRO_ROWS) for start in range(0, ROWS, MICRO_ROWS)]
    theirs = torch.stack([trl_loss(trainer, arrays, rows) for rows in slices]).sum()
    if case.theirs["loss_type"] == "bnpo":  # TRL's normaliser is that of each micro-batch, so the split matters to it
        denominators: list[float | None] = [float(arrays.mask[rows].sum()) * ACCUMULATION for rows in slices]
        parts = [our_inputs(arrays, rows, d) for rows, d in zip(slices, denominators, strict=True)]
        ours = torch.stack([policy_loss(part, case.ours).loss for part in parts]).sum()
    else:
        ours = policy_loss(our_inputs(arrays), case.ours).loss
    assert_same(theirs, ours, arrays.logprobs)


@pytest.mark.parametrize("name", [name for name in CASES if "dual" not in name and "gspo" not in name])
def test_metrics_are_those_that_trl_logs(make_trainer: MakeTrainer, name: str) -> None:
    # Not with a dual clip, whose tokens TRL does not count, nor by sequence, where it takes the mean over sequences.
    case, arrays = CASES[name], random_arrays()
    trainer = make_trainer(**case.theirs)
    trl_loss(trainer, arrays, slice(None))
    logged = trainer._metrics["train"]
    metrics = policy_loss(our_inputs(arrays), case.ours).metrics
    assert metrics["entropy"].item() == pytest.approx(logged["entropy"][-1])
    if case.ours.objective == "clip":
        assert metrics["clipped_fraction_acting"].item() == pytest.approx(logged["clip_ratio/region_mean"][-1])
        assert 0 < metrics["clipped_fraction_acting"] < 1
    if case.ours.kl_coef and not case.ours.kl_unbiased:  # TRL logs the weighted divergence, we the divergence
        assert metrics["kl"].item() == pytest.approx(logged["kl"][-1])


def test_the_entropy_bonus_is_trls_with_a_mean_over_tokens(make_trainer: MakeTrainer) -> None:
    # TRL takes the mean over tokens whatever the loss type; ours goes by the aggregation, so they meet here.
    arrays = random_arrays()
    trainer = make_trainer(loss_type="bnpo", entropy_coef=0.2)
    theirs = trl_loss(trainer, arrays, slice(None)) * ACCUMULATION
    ours = policy_loss(our_inputs(arrays), LossConfig(aggregation="token_mean", entropy_coef=0.2)).loss
    assert_same(theirs, ours, arrays.logprobs, arrays.entropy)


def test_a_row_without_trained_tokens_counts_in_trls_mean_over_sequences(make_trainer: MakeTrainer) -> None:
    arrays = random_arrays()
    arrays = replace(arrays, mask=arrays.mask & (torch.arange(ROWS) != 3)[:, None])
    theirs = trl_loss(make_trainer(loss_type="grpo"), arrays, slice(None)) * ACCUMULATION
    ours = policy_loss(our_inputs(arrays), LossConfig()).loss
    torch.testing.assert_close(ours * (ROWS - 1) / ROWS, theirs)
    assert_same(theirs, policy_loss(our_inputs(arrays, denominator=ROWS), LossConfig()).loss, arrays.logprobs)


# From completions to inputs: TRL's own preparation of rewards, corrections and masks

PROMPTS = [[40, 41]] * 4 + [[42]] * 4
REWARDS = [1.0, 0.0, 0.5, 1.0, 0.1, 0.1, 0.1, 0.1]
GROUPS = torch.tensor([0] * 4 + [1] * 4)


def completions(seed: int = 1) -> list[list[int]]:
    """Of 1 to 6 tokens, the end included."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(WIDTH, (ROWS,), generator=random).tolist()
    return [[*torch.randint(43, 120, (length,), generator=random).tolist(), END_ID] for length in lengths]


def prepared(trainer: Any, sampled: Sequence[Sequence[float]] | None = None) -> dict[str, Tensor]:
    """The inputs that TRL makes of these completions."""
    answer = (PROMPTS, completions(), None, ["x"] * ROWS, sampled, {}, None, None)
    trainer._generate = lambda prompts: answer
    inputs: dict[str, Tensor] = trainer._generate_and_score_completions([{"prompt": "a"}] * ROWS)
    return inputs


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_are_trls(make_trainer: MakeTrainer, scale: Scale) -> None:
    trainer = make_trainer(REWARDS, scale_rewards=scale)
    rewards = torch.tensor(REWARDS)
    theirs = prepared(trainer)["advantages"]
    ours = group_advantages(rewards, GROUPS, scale)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)  # 1e-8 of rounding over a deviation of 1e-4
    torch.testing.assert_close(ours[:4], theirs[:4])
    assert ours[4:].tolist() == [0.0] * 4
    if scale != "batch":
        is_equal, _ = equal_groups(rewards, GROUPS)
        assert is_equal.float().mean().item() == trainer._metrics["train"]["frac_reward_zero_std"][-1]


@pytest.mark.parametrize("bounds", [(None, 3.0), (0.5, 1.5)])
@pytest.mark.parametrize("correction", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_corrections_are_trls(
    make_trainer: MakeTrainer, level: CorrectionLevel, correction: Correction, bounds: tuple[float | None, float]
) -> None:
    low, high = bounds
    trainer = make_trainer(
        REWARDS,
        loss_type="grpo",
        vllm_importance_sampling_mode=f"{level}_{correction}",
        vllm_importance_sampling_clip_max=high,
        vllm_importance_sampling_clip_min=low,
    )
    trainer.use_vllm = True  # set afterwards: vLLM itself would only be asked to generate
    arrays = random_arrays()
    truth = prepared(trainer, [[0.0] * len(tokens) for tokens in completions()])["old_per_token_logps"]
    noise = 1.2 * torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3))
    sampled = [(truth[row] + noise[row])[: len(tokens)].tolist() for row, tokens in enumerate(completions())]
    inputs = prepared(trainer, sampled)
    mask = inputs["completion_mask"].bool()
    old, rollout = inputs["old_per_token_logps"].double(), inputs["sampling_per_token_logps"].double()
    drifted = torch.where(mask, old + 0.3 * arrays.old, 0.0).detach().requires_grad_()
    arrays = replace(
        arrays, logprobs=drifted, old=old, advantages=inputs["advantages"].double() + arrays.advantages, mask=mask
    )
    weights = inputs["importance_sampling_ratio"]
    theirs = trl_loss(trainer, arrays, slice(None), importance_sampling_ratio=weights) * ACCUMULATION
    outputs = policy_loss(
        replace(our_inputs(arrays), rollout_logprobs=rollout, old_logprobs=old),
        LossConfig(
            correction=correction,
            correction_level=level,
            correction_max=high,
            correction_min=0.0 if low is None else low,
        ),
    )
    assert outputs.metrics["correction_fraction"] > 0
    expected = torch.autograd.grad(theirs, drifted)[0]
    torch.testing.assert_close(outputs.loss, theirs, rtol=1e-5, atol=1e-6)  # TRL's weights are fp32
    torch.testing.assert_close(torch.autograd.grad(outputs.loss, drifted)[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("buffer", [0, 1, 4, 10])
def test_the_overlong_penalty_is_trls(make_trainer: MakeTrainer, buffer: int) -> None:
    from trl.rewards import get_soft_overlong_punishment

    lengths = torch.arange(15)
    theirs = get_soft_overlong_punishment(10, buffer)([[0] * length for length in lengths.tolist()])
    assert overlong_penalty(lengths, max_length=10, buffer=buffer).tolist() == pytest.approx(theirs)


def test_a_real_models_parameters_get_trls_gradient(make_trainer: MakeTrainer) -> None:
    """From tokens to the gradient of every parameter: the model, the output head, temperature, reference and loss."""
    temperature = 0.7
    trainer = make_trainer(REWARDS, loss_type="dapo", epsilon_high=0.28, beta=0.1, temperature=temperature)
    with torch.no_grad():  # else the reference is the policy, and its divergence 0
        trainer.ref_model.lm_head.weight.add_(0.1)
        trainer.ref_model.model.norm.weight.mul_(0.8)
    inputs = prepared(trainer)
    model = trainer.model
    trainer._compute_loss(model, inputs).backward()
    theirs = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()

    tokens = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    mask = inputs["completion_mask"].bool()
    hidden = model.model(tokens, attention_mask=attention_mask).last_hidden_state[:, -WIDTH - 1 : -1]
    logprobs, _ = token_logprobs(hidden, model.lm_head.weight, inputs["completion_ids"], temperature=temperature)
    outputs = policy_loss(
        LossInputs(logprobs, logprobs.detach(), inputs["advantages"], mask, ref_logprobs=inputs["ref_per_token_logps"]),
        replace(LossConfig.preset("dapo"), kl_coef=0.1, kl_unbiased=True),
    )
    outputs.loss.backward()
    assert outputs.metrics["kl"] > 0.01
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, theirs[name], rtol=1e-4, atol=1e-6, msg=lambda text, n=name: n + text
        )
