"""Reading the ends of files, and what is added to them."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from grpo_engine.errors import GrpoError
from grpo_tui.cli import follow
from grpo_tui.cli.metrics import metrics_command
from grpo_tui.client.local import latest_metrics
from grpo_tui.supervisor.capped_log import cap


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.log"


def last_lines(path: Path, count: int, *, with_unfinished: bool = True) -> follow.Tail:
    return follow.tail(path, count, lambda line: True, with_unfinished=with_unfinished)


def numbered(count: int) -> list[bytes]:
    return [b"line %d\n" % number for number in range(count)]


@pytest.mark.parametrize("block_bytes", [3, 7, 8, 64, 1 << 20])
def test_the_last_lines_are_found_across_blocks(path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int) -> None:
    path.write_bytes(b"".join(numbered(100)))
    monkeypatch.setattr(follow, "BLOCK_BYTES", block_bytes)
    last = last_lines(path, 3)
    assert last == follow.Tail(numbered(100)[97:], path.stat().st_size, b"")
    assert last_lines(path, 200).lines == numbered(100)


def test_with_a_pattern_the_last_matching_lines_count(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_bytes(b"".join(numbered(100)))
    monkeypatch.setattr(follow, "BLOCK_BYTES", 16)
    last = follow.tail(path, 2, lambda line: line.endswith(b"1\n"), with_unfinished=True)
    assert last.lines == [b"line 81\n", b"line 91\n"]


def test_an_unfinished_last_line_is_shown_or_left_to_be_followed(path: Path) -> None:
    path.write_bytes(b"one\n\ntwo")
    assert last_lines(path, 5).lines == [b"one\n", b"\n", b"two"]
    last = last_lines(path, 5, with_unfinished=False)
    assert last == follow.Tail([b"one\n", b"\n"], 8, b"two")
    append(path, b" halves\n")
    assert list(follow.grown(path, last, lambda: False)) == [b"two halves\n"]


def test_a_missing_file_is_empty(path: Path) -> None:
    assert last_lines(path, 5) == follow.Tail([])
    assert list(follow.grown(path, follow.Tail([]), lambda: False)) == []


def test_following_ends_with_the_run_and_loses_neither_the_last_nor_a_replaced_line(path: Path) -> None:
    path.write_bytes(b"old\n")
    script = iter([b"new\nhal", b"f\n", None, b"end"])

    def goes_on() -> bool:
        step = next(script, b"")
        if step is None:
            path.write_bytes(b"cut\n")
        elif step:
            append(path, step)
        return bool(step is None or step)

    lines = list(follow.grown(path, follow.Tail([], 4), goes_on, wait=lambda unfinished: None))
    assert lines == [b"new\n", b"half\n", b"cut\n", b"end"]


def test_a_line_without_an_end_is_yielded_in_pieces(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "BLOCK_BYTES", 4)
    monkeypatch.setattr(follow, "MAX_LINE_BYTES", 6)
    path.write_bytes(b"0123456789abcdefghij\nnext\n")
    forwards = list(follow.grown(path, follow.Tail([]), lambda: False))
    backwards = last_lines(path, 100).lines
    for pieces in (forwards, backwards):
        assert b"".join(pieces) == path.read_bytes()
        assert max(map(len, pieces)) <= 10
        assert pieces[-1] == b"next\n"


def test_a_progress_bar_that_never_ends_is_held_in_its_last_state(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "MAX_LINE_BYTES", 100)
    path.write_bytes(b"".join(b"%3d %%\r" % percent for percent in range(100)))
    states: list[bytes] = []
    looks = iter([True, True, False])
    left = list(follow.grown(path, follow.Tail([]), lambda: next(looks, False), wait=states.append))
    assert (states, left) == ([b" 99 %"], [b" 99 %"])


def test_a_follower_loses_nothing_when_lines_it_has_read_are_dropped(path: Path) -> None:
    path.write_bytes(b"".join(numbered(20_000)))
    last = last_lines(path, 0, with_unfinished=False)
    append(path, b"a\nb")
    assert cap(path, 100_000) > 0
    append(path, b"c\n")
    assert list(follow.grown(path, last, lambda: False)) == [b"a\n", b"bc\n"]


def test_a_follower_that_reads_too_slowly_reports_the_gap_and_goes_on_with_the_oldest_line_left(
    path: Path,
) -> None:
    path.write_bytes(b"".join(numbered(20_000)) + b"end\n")
    gaps: list[int] = []
    last = follow.Tail([], 1000, b"begun")
    dropped_bytes = cap(path, 100_000)
    begun, header, first, *_, end = follow.grown(path, last, lambda: False, report_gap=gaps.append)
    assert begun == b"begun\n"
    assert gaps == [dropped_bytes - 1000]
    assert header.startswith("=== capped · dropped ".encode())
    assert first in numbered(20_000)
    assert end == b"end\n"
    lines = last_lines(path, 100_000).lines
    assert lines[:2] == [header, first]


def page(*, is_terminal: bool, lines: list[bytes], unfinished: bytes = b"") -> str:
    out = io.StringIO()
    shown = follow._Printer(out, is_terminal=is_terminal, whole_lines=False)
    shown.put_unfinished(unfinished)
    for line in lines:
        shown.put(line)
    shown.end()
    return out.getvalue()


def test_lines_come_as_on_a_terminal_and_nothing_else_is_stripped() -> None:
    lines = [
        b"  caf\xe9\tx  \n",
        b"10%\r100%\r\n",
        b"\x1b[2K\x1b[31mred\x1b[0m\x1b]0;title\x07\n",
        b"=== attempt 2 \xc2\xb7 now\n",
        b"end",
    ]
    texts = ["  caf\ufffd\tx  ", "100%", "\x1b[31mred\x1b[0m", "=== attempt 2 · now", "end"]
    assert page(is_terminal=False, lines=lines, unfinished=b"...") == "".join(f"{text}\n" for text in texts)


def test_on_a_terminal_attempts_are_dim_and_a_progress_bar_moves() -> None:
    shown = page(is_terminal=True, lines=["=== attempt 2 · now\n".encode()], unfinished=b"5%\r10%")
    assert shown == "\r\x1b[K10%\r\x1b[K\x1b[2m=== attempt 2 · now\x1b[0m\n"


def test_the_latest_value_of_every_metric_is_found_past_damaged_lines(tmp_path: Path) -> None:
    assert latest_metrics(tmp_path) == {}
    lines = [
        '{"time": 1, "step": 1, "policy_version": 1, "metrics": {"train/loss": 0.5, "eval/score": 0.25}}',
        "not json",
        '{"time": 2, "step": 2, "policy_version": 2, "metrics": {"train/loss": 0.4, "grpo/kl": NaN}}',
        '{"time": 3, "step": 3, "metr',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert latest_metrics(tmp_path) == {"step": 2, "train/loss": 0.4, "eval/score": 0.25}


def test_only_the_requested_metrics_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "logs" / "r"
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text("{}")
    (folder / "metrics.jsonl").write_text(
        '{"time": 1, "step": 1, "policy_version": 1, "metrics": {"eval/score": 0.25}}\n'
        '{"time": 2, "step": 2, "policy_version": 2, "metrics": {"train/loss": 0.5, "reward/mean": 0.25}}\n'
    )
    monkeypatch.chdir(tmp_path)
    metrics_command("r", only=["reward", "train/l"])
    assert capsys.readouterr().out == "step 2  train/loss 0.5  reward/mean 0.25\n"
    metrics_command("r", only=["nosuch"])
    assert "no metric of r starts with nosuch" in capsys.readouterr().err


def test_a_log_whose_bytes_cannot_be_read_is_one_message(tmp_path: Path) -> None:
    """As on a disk that fails; `logs` ended with a traceback."""
    (tmp_path / "trainer.log").symlink_to("/proc/self/mem")
    with pytest.raises(GrpoError, match=r"trainer.log: cannot be read: Input/output error"):
        last_lines(tmp_path / "trainer.log", 5)
