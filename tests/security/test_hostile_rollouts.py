"""A `rollouts.jsonl` from elsewhere: no line of it ends or stalls the rollout screen, or fills its memory."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from group_fakes import completion, group, write_groups

from grpo_engine.diagnosis.token_differences import AlignmentNumbers, alignment_numbers, group_tokens
from grpo_tui.ui.widgets.rollout_list import BAR_WIDTH, reward_bars
from grpo_tui.view.logs.folding import CHARACTERS_A_CELL
from grpo_tui.view.rollouts import file as rollout_file
from grpo_tui.view.rollouts import text
from grpo_tui.view.rollouts.file import RolloutFile, user_part
from grpo_tui.view.rollouts.text import MAX_CHARACTERS, MAX_LINES, Piece, token_name, wrapped


def _file_of(folder: Path, **changes: Any) -> RolloutFile:
    """A file of one group with these values."""
    record = {**group(1).model_dump(mode="json"), **changes}
    (folder / "rollouts.jsonl").write_text(json.dumps(record) + "\n")
    file = RolloutFile(folder / "rollouts.jsonl")
    file.refresh()
    return file


def test_rewards_whose_difference_no_float_holds_end_no_screen() -> None:
    most = 1.7e308
    assert reward_bars((-most, 0.0, most, math.nan, math.inf), BAR_WIDTH, (-most, most)) == "▁▅█?█"


def _alignment(training: list[float], inference: list[float]) -> AlignmentNumbers | None:
    sampled = completion("abc", training_logprobs=training, inference_logprobs=inference)
    return alignment_numbers([group_tokens(group(1).model_copy(update={"completions": [sampled]}), 0)])


@pytest.mark.parametrize("far", [1e155, -1e155, 1.7e308, -1.7e308])
def test_logprobs_whose_square_no_float_holds_end_no_screen(far: float) -> None:
    """A file with some of them ended the screen of alignment."""
    numbers = _alignment([far, -0.5], [-0.5, -0.4])
    assert numbers is not None
    assert (numbers.all.num, numbers.num_without) == (1, 1)
    assert _alignment([far, -0.5], [-0.5, -abs(far)]) is None


def test_the_farthest_logprobs_of_a_float32_end_no_screen() -> None:
    numbers = _alignment([3.4e38, -0.5], [-3.4e38, -0.4])
    assert numbers is not None
    assert numbers.num_without == 0
    assert numbers.line is not None


def test_the_question_of_a_prompt_is_found_in_linear_time() -> None:
    blank = " " * 1_000_000  # with the square of it, hours
    assert user_part(f"<|user|>a{blank}b") == f"a{blank}b"
    assert user_part(f"<|user|>{blank}a{blank}<|end|>") == "a"


@pytest.mark.parametrize("letters", ["\n" * 10_000_000, "\x01" * 10_000_000, "é" * 10_000_000])
def test_of_a_text_longer_than_any_its_beginning_is_shown(letters: str) -> None:
    lines = wrapped([Piece(letters, None)], 74)
    assert len(lines) <= MAX_LINES + 2
    assert sum(len(piece.text) for line in lines for piece in line) <= 4 * MAX_CHARACTERS + 74
    assert lines[-1] == [Piece("… what follows is too long to be shown", None)]


@pytest.mark.parametrize(
    "pieces",
    [[Piece("e" + "\u0301" * 20_000, None)], [Piece("\u0301", token) for token in range(5000)]],
    ids=["one token", "a token each"],
)
def test_marks_without_a_width_fill_rows_of_a_bounded_length(pieces: list[Piece]) -> None:
    rows = wrapped(pieces, 74)
    assert max(sum(len(piece.text) for piece in row) for row in rows) <= 74 * CHARACTERS_A_CELL
    assert "".join(piece.text for row in rows for piece in row) == "".join(piece.text for piece in pieces)


def test_of_tokens_without_text_no_more_are_looked_at_than_of_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "MAX_CHARACTERS", 1000)
    tokens = iter([Piece("", None)] * (1000 + 5))
    assert wrapped(tokens, 74)[-1] == [Piece("… what follows is too long to be shown", None)]
    assert next(tokens, None) is not None


def test_a_token_of_a_million_characters_is_named_by_its_beginning() -> None:
    assert len(token_name(completion("abc", token_texts=["\x01" * 1_000_000, "<end>"]), 0)) < 2000


def test_a_line_of_more_values_than_a_trainer_writes_is_no_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_file, "MAX_VALUES", 1000)
    for values in ([[]] * 1000, [0] * 1001, [{}] * 1000, [""] * 1000):
        file = _file_of(tmp_path, others=values)
        assert file.head(0) is None
        assert file.read(0) is None
    known = _file_of(tmp_path).read(0)
    assert known is not None
    assert known.model_dump() == group(1).model_dump()


def test_an_environment_with_a_name_of_a_million_characters_is_no_group(tmp_path: Path) -> None:
    file = _file_of(tmp_path, environment="é" * 1_000_000)
    assert file.head(0) is None
    assert file.read(0) is None


def test_a_moment_is_found_among_many_damaged_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rollouts.jsonl"
    early = group(1)
    write_groups(tmp_path, early)
    with path.open("ab") as file:
        file.write(b"1\n" * 90_000)
    rollouts = RolloutFile(path)
    rollouts.refresh()
    num_read = 0
    line_of = rollouts._line

    def counted(index: int) -> bytes:
        nonlocal num_read
        num_read += 1
        return line_of(index)

    monkeypatch.setattr(rollouts, "_line", counted)
    assert rollouts.num_until(early.time) == 1
    assert rollouts.num_until(early.time - 1) == 0
    assert num_read < 10_000
