"""Sequences whose trained tokens are apart, as those of several turns: laid out, shared, shown as they were."""

from __future__ import annotations

import pytest
import torch
from training import trainee

from grpo_engine.data.batching import make_batch, prompt_lengths
from grpo_engine.data.packing import pack
from grpo_engine.train.recording.samples import sampled_rollouts
from grpo_engine.train.step import gradient_step, rollout_metrics
from grpo_engine.wire.rollouts import ScoredGroup

PROMPT = [5, 9, 6]
TURNS = [[[7, 2], [11, 12], [8, 4, 2]], [[8, 2], [13], [7, 2]]]
"""Of two sequences: said, read, said."""


def two_turns() -> ScoredGroup:
    def rows(read: int | float | None, said: list[list[float]] | None = None) -> list[list[float]]:
        """Each sequence with `read` in place of what was read; None: as it is."""
        return [
            [
                *(PROMPT if read is None else [read] * len(PROMPT)),
                *(said[0] if said else first),
                *(between if read is None else [read] * len(between)),
                *(said[1] if said else second),
            ]
            for first, between, second in TURNS
        ]

    return ScoredGroup.model_validate(
        {
            "tokens": rows(None),
            "masks": rows(-100),
            "scores": [1.0, 0.0],
            "inference_logprobs": [[1.0 if label == -100 else -3.4 for label in row] for row in rows(-100)],
            "policy_versions": [[0 if label == -100 else 3 for label in row] for row in rows(-100)],
            "truncated": [False, False],
            "generation_params": {"temperature": 1.0, "logprobs_mode": "processed"},
        }
    )


def test_only_what_comes_before_the_first_sampled_token_is_shared() -> None:
    batch = make_batch([two_turns()], seq_len=16)
    assert prompt_lengths(batch).tolist() == [3, 3]
    packed = pack(batch, in_one_row=False)
    assert packed.inputs.tolist() == [[5, 9, 6, 7, 2, 11, 12, 8, 4, 8, 2, 13, 7]]
    assert packed.positions.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 8, 3, 4, 5, 6]]
    # What predicts the second turn's first token is the last one that was read.
    assert packed.trained.tolist() == [2, 3, 6, 7, 8, 2, 9, 11, 12]


def test_log_probabilities_are_those_of_rows_of_their_own() -> None:
    batch = make_batch([two_turns()], seq_len=16)
    shared, plain = trainee(), trainee()
    plain._scorer.shares_prompts = False
    torch.testing.assert_close(shared.logprobs(batch), plain.logprobs(batch), rtol=1e-4, atol=1e-5)


def test_a_step_counts_sampled_tokens_only() -> None:
    batch = make_batch([two_turns()], seq_len=16)
    assert batch.num_tokens == 9
    metrics = rollout_metrics(batch, policy_version=4)
    assert metrics["rollout/length_mean"] == 4.5
    assert (metrics["rollout/staleness_mean"], metrics["rollout/staleness_max"]) == (1.0, 1.0)
    result = gradient_step(trainee(), batch, step=0, policy_version=4)
    assert result.applied
    assert (result.advantages != 0).tolist() == batch.mask.tolist()


def test_a_sequence_that_is_cut_keeps_the_turns_before() -> None:
    batch = make_batch([two_turns()], seq_len=7)
    assert batch.mask.sum(dim=1).tolist() == [2, 3]
    assert batch.is_truncated.tolist() == [True, True]


def test_a_sampled_conversation_is_shown_with_what_was_read_between_its_turns() -> None:
    batch = make_batch([two_turns()], seq_len=16)
    result = gradient_step(trainee(), batch, step=0, policy_version=4)
    [line] = sampled_rollouts(
        batch, result, lambda tokens: " ".join(map(str, tokens)), environments={}, step=1, count=1
    )
    assert line.prompt == "5 9 6"
    assert [completion.text for completion in line.completions] == ["7 2 11 12 8 4 2", "8 2 13 7 2"]
    assert [completion.token_ids for completion in line.completions] == [[7, 2, 8, 4, 2], [8, 2, 7, 2]]
    assert [len(completion.training_logprobs) for completion in line.completions] == [5, 4]
    assert [completion.read_before for completion in line.completions] == [{2: "11 12"}, {2: "13"}]
    assert line.completions[0].advantage == pytest.approx(0.707, abs=1e-3)
