"""Shared prompts: the same hidden states, log-probabilities and gradients as rows of their own, for fewer positions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from training import made_up_groups, scored_group, small_model, trainee

from grpo_engine.data.batching import make_batch
from grpo_engine.data.packing import pack
from grpo_engine.models.attention import may_look
from grpo_engine.train.scoring import Scorer
from grpo_engine.wire.rollouts import ScoredGroup


def test_completions_follow_their_prompt_at_the_positions_they_would_have_alone() -> None:
    packed = pack(make_batch([scored_group([5, 9], [[7, 2], [8, 4, 2]])], seq_len=8), in_one_row=False)
    assert packed.inputs.tolist() == [[5, 9, 7, 8, 4]]
    assert packed.positions.tolist() == [[0, 1, 2, 2, 3]]
    assert packed.segments.tolist() == [[0, 0, 1, 3, 3]]
    assert packed.parents.tolist() == [[0, 0, 0, 0, 0]]
    assert may_look(packed)[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 1, 1],
    ]
    assert packed.trained.tolist() == [1, 2, 1, 3, 4]


@pytest.mark.parametrize("seed", range(3))
def test_log_probabilities_and_gradients_are_those_of_rows_of_their_own(seed: int) -> None:
    batch = make_batch(made_up_groups(seed, groups=3, size=4), seq_len=32)
    packed, plain = trainee(), trainee()
    plain._scorer.shares_prompts = False
    assert packed._scorer._packed(batch) is not None
    for subject in (packed, plain):
        logprobs, entropy = subject.logprobs(batch)
        torch.autograd.backward((logprobs * (1 + batch.labels) + entropy).sum())
    torch.testing.assert_close(packed.logprobs(batch), plain.logprobs(batch), rtol=1e-4, atol=1e-5)
    for (name, ours), (_, theirs) in zip(packed.model.named_parameters(), plain.model.named_parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-3, msg=name)


def test_rows_share_a_prompt_only_where_it_is_the_same() -> None:
    mixed = ScoredGroup(
        tokens=[[5, 9, 7], [5, 8, 7], [5, 9, 4]],
        masks=[[-100, -100, 7], [-100, -100, 7], [-100, -100, 4]],
        scores=[1.0, 0.0, 0.5],
        inference_logprobs=[[1.0, 1.0, -1.0]] * 3,
    )
    packed = pack(make_batch([mixed], seq_len=8), in_one_row=False)
    assert packed.inputs.tolist() == [[5, 9], [5, 8]]
    assert packed.trained.tolist() == [1, 3, 1]


def test_the_same_prompt_in_two_groups_stays_two_rows() -> None:
    batch = make_batch([scored_group([5, 9, 3], [[7], [8]]), scored_group([5, 9, 3], [[6], [4]])], seq_len=8)
    assert len(pack(batch, in_one_row=False).inputs) == 2


def test_one_row_holds_all_groups_without_attention_between_them() -> None:
    batch = make_batch([scored_group([5, 9, 3], [[7, 1], [8]]), scored_group([6], [[6, 4], [4, 4]])], seq_len=8)
    packed = pack(batch, in_one_row=True)
    assert packed.inputs.tolist() == [[5, 9, 3, 7, 6, 6, 4]]
    assert packed.positions.tolist() == [[0, 1, 2, 3, 0, 1, 1]]
    assert may_look(packed)[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
        [0, 0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1, 0, 1],
    ]
    assert packed.trained.tolist() == [2, 3, 2, 4, 5, 4, 6]


@pytest.mark.parametrize("seed", range(3))
def test_one_padded_row_gives_the_same_log_probabilities(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(made_up_groups(seed, groups=3, size=4), seq_len=32)
    subject = trainee()
    expected = subject.logprobs(batch)
    row = pack(batch, in_one_row=True)
    monkeypatch.setattr(subject._scorer, "_packed", lambda batch: row.padded(row.inputs.shape[1] + 7))
    torch.testing.assert_close(subject.logprobs(batch), expected, rtol=1e-4, atol=1e-5)


def test_prompts_whose_sharing_saves_little_are_not_shared() -> None:
    long = list(range(3, 30))
    batch = make_batch([scored_group([5], [long, long[::-1]])], seq_len=64)
    assert Scorer(small_model())._packed(batch) is None


def test_a_saved_model_names_no_attention_implementation_of_this_project(tmp_path: Path) -> None:
    model = small_model()
    Scorer(model)
    model.save_pretrained(tmp_path)
    assert "grpo_engine" not in (tmp_path / "config.json").read_text()
