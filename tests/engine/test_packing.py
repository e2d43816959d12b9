"""Shared prompts: the same hidden states, log-probabilities and gradients as rows of their own, for fewer positions."""

from __future__ import annotations

import pytest
import torch
from training import made_up_groups, small_model, trainee
from transformers import MistralConfig, MistralForCausalLM

from grpo_engine.data.batching import make_batch
from grpo_engine.data.packing import pack_prompts
from grpo_engine.models.layers import takes_any_mask
from grpo_engine.wire.rollouts import ScoredGroup


def group(prompt: list[int], completions: list[list[int]]) -> ScoredGroup:
    return ScoredGroup(
        tokens=[prompt + c for c in completions],
        masks=[[-100] * len(prompt) + c for c in completions],
        scores=[float(i) for i in range(len(completions))],
        inference_logprobs=[[1.0] * len(prompt) + [-1.0] * len(c) for c in completions],
    )


def test_completions_follow_their_prompt_at_the_positions_they_would_have_alone() -> None:
    packed = pack_prompts(make_batch([group([5, 9], [[7, 2], [8, 4, 2]])], seq_len=8))
    assert packed is not None
    assert packed.inputs.tolist() == [[5, 9, 7, 8, 4]]
    assert packed.positions.tolist() == [[0, 1, 2, 2, 3]]
    assert packed.attention_mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 1, 1],
    ]
    assert packed.trained.tolist() == [1, 2, 1, 3, 4]


@pytest.mark.parametrize("seed", range(5))
def test_log_probabilities_and_gradients_are_those_of_rows_of_their_own(seed: int) -> None:
    batch = make_batch(made_up_groups(seed, groups=3, size=4), seq_len=32)
    assert pack_prompts(batch) is not None
    packed, plain = trainee(), trainee()
    plain._can_share_prompts = False
    for subject in (packed, plain):
        logprobs, entropy = subject.logprobs(batch)
        torch.autograd.backward((logprobs * (1 + batch.labels) + entropy).sum())
    torch.testing.assert_close(packed.logprobs(batch), plain.logprobs(batch), rtol=1e-4, atol=1e-5)
    for (name, ours), (_, theirs) in zip(packed.model.named_parameters(), plain.model.named_parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-3, msg=name)


def test_rows_whose_prompts_differ_do_not_share_one() -> None:
    mixed = ScoredGroup(
        tokens=[[5, 9, 7], [5, 8, 7], [5, 9, 4]],
        masks=[[-100, -100, 7], [-100, -100, 7], [-100, -100, 4]],
        scores=[1.0, 0.0, 0.5],
        inference_logprobs=[[1.0, 1.0, -1.0]] * 3,
    )
    packed = pack_prompts(make_batch([mixed], seq_len=8))
    assert packed is not None
    assert packed.inputs.tolist() == [[5, 9], [5, 8]]
    assert packed.trained.tolist() == [1, 3, 1]


def test_the_same_prompt_in_two_groups_stays_two_rows() -> None:
    packed = pack_prompts(make_batch([group([5, 9, 3], [[7], [8]]), group([5, 9, 3], [[6], [4]])], seq_len=8))
    assert packed is not None
    assert len(packed.inputs) == 2


def test_prompts_that_are_hardly_worth_it_are_left_alone() -> None:
    long = list(range(3, 30))
    assert pack_prompts(make_batch([group([5], [long, long[::-1]])], seq_len=64)) is None


def test_a_model_with_a_sliding_window_is_not_given_a_mask_of_ours() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    assert takes_any_mask(small_model())
    assert not takes_any_mask(MistralForCausalLM(MistralConfig(**sizes, **heads, sliding_window=4)))
    assert takes_any_mask(MistralForCausalLM(MistralConfig(**sizes, **heads, sliding_window=None)))
