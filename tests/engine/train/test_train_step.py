"""One batch: what it measures, what it changes, what each setting does, and that splitting it changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from training import attached, made_up_groups, settings, small_model, trainee
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from grpo_engine.data.batching import Batch, make_batch
from grpo_engine.models.config import LoraSettings
from grpo_engine.models.lora import add_lora
from grpo_engine.train.batch import drop_stale, trainable_batch
from grpo_engine.train.checkpointing import checkpoints
from grpo_engine.train.reference import FrozenCopy
from grpo_engine.train.step import StepResult, advantage_metrics, gradient_step, shaped_rewards
from grpo_engine.train.trainee import Trainee, TrainingDiverged
from grpo_engine.train.unused_settings import settings_without_effect


def masters(subject: Trainee) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in subject._masters.parameters])


def mixed_batch() -> Batch:
    """Two groups that differ, one whose rewards are equal, and completions that were cut short in each."""
    first, second, equal = made_up_groups(1, groups=3)
    return make_batch(
        [
            first.model_copy(update={"truncated": [False, True, False, False]}),
            second.model_copy(update={"truncated": [False, False, True, True]}),
            equal.model_copy(update={"scores": [0.25] * 4, "truncated": [True, False, False, False]}),
        ],
        seq_len=32,
    )


def in_float64(subject: Trainee) -> Trainee:
    """The same, computing in float64; its masters stay fp32."""
    doubled(subject.model)
    if isinstance(subject.reference, FrozenCopy):
        doubled(subject.reference._scorer.causal_lm)
    return subject


def doubled(model: torch.nn.Module) -> torch.nn.Module:
    """The model in float64, its norms too, which transformers computes in fp32 whatever the type."""
    for module in model.double().modules():
        if isinstance(module, LlamaRMSNorm):
            module.forward = partial(
                torch.nn.functional.rms_norm,
                normalized_shape=module.weight.shape,
                weight=module.weight,
                eps=module.variance_epsilon,
            )
    return model


def gradient(subject: Trainee, batch: Batch) -> tuple[Tensor, StepResult]:
    """What one step adds up for all parameters, in the model's type, before any clipping."""
    parameters = [p for p in subject.model.parameters() if p.requires_grad]
    sums = [torch.zeros_like(p) for p in parameters]
    hooks = [p.register_hook(partial(_add, total)) for p, total in zip(parameters, sums, strict=True)]
    result = gradient_step(subject, batch, step=0, policy_version=0)
    for hook in hooks:
        hook.remove()
    return torch.cat([total.flatten() for total in sums]), result


def _add(total: Tensor, gradient: Tensor) -> None:
    """Return nothing: the return value of a hook would replace the gradient."""
    total.add_(gradient)


def plain_logprobs(model: torch.nn.Module, batch: Batch) -> Tensor:
    """By the model's own logits, row by row, with their graph."""
    logits = model(input_ids=batch.inputs, attention_mask=batch.attention_mask).logits
    return logits.log_softmax(-1).gather(-1, batch.labels[..., None])[..., 0]


