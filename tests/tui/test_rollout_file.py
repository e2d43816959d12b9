"""The reader of rollouts.jsonl on files that grow, are cut, replaced, damaged or missing."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from grpo_engine.wire.codec import Message
from grpo_engine.wire.metrics import SampledCompletion
from grpo_tui.view.rollouts import file as rollout_file
from grpo_tui.view.rollouts.file import RolloutFile


def group(step: int, rewards: tuple[float, ...] = (1.0, 0.0), prompt: str = "sort 312", **changes: Any) -> str:
    """A line of the file, as the trainer writes it."""
    completions = [
        {
            "text": f"12{number}",
            "reward": reward,
            "advantage": reward - 0.5,
            "token_ids": [49, 50],
            "inference_logprobs": [-0.5, -0.25],
            "training_logprobs": [-0.5, -0.2],
            "policy_versions": [step - 1, step],
        }
        for number, reward in enumerate(rewards)
    ]
    record = {"time": 1000.0 + step, "step": step, "environment": "sort6", "prompt": prompt, "completions": completions}
    return json.dumps({**record, **changes}) + "\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rollouts.jsonl"


def steps(file: RolloutFile) -> list[int | None]:
    return [head and head.step for head in map(file.head, range(file.refresh()))]


def test_a_growing_file_is_indexed_by_whole_lines(path: Path) -> None:
    file = RolloutFile(path)
    assert file.refresh() == 0
    path.write_text(group(1) + group(2)[:40])
    assert steps(file) == [1]
    with path.open("a") as end:
        end.write(group(2)[40:] + "\n" + group(3))
    assert steps(file) == [1, 2, 3]
    assert file.generation == 0


def test_a_head_has_what_a_list_shows(path: Path) -> None:
    path.write_text(group(4, (1.0, 0.0, 0.5), prompt="p" * 1000))
    file = RolloutFile(path)
    file.refresh()
    head = file.head(0)
    assert head is not None
    assert (head.time, head.step, head.environment) == (1004.0, 4, "sort6")
    assert (head.num_completions, head.mean_reward, head.min_reward, head.max_reward) == (3, 0.5, 0.0, 1.0)
    assert head.prompt_start == "p" * rollout_file.PROMPT_START_CHARACTERS
    assert head.policy_versions == (3, 4)


def test_a_broken_line_is_none_and_hides_no_other(path: Path) -> None:
    damaged = b'\xff\xfe\n[1]\n{"step": 1}\n{"time": 1, "step": 2, "prompt": 3, "completions": 4}\n'
    path.write_bytes(damaged + group(7).encode())
    file = RolloutFile(path)
    assert steps(file) == [None, None, None, None, 7]
    assert [file.read(index) is None for index in range(5)] == [True, True, True, True, False]
    assert file.texts(0) == []
    assert file.texts(4) == ["sort 312", "120", "121"]


def test_numbers_that_json_does_not_have_are_nan(path: Path) -> None:
    path.write_text(group(1).replace("-0.25", "null").replace('"reward": 1.0', '"reward": null'))
    file = RolloutFile(path)
    file.refresh()
    read, head = file.read(0), file.head(0)
    assert read is not None
    assert head is not None
    assert math.isnan(read.completions[0].inference_logprobs[1])
    assert math.isnan(head.rewards[0])
    assert head.mean_reward == 0.0


@pytest.mark.parametrize(
    ("how", "written"),
    [("cut", [5]), ("cut and regrown", [5, 6, 7]), ("replaced", [5, 6, 7]), ("deleted and recreated", [5])],
)
def test_a_file_that_was_recreated_is_read_from_its_start(path: Path, how: str, written: list[int]) -> None:
    path.write_text(group(1) + group(2))
    file = RolloutFile(path)
    assert steps(file) == [1, 2]
    if how == "deleted and recreated":
        path.unlink()
        assert (file.read(0), file.refresh()) == (None, 0)
    target = path.with_suffix(".new") if how == "replaced" else path
    target.write_text("".join(map(group, written)))
    target.replace(path)
    assert steps(file) == written
    assert file.generation > 0


def test_half_a_line_that_was_written_anew_hides_no_group(path: Path) -> None:
    path.write_text(group(1) + group(2, prompt="x" * 4000)[:3000])
    file = RolloutFile(path)
    assert steps(file) == [1]
    path.write_text(group(1) + "".join(group(step) for step in range(2, 30)))
    assert steps(file) == list(range(1, 30))


def test_a_long_file_is_indexed_in_pieces(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_file, "MAX_BYTES_A_REFRESH", 1000)
    monkeypatch.setattr(rollout_file, "BLOCK_BYTES", 300)
    path.write_text("".join(group(step) for step in range(1, 21)))
    file = RolloutFile(path)
    first = file.refresh()
    assert 0 < first < 20
    assert file.is_behind
    while file.is_behind:
        file.refresh()
    assert steps(file) == list(range(1, 21))


def test_groups_up_to_a_moment_are_counted_past_broken_lines(path: Path) -> None:
    path.write_text(group(1) + "broken\n" + group(2) + group(3) + "broken\n")
    file = RolloutFile(path)
    file.refresh()
    assert [file.num_until(time) for time in (1000.9, 1001.0, 1002.5, 1003.0, 2000.0)] == [0, 1, 3, 4, 4]


def test_only_few_groups_are_kept_in_full(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_file, "MAX_CACHED_BYTES", 1000)
    path.write_text("".join(group(step) for step in range(1, 11)))
    file = RolloutFile(path)
    file.refresh()
    newest = [file.read(index) for index in range(10)][-1]
    assert file.read(9) is newest
    assert sum(size for size, _ in file._groups.values()) <= 1000


@pytest.mark.parametrize(
    "completion",
    [
        '{"text": "", "reward": 1}',
        '{"text": "", "reward": 1, "advantage": 0, "token_ids": [], "inference_logprobs": [], "training_logprobs": [], '
        '"policy_versions": []}',
    ],
    ids=["damaged", "whole"],
)
def test_a_line_with_more_completions_than_any_group_is_not_validated(
    path: Path, completion: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for model in (rollout_file._SearchedLine, rollout_file._ReadLine):
        monkeypatch.setattr(model, "model_validate", lambda record: pytest.fail("validated"))
        monkeypatch.setattr(model, "model_validate_json", lambda line: pytest.fail("validated"))
    many = f"[{','.join([completion] * (rollout_file.MAX_COMPLETIONS + 1))}]"
    path.write_text(f'{{"time": 1, "step": 1, "environment": null, "prompt": "p", "completions": {many}}}\n')
    file = RolloutFile(path)
    assert file.refresh() == 1
    assert (file.head(0), file.read(0), file.texts(0)) == (None, None, [])


@pytest.mark.parametrize(
    ("model", "damaged"),
    [
        (rollout_file._SearchedLine, "completions"),
        (rollout_file._SearchedLine, "policy_versions"),
        (rollout_file._ReadLine, "completions"),
        (rollout_file._ReadLine, "token_ids"),
        (rollout_file._ReadLine, "entropies"),
    ],
)
def test_the_faults_of_a_line_are_not_collected(model: type[Message], damaged: str) -> None:
    record = json.loads(group(1, (1.0,) * 4))
    if damaged == "completions":
        record["completions"] = [{} for _ in range(50)]
    else:
        for one in record["completions"]:
            one[damaged] = ["?"] * 50
    with pytest.raises(ValidationError) as raised:
        model.model_validate(record)
    assert raised.value.error_count() <= len(SampledCompletion.model_fields)


def test_a_file_of_very_many_short_lines_is_indexed_in_pieces(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_file, "MAX_LINES_A_REFRESH", 3)
    path.write_text(group(1) + "a\n\nb\n" + group(2) + "c\n" + group(3))
    file = RolloutFile(path)
    assert (file.refresh(), file.is_behind) == (2, True)
    assert (file.refresh(), file.is_behind) == (5, True)
    assert (file.refresh(), file.is_behind) == (6, False)
    assert steps(file) == [1, None, None, 2, None, 3]
    assert file.generation == 0
