"""The reference policy: whose log-probabilities it gives, what it leaves alone, and which way it pulls."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from training import VOCABULARY, attached, made_up_groups, settings, small_model, trainee
from transformers import LlamaForCausalLM

from grpo_engine.data.batching import Batch, make_batch
from grpo_engine.errors import ModelError
from grpo_engine.models.config import LoraSettings
from grpo_engine.models.lora import add_lora
from grpo_engine.train.reference import FrozenCopy, UnderAdapters, load_reference
from grpo_engine.train.scoring import Scorer
from grpo_engine.train.step import gradient_step
from grpo_engine.train.trainee import Trainee
from grpo_engine.wire.rollouts import ScoredGroup


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a model with other weights."""
    folder = tmp_path_factory.mktemp("models") / "other"
    small_model(seed=1).save_pretrained(folder)
    return str(folder)


def with_adapters(**changes: object) -> Trainee:
    """A trainee whose adapters are not zero."""
    model = add_lora(small_model(), LoraSettings(rank=4, alpha=8))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    return Trainee(attached(model, is_shared=False), settings(**changes))


def plain_logprobs(model: LlamaForCausalLM, batch: Batch, temperature: float = 1.0) -> Tensor:
    logits = model(input_ids=batch.inputs, attention_mask=batch.attention_mask).logits.float() / temperature
    chosen = logits.log_softmax(-1).gather(-1, batch.labels[..., None])[..., 0]
    return torch.where(batch.mask, chosen, 0.0).detach()


def k3(reference: Tensor, policy: Tensor, mask: Tensor) -> float:
    log_ratio = (reference - policy)[mask]
    return float((log_ratio.exp() - 1 - log_ratio).mean())


def test_the_reference_of_adapters_is_the_model_under_them() -> None:
    subject, batch = with_adapters(kl_coef=0.1), make_batch(made_up_groups(1), seq_len=32)
    assert isinstance(subject.reference, UnderAdapters)
    base, _ = Scorer(small_model()).logprobs(batch)
    policy, _ = subject.logprobs(batch)
    assert torch.equal(subject.reference.logprobs(batch), base)
    assert not torch.allclose(policy, base, atol=0.1)


def test_scoring_the_reference_under_adapters_changes_nothing() -> None:
    subject, batch = with_adapters(kl_coef=0.1), make_batch(made_up_groups(1), seq_len=32)
    frozen = next(p for name, p in subject.model.named_parameters() if "layers.0" in name and "lora_A" in name)
    frozen.requires_grad_(False)
    learning = [name for name, p in subject.model.named_parameters() if p.requires_grad]
    before, _ = subject.logprobs(batch)
    assert subject.reference is not None
    assert not subject.reference.logprobs(batch).requires_grad
    after, _ = subject.logprobs(batch)
    assert torch.equal(before, after)
    assert [name for name, p in subject.model.named_parameters() if p.requires_grad] == learning
    assert subject.model.training


def test_a_step_with_adapters_measures_the_divergence_from_the_model_under_them() -> None:
    subject, batch = with_adapters(kl_coef=0.1), make_batch(made_up_groups(2), seq_len=32)
    result = gradient_step(subject, batch, step=0, policy_version=0)
    expected = k3(plain_logprobs(small_model(), batch), result.logprobs, batch.mask)
    assert result.metrics["grpo/kl"] == pytest.approx(expected, rel=1e-3)
    assert expected > 0.01


def test_another_model_is_loaded_in_the_type_of_the_one_in_training(other_model: str) -> None:
    model = small_model().to(torch.bfloat16)
    reference = load_reference(settings(reference_model=other_model), model)
    assert isinstance(reference, FrozenCopy)
    scored = reference._scorer.causal_lm
    assert {p.dtype for p in scored.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in scored.parameters())
    assert not scored.training


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("kind", ["another model", "another model with adapters", "unset"])
def test_a_frozen_copy_gives_its_models_log_probabilities_at_the_temperature_of_the_samples(
    kind: str, temperature: float, other_model: str, tmp_path: Path
) -> None:
    small_model(seed=0).save_pretrained(tmp_path)
    match kind:
        case "another model":
            subject, seed = trainee(settings(reference_model=other_model)), 1
        case "another model with adapters":
            subject, seed = with_adapters(kl_coef=0.1, reference_model=other_model), 1
        case _:  # whatever an earlier trainer made of the model that the server holds
            subject, seed = trainee(settings(model_name=str(tmp_path), kl_coef=0.1), seed=7), 0
    params = {"temperature": temperature, "logprobs_mode": "processed"}
    groups = [group.model_copy(update={"generation_params": params}) for group in made_up_groups(5)]
    batch = make_batch(groups, seq_len=32)
    assert isinstance(subject.reference, FrozenCopy)
    expected = plain_logprobs(small_model(seed), batch, temperature)
    torch.testing.assert_close(subject.reference.logprobs(batch), expected, rtol=1e-4, atol=1e-5)


