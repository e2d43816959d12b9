"""Reading the ends of files, and what is added to them."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_tui.cli import follow
from grpo_tui.client.local import latest_metrics


def everything(line: bytes) -> bool:
    return True


def test_the_last_lines_are_found_across_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"".join(b"line %d\n" % number for number in range(100)))
    for block_bytes in (3, 7, 8, 64, 1 << 20):
        monkeypatch.setattr(follow, "BLOCK_BYTES", block_bytes)
        end, lines = follow.tail(path, 3, everything)
        assert lines == [b"line 97", b"line 98", b"line 99"]
        assert end == path.stat().st_size
        assert follow.tail(path, 200, everything)[1] == [b"line %d" % number for number in range(100)]


def test_with_a_pattern_the_last_matching_lines_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"".join(b"line %d\n" % number for number in range(100)))
    monkeypatch.setattr(follow, "BLOCK_BYTES", 16)
    _, lines = follow.tail(path, 2, lambda line: line.endswith(b"1"))
    assert lines == [b"line 81", b"line 91"]


def test_an_unfinished_last_line_is_shown_and_a_missing_file_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    assert follow.tail(path, 5, everything) == (0, [])
    path.write_bytes(b"one\ntwo")
    assert follow.tail(path, 5, everything)[1] == [b"one", b"two"]
    assert follow.tail(path, 0, everything)[1] == []


def test_following_ends_with_the_run_and_loses_neither_the_last_nor_a_replaced_line(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"old\n")
    script = iter([b"new\nhal", b"f\n", None, b"end"])

    def goes_on() -> bool:
        step = next(script, b"")
        if step is None:
            path.write_bytes(b"cut\n")
        elif step:
            with path.open("ab") as file:
                file.write(step)
        return bool(step is None or step)

    assert list(follow.grown(path, 4, goes_on)) == [b"new", b"half", b"cut", b"end"]


def test_a_line_without_an_end_is_handed_on_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "BLOCK_BYTES", 4)
    monkeypatch.setattr(follow, "MAX_LINE_BYTES", 6)
    path = tmp_path / "a.log"
    path.write_bytes(b"x" * 20)
    assert b"".join(follow.grown(path, 0, lambda: False)) == b"x" * 20


def test_the_latest_value_of_every_metric_is_found_in_a_file_with_rubbish(tmp_path: Path) -> None:
    assert latest_metrics(tmp_path) == {}
    lines = [
        '{"time": 1, "step": 1, "policy_version": 1, "metrics": {"train/loss": 0.5, "eval/score": 0.25}}',
        "not json",
        '{"time": 2, "step": 2, "policy_version": 2, "metrics": {"train/loss": 0.4, "grpo/kl": NaN}}',
        '{"time": 3, "step": 3, "metr',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert latest_metrics(tmp_path) == {"step": 2, "train/loss": 0.4, "eval/score": 0.25}