def plain_gradient(batch: Batch, loss: Callable[[Tensor], Tensor]) -> Tensor:
    """Of a loss of log-probabilities (B, T), for the model that every trainee here starts from, in float64."""
    model = doubled(small_model())
    torch.autograd.backward(loss(plain_logprobs(model, batch)))
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a model with other weights."""
    folder = tmp_path_factory.mktemp("models") / "other"
    small_model(seed=1).save_pretrained(folder)
    return str(folder)


CHANGES: dict[str, dict[str, object]] = {
    **{loss: {"loss": loss} for loss in ("dr_grpo", "dapo", "bnpo", "gspo", "cispo", "ppo_dual_clip")},
    "clip": {"clip_low": 0.0, "clip_high": 0.05, "dual_clip": 1.1},
    "cispo_max": {"loss": "cispo", "cispo_max": 1.0},
    "entropy": {"entropy_coef": 0.1},
    **{f"kl_{k}": {"kl_coef": 0.3, "kl_estimator": k} for k in ("k1", "k2", "k3")},
    "kl_unbiased": {"kl_coef": 0.3, "kl_unbiased": True},
    "truncate": {"correction": "truncate", "correction_max": 1.1, "correction_min": 0.9},
    "mask": {"correction": "mask", "correction_max": 0.5, "correction_min": 0.1, "correction_level": "sequence"},
    "geometric": {"correction": "truncate", "correction_max": 1.05, "correction_level": "geometric"},
    "scale_batch": {"advantage_scale": "batch"},
    "scale_none": {"advantage_scale": "none", "loss": "bnpo"},
    "leave_one_out": {"advantage_baseline": "leave_one_out"},
    "drop_equal_groups": {"drop_equal_groups": True},
    "mask_truncated": {"mask_truncated": True, "loss": "dapo"},
    "overlong": {"overlong_buffer": 4, "overlong_length": 6},
    "everything": {
        "loss": "dr_grpo", "entropy_coef": 0.1, "kl_coef": 0.3, "correction": "truncate", "drop_equal_groups": True,
        "mask_truncated": True, "overlong_buffer": 4, "overlong_length": 6, "advantage_baseline": "leave_one_out",
    },
}  # fmt: skip
"""Every setting between advantages and gradient, each with a value that acts on `mixed_batch`."""


@pytest.fixture(scope="module")
def default_gradient() -> Tensor:
    return gradient(in_float64(trainee(settings(batch_size=12))), mixed_batch())[0]


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, *CHANGES.values()], ids=["default", *CHANGES])
def test_every_setting_changes_the_gradient_and_none_makes_it_depend_on_the_split_into_micro_batches(
    changes: dict[str, object], other_model: str, default_gradient: Tensor
) -> None:
    if "kl_coef" in changes:
        changes = {**changes, "reference_model": other_model}
    batch = mixed_batch()
    whole, of_whole = gradient(in_float64(trainee(settings(**changes, batch_size=12))), batch)
    assert whole.norm() > 1e-3
    assert ((whole - default_gradient).norm() > 1e-3 * default_gradient.norm()) == bool(changes)
    for split in ({"batch_size": 1}, {"batch_size": 5}, {"micro_batch_tokens": 32}):
        parts, of_parts = gradient(in_float64(trainee(settings(**{**changes, **split}))), batch)
        torch.testing.assert_close(parts, whole, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(of_parts.logprobs, of_whole.logprobs, rtol=1e-4, atol=1e-5)
        assert of_parts.metrics == pytest.approx(of_whole.metrics, rel=1e-5, abs=1e-6)


def test_logprobs_and_entropy_are_those_of_a_plain_log_softmax_at_the_groups_temperature() -> None:
    groups = made_up_groups(3)
    groups = [
        g.model_copy(update={"generation_params": {"temperature": 0.5, "logprobs_mode": "processed"}}) for g in groups
    ]
    batch = make_batch(groups, seq_len=32)
    model = small_model()
    logits = model(input_ids=batch.inputs, attention_mask=batch.attention_mask).logits.float() / 0.5
    expected = logits.log_softmax(-1).gather(-1, batch.labels[..., None])[..., 0]
    result = gradient_step(trainee(), batch, step=0, policy_version=0)
    torch.testing.assert_close(result.logprobs[batch.mask], expected[batch.mask].detach(), rtol=1e-4, atol=1e-5)
    assert not result.logprobs[~batch.mask].any()
    entropies = torch.distributions.Categorical(logits=logits.detach()).entropy()[batch.mask]
    assert result.metrics["grpo/entropy"] == pytest.approx(float(entropies.mean()), rel=1e-4)


@pytest.mark.parametrize("num_updates", [1, 3])
def test_what_inference_reads_changes_only_when_the_weights_are_written(num_updates: int) -> None:
    subject = trainee(settings(num_iterations=num_updates))
    weight = subject.model.model.embed_tokens.weight
    address, before = weight.data_ptr(), weight.detach().clone()
    assert gradient_step(subject, make_batch(made_up_groups(4), seq_len=32), step=0, policy_version=0).applied
    assert weight.data_ptr() == address
    assert torch.equal(weight, before)
    subject.write_weights()
    assert not torch.equal(weight, before)
    assert torch.equal(weight.flatten(), masters(subject)[: weight.numel()])


def test_better_completions_become_more_probable_and_worse_ones_less() -> None:
    [group] = made_up_groups(5, groups=1)
    group = group.model_copy(update={"scores": [1.0, 0.0, 0.0, 0.0]})
    batch = make_batch([group], seq_len=32)
    subject = trainee(settings(lr=1e-3))
    before = gradient_step(subject, batch, step=0, policy_version=0).logprobs.sum(dim=1)
    subject.write_weights()
    after = gradient_step(subject, batch, step=1, policy_version=1).logprobs.sum(dim=1)
    assert after[0] > before[0]
    assert (after - before)[1:].mean() < 0


def test_a_step_that_is_not_finite_is_skipped_and_several_in_a_row_stop_the_training() -> None:
    subject = trainee(settings(max_bad_steps=2))
    batch = make_batch(made_up_groups(6), seq_len=32)
    with torch.no_grad():
        subject.model.model.norm.weight[0] = torch.nan
    before = masters(subject)
    assert not gradient_step(subject, batch, step=0, policy_version=0).applied
    assert torch.equal(masters(subject), before)
    assert all(p.grad is None for group in subject.optimizer.param_groups for p in group["params"])
    with pytest.raises(TrainingDiverged, match=r"2 steps in a row.*--lr"):
        gradient_step(subject, batch, step=1, policy_version=0)


def in_float16(scale: float = 2.0**16) -> Trainee:
    """A trainee of a float16 model with this scale of its loss."""
    subject = Trainee(attached(small_model().half()), settings(dtype="float16"))
    subject._scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    return subject


def test_a_float16_model_is_trained_as_in_float32() -> None:
    batch = make_batch(made_up_groups(6), seq_len=32)
    half, full = in_float16(), trainee()
    results = [gradient_step(subject, batch, step=0, policy_version=0) for subject in (half, full)]
    norms = [result.metrics["train/grad_norm"] for result in results]
    assert norms[0] == pytest.approx(norms[1], rel=0.01)
    moved = [masters(subject) - masters(trainee()) for subject in (half, full)]
    assert torch.cosine_similarity(moved[0], moved[1], dim=0) > 0.99
    assert results[0].metrics["train/loss_scale"] == 2**16
    assert "train/loss_scale" not in results[1].metrics


def test_scaling_the_loss_keeps_gradients_that_float16_rounds_to_zero() -> None:
    batch = make_batch(made_up_groups(6), seq_len=32)
    batch = replace(batch, rewards=batch.rewards * 1e-5)  # advantages of 1e-5, on which clipping has no effect
    norms = {}
    for scale in (1.0, 2.0**16):
        subject = in_float16(scale)
        subject.config = subject.config.model_copy(update={"advantage_scale": "none"})
        norms[scale] = gradient_step(subject, batch, step=0, policy_version=0).metrics["train/grad_norm"]
    exact = trainee(settings(advantage_scale="none"))
    expected = gradient_step(exact, batch, step=0, policy_version=0).metrics["train/grad_norm"]
    assert norms[2.0**16] == pytest.approx(expected, rel=0.01)
    assert norms[1.0] != pytest.approx(expected, rel=0.01)


def test_a_batch_whose_scaled_gradients_overflow_is_computed_again_and_no_bad_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    batch = make_batch(made_up_groups(6), seq_len=32)
    high, usual = in_float16(2.0**30), in_float16()
    high.config = high.config.model_copy(update={"max_bad_steps": 1})
    results = [gradient_step(subject, batch, step=0, policy_version=0) for subject in (high, usual)]
    assert results[0].applied
    assert 1 < results[0].metrics["train/loss_scale"] < 2**30
    assert "computed again with the loss scaled by less" in caplog.text
    assert results[0].metrics["train/grad_norm"] == pytest.approx(results[1].metrics["train/grad_norm"], rel=0.01)


def test_a_float16_model_that_overflows_whatever_the_scale_fails() -> None:
    subject = in_float16(8.0)
    subject.config = subject.config.model_copy(update={"max_bad_steps": 1})
    subject.model.model.norm.weight.register_hook(lambda gradient: gradient * torch.inf)
    with pytest.raises(TrainingDiverged):
        gradient_step(subject, make_batch(made_up_groups(6), seq_len=32), step=0, policy_version=0)
    assert subject._scaler.get_scale() <= 1


def test_the_scale_of_the_loss_is_kept_over_a_restart(tmp_path: Path) -> None:
    before, after = in_float16(2.0**7), in_float16()
    gradient_step(before, make_batch(made_up_groups(6), seq_len=32), step=0, policy_version=0)
    folder = before.save(tmp_path, step=1, policy_version=1, lease="", settings={})
    after.restore(checkpoints.load(folder, model_name="test/model"))
    assert after._scaler.state_dict() == before._scaler.state_dict()
    assert (after._scaler.get_scale(), before._scaler.state_dict()["_growth_tracker"]) == (2**7, 1)
    full = trainee()  # which resumes without it
    full.restore(checkpoints.load(folder, model_name="test/model"))
    assert full.scale_metrics() == {}


def test_advantages_are_measured_over_trained_tokens() -> None:
    advantages = torch.tensor([[2.0, 2.0, 2.0], [-2.0, 0.0, 0.0]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    assert advantage_metrics(advantages, mask) == pytest.approx(
        {"advantage/mean": 1.0, "advantage/std": 3**0.5, "advantage/abs_max": 2.0}
    )
    assert gradient_step(trainee(), mixed_batch(), step=0, policy_version=0).metrics["advantage/std"] > 0


def test_staleness_counts_versions_between_sampling_and_training() -> None:
    groups = made_up_groups(7, version=3) + made_up_groups(8, version=5)
    metrics = gradient_step(trainee(), make_batch(groups, seq_len=32), step=6, policy_version=6).metrics
    assert metrics["rollout/staleness_max"] == 3
    assert 1 < metrics["rollout/staleness_mean"] < 3


def test_groups_beyond_the_staleness_limit_are_dropped_and_those_without_versions_have_none() -> None:
    old, fresh = made_up_groups(10, groups=1, version=1), made_up_groups(11, groups=1, version=4)
    assert drop_stale(old + fresh, 5, 1) == fresh
    assert drop_stale(old + fresh, 5, 4) == old + fresh
    assert drop_stale(old + fresh, 5, None) == old + fresh
    stock = [g.model_copy(update={"policy_versions": None}) for g in made_up_groups(9)]
    assert drop_stale(stock, 100, 0) == stock
    metrics = gradient_step(trainee(), make_batch(stock, seq_len=32), step=0, policy_version=4).metrics
    assert "rollout/staleness_mean" not in metrics


def test_a_group_whose_versions_do_not_fit_its_tokens_is_left_out_by_name_and_ends_no_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sound, ragged = made_up_groups(13)
    ragged = ragged.model_copy(update={"policy_versions": [[0]] * 4})
    groups = drop_stale([sound, ragged], 5, 8)
    assert trainable_batch(groups, 32, vocab_size=64).num_sequences == 4
    assert "policy_versions has 1 entries" in caplog.text


def test_rewards_that_are_all_equal_are_counted_and_change_no_weight() -> None:
    groups = [g.model_copy(update={"scores": [0.5] * 4}) for g in made_up_groups(12)]
    subject = trainee()
    before = masters(subject)
    metrics = gradient_step(subject, make_batch(groups, seq_len=32), step=0, policy_version=0).metrics
    assert metrics["reward/frac_zero_std"] == 1
    assert metrics["train/grad_norm"] == 0
    assert torch.equal(masters(subject), before)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"dual_clip": 2.5}, {"dual_clip": 2.5}),
        ({"entropy_coef": 0.1}, {"entropy_coef": 0.1}),
        ({"kl_coef": 0.2, "kl_estimator": "k1"}, {"kl_coef": 0.2, "kl_estimator": "k1"}),
        ({"kl_unbiased": True}, {"kl_unbiased": True}),
        (
            {"correction": "mask", "correction_level": "geometric"},
            {"correction": "mask", "correction_level": "geometric"},
        ),
        ({"correction_max": 3.0, "correction_min": 0.5}, {"correction_max": 3.0, "correction_min": 0.5}),
        ({"clip_eps": 0.1}, {"clip_low": 0.1, "clip_high": 0.1}),
        ({"clip_low": 0, "clip_high": 0.3}, {"clip_low": 0, "clip_high": 0.3}),
        ({"loss": "dapo"}, {"clip_high": 0.28}),
        ({"loss": "dapo", "clip_high": 0.3}, {"clip_high": 0.3}),
        ({"loss": "dr_grpo"}, {"constant_length": 32}),
        ({"loss": "ppo_dual_clip"}, {"dual_clip": 3}),
        ({"loss": "ppo_dual_clip", "dual_clip": 2}, {"dual_clip": 2}),
        ({"loss": "cispo"}, {"cispo_max": 5}),
        ({"loss": "cispo", "cispo_max": 3}, {"cispo_max": 3}),
    ],
)
def test_the_loss_has_the_given_settings_and_else_those_of_its_preset(
    given: dict[str, object], expected: dict[str, object]
) -> None:
    config = settings(**given).loss_config
    assert {name: getattr(config, name) for name in expected} == expected
    assert config != settings().loss_config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"overlong_buffer": 4}, "overlong_buffer 4 needs overlong_length"),
        ({"overlong_buffer": 9, "overlong_length": 8}, "overlong_buffer 9 is more than overlong_length 8"),
        ({"correction_min": 3, "correction": "mask"}, "correction_min = 3.0 lies above correction_max = 2.0"),
        ({"loss": "cispo", "dual_clip": 3}, "dual_clip = 3.0 has no effect"),
        ({"micro_batch_tokens": 31}, "micro_batch_tokens 31 is less than seq_len 32"),
        ({"train_layer_indices": "0", "bridge": {"mode": "lora_only"}}, "lora_only trains adapters alone"),
        ({"train_layer_indices": "0", "bridge": {"mode": "lora_merged"}}, "lora_merged trains adapters alone"),
        ({"lora_dropout": 0.05, "bridge": {"mode": "lora_merged"}}, r"lora_dropout 0\.05 cannot be merged"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        settings(**changes)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, []),
        ({"loss": "dapo", "clip_eps": 0.1}, ["clip_eps"]),
        ({"loss": "cispo", "clip_low": 0.1, "clip_high": 0.1}, ["clip_low", "clip_high"]),
        ({"clip_low": 0.1, "clip_high": 0.1, "clip_eps": 0.1}, ["clip_eps"]),
        ({"cispo_max": 3}, ["cispo_max"]),
        ({"lora_r": 8, "lora_layer_indices": "0"}, ["lora_r", "lora_layer_indices"]),
        ({"lora_r": 8, "bridge": {"mode": "lora_only"}}, []),
        ({"lora_r": 8, "bridge": {"mode": "lora_merged"}}, []),
        ({"wandb_project": "p", "trackio_project": "p"}, ["wandb_project", "trackio_project"]),
        ({"eval_samples": 2}, ["eval_samples"]),
        ({"eval_samples": 2, "eval_every": 5}, []),
        ({"kl_estimator": "k2"}, ["kl_estimator"]),
        ({"kl_estimator": "k2", "reference_model": "m"}, []),
        ({"kl_unbiased": True}, ["kl_unbiased"]),
        ({"kl_estimator": "k1", "kl_coef": 0.1}, ["kl_coef"]),
        ({"kl_estimator": "k1", "kl_coef": 0.1, "kl_unbiased": True}, []),
        ({"correction_max": 3, "correction_level": "sequence"}, ["correction_level", "correction_max"]),
        ({"correction": "mask", "correction_max": 3}, []),
        ({"correction": "mask", "dual_clip": 3}, ["dual_clip"]),
        ({"correction": "mask", "dual_clip": 3, "num_iterations": 2}, []),
        ({"overlong_length": 9, "overlong_penalty": 2}, ["overlong_length", "overlong_penalty"]),
        ({"overlong_length": 9, "overlong_buffer": 2, "overlong_penalty": 0}, ["overlong_buffer"]),
        ({"overlong_length": 33, "overlong_buffer": 2}, ["overlong_buffer"]),
        ({"overlong_length": 32, "overlong_buffer": 2}, []),
        ({"adafactor_relative_step": True, "warmup_steps": 2}, ["adafactor_relative_step"]),
        ({"optimizer": "adafactor", "adafactor_relative_step": True}, ["lr"]),
        ({"keep_attention": True}, ["keep_attention"]),
        ({"keep_attention": True, "gradient_checkpointing": True}, []),
    ],
)
def test_a_setting_without_effect_is_named(changes: dict[str, object], names: list[str]) -> None:
    sentences = list(settings_without_effect(settings(**changes)))
    assert [sentence.split()[0] for sentence in sentences] == names


def test_a_trainer_warns_at_its_start_of_settings_without_effect(caplog: pytest.LogCaptureFixture) -> None:
    Trainee(attached(small_model().bfloat16()), settings(dtype="bfloat16", gradient_dtype="bfloat16"))
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []
    trainee(settings(cispo_max=3, master_weights="stochastic_rounding", gradient_dtype="bfloat16"))
    assert "cispo_max has no effect with loss grpo" in caplog.text
    assert "stochastic_rounding has no effect" in caplog.text
    assert "gradient_dtype bfloat16 has no effect" in caplog.text


def test_gradients_of_adapters_on_a_bf16_model_are_fp32_whatever_the_setting(caplog: pytest.LogCaptureFixture) -> None:
    config = settings(dtype="bfloat16", gradient_dtype="bfloat16", bridge={"mode": "lora_only"})
    subject = Trainee(attached(add_lora(small_model().bfloat16(), LoraSettings(rank=4)), is_shared=False), config)
    assert "gradient_dtype bfloat16 has no effect" in caplog.text
    torch.autograd.backward(subject.logprobs(make_batch(made_up_groups(0), seq_len=32))[0].sum())
    gradients = [p.grad for group in subject.optimizer.param_groups for p in group["params"]]
    assert {gradient.dtype for gradient in gradients if gradient is not None} == {torch.float32}


@pytest.mark.parametrize("master_weights", ["float32", "stochastic_rounding"])
@pytest.mark.parametrize(("batch_size", "same"), [(8, 1e-6), (1, 2e-3)], ids=["one micro-batch", "eight"])
def test_steps_with_bf16_gradients_are_nearly_those_with_fp32_gradients(
    master_weights: str, batch_size: int, same: float
) -> None:
    """Of one micro-batch the sums are exact, and differ by their order alone."""
    norms, ends = [], []
    for gradient_dtype in ("float32", "bfloat16"):
        dtypes = {"dtype": "bfloat16", "gradient_dtype": gradient_dtype, "master_weights": master_weights}
        subject = Trainee(
            attached(small_model().bfloat16()), settings(**dtypes, batch_size=batch_size, max_grad_norm=0.01)
        )
        torch.manual_seed(0)
        result = gradient_step(subject, make_batch(made_up_groups(0), seq_len=32), step=0, policy_version=0)
        norms.append(result.metrics["train/grad_norm"])
        ends.append(torch.cat([value.flatten().float() for value in subject._masters.state_dict().values()]))
    assert norms[0] > 0.01  # so it was clipped
    assert norms[0] == pytest.approx(norms[1], rel=same)
    if batch_size == 8:
        torch.testing.assert_close(*ends, rtol=0, atol=1e-6 if master_weights == "float32" else 1e-3)


def test_a_setting_of_adafactor_leaves_the_learning_rate_of_adamw_to_its_schedule() -> None:
    subject = trainee(settings(adafactor_relative_step=True, warmup_steps=4, lr=1e-2))
    gradient_step(subject, make_batch(made_up_groups(0), seq_len=32), step=0, policy_version=0)
    assert [group["lr"] for group in subject.optimizer.param_groups] == [2.5e-3, 2.5e-3]


def test_a_penalty_for_length_enters_the_advantages_and_not_the_metrics() -> None:
    config = settings(overlong_buffer=2, overlong_length=6, overlong_penalty=0.5)
    batch = mixed_batch()
    lost_at = {3: 0.0, 4: 0.0, 5: 0.25, 6: 0.5, 7: 0.5}
    lengths = batch.mask.sum(dim=1).tolist()
    assert set(lengths) == set(lost_at)
    lost = torch.tensor([lost_at[length] for length in lengths])
    torch.testing.assert_close(shaped_rewards(batch, config), batch.rewards - lost)
    plain = gradient_step(trainee(), batch, step=0, policy_version=0)
    shaped = gradient_step(trainee(config), batch, step=0, policy_version=0)
    by_hand = gradient_step(trainee(), replace(batch, rewards=batch.rewards - lost), step=0, policy_version=0)
    torch.testing.assert_close(shaped.advantages, by_hand.advantages)
    assert not torch.allclose(shaped.advantages, plain.advantages, atol=0.1)
    for name in ("reward/mean", "reward/std", "reward/frac_zero_std"):
        assert shaped.metrics[name] == plain.metrics[name]


def test_dropping_groups_of_equal_rewards_equals_a_batch_without_them() -> None:
    first, second, equal = made_up_groups(20, groups=3)
    equal = equal.model_copy(update={"scores": [0.5] * 4})
    config = settings(drop_equal_groups=True, entropy_coef=0.1)
    dropping, never = trainee(config), trainee(config)
    result = gradient_step(dropping, make_batch([first, equal, second], seq_len=32), step=0, policy_version=0)
    expected = gradient_step(never, make_batch([first, second], seq_len=32), step=0, policy_version=0)
    torch.testing.assert_close(masters(dropping), masters(never), rtol=0, atol=1e-6)
    assert result.is_trained.tolist() == [True] * 4 + [False] * 4 + [True] * 4
    assert not result.logprobs[4:8].any()
    width = expected.logprobs.shape[1]
    torch.testing.assert_close(result.logprobs[result.is_trained][:, :width], expected.logprobs, rtol=1e-4, atol=1e-5)
    for name in ("train/loss", "train/grad_norm", "grpo/mean_ratio", "grpo/ess", "alignment/diff_abs_mean"):
        assert result.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-4)
    assert result.metrics["reward/frac_zero_std"] == pytest.approx(1 / 3)
    assert result.metrics["rollout/group_size_mean"] == 4


def test_a_group_with_advantages_of_its_own_is_not_dropped_for_equal_rewards() -> None:
    [group] = made_up_groups(21, groups=1)
    own = [[1.0 if label >= 0 else 0.0 for label in row] for row in group.masks]
    group = group.model_copy(update={"scores": [0.5] * 4, "advantages": own})
    config = settings(drop_equal_groups=True)
    assert gradient_step(trainee(config), make_batch([group], seq_len=32), step=0, policy_version=0).is_trained.all()


@pytest.mark.parametrize("loss", ["grpo", "bnpo"])
def test_truncated_completions_count_in_the_baseline_of_their_group_and_nowhere_else(loss: str) -> None:
    batch = mixed_batch()
    taken = batch.mask & ~batch.is_truncated[:, None]
    deviation = torch.cat([rewards - rewards.mean() for rewards in batch.rewards.double().split(4)])
    scale = torch.cat([rewards.std().expand(4) + 1e-4 for rewards in batch.rewards.double().split(4)])
    advantages = torch.where(torch.arange(12) < 8, deviation / scale, 0.0)[:, None]

    def plain_loss(logprobs: Tensor) -> Tensor:
        ratio = (logprobs - batch.rollout_logprobs.double()).exp()
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        per_token = torch.where(taken, -surrogate, 0.0)
        if loss == "bnpo":
            return per_token.sum() / taken.sum()
        lengths = taken.sum(dim=1)
        return (per_token.sum(dim=1) / lengths.clamp(min=1)).sum() / (lengths > 0).sum()

    expected = plain_gradient(batch, plain_loss)
    found, result = gradient(in_float64(trainee(settings(loss=loss, mask_truncated=True, batch_size=5))), batch)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    assert torch.equal(result.is_trained, ~batch.is_truncated)
    assert not result.logprobs[batch.is_truncated].any()
    assert result.metrics["rollout/truncated_fraction"] == pytest.approx(4 / 12)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            {"drop_equal_groups": True},
            "drop_equal_groups leave out all 8 completions of the batch, 8 of them truncated",
        ),
        ({"mask_truncated": True}, "mask_truncated leave out all 8 completions of the batch, 8 of them truncated"),
        ({"correction": "mask", "num_iterations": 2}, "the correction masks every token"),
    ],
    ids=["equal groups", "truncated", "correction"],
)
def test_a_batch_of_which_nothing_is_trained_moves_neither_weights_nor_momentum(
    setting: dict[str, object], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    subject = trainee(settings(**setting, weight_decay=0.1, max_bad_steps=1))
    batch = make_batch(made_up_groups(22), seq_len=32)
    assert gradient_step(subject, batch, step=0, policy_version=0).applied  # so that there is momentum
    if "correction" in setting:
        nothing = replace(batch, rollout_logprobs=batch.rollout_logprobs - 9.0)
    else:
        nothing = replace(batch, is_truncated=torch.ones(8, dtype=torch.bool), rewards=torch.full((8,), 0.5))
    before, state = masters(subject), copy.deepcopy(subject._optimizer.state_dict())
    result = gradient_step(subject, nothing, step=1, policy_version=1)
    assert not result.applied
    assert torch.equal(masters(subject), before)
    torch.testing.assert_close(subject._optimizer.state_dict(), state, rtol=0, atol=0)
    assert f"step 2: {message}" in caplog.text
    if "correction" in setting:
        assert result.metrics["grpo/correction_mean"] == 0
    else:
        assert not result.is_trained.any()
        assert not result.advantages.any()
        assert (result.metrics["train/loss"], result.metrics["train/grad_norm"]) == (0, 0)
        assert result.metrics["reward/mean"] == 0.5
    assert gradient_step(subject, batch, step=2, policy_version=1).applied


def plain_updates(batch: Batch, advantages: Tensor, *, updates: int, lr: float) -> tuple[Tensor, list[float]]:
    """The weights after GRPO's updates on one batch, and the mean ratio at each, in 20 lines of nothing but torch."""
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    lengths = batch.mask.sum(dim=1)
    old: Tensor | None = None
    ratios = []
    for _ in range(updates):
        logprobs = plain_logprobs(model, batch)
        old = logprobs.detach() if old is None else old
        ratio = torch.where(batch.mask, logprobs - old, 0.0).exp()
        ratios.append(float(ratio.detach()[batch.mask].mean()))
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        loss = -(torch.where(batch.mask, surrogate, 0.0).sum(dim=1) / lengths).mean()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]), ratios


