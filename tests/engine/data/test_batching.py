"""Groups to batches: what is refused and how it is said, and where every number ends up."""

from __future__ import annotations

import math
import pickle
import random
from dataclasses import fields
from typing import Any

import pytest
import torch

from grpo_engine.data.batching import batch_advantages, check_group, make_batch, micro_batches, plan_rows
from grpo_engine.errors import DataError
from grpo_engine.wire.rollouts import ScoredGroup


def example(**changes: Any) -> ScoredGroup:
    """Two completions of one prompt: 5 9 → 7 2, and 5 9 → 8 4 2."""
    fields: dict[str, Any] = {
        "tokens": [[5, 9, 7, 2], [5, 9, 8, 4, 2]],
        "masks": [[-100, -100, 7, 2], [-100, -100, 8, 4, 2]],
        "scores": [1.0, 0.0],
        "inference_logprobs": [[1.0, 1.0, -0.3, -0.01], [1.0, 1.0, -0.5, -0.25, 0.0]],
        "env_id": 3,
    }
    return ScoredGroup.model_construct(**(ScoredGroup(**fields).model_dump() | changes))


def generated(num_sequences: int, seed: int, longest: int = 12) -> ScoredGroup:
    """A group of ragged sequences over tokens 0 to 19, the prompt of two tokens."""
    source = random.Random(seed)
    lengths = [source.randint(3, longest) for _ in range(num_sequences)]
    tokens = [[source.randrange(20) for _ in range(length)] for length in lengths]
    return ScoredGroup(
        tokens=tokens,
        masks=[[-100, -100, *row[2:]] for row in tokens],
        scores=[source.random() for _ in lengths],
        inference_logprobs=[[1.0, 1.0, *(-3 * source.random() for _ in row[2:])] for row in tokens],
    )


def test_labels_and_log_probabilities_are_shifted_onto_the_inputs_that_predict_them() -> None:
    batch = make_batch([example(policy_versions=[[5, 5, 6, 7], [0, 5, 7, 7, 8]], truncated=[False, True])], seq_len=64)
    assert batch.inputs.tolist() == [[5, 9, 7, 0], [5, 9, 8, 4]]
    assert batch.labels.tolist() == [[9, 7, 2, 0], [9, 8, 4, 2]]
    assert batch.mask.tolist() == [[False, True, True, False], [False, True, True, True]]
    torch.testing.assert_close(batch.rollout_logprobs, torch.tensor([[0.0, -0.3, -0.01, 0.0], [0.0, -0.5, -0.25, 0.0]]))
    assert batch.policy_versions.tolist() == [[0, 6, 7, 0], [0, 7, 7, 8]]
    assert batch.has_policy_versions.tolist() == [True, True]
    assert batch.lengths.tolist() == [3, 4]
    assert batch.attention_mask.tolist() == [[True, True, True, False], [True, True, True, True]]
    assert batch.is_truncated.tolist() == [False, True]
    assert batch.rewards.tolist() == [1.0, 0.0]
    assert batch.env_ids == (3, 3)
    assert (batch.num_sequences, batch.num_tokens, batch.num_inputs, batch.num_cut) == (2, 5, 7, 0)
    assert {str(t.dtype) for t in (batch.inputs, batch.labels, batch.group_ids)} == {"torch.int64"}
    assert batch.rollout_logprobs.dtype is batch.rewards.dtype is batch.temperatures.dtype is torch.float32


def test_rows_stay_in_the_order_of_their_groups() -> None:
    groups = [generated(2, 0), example(), generated(3, 1)]
    batch = make_batch(groups, seq_len=64)
    assert batch.group_ids.tolist() == [0, 0, 1, 1, 2, 2, 2]
    assert batch.env_ids == (None, None, 3, 3, None, None, None)
    assert batch.has_policy_versions.tolist() == [False] * 7
    rows = [row for group in groups for row in group.tokens]
    for row, tokens in enumerate(rows):
        assert batch.inputs[row, : len(tokens) - 1].tolist() == tokens[:-1]
        assert batch.inputs[row, len(tokens) - 1 :].eq(0).all()


def test_a_multi_turn_mask_keeps_every_trained_span() -> None:
    group = example(
        tokens=[[1, 2, 3, 4, 5, 6]], masks=[[-100, 2, 3, -100, -100, 6]], scores=[1.0],
        inference_logprobs=[[1.0, -0.1, -0.2, 1.0, 1.0, -0.3]],
    )  # fmt: skip
    batch = make_batch([group], seq_len=8)
    assert batch.mask.tolist() == [[True, True, False, False, True]]
    assert batch.labels[batch.mask].tolist() == [2, 3, 6]
    torch.testing.assert_close(batch.rollout_logprobs[batch.mask], torch.tensor([-0.1, -0.2, -0.3]))


