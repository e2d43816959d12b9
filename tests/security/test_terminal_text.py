"""Text of a log reaches the terminal as text: nothing that reorders it, hides it or colours what comes after it."""

from __future__ import annotations

import io
import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from textual import events
from textual.app import App
from textual.drivers.linux_driver import LinuxDriver
from textual.message import Message

from grpo_engine import cli
from grpo_engine.check.report import Report, finding_lines
from grpo_engine.diagnosis.finding import Finding
from grpo_engine.errors import PeerError
from grpo_engine.wire.metrics import MetricsLine
from grpo_engine.wire.terminal_text import PrintableFormatter
from grpo_tui.cli import follow
from grpo_tui.cli.metrics import StepTable, metrics_command
from grpo_tui.cli.printing import table
from grpo_tui.supervisor.state_file import read_state
from grpo_tui.ui.terminal.paste_parser import MAX_PASTED, MAX_SIZE, PasteParser
from grpo_tui.ui.terminal.resumable_driver import MAX_WAITING, ResumableDriver
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


OBEYED = f"\x1b]0;owned\x07\x1b[2J{HIDDEN}"


def test_a_check_prints_what_a_server_answers_as_text_and_json_escapes_it(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = f"a{OBEYED}b"
    found = Finding(id="server", severity="error", text=hostile, cause=hostile, hint=hostile, details=(hostile,))
    shown = "\n".join(finding_lines(found, width=80, has_colour=False))
    assert shown.count("a]0;owned[2Jb") == 4
    assert shown.replace("\n", "").isprintable()
    report = Report(SimpleNamespace(model_name="m", bridge=SimpleNamespace(mode="none"), vllm_port=1, as_json=True))
    report.add(found)
    report.end()
    (line,) = capsys.readouterr().out.splitlines()
    assert (line.isprintable(), json.loads(line)["findings"][0]["seen"]) == (True, hostile)


def test_a_line_feed_in_a_name_of_a_run_folder_begins_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "logs" / "r"
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text("{}")
    metrics = {"train/loss": 0.5, "reward/a\nstep 9\treward/mean/mean": 0.25}
    line = {"time": 1, "step": 1, "policy_version": 1, "metrics": metrics}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    monkeypatch.chdir(tmp_path)
    metrics_command("r", all_=True)
    assert capsys.readouterr().out == "step 1  train/loss 0.5  reward/astep 9reward/mean/mean 0.25\n"
    (head, _) = StepTable(400).lines_of(MetricsLine.model_validate({**line, "metrics": {"a\nb": 1.0}}))
    assert head.split() == ["step", "ab"]
    assert table([("METRIC", "NOW"), ("a\nstep 9", "1")]) == "METRIC   NOW\nastep 9  1"
    (folder / f"x\n{OBEYED}.log").touch()
    monkeypatch.setattr(follow, "_is_service", lambda *_: False)
    with pytest.raises(typer.BadParameter, match=r"logs: x]0;owned\[2J$"):
        follow.logs_command(["r", "nothing"])


@pytest.mark.parametrize(("version", "shown"), [(99, "99"), (OBEYED, "no number"), ([OBEYED], "no number")])
def test_what_a_state_of_another_version_has_logged_is_text(
    version: object, shown: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / f"r{OBEYED}"
    folder.mkdir()
    (folder / "state.json").write_text(json.dumps({"ledger": {"version": version}}))
    with pytest.raises(PeerError):
        read_state(folder)
    assert f"r]0;owned[2J/state.json: its ledger is of version {shown}," in caplog.messages[0]


def test_errors_and_log_lines_of_engine_commands_are_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_words: object) -> int:
        raise PeerError(f"http://u:pw@h\nsecond{OBEYED}")

    monkeypatch.setitem(cli.COMMANDS, "env", fails)
    assert cli.main(["env"]) == 1
    assert capsys.readouterr().err == "grpo-engine env: http://u:***@h\nsecond]0;owned[2J\n"
    try:
        raise ValueError(OBEYED)
    except ValueError:
        record = logging.LogRecord(
            "x", logging.ERROR, "x.py", 1, "%s", (f"http://u:pw@h\ntwo{OBEYED}",), sys.exc_info()
        )
    formatted = PrintableFormatter("%(message)s").format(record)
    assert formatted.startswith("http://u:***@h\ntwo]0;owned[2J\nTraceback")  # W&B is sent what a trainer prints
    assert formatted.replace("\n", "").isprintable()


@pytest.mark.parametrize("read_length", [1, 5, 7, 4096])
def test_a_paste_with_escapes_is_text_and_no_keys(read_length: int) -> None:
    """`D` and `y` after an ESC in what was copied ended the run on whose screen it was pasted."""
    pasted = "a\x1b" + "D" * 40 + "\x1b" + "y" * 40 + "\x1b\x1b\x1b[200~\x1b[48;1;1;1;1t\x1b[O\x1b[201\nb\x9b"
    typed = f"q\x1b[200~{pasted}\x1b[201~w\x1b[A\x1b[200~\x1b[201~\x1b[B"
    parser = PasteParser()
    found = [
        event
        for start in range(0, len(typed), read_length)
        for event in parser.feed(typed[start : start + read_length])
    ]
    text = f"a{'D' * 40}{'y' * 40}[200~[48;1;1;1;1t[O[201\nb"
    assert [each.text if isinstance(each, events.Paste) else getattr(each, "key", each) for each in found] == [
        *("q", text, "w", "up", "", "down")
    ]


def test_of_a_paste_without_an_end_only_the_beginning_is_kept() -> None:
    parser = PasteParser()
    assert not [*parser.feed("\x1b[200~"), *(event for _ in range(50) for event in parser.feed("\x1b\x1b" * 2048))]
    assert not [*parser.feed("y" * 10 + "\x1b[20"), *parser.tick()]
    (paste,) = parser.feed("1~")
    assert isinstance(paste, events.Paste)
    assert len(paste.text) <= MAX_PASTED


@pytest.mark.parametrize("report", ["0;0;0;0", "24;80;0;0", "0;80;480;800"])
def test_a_mouse_event_after_a_size_of_0_is_ignored_and_ends_no_screen(report: str) -> None:
    parser = PasteParser()
    found = [*parser.feed(f"\x1b[48;{report}t"), *parser.feed("\x1b[<0;5;5M"), *parser.feed("a")]
    assert [type(event) for event in found] == [events.Resize, events.Key]


def test_a_size_that_no_terminal_has_is_ignored() -> None:
    """Textual makes every cell of it: 15 GB, until the memory ended."""
    reported = [*PasteParser().feed("\x1b[48;99999;99999;0;0t\x1b[48;24;80;480;800t")]
    assert [message.size for message in reported if isinstance(message, events.Resize)] == [(80, 24)]


def test_of_a_terminal_that_says_it_has_65535_columns_and_rows_a_part_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Textual made every cell of it: 2.4 GB within two minutes, in which no key was read."""
    monkeypatch.setenv("COLUMNS", "65535")
    monkeypatch.setenv("LINES", "65535")
    driver = ResumableDriver.__new__(ResumableDriver)
    assert driver._get_terminal_size() == MAX_SIZE
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    assert driver._get_terminal_size() == (80, 24)


async def test_of_keys_that_come_faster_than_they_are_handled_some_wait_and_the_rest_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """70 kB of them kept the screen for more than 90 s from reading the next one."""
    waiting: list[Message] = []
    monkeypatch.setattr(LinuxDriver, "process_message", lambda driver, message: waiting.append(message))
    driver = ResumableDriver(App(), size=(80, 24))
    for typed in ("w" * 5000, "\x1b[<35;1;1M", "\x1b[200~a paste\x1b[201~", "\x1b[48;24;80;480;800t"):
        for message in PasteParser().feed(typed):
            driver.process_message(message)
    del message
    assert [type(each) for each in waiting] == [*[events.Key] * MAX_WAITING, events.Paste, events.Resize]
    del waiting[:1]  # it is handled
    driver.process_message(events.Key("q", "q"))
    driver.process_message(events.Key("z", "z"))
    assert [each.key for each in waiting if isinstance(each, events.Key)] == [*["w"] * (MAX_WAITING - 1), "q"]


def test_a_key_that_is_no_character_ends_no_screen() -> None:
    typed = "\x1b[1114112ua\x1b[999999999~\x1b[99999999999ub"
    keys = [event.key for event in PasteParser().feed(typed) if isinstance(event, events.Key)]
    assert keys == ["a", "b"]


def test_a_command_of_the_engine_has_a_stdout_where_the_shell_has_closed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """`grpo-engine server >&-` ended with a traceback at what asks stdout whether it is a terminal, or flushes it."""
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main(["--help"]) == 0
    with sys.stdout as stdout:
        assert not stdout.isatty()
