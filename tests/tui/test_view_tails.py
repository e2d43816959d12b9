"""Reading files that grow, are cut, are replaced, or hold half a line."""

from pathlib import Path

import pytest
from screen_fakes import metrics_line

from grpo_engine.wire.codec import MAX_HOLES_BYTES
from grpo_tui.run_files import metrics as metrics_file
from grpo_tui.run_files.metrics import MetricsChunk, MetricsTail
from grpo_tui.view.logs.tail import LogTail, without_colours


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


# --- metrics ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def as_lines(*steps: int) -> bytes:
    return b"".join(metrics_line(step).model_dump_json().encode() + b"\n" for step in steps)


def steps_of(*chunks: MetricsChunk) -> list[int]:
    return [line.step for chunk in chunks for line in chunk.lines]


def test_metrics_are_read_as_they_are_written_by_whole_lines(metrics: Path) -> None:
    tail = MetricsTail(metrics)
    assert tail.read().lines == ()
    metrics.write_bytes(as_lines(1))
    assert steps_of(tail.read()) == [1]
    append(metrics, as_lines(2, 3) + as_lines(4)[:40])
    assert steps_of(tail.read()) == [2, 3]
    append(metrics, as_lines(4)[40:])
    assert steps_of(tail.read(), tail.read()) == [4]


def test_lines_that_are_no_metrics_are_counted_and_skipped(metrics: Path) -> None:
    metrics.write_bytes(as_lines(1) + b'garbage\n{"step": 2}\n' + b"[" * 100_000 + b"\n" + as_lines(3))
    chunk = MetricsTail(metrics).read()
    assert (steps_of(chunk), chunk.num_bad_lines) == ([1, 3], 3)


@pytest.mark.parametrize("strange", ["null", '"n/a"', "NaN", "-Infinity", "1" + "0" * 400, "[1]", "1e999"])
def test_a_value_that_is_no_finite_number_hides_itself_only(metrics: Path, strange: str) -> None:
    values = f'{{"a": {strange}, "reward/mean": 0.5}}'
    metrics.write_text(f'{{"time": 1, "step": 1, "policy_version": 1, "metrics": {values}}}\n')
    assert [line.metrics for line in MetricsTail(metrics).read().lines] == [{"reward/mean": 0.5}]


@pytest.mark.parametrize(("is_replaced", "written"), [(True, [7]), (False, [7]), (False, [7, 8, 9])])
def test_a_metrics_file_that_was_recreated_is_read_from_its_start(
    metrics: Path, is_replaced: bool, written: list[int]
) -> None:
    metrics.write_bytes(as_lines(1, 2))
    tail = MetricsTail(metrics)
    tail.read()
    target = metrics.with_suffix(".new") if is_replaced else metrics
    target.write_bytes(as_lines(*written))
    target.replace(metrics)
    chunk = tail.read()
    assert (chunk.is_restarted, steps_of(chunk)) == (True, written)


def test_a_long_file_and_a_line_without_an_end_are_read_in_bounded_pieces(
    metrics: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_file, "MAX_BYTES_A_READ", 1000)
    metrics.write_bytes(as_lines(*range(1, 21)) + b"x" * 5000 + b"\n" + as_lines(21))
    tail = MetricsTail(metrics)
    chunks = [tail.read()]
    while chunks[-1].has_more:
        chunks.append(tail.read())
    assert len(chunks) > 20
    assert steps_of(*chunks) == list(range(1, 22))
    assert sum(chunk.num_bad_lines for chunk in chunks) == 1


def test_metrics_that_were_deleted_or_cannot_be_read_are_no_error(metrics: Path) -> None:
    metrics.write_bytes(as_lines(1))
    tail = MetricsTail(metrics)
    tail.read()
    metrics.unlink()
    assert tail.read().is_restarted
    assert not tail.read().is_restarted
    metrics.mkdir()
    assert MetricsTail(metrics).read() == MetricsChunk()


# --- logs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.log"


def test_a_log_opens_at_its_tail_with_whole_lines(path: Path) -> None:
    path.write_bytes(b"".join(b"line %05d\n" % number for number in range(10_000)))
    chunk = LogTail(path, first_bytes=100).read()
    assert chunk.lines == tuple(f"line {number:05d}" for number in range(9991, 10_000))


def test_a_huge_log_opens_without_reading_it(path: Path) -> None:
    with path.open("wb") as file:
        file.seek(MAX_HOLES_BYTES - 4096)  # sparse, as long as one may be
        file.write(b"\nlast\n")
    tail = LogTail(path, first_bytes=4096)
    assert tail.read().lines[-1] == "last"


def test_a_log_is_waited_for_and_its_new_lines_come_once(path: Path) -> None:
    tail = LogTail(path)
    assert not tail.read().has_changed
    path.write_bytes(b"one\n")
    assert tail.read().lines == ("one",)
    append(path, b"two\nthr")
    chunk = tail.read()
    assert (chunk.lines, chunk.open_line) == (("two",), "thr")
    append(path, b"ee\n")
    chunk = tail.read()
    assert (chunk.lines, chunk.open_line) == (("three",), "")
    assert not tail.read().has_changed


def test_a_progress_bar_is_its_latest_state(path: Path) -> None:
    path.write_bytes(b"load:  10%\rload:  50%\r")
    tail = LogTail(path)
    assert tail.read().open_line == "load:  50%"
    append(path, b"load: 100%\r\ndone\n")
    assert tail.read().lines == ("load: 100%", "done")


def test_bytes_that_are_no_utf8_hide_no_line_and_a_character_split_over_two_reads_is_whole(path: Path) -> None:
    path.write_bytes(b"caf\xe9 \xff ok\n\xe2\x94")
    tail = LogTail(path)
    assert tail.read().lines == ("caf\ufffd \ufffd ok",)
    append(path, b"\x80\n")
    assert tail.read().lines == ("─",)


def test_colours_stay_and_every_other_control_sequence_goes(path: Path) -> None:
    path.write_bytes(b"\x1b[2K\x1b[1A\x1b]0;title\x07\x1b[31mred\x1b[0m\x07 end\x1b[?25h\tx\x00\x1b\n")
    line = LogTail(path).read().lines[0]
    assert line == "\x1b[31mred\x1b[0m end x"
    assert without_colours(line) == "red end x"


@pytest.mark.parametrize(("how", "text"), [("cut", "new"), ("replaced", "new"), ("cut and regrown", "new line\n" * 20)])
def test_a_log_that_was_recreated_replaces_what_was_read(path: Path, how: str, text: str) -> None:
    path.write_bytes(b"old line\n" * 10)
    tail = LogTail(path)
    tail.read()
    target = path.with_suffix(".new") if how == "replaced" else path
    target.write_text(text.rstrip() + "\n")
    target.replace(path)
    chunk = tail.read()
    assert (chunk.is_restarted, list(chunk.lines)) == (True, text.splitlines())


def test_a_flood_is_skipped_and_says_how_much(path: Path) -> None:
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


def test_an_endless_line_is_cut(path: Path) -> None:
    path.write_bytes(b"x" * 100_000 + b"\n")
    assert len(LogTail(path).read().lines[0]) == 4001