def test_a_sequence_longer_than_seq_len_is_cut_marked_and_counted() -> None:
    batch = make_batch([example()], seq_len=4)
    assert batch.inputs.tolist() == [[5, 9, 7], [5, 9, 8]]
    assert batch.labels.tolist() == [[9, 7, 2], [9, 8, 4]]
    assert batch.is_truncated.tolist() == [False, True]
    assert batch.num_cut == 1


def test_a_batch_without_a_trainable_token_is_refused_with_its_group_and_sequence() -> None:
    late = example(masks=[[-100, -100, 7, 2], [-100, -100, -100, -100, 2]])
    words = "sequence 1 has 5 tokens, and none of its first 4"
    with pytest.raises(ValueError, match="seq_len = 1"):
        make_batch([example()], seq_len=1)
    with pytest.raises(DataError, match="a batch without groups"):
        make_batch([], seq_len=8)
    with pytest.raises(DataError, match=f"group of the environment with env_id 3: {words}"):
        make_batch([generated(2, 0), late], seq_len=4)
    with pytest.raises(DataError, match=rf"group of environment 'gsm8k' \(env_id 3\): {words}"):
        make_batch([generated(2, 0), late], seq_len=4, environment_names={3: "gsm8k"})
    with pytest.raises(DataError, match=f"group of an unnamed environment: {words}"):
        make_batch([generated(2, 0), late.model_copy(update={"env_id": None})], seq_len=4)


@pytest.mark.parametrize(
    ("params", "overrides", "temperatures"),
    [
        ({}, {}, [1.0, 1.0]),
        ({"temperature": 0.7}, {}, [1.0, 1.0]),  # does not say: raw, as stock servers
        ({"temperature": 0.7, "logprobs_mode": "raw"}, {}, [1.0, 1.0]),
        ({"temperature": 0.0, "logprobs_mode": "raw"}, {}, [1.0, 1.0]),
        ({"temperature": 0.7, "logprobs_mode": "processed"}, {}, [0.7, 0.7]),
        ({"logprobs_mode": "processed"}, {}, [1.0, 1.0]),
        ({"logprobs_mode": "processed"}, {"group_overrides": {"temperature": 0.5}}, [0.5, 0.5]),
        (
            {"temperature": 0.7, "logprobs_mode": "processed"},
            {"group_overrides": {"temperature": 0.5}, "overrides": [{"temperature": 1.3}, {}]},
            [1.3, 0.7],
        ),
    ],
)
def test_logits_are_divided_by_the_temperature_only_where_log_probabilities_were(
    params: dict[str, Any], overrides: dict[str, Any], temperatures: list[float]
) -> None:
    batch = make_batch([example(generation_params=params, **overrides)], seq_len=8)
    assert batch.temperatures.tolist() == pytest.approx(temperatures)


def test_groups_that_declare_no_convention_have_the_default_one() -> None:
    group = example(generation_params={"temperature": 0.7})
    batch = make_batch([group], seq_len=8, default_logprobs_mode="processed")
    assert batch.temperatures.tolist() == pytest.approx([0.7, 0.7])


def test_advantages_are_the_groups_the_environments_or_zero() -> None:
    given = [[0.0, 0.0, 3.0, -1.0], [9.0, 9.0, 0.5, 0.5, 0.5]]
    groups = [
        example(),
        example(scores=[2.0, 4.0], overrides=[{"set_advantage_to_zero": True}, {}]),
        example(advantages=given),
    ]
    advantages = batch_advantages(make_batch(groups, seq_len=8), scale="none")
    assert advantages.tolist() == [
        [0.0, 0.5, 0.5, 0.0],
        [0.0, -0.5, -0.5, -0.5],
        [0.0, 0.0, 0.0, 0.0],
        [0.0, 1.0, 1.0, 1.0],  # the zeroed sequence still counts in its group's mean
        [0.0, 3.0, -1.0, 0.0],
        [0.0, 0.5, 0.5, 0.5],
    ]


def test_empty_lists_of_stock_environments_mean_absent() -> None:
    group = example(advantages=[], ref_logprobs=[], messages=[], overrides=[], images=[], group_overrides={})
    batch = make_batch([group], seq_len=8)
    assert batch.token_advantages is None
    assert batch.ref_logprobs is None


def test_reference_log_probabilities_are_marked_for_the_groups_that_have_them() -> None:
    reference = [[1.0, 1.0, -0.4, -0.02], [1.0, 1.0, -0.6, -0.35, -0.1]]
    batch = make_batch([example(ref_logprobs=reference)], seq_len=8)
    assert batch.ref_logprobs is not None
    torch.testing.assert_close(batch.ref_logprobs, torch.tensor([[0, -0.4, -0.02, 0], [0, -0.6, -0.35, -0.1]]))
    mixed = make_batch([example(ref_logprobs=reference), example()], seq_len=8)
    assert mixed.ref_logprobs is not None
    assert mixed.has_ref_logprobs.tolist() == [True, True, False, False]
    assert mixed.ref_logprobs[2:].count_nonzero() == 0


