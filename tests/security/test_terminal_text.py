"""Text of a log reaches the terminal as text: nothing that reorders it, hides it or colours what comes after it."""

from __future__ import annotations

import io
import json

import pytest

from grpo_tui.cli import follow
from grpo_tui.view.logs.tail import as_text, on_terminal

HIDDEN = "\u202e\u200b\U000e0041\u2028\ufeff\u2066\x9b"


def printed(*lines: bytes, is_terminal: bool = True) -> str:
    out = io.StringIO()
    printer = follow._Printer(out, is_terminal=is_terminal, whole_lines=False)
    for line in lines:
        printer.put(line)
    printer.end()
    return out.getvalue()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_logs_print_no_bidirectional_and_no_invisible_characters(is_terminal: bool) -> None:
    line = f"a{HIDDEN}b\t\x1b[31mc{HIDDEN}\x1b[0m é奖\u00a0d\n".encode()
    assert printed(line, is_terminal=is_terminal) == "ab\t\x1b[31mc\x1b[0m é奖\u00a0d\n"


def test_the_screen_shows_none_of_them_either_and_not_those_that_json_escapes() -> None:
    assert as_text(f"a{HIDDEN}b".encode()) == "ab"
    assert as_text(json.dumps({"event": f"a{HIDDEN}\ud800b\x1b[8mc"}).encode()) == "abc"


def test_an_unfinished_line_is_printed_without_them() -> None:
    out = io.StringIO()
    follow._Printer(out, is_terminal=True, whole_lines=False).put_unfinished(f"a{HIDDEN}\x1b[8mb".encode())
    assert out.getvalue() == follow.ERASE_LINE + "ab"


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        *(
            ("8", None),
            ("1;8", "1"),
            ("8;31", "31"),
            ("1;08;4", "1;4"),
            ("8:1;3", "3"),
            (";8", ""),
            ("38;8;5;8", "38;5"),
        ),
        *(("38;5;8", "38;5;8"), ("48;5;8;8", "48;5;8"), ("38;2;8;8;8;8", "38;2;8;8;8"), ("38:5:8", "38:5:8")),
        *(("28", "28"), ("88", "88"), ("", ""), ("0;1", "0;1")),
    ],
)
def test_conceal_is_removed_from_colours_and_colour_number_8_is_kept(sent: str, kept: str | None) -> None:
    assert on_terminal(f"\x1b[{sent}mx".encode()) == ("" if kept is None else f"\x1b[{kept}m") + "x"


def test_a_colour_ends_with_its_line() -> None:
    assert printed(b"\x1b[31mred\n", b"plain\n") == "\x1b[31mred\x1b[0m\nplain\n"
    assert printed(b"\x1b[31mred\x1b[0m end\n", b"\x1b[31mred\x1b[m") == "\x1b[31mred\x1b[0m end\n\x1b[31mred\x1b[m\n"
    assert printed(b"last \x1b[7m") == "last \x1b[7m\x1b[0m\n"
