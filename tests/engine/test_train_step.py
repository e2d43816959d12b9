"""One optimizer step: what it measures, what it changes, and that splitting a batch changes nothing."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from training import attached, made_up_groups, settings, small_model, trainee
from transformers import CohereConfig, CohereForCausalLM, GraniteConfig, GraniteForCausalLM

from grpo_engine.data.batching import Batch, make_batch
from grpo_engine.train.objective import loss_config
from grpo_engine.train.step import drop_stale, gradient_step
from grpo_engine.train.trainee import Trainee, TrainingDiverged


def masters(subject: Trainee) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in subject._masters.parameters])


def padded(batch: Batch, columns: int) -> Batch:
    """The same rows with more padding to their right."""
    tensors = {field.name: getattr(batch, field.name) for field in fields(batch)}
    wider = {
        name: torch.nn.functional.pad(value, (0, columns))
        for name, value in tensors.items()
        if isinstance(value, torch.Tensor) and value.ndim == 2
    }
    return replace(batch, **wider)


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo", "bnpo", "gspo", "cispo", "ppo_dual_clip"])
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_the_update_does_not_depend_on_the_split_into_micro_batches(loss: str, batch_size: int) -> None:
    batch = make_batch(made_up_groups(1), seq_len=32)
    whole = trainee(settings(loss=loss, batch_size=8, gradient_accumulation_steps=1))
    split = trainee(settings(loss=loss, batch_size=batch_size))
    first = gradient_step(whole, batch, step=0, policy_version=0)
    second = gradient_step(split, batch, step=0, policy_version=0)
    # Adam's first step is as large as the learning rate (1e-2), whatever the gradient: a hundredth of it is rounding.
    torch.testing.assert_close(masters(whole), masters(split), rtol=0, atol=1e-4)
    assert second.metrics == pytest.approx(first.metrics, rel=1e-3, abs=1e-5)
    torch.testing.assert_close(first.logprobs, second.logprobs, rtol=1e-4, atol=1e-5)


def test_padding_changes_neither_measurements_nor_update() -> None:
    groups = made_up_groups(2)
    narrow, wide = trainee(), trainee()
    first = gradient_step(narrow, make_batch(groups, seq_len=32), step=0, policy_version=0)
    second = gradient_step(wide, padded(make_batch(groups, seq_len=32), 7), step=0, policy_version=0)
    assert second.metrics == pytest.approx(first.metrics, rel=1e-4, abs=1e-6)
    torch.testing.assert_close(masters(narrow), masters(wide), rtol=0, atol=1e-4)


def test_the_logprobs_are_those_of_a_plain_log_softmax_at_the_groups_temperature() -> None:
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


def test_a_model_that_scales_its_logits_gets_the_log_probabilities_it_means() -> None:
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    batch = make_batch(made_up_groups(3), seq_len=32)
    for model in (
        GraniteForCausalLM(GraniteConfig(**sizes, **heads, logits_scaling=8.0)),
        CohereForCausalLM(CohereConfig(**sizes, **heads, logit_scale=0.25)),
    ):
        logits = model(input_ids=batch.inputs, attention_mask=batch.attention_mask).logits.float()
        expected = logits.log_softmax(-1).gather(-1, batch.labels[..., None])[..., 0]
        logprobs, _ = Trainee(attached(model), settings()).logprobs(batch)
        torch.testing.assert_close(logprobs[batch.mask], expected[batch.mask], rtol=1e-4, atol=1e-5)


def test_what_inference_reads_changes_only_when_the_weights_are_written() -> None:
    subject = trainee()
    before = subject.model.model.embed_tokens.weight.detach().clone()
    result = gradient_step(subject, make_batch(made_up_groups(4), seq_len=32), step=0, policy_version=0)
    assert result.applied
    assert torch.equal(subject.model.model.embed_tokens.weight, before)
    subject.write_weights()
    assert not torch.equal(subject.model.model.embed_tokens.weight, before)


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
    with pytest.raises(TrainingDiverged, match=r"2 steps in a row.*--lr"):
        gradient_step(subject, batch, step=1, policy_version=0)


def test_staleness_counts_versions_between_sampling_and_training() -> None:
    groups = made_up_groups(7, version=3) + made_up_groups(8, version=5)
    metrics = gradient_step(trainee(), make_batch(groups, seq_len=32), step=6, policy_version=6).metrics
    assert metrics["rollout/staleness_max"] == 3
    assert 1 < metrics["rollout/staleness_mean"] < 3


def test_a_stock_environment_says_no_versions_and_gets_no_staleness() -> None:
    groups = [g.model_copy(update={"policy_versions": None}) for g in made_up_groups(9)]
    metrics = gradient_step(trainee(), make_batch(groups, seq_len=32), step=0, policy_version=4).metrics
    assert "rollout/staleness_mean" not in metrics
    assert drop_stale(groups, 100, 0) == groups


def test_groups_beyond_the_staleness_limit_are_dropped() -> None:
    old, fresh = made_up_groups(10, groups=1, version=1), made_up_groups(11, groups=1, version=4)
    assert drop_stale(old + fresh, 5, 1) == fresh
    assert drop_stale(old + fresh, 5, 4) == old + fresh
    assert drop_stale(old + fresh, 5, None) == old + fresh


def test_rewards_that_are_all_equal_are_counted_and_teach_nothing() -> None:
    groups = [g.model_copy(update={"scores": [0.5] * 4}) for g in made_up_groups(12)]
    subject = trainee()
    before = masters(subject)
    metrics = gradient_step(subject, make_batch(groups, seq_len=32), step=0, policy_version=0).metrics
    assert metrics["reward/frac_zero_std"] == 1
    assert metrics["train/grad_norm"] == 0
    assert torch.equal(masters(subject), before)


def test_clip_eps_is_the_band_unless_a_preset_has_its_own() -> None:
    assert (loss_config(settings(clip_eps=0.1)).clip_low, loss_config(settings(clip_eps=0.1)).clip_high) == (0.1, 0.1)
    assert loss_config(settings(loss="dapo")).clip_high == 0.28
    assert loss_config(settings(loss="dapo", clip_high=0.3)).clip_high == 0.3
    assert loss_config(settings(loss="dr_grpo")).constant_length == 32