@pytest.mark.parametrize(("updates", "is_shared"), [(2, False), (3, True)])
def test_several_updates_a_batch_are_those_of_a_plain_loop(updates: int, is_shared: bool) -> None:
    config = settings(num_iterations=updates, lr=1e-3, batch_size=3)
    subject = Trainee(attached(small_model(), is_shared=is_shared), config)
    batch = make_batch(made_up_groups(23), seq_len=32)
    result = gradient_step(subject, batch, step=0, policy_version=0)
    expected, ratios = plain_updates(batch, result.advantages, updates=updates, lr=1e-3)
    # Adam's updates are as large as the learning rate where a gradient is not 0: a hundredth of one is rounding.
    torch.testing.assert_close(masters(subject), expected, rtol=0, atol=1e-5)
    once, _ = plain_updates(batch, result.advantages, updates=updates - 1, lr=1e-3)
    assert (expected - once).abs().max() > 5e-4
    assert result.metrics["grpo/mean_ratio"] == pytest.approx(sum(ratios) / updates, rel=1e-5)
    assert ratios[-1] != pytest.approx(1, abs=1e-4)


def test_alignment_and_sample_size_are_measured_before_the_first_update() -> None:
    batch = make_batch(made_up_groups(24), seq_len=32)
    once = gradient_step(trainee(), batch, step=0, policy_version=0)
    thrice = gradient_step(trainee(settings(num_iterations=3)), batch, step=0, policy_version=0)
    assert torch.equal(once.logprobs, thrice.logprobs)
    measured = [name for name in once.metrics if name.startswith(("alignment/", "logprobs/"))] + ["grpo/ess"]
    assert len(measured) == 6
    for name in measured:
        assert once.metrics[name] == thrice.metrics[name]
    assert once.metrics["alignment/diff_abs_mean"] > 0.01


