"""The state of the rollout screen after each key, what a filter selects, and how text becomes lines of tokens."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from group_fakes import completion, group, write_groups
from screen_fakes import STARTED

from grpo_engine.wire.metrics import RolloutLine
from grpo_tui.view.rollouts import reader as rollout_reader
from grpo_tui.view.rollouts.reader import RolloutReader
from grpo_tui.view.rollouts.state import (
    CompletionMoved,
    EnvironmentTurned,
    FilterCleared,
    GroupFilter,
    GroupMoved,
    GroupsArrived,
    MarkToggled,
    Narrowed,
    NewestFollowed,
    RewardKindTurned,
    RolloutChange,
    RolloutView,
    SamePromptToggled,
    SteppedBack,
    TintTurned,
    TokenSet,
    after,
)
from grpo_tui.view.rollouts.text import (
    SCALES,
    Piece,
    line_of,
    pieces_of,
    telling_starts,
    token_at,
    token_name,
    token_words,
    value_of,
    visible,
    wrapped,
)

SAME_PROMPT = "sort 123"
RUN = [
    group(1, (1.0, 1.0), prompt=SAME_PROMPT),
    group(2, (0.0, 0.0), environment="gsm8k", texts=("Äpfel: 4", "none")),
    group(3, (1.0, 0.0), prompt=SAME_PROMPT),
    group(4, (0.5, 0.25, 0.5)),
    group(5, (1.0, 1.0), prompt=SAME_PROMPT),
]


class Seen:
    """A view and its reader, as the screen has them."""

    def __init__(self, folder: Path, *groups: RolloutLine) -> None:
        write_groups(folder, *groups)
        self.folder = folder
        self.reader = RolloutReader(folder / "rollouts.jsonl")
        self.view = RolloutView()
        self.until: float | None = None
        self.look()

    def append(self, *groups: RolloutLine) -> None:
        write_groups(self.folder, *groups, mode="ab")
        self.look()

    def look(self) -> None:
        while True:
            read = self.reader.look(self.view.filter, self.view.selected, until=self.until)
            self.view = after(self.view, GroupsArrived(read=read))
            if not read.is_searching:
                return

    def after(self, *changes: RolloutChange) -> RolloutView:
        for change in changes:
            self.view = after(self.view, change)
            self.look()
        return self.view

    @property
    def steps(self) -> list[int]:
        """Of the groups in the list."""
        assert self.view.read is not None
        heads = [self.view.read.heads[index] for index in self.view.found]
        return [head.step for head in heads if head is not None]

    @property
    def step(self) -> int | None:
        """Of the group that is read."""
        return self.view.group and self.view.group.step


@pytest.fixture
def seen(tmp_path: Path) -> Seen:
    return Seen(tmp_path, *RUN)


def test_the_newest_group_is_read_until_one_moves_away(seen: Seen) -> None:
    assert (seen.steps, seen.step, seen.view.is_following) == ([5, 4, 3, 2, 1], 5, True)
    seen.append(group(6))
    assert seen.step == 6
    seen.after(GroupMoved(by=1))
    seen.append(group(7))
    assert (seen.step, seen.view.is_following) == (5, False)
    seen.after(NewestFollowed())
    assert (seen.step, seen.view.is_following) == (7, True)


def test_reading_a_completion_holds_its_group_and_moving_stops_at_both_ends(seen: Seen) -> None:
    seen.after(CompletionMoved(by=1), TokenSet(token=2))
    seen.append(group(6))
    assert (seen.step, seen.view.completion, seen.view.token) == (5, 1, 2)
    seen.after(CompletionMoved(by=5))
    assert (seen.view.completion, seen.view.token) == (1, 0)
    for by, step in ((99, 1), (-99, 6)):
        seen.after(GroupMoved(by=by))
        assert seen.step == step


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (Narrowed(by="above", number=0.42), [5, 3, 1]),
        (Narrowed(by="below", number=0.42), [4, 2]),
        (Narrowed(by="text", text="ÄPFEL"), [2]),
        (Narrowed(by="text", text="answer 2 of"), [4]),
        (Narrowed(by="text", text="nowhere"), []),
        (Narrowed(by="text", text="policy_versions"), []),  # a word of the file, and of no group
    ],
)
def test_a_filter_selects_groups_by_reward_or_text(seen: Seen, change: RolloutChange, expected: list[int]) -> None:
    seen.after(change)
    assert seen.steps == expected
    assert seen.step == (expected[0] if expected else None)
    seen.after(FilterCleared())
    assert seen.steps == [5, 4, 3, 2, 1]


def test_kinds_of_rewards_and_environments_are_cycled(seen: Seen) -> None:
    assert GroupFilter(environment="0").words == "environment 0", "an environment without a name has its number"
    kinds = []
    for _ in range(4):
        seen.after(RewardKindTurned())
        kinds.append((str(seen.view.filter.kind), seen.steps))
    assert kinds == [
        ("all right", [5, 1]),
        ("all wrong", [2]),
        ("mixed", [4, 3]),
        ("any rewards", [5, 4, 3, 2, 1]),
    ]
    seen.after(EnvironmentTurned())
    assert (seen.view.filter.words, seen.steps) == ("gsm8k", [2])
    seen.after(EnvironmentTurned())
    assert (seen.view.filter.words, seen.steps) == ("sort6", [5, 4, 3, 1])
    seen.after(EnvironmentTurned())
    assert seen.view.filter.is_open


def test_a_filter_follows_what_is_added(seen: Seen) -> None:
    seen.after(RewardKindTurned())
    seen.append(group(6, (1.0,)), group(7, (0.0,)))
    assert (seen.steps, seen.step) == ([6, 5, 1], 6)


def test_one_prompt_is_followed_over_policy_versions_and_back(seen: Seen) -> None:
    seen.after(GroupMoved(by=2), SamePromptToggled())
    assert (seen.steps, seen.step) == ([1, 3, 5], 3)
    seen.after(GroupMoved(by=1))
    assert seen.step == 5
    seen.after(SamePromptToggled())
    assert (seen.steps, seen.step) == ([5, 4, 3, 2, 1], 3)


def test_a_marked_completion_stays_while_others_are_read(seen: Seen) -> None:
    view = seen.after(CompletionMoved(by=1), MarkToggled(), GroupMoved(by=2))
    assert view.marked is not None
    assert (view.marked.line.step, view.marked.completion, seen.step) == (5, 1, 3)
    assert seen.after(SteppedBack()).marked is None


def test_only_what_was_recorded_until_a_moment_is_there(seen: Seen) -> None:
    seen.until = STARTED + 2.4 * 3
    seen.look()
    assert (seen.steps, seen.step) == ([3, 2, 1], 3)
    seen.after(RewardKindTurned())
    assert seen.steps == [1]
    seen.until = None
    seen.look()
    assert seen.steps == [5, 1]


def test_a_file_that_was_recreated_is_read_from_its_newest_group(seen: Seen, tmp_path: Path) -> None:
    seen.after(GroupMoved(by=3))
    (tmp_path / "rollouts.jsonl").unlink()
    seen.look()
    assert seen.steps == []
    write_groups(tmp_path, group(9))
    seen.look()
    assert (seen.steps, seen.step, seen.view.is_following) == ([9], 9, True)


def test_a_damaged_line_is_in_the_list_and_hides_no_other(tmp_path: Path) -> None:
    seen = Seen(tmp_path, group(1))
    with (tmp_path / "rollouts.jsonl").open("ab") as file:
        file.write(b'{"time": 1\n')
    seen.look()
    assert (len(seen.view.found), seen.view.chosen, seen.view.group) == (2, 1, None)
    seen.after(GroupMoved(by=1))
    assert seen.step == 1


def test_heads_that_take_long_come_a_few_a_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_reader, "HEADS_S", -1.0)
    seen = Seen(tmp_path, *RUN)
    assert seen.view.read is not None
    assert list(seen.view.read.heads) == [4]
    assert not seen.view.read.has_all_heads
    assert seen.step == 5


def test_a_result_for_an_older_filter_changes_nothing(seen: Seen) -> None:
    stale = seen.reader.look(GroupFilter(text="Äpfel"), None)
    assert after(seen.view, GroupsArrived(read=stale)) is seen.view


# --- text ------------------------------------------------------------------------------------------------------------


def test_control_characters_are_escaped() -> None:
    assert visible("a\x1b[2Jb\x07\r\t\u202e\u200b\x9b") == r"a\x1b[2Jb\x07\r\t\u202e\u200b\x9b"
    assert (
        visible("a\u034f\u3164\ufe00\U000e0101\u2764\ufe0fe\u0301")
        == "a\\u034f\\u3164\\ufe00\\U000e0101\u2764\ufe0fe\u0301"
    )
    assert visible("naïve 日本 👍") == "naïve 日本 👍"


def test_lines_break_at_tokens_and_new_lines_and_never_grow_too_wide() -> None:
    pieces = [Piece("Hello", 0), Piece(" world", 1), Piece("\n", 2), Piece("日本日本日本", 3), Piece("!", 4)]
    lines = wrapped(pieces, 9)
    assert [[piece.text for piece in line] for line in lines] == [
        ["Hello"],
        [" world", r"\n"],
        ["日本日本"],
        ["日本", "!"],
    ]
    assert [line_of(lines, token) for token in range(5)] == [0, 1, 1, 2, 3]
    assert token_at(lines, 3) == 3
    assert wrapped([], 9) == []


def test_a_very_long_completion_is_laid_out_whole() -> None:
    long = completion("word" * 20_000)
    lines = wrapped(pieces_of(long), 74)
    assert "".join(piece.text for line in lines for piece in line) == long.text


def test_text_read_between_turns_is_no_token() -> None:
    turns = completion("abcdef", read_before={1: "[tool] 7\n"})
    assert list(pieces_of(turns)) == [Piece("abc", 0), Piece("[tool] 7\n", None), Piece("def", 1), Piece("<end>", 2)]
    assert list(pieces_of(completion("abc", token_texts=[]))) == [Piece("abc<end>", None)]


def test_tokens_have_the_tone_of_their_value() -> None:
    one = completion("abcdefghi", reward=0.0)
    tones = {tint: [scale.tone(value_of(one, token, tint)) for token in range(4)] for tint, scale in SCALES.items()}
    assert list(tones.values()) == [
        ["", ".warm-end", ".cool-end", ""],
        [".bad-end"] * 4,
        [".cool-end", ".cool", ".cool", ""],
    ]
    assert SCALES[after(RolloutView(), TintTurned()).tint].tone(math.nan) == ""


def test_a_token_is_described_with_its_numbers() -> None:
    one = completion("abcd\n", version=7)
    assert token_name(one, 1) == r'token 2 of 3 "d\n"'
    assert token_words(one, 1) == (
        "ratio 1.499, log-prob -0.500 inference, -0.095 trainer, entropy 0.250 nats, advantage +1.000, policy version 7"
    )
    untrained = completion("abc", training_logprobs=[], entropies=[])
    assert token_words(untrained, 0) == "log-prob -0.500 inference, advantage +1.000, policy version 3, not trained on"
    assert (
        token_name(completion("", token_texts=["", "é"], token_ids=[1, 2]), 0) == "token 1 of 2 (part of a character)"
    )


def test_prompts_are_shown_without_the_start_that_they_share() -> None:
    system = "<|im_start|>system\nBe brief.<|im_end|>"
    assert telling_starts([f"{system}sort 12", f"{system}sort 31"]) == ["12", "31"]
    assert telling_starts([system, system]) == [system, system]
    assert telling_starts([]) == []