def with_sent_reference(group: ScoredGroup) -> ScoredGroup:
    """As an environment sends it that measures its reference itself."""
    sent = [[1.0 if label < 0 else -2.5 for label in row] for row in group.masks]
    return group.model_copy(update={"ref_logprobs": sent})


@pytest.mark.parametrize("num_sent", [1, 2])
def test_reference_log_probabilities_that_environments_send_are_preferred_to_the_models(
    num_sent: int, other_model: str
) -> None:
    groups = made_up_groups(6)
    sent = [with_sent_reference(group) for group in groups[:num_sent]]
    batch = make_batch([*sent, *groups[num_sent:]], seq_len=32)
    subject = trainee(settings(kl_coef=0.1, reference_model=other_model))
    result = gradient_step(subject, batch, step=0, policy_version=0)
    reference = plain_logprobs(small_model(seed=1), batch)
    reference[: sum(len(group.tokens) for group in sent)] = -2.5
    assert result.metrics["grpo/kl"] == pytest.approx(k3(reference, result.logprobs, batch.mask), rel=1e-3)


@pytest.mark.parametrize("batch_size", [4, 8])
def test_without_a_model_the_divergence_is_measured_only_if_every_group_has_a_reference(batch_size: int) -> None:
    first, second = map(with_sent_reference, made_up_groups(3))
    subject = trainee(settings(batch_size=batch_size))
    assert subject.reference is None
    batch = make_batch([first, second], seq_len=32)
    result = gradient_step(subject, batch, step=0, policy_version=0)
    expected = k3(torch.full_like(result.logprobs, -2.5), result.logprobs, batch.mask)
    assert result.metrics["grpo/kl"] == pytest.approx(expected, rel=1e-3)
    some = make_batch([first, made_up_groups(3)[1]], seq_len=32)
    metrics = gradient_step(subject, some, step=1, policy_version=0).metrics
    assert metrics["grpo/kl"] == metrics["grpo/kl_rollout"]


def test_unset_the_reference_is_the_model_that_training_starts_from(tmp_path: Path) -> None:
    small_model().save_pretrained(tmp_path)
    subject = trainee(settings(model_name=str(tmp_path), kl_coef=0.1))
    batch = make_batch(made_up_groups(3), seq_len=32)
    first = gradient_step(subject, batch, step=0, policy_version=0)
    subject.write_weights()
    second = gradient_step(subject, batch, step=1, policy_version=1)
    assert first.metrics["grpo/kl"] == 0
    assert second.metrics["grpo/kl"] == pytest.approx(k3(first.logprobs, second.logprobs, batch.mask), rel=1e-3)
    assert second.metrics["grpo/kl"] > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_divergence_pulls_the_policy_back_to_the_reference(other_model: str, estimator: str) -> None:
    config = settings(kl_coef=1.0, kl_estimator=estimator, reference_model=other_model, training_steps=40, lr=3e-3)
    subject = trainee(config)
    equal_rewards = [group.model_copy(update={"scores": [0.5] * len(group.tokens)}) for group in made_up_groups(7)]
    batch = make_batch(equal_rewards, seq_len=32)
    divergences = []
    for step in range(30):
        divergences.append(gradient_step(subject, batch, step=step, policy_version=step).metrics["grpo/kl"])
        subject.write_weights()
    assert divergences[0] > 0.01
    assert divergences[-1] < divergences[0] / 10


def test_a_reference_without_kl_coef_is_measured_and_changes_nothing(other_model: str) -> None:
    batch = make_batch(made_up_groups(8), seq_len=32)
    plain, measuring = trainee(), trainee(settings(reference_model=other_model))
    first = gradient_step(plain, batch, step=0, policy_version=0)
    second = gradient_step(measuring, batch, step=0, policy_version=0)
    for one, other in zip(plain._masters.parameters, measuring._masters.parameters, strict=True):
        assert torch.equal(one, other)
    expected = k3(plain_logprobs(small_model(seed=1), batch), first.logprobs, batch.mask)
    assert second.metrics["grpo/kl"] == pytest.approx(expected, rel=1e-3)
    assert first.metrics["grpo/kl"] == first.metrics["grpo/kl_rollout"] == second.metrics["grpo/kl_rollout"]


def test_a_reference_that_lacks_tokens_is_refused_with_both_counts(tmp_path: Path) -> None:
    small_model(vocab_size=VOCABULARY - 8).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"knows 24 tokens and test/model 32: choose a reference"):
        load_reference(settings(reference_model=str(tmp_path)), small_model())