def test_an_update_that_is_not_finite_is_skipped_and_those_before_it_stand(caplog: pytest.LogCaptureFixture) -> None:
    subject = trainee(settings(num_iterations=3, lr=1e36, max_bad_steps=2))  # the second forward pass overflows
    result = gradient_step(subject, make_batch(made_up_groups(26), seq_len=32), step=0, policy_version=0)
    assert result.applied
    assert caplog.text.count("skipped") == 1
    assert masters(subject).isfinite().all()
    assert masters(subject).abs().max() > 1e35
    assert result.logprobs.isfinite().all()


def test_with_a_correction_and_one_update_the_gradient_is_the_policys_own_times_the_weight() -> None:
    batch = mixed_batch()
    subject = in_float64(trainee(settings(correction="truncate", correction_max=1.1, batch_size=5)))
    found, result = gradient(subject, batch)
    advantages = result.advantages.double()

    def plain_loss(logprobs: Tensor) -> Tensor:
        weights = (logprobs.detach() - batch.rollout_logprobs.double()).exp().clamp(max=1.1)
        per_token = torch.where(batch.mask, -weights * advantages * logprobs, 0.0)
        return (per_token.sum(dim=1) / batch.mask.sum(dim=1)).mean()

    torch.testing.assert_close(found, plain_gradient(batch, plain_loss), rtol=1e-5, atol=1e-8)
    weights = (result.logprobs - batch.rollout_logprobs)[batch.mask].exp().clamp(max=1.1)
    assert result.metrics["grpo/mean_ratio"] == 1
    assert result.metrics["grpo/clipped_fraction"] == 0
    assert result.metrics["grpo/correction_mean"] == pytest.approx(float(weights.mean()), rel=1e-5)
    assert 0 < result.metrics["grpo/correction_fraction"] < 1


def test_a_budget_of_tokens_makes_more_and_smaller_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = mixed_batch()
    sizes: list[int] = []
    subject = trainee(settings(micro_batch_tokens=32))
    score = subject.logprobs

    def record(part: Batch) -> tuple[Tensor, Tensor]:
        sizes.append(part.num_sequences)
        return score(part)

    monkeypatch.setattr(subject, "logprobs", record)
    gradient_step(subject, batch, step=0, policy_version=0)
    assert sum(sizes) == 12
    assert len(sizes) > 1
    assert max(sizes) > 1


def test_a_completion_cut_at_seq_len_is_trained_up_to_there() -> None:
    groups = made_up_groups(28)
    longest = max(len(tokens) for group in groups for tokens in group.tokens)
    batch = make_batch(groups, seq_len=longest - 1)
    assert batch.num_cut > 0
    assert gradient_step(trainee(), batch, step=0, policy_version=0).is_trained.all()
    masked = gradient_step(trainee(settings(mask_truncated=True)), batch, step=0, policy_version=0)
    assert torch.equal(masked.is_trained, ~batch.is_cut)
