"""Reading files that grow, are cut, are replaced, or hold half a line."""

import json
import math
import os
from pathlib import Path

import pytest
from screen_fakes import metrics_line

from grpo_tui.run_files.metrics import MetricsTail
from grpo_tui.view.logs.tail import LogTail, without_colours


def as_line(step: int) -> str:
    return json.dumps(metrics_line(step).model_dump()) + "\n"


# --- metrics ---------------------------------------------------------------------------------------------------------


def test_metrics_come_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert tail.read().lines == ()
    path.write_text(as_line(1))
    assert [line.step for line in tail.read().lines] == [1]
    with path.open("a") as file:
        file.write(as_line(2) + as_line(3))
    assert [line.step for line in tail.read().lines] == [2, 3]
    assert tail.read().lines == ()


def test_half_a_last_line_waits_for_its_other_half(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    text = as_line(1)
    path.write_text(text[:40])
    tail = MetricsTail(path)
    assert tail.read().lines == ()
    with path.open("a") as file:
        file.write(text[40:])
    assert [line.step for line in tail.read().lines] == [1]


def test_a_line_that_is_no_json_is_counted_and_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(as_line(1) + "garbage\n" + '{"step": 2}\n' + as_line(3))
    chunk = MetricsTail(path).read()
    assert [line.step for line in chunk.lines] == [1, 3]
    assert chunk.num_bad_lines == 2


def test_a_nan_hides_its_own_metric_only(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    record = metrics_line(1).model_dump()
    record["metrics"]["train/grad_norm"] = math.nan
    path.write_text(json.dumps(record) + "\n")
    line = MetricsTail(path).read().lines[0]
    assert "train/grad_norm" not in line.metrics
    assert line.metrics["train/lr"] == 1e-5


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_file_that_begins_anew_is_read_from_its_start(tmp_path: Path, is_replaced: bool) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(as_line(1) + as_line(2))
    tail = MetricsTail(path)
    tail.read()
    if is_replaced:
        other = tmp_path / "other"
        other.write_text(as_line(7))
        other.replace(path)
    else:
        path.write_text(as_line(7))
    chunk = tail.read()
    assert chunk.is_restarted
    assert [line.step for line in chunk.lines] == [7]


def test_a_long_file_comes_in_bounded_pieces(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(as_line(step) for step in range(1, 1501)))
    tail = MetricsTail(path)
    pieces = [tail.read()]
    while pieces[-1].has_more:
        pieces.append(tail.read())
    assert len(pieces) > 1
    assert [line.step for piece in pieces for line in piece.lines] == list(range(1, 1501))


def test_metrics_of_a_run_that_was_deleted_are_no_error(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(as_line(1))
    tail = MetricsTail(path)
    tail.read()
    path.unlink()
    assert tail.read().is_restarted
    assert not tail.read().is_restarted


# --- logs ------------------------------------------------------------------------------------------------------------


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_a_log_opens_at_its_tail_with_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"".join(b"line %05d\n" % number for number in range(10_000)))
    chunk = LogTail(path, first_bytes=100).read()
    assert chunk.lines == tuple(f"line {number:05d}" for number in range(9991, 10_000))


def test_a_huge_log_opens_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    with path.open("wb") as file:
        file.seek(3 << 30)  # a sparse file of 3 GiB
        file.write(b"\nlast\n")
    tail = LogTail(path, first_bytes=4096)
    assert tail.read().lines[-1] == "last"


def test_new_lines_come_once(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"one\n")
    tail = LogTail(path)
    assert tail.read().lines == ("one",)
    append(path, b"two\nthr")
    chunk = tail.read()
    assert (chunk.lines, chunk.open_line) == (("two",), "thr")
    append(path, b"ee\n")
    chunk = tail.read()
    assert (chunk.lines, chunk.open_line) == (("three",), "")
    assert not tail.read().has_changed


def test_a_progress_bar_is_its_latest_state(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"load:  10%\rload:  50%\r")
    tail = LogTail(path)
    assert tail.read().open_line == "load:  50%"
    append(path, b"load: 100%\r\ndone\n")
    assert tail.read().lines == ("load: 100%", "done")


def test_bytes_that_are_no_utf8_do_not_hide_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"caf\xe9 \xff ok\n")
    assert LogTail(path).read().lines == ("caf\ufffd \ufffd ok",)


def test_a_character_split_over_two_reads_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"x\n\xe2\x94")
    tail = LogTail(path)
    tail.read()
    append(path, b"\x80\n")
    assert tail.read().lines == ("─",)


def test_colours_stay_and_every_other_control_sequence_goes(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"\x1b[2K\x1b[1A\x1b]0;title\x07\x1b[31mred\x1b[0m\x07 end\x1b[?25h\tx\x00\x1b\n")
    line = LogTail(path).read().lines[0]
    assert line == "\x1b[31mred\x1b[0m end x"
    assert without_colours(line) == "red end x"


@pytest.mark.parametrize("how", ["cut", "replaced", "cut and regrown"])
def test_a_log_that_begins_anew_replaces_what_was_read(tmp_path: Path, how: str) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"old line\n" * 10)
    tail = LogTail(path)
    tail.read()
    if how == "cut":
        os.truncate(path, 0)
        append(path, b"new\n")
        expected: tuple[str, ...] = ("new",)
    elif how == "replaced":
        (tmp_path / "b").write_bytes(b"new\n")
        (tmp_path / "b").replace(path)
        expected = ("new",)
    else:
        os.truncate(path, 0)
        append(path, b"new line\n" * 20)
        expected = ("new line",) * 20
    chunk = tail.read()
    assert chunk.is_restarted
    assert chunk.lines == expected


def test_a_flood_is_skipped_and_says_how_much(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"start\n")
    tail = LogTail(path, first_bytes=1000, max_bytes=5000)
    tail.read()
    append(path, b"0123456789abcde\n" * 1000)
    chunk = tail.read()
    assert not chunk.is_restarted
    assert "15K skipped" in chunk.lines[0]
    assert chunk.lines[1:] == ("0123456789abcde",) * (1000 // 16)
    append(path, b"calm\n")
    assert tail.read().lines == ("calm",)


def test_a_log_that_does_not_exist_yet_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    tail = LogTail(path)
    assert not tail.read().has_changed
    path.write_bytes(b"here\n")
    assert tail.read().lines == ("here",)


def test_an_endless_line_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"x" * 100_000 + b"\n")
    assert len(LogTail(path).read().lines[0]) == 4001