def test_a_group_without_log_probabilities_names_its_environment_and_the_flag() -> None:
    for missing in (None, [], [[], []]):
        group = example(inference_logprobs=missing)
        with pytest.raises(DataError, match=r"env_id 3: no inference_logprobs.*--openai\.server_type vllm"):
            check_group(group)
        with pytest.raises(DataError, match=r"environment 'gsm8k' \(env_id 3\): no inference_logprobs"):
            make_batch([group], seq_len=8, environment_names={3: "gsm8k"})


MASK = [-100, -100, 8, 4, 2]


def logprobs(first: list[float]) -> dict[str, Any]:
    return {"inference_logprobs": [first, [1.0, 1.0, -0.5, -0.1, 0.0]]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": [], "masks": [], "scores": []}, "the group has no sequences"),
        ({"tokens": [[5, 9, 7, 2], []]}, "sequence 1 has 0 tokens: post a prompt and a completion"),
        ({"tokens": [[5, 9, 7, 2], [5]]}, "sequence 1 has 1 tokens"),
        ({"tokens": {"input_ids": [1]}}, "masks has 2 entries, tokens has 1 sequences"),
        ({"masks": [[-100, -100, 7, 2]]}, "masks has 1 entries, tokens has 2 sequences"),
        ({"masks": [[-100, -100, 7, 2], [-100, 8, 4, 2]]}, "sequence 1: masks has 4 entries, tokens has 5"),
        ({"scores": [1.0]}, "scores has 1 entries, tokens has 2 sequences"),
        ({"scores": [1.0, math.nan]}, "sequence 1: scores = nan is not a finite number: fix the reward"),
        ({"scores": [math.inf, 1.0]}, "sequence 0: scores = inf"),
        ({"scores": [1e300, 1.0]}, r"sequence 0: scores = 1e\+300 is beyond"),
        ({"scores": [0.0, -(10**400)]}, "sequence 1: scores = -1000"),
        ({"inference_logprobs": [[1.0, 1.0, -0.3, -0.01]]}, "inference_logprobs has 1 entries"),
        (logprobs([-0.3, -0.01]), "sequence 0: inference_logprobs has 2 entries, tokens has 4"),
        (logprobs([1.0, 1.0, math.nan, 0.0]), r"sequence 0: inference_logprobs\[2\] = nan is not finite"),
        (logprobs([1.0, 1.0, -0.3, -math.inf]), r"sequence 0: inference_logprobs\[3\] = -inf is not finite"),
        (logprobs([1.0, 1.0, -0.3, 1.0]), r"inference_logprobs\[3\] = 1 is above 0 at a trained token"),
        (logprobs([1.0, 1.0, 0.001, -0.01]), r"inference_logprobs\[2\] = 0.001 is above 0"),
        ({"masks": [[-100, -100, 1, 2], MASK]}, r"sequence 0: masks\[2\] = 1 is neither -100 nor the token there"),
        ({"masks": [[-100] * 4, MASK]}, "sequence 0: every label is -100, so nothing is trained"),
        ({"masks": [[5, -100, 7, 2], MASK]}, r"masks\[0\] = 5 trains a token that nothing precedes"),
        ({"tokens": [[5, 9, 7, 2], [5, [9], 8, 4, 2]]}, "tokens has entries that are not numbers"),
        ({"tokens": [[5, 9, 7, 2], [5, 9.5, 8, 4, 2]]}, "tokens holds float32 values: post integers"),
        ({"tokens": [[5, 9, 7, 2], [5, -9, 8, 4, 2]]}, r"sequence 1: tokens\[1\] = -9 is not a token id"),
        ({"tokens": [[5, 9, 7, 2], [5, "9", 8, 4, 2]]}, "tokens has entries that are not numbers"),
        ({"tokens": [[5, 9, 7, 2], [5, 2**70, 8, 4, 2]]}, "tokens has entries that are not numbers"),
        ({"advantages": [[0.0] * 4, [0.0] * 4]}, "sequence 1: advantages has 4 entries, tokens has 5"),
        ({"advantages": [[0.0] * 4, [0.0, 0.0, math.nan, 0.0, 0.0]]}, r"advantages\[2\] = nan is not finite"),
        ({"advantages": [[0.0, 0.0, 3e38, 0.0], [0.0] * 5]}, r"sequence 0: advantages\[2\] = 3e\+38 is beyond"),
        ({"policy_versions": [[0] * 4]}, "policy_versions has 1 entries"),
        ({"truncated": [True]}, "truncated has 1 entries"),
        ({"overrides": [{}]}, "overrides has 1 entries"),
        ({"distill_token_ids": [[[1]], [[1]]]}, "has distillation targets"),
        ({"images": ["data:image/png;base64,"]}, "has images"),
        ({"generation_params": {"logprobs_mode": "tempered"}}, "'tempered': say one of raw, processed"),
        (
            {"generation_params": {"logprobs_mode": "processed", "temperature": 0.0}},
            "temperature = 0.0 with processed log-probabilities",
        ),
        *(  # the first ended a trainer, and again after each resume; of 1e-300 the whole batch had no finite loss
            ({"generation_params": {"logprobs_mode": "processed", "temperature": value}}, f"temperature = {text}")
            for value, text in ((10**400, "1000"), (1e-300, "1e-300"), (1e300, r"1e\+300"))
        ),
        ({"generation_params": {"logprobs_mode": "processed", "top_p": 0.9}}, "sample with top_p = 1"),
        ({"generation_params": {"logprobs_mode": "processed", "top_k": 50}}, "sample with top_k = -1"),
    ],
)
def test_a_group_that_cannot_be_trained_on_is_refused_with_environment_place_and_remedy(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        check_group(example(**changes))
    assert str(caught.value).startswith("group of the environment with env_id 3: ")


def test_values_at_masked_positions_are_ignored() -> None:
    noisy = [[-7.0, math.nan, -0.3, -0.01], [math.inf, 1.0, -0.5, -0.25, 0.0]]
    clean, dirty = (make_batch([group], seq_len=8) for group in (example(), example(inference_logprobs=noisy)))
    assert torch.equal(clean.rollout_logprobs, dirty.rollout_logprobs)


def test_rows_of_like_length_share_a_micro_batch_and_the_longest_come_first() -> None:
    lengths = [3, 9, 4, 8, 2]
    assert plan_rows(lengths, 2) == [[1, 3], [2, 0], [4]]
    assert plan_rows(lengths, max_tokens=18) == [[1, 3], [2, 0, 4]]
    assert plan_rows(lengths, max_tokens=9) == [[1], [3], [2, 0], [4]]
    assert plan_rows([], 2) == []


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({}, "give exactly one"),
        ({"batch_size": 2, "max_tokens": 8}, "give exactly one"),
        ({"batch_size": 0}, "batch_size = 0"),
        ({"max_tokens": 8}, "max_tokens = 8: a row of 9 does not fit"),
    ],
)
def test_a_plan_without_a_workable_limit_is_refused(limits: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_rows([3, 9], **limits)


@pytest.mark.parametrize("limits", [{"batch_size": 1}, {"batch_size": 3}, {"batch_size": 99}, {"max_tokens": 24}])
def test_every_row_is_in_exactly_one_micro_batch_with_its_own_numbers(limits: dict[str, int]) -> None:
    batch = make_batch([generated(4, seed) for seed in range(3)], seq_len=64)
    micros = micro_batches(batch, **limits)
    assert sorted(row for micro in micros for row in micro.row_numbers.tolist()) == list(range(12))
    for micro in micros:
        part = micro.batch
        assert part.inputs.shape[1] == part.lengths.max()
        assert part.inputs.numel() <= limits.get("max_tokens", math.inf)
        assert (micro.num_sequences, micro.num_tokens) == (12, batch.num_tokens)
        for values, whole in ((part.labels, batch.labels), (part.mask, batch.mask), (part.rewards, batch.rewards)):
            assert torch.equal(values, micro.part_of(whole))
        assert part.env_ids == (None,) * part.num_sequences
        assert all(not batch.mask[row, part.inputs.shape[1] :].any() for row in micro.row_numbers)


def test_a_micro_batch_moves_to_a_device_with_all_its_tensors() -> None:
    batch = make_batch([example()], seq_len=8)
    (micro,) = micro_batches(batch, 8)
    moved = micro.to("meta").batch
    assert {moved.inputs.device.type, moved.mask.device.type, moved.rewards.device.type} == {"meta"}
    assert moved.env_ids == batch.env_ids


@pytest.mark.parametrize("more", [{}, {"ref_logprobs": [[0.0, 0.0, -0.2, -0.1], [0.0, 0.0, -0.3, -0.2, -0.1]]}])
def test_a_batch_that_was_announced_to_other_ranks_is_the_same(more: dict[str, Any]) -> None:
    batch = make_batch([example(**more)], seq_len=64)
    received = pickle.loads(pickle.dumps(batch))
    assert (received.ref_logprobs is None) is not bool(more)
    for field in fields(batch):
        sent, got = getattr(batch, field.name), getattr(received, field.name)
        assert got.dtype is sent.dtype and torch.equal(got, sent) if isinstance(sent, torch.Tensor) else got == sent
    received.rewards.add_(1.0)  # in memory of its own
