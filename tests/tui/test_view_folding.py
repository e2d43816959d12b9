"""Where lines of a log are folded, and how much of a long one is looked at; by hand."""

from __future__ import annotations

import pytest
from rich.cells import cell_len

from grpo_tui.ui.widgets.log_page import _content
from grpo_tui.view.logs.folding import beginning, fold
from grpo_tui.view.logs.reader import LogLine
from grpo_tui.view.logs.state import LogsView, num_rows
from grpo_tui.view.logs.tail import without_colours

GREEN, PLAIN = "\x1b[32m", "\x1b[0m"


def rows(text: str, columns: int, most: int = 100) -> list[str]:
    return [text[piece] for piece in fold(text, columns, most)]


def drawn(text: str, columns: int, *, rows: int = 10, searched: str = "") -> list[str]:
    """With what is found in brackets."""
    logs = LogsView(
        services=("trainer",), chosen="trainer", columns=columns, rows=rows, is_wrapped=True, searched=searched
    )
    line = LogLine(source=0, offset=0, end=len(text), text=text, time=None)
    made = _content(line, logs, ("", ""), columns + 1)
    assert len(made) == num_rows(line, logs)
    assert all(each.cell_length == columns for each in made)
    marked = []
    for each in made:
        plain = each.plain
        for span in sorted((span for span in each.spans if span.style == ".match"), reverse=True):
            plain = f"{plain[: span.start]}[{plain[span.start : span.end]}]{plain[span.end :]}"
        marked.append(plain.rstrip())
    return marked


@pytest.mark.parametrize(
    ("text", "folded"),
    [
        ("", [""]),
        ("one two", ["one two"]),
        ("reward is 0.87 now", ["reward is ", "0.87 now"]),
        ("0123456789 next", ["0123456789 ", "next"]),
        ("a /data/checkpoints/step-40", ["a /data/ch", "eckpoints/", "step-40"]),
        ("    indented words", ["    indent", "ed words"]),
        ("x" * 23, ["x" * 10, "x" * 10, "xxx"]),
        (" " * 12, [" " * 11, " "]),
        ("语言模型 奖励平均值", ["语言模型 ", "奖励平均值"]),
        ("e\u0301" * 12, ["e\u0301" * 10, "e\u0301" * 2]),
    ],
)
def test_a_line_is_folded_at_blanks_and_a_word_longer_than_a_row_anywhere(text: str, folded: list[str]) -> None:
    assert rows(text, 10) == folded


def test_no_character_is_lost_and_no_row_is_too_wide() -> None:
    text = "INFO 训练 step 40 /very/long/path/with/many/parts/and/no/blank reward 0.8700 \u200bok 👩‍👩‍👧‍👦 " * 20
    for columns in (1, 2, 7, 40, 119):
        pieces = rows(text, columns, most=10_000)
        assert "".join(pieces) == text
        assert all(cell_len(piece.removesuffix(" ")) <= max(2, columns) for piece in pieces)


def test_a_line_of_a_megabyte_is_looked_at_as_far_as_it_is_shown() -> None:
    line = "word " * 200_000
    assert len(rows(line, 100, most=30)) == 31
    assert len(beginning(line, 3100)) == 3100
    coloured = f"{GREEN}word{PLAIN} " * 100_000
    assert without_colours(beginning(coloured, 3100)) == ("word " * 700)[:3100]
    assert beginning("short", 3100) == "short"


def test_what_is_found_is_marked_in_every_row_it_reaches() -> None:
    assert drawn("loss 0.02 reward 0.87", 10, searched="reward") == ["loss 0.02", "[reward]", "0.87"]
    assert drawn("loss 0.02 reward 0.87", 10, searched="0.02 reward") == ["loss [0.02 ]", "[reward]", "0.87"]
    assert drawn(f"{GREEN}loss{PLAIN} 0.02 {GREEN}reward{PLAIN} 0.87", 10, searched="ward") == [
        "loss 0.02", "re[ward]", "0.87",
    ]  # fmt: skip


def test_a_line_with_more_rows_than_the_page_ends_with_a_sign_wherever_it_was_folded() -> None:
    assert drawn("reward is 0.87 now and later", 10, rows=2) == ["reward is", "0.87 now …"]
