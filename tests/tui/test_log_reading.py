"""Lines of logs from any place in either direction, merged by time, narrowed, searched and counted."""

import errno
import json
import os
import re
from datetime import datetime
from pathlib import Path

import pytest

from grpo_tui.run_files.log_file import Part, read_part
from grpo_tui.supervisor.capped_log import cap
from grpo_tui.view.logs import reader as log_reader
from grpo_tui.view.logs import window
from grpo_tui.view.logs.reader import Found, LogFile, LogReader, MatchCount
from grpo_tui.view.logs.search import InvalidPattern, Level, line_tests
from grpo_tui.view.logs.timestamps import InvalidTime, time_of, typed_time

NOON = datetime(2026, 1, 31, 12, 0, 0).timestamp()


def reader_of(tmp_path: Path, **logs: str) -> LogReader:
    """Put logs into files, and read them."""
    for name, text in logs.items():
        (tmp_path / f"{name}.log").write_text(text)
    return LogReader([LogFile(name=name, path=tmp_path / f"{name}.log") for name in logs])


def texts(found: Found) -> list[str]:
    return [line.text for line in found.lines]


# --- in either direction ---------------------------------------------------------------------------------------------


def test_pages_back_and_pages_on_give_every_line_once(tmp_path: Path) -> None:
    lines = [f"line {number} " + "x" * (number % 300) for number in range(5000)]
    reader = reader_of(tmp_path, trainer="\n".join(lines) + "\n")
    ends = reader.extent().ends
    cut, back = ends, list[str]()
    while True:
        found = reader.before(cut, 333)
        cut, back = found.cut, texts(found) + back
        if found.is_all:
            break
    assert back == lines
    on = list[str]()
    while True:
        found = reader.after(cut, 333, ends)
        cut, on = found.cut, on + texts(found)
        if found.is_all:
            break
    assert on == lines


def test_a_line_longer_than_a_block_is_read_in_pieces_and_the_lines_after_it_too(tmp_path: Path) -> None:
    long = "y" * 3_000_000
    reader = reader_of(tmp_path, trainer=f"first\n{long}\nlast\n")
    ends = reader.extent().ends
    on, back = reader.after((0,), 100, ends), reader.before(ends, 100)
    for found in (on, back):
        assert found.is_all
        assert (texts(found)[0], texts(found)[-1]) == ("first", "last")
        assert sum(line.end - line.offset for line in found.lines) == ends[0]


def test_a_line_that_is_being_written_is_read_again_when_it_is_longer(tmp_path: Path) -> None:
    reader = reader_of(tmp_path, trainer="one\ntwo is not")
    ends = reader.extent().ends
    assert texts(reader.before(reader.last_lines_begin(ends), 10)) == ["one"]
    found = reader.after((0,), 10, ends)
    assert (texts(found), found.lines[-1].is_open) == (["one", "two is not"], True)
    with (tmp_path / "trainer.log").open("a") as file:
        file.write(" yet there\n")
    again = reader.after(found.cut, 10, reader.extent().ends)
    assert (texts(again), again.lines[0].is_open) == (["two is not yet there"], False)


def test_lines_keep_their_offsets_when_the_older_half_of_the_log_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "trainer.log"
    path.write_text("=== attempt 1 · 2026-01-31 12:00:00 · python\n" + "".join(f"line {n:06}\n" for n in range(40_000)))
    reader = LogReader([LogFile(name="trainer", path=path)])
    before = reader.before(reader.extent().ends, 50)
    with path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    assert cap(path, 200_000) > 0
    extent = reader.extent()
    assert extent.starts[0] > 0
    assert reader.after(before.cut, 50, extent.ends).lines == before.lines
    oldest = reader.after((0,), 3, extent.ends)
    assert oldest.lines[0].text.startswith("=== capped")


def test_a_log_that_is_not_there_holds_nothing_and_keeps_no_other_from_being_read(tmp_path: Path) -> None:
    reader = reader_of(tmp_path, api="12:00:00 here\n", vllm="")
    (tmp_path / "vllm.log").unlink()
    ends = reader.extent().ends
    assert ends == (14, 0)
    assert texts(reader.before(ends, 10)) == ["12:00:00 here"]


# --- merged by time --------------------------------------------------------------------------------------------------


def test_logs_are_merged_by_time_and_a_line_without_one_stays_below_the_line_before_it(tmp_path: Path) -> None:
    reader = reader_of(
        tmp_path,
        api='=== attempt 1 · 2026-01-31 12:00:00 · api\n{"time": "2026-01-31T12:00:05", "event": "b"}\n',
        trainer="=== attempt 1 · 2026-01-31 12:00:01 · train\n  no time\n12:00:03 INFO a\nTraceback\n12:00:07 INFO c\n",
    )
    ends = reader.extent().ends
    merged = reader.after((0, 0), 100, ends)
    ends_of_lines = [(line.source, line.text[-7:]) for line in merged.lines]
    assert ends_of_lines == [
        (0, "0 · api"), (1, "· train"), (1, "no time"), (1, " INFO a"), (1, "aceback"), (0, "00:05 b"), (1, " INFO c"),
    ]  # fmt: skip
    back = reader.before(ends, 100)
    assert back.lines == merged.lines
    cut = reader.at_time(NOON + 4, ends)
    assert texts(reader.after(cut, 1, ends)) == ["12:00:05 b"]


def test_a_last_line_without_an_end_stays_at_its_time_where_nothing_more_is_written(tmp_path: Path) -> None:
    reader = reader_of(tmp_path, api="12:00:03 a\n12:00:05 b\n12:00:07 c\n", trainer="12:00:04 INFO\n  90 %")
    ends, in_order = reader.extent().ends, ["12:00:03 a", "12:00:04 INFO", "  90 %", "12:00:05 b", "12:00:07 c"]
    cut, on = (0, 0), list[str]()
    for _ in in_order:  # a line at a time, as a screen that is scrolled reads
        found = reader.after(cut, 1, ends, is_final=True)
        cut, on = found.cut, on + texts(found)
    assert on == in_order
    assert reader.after(cut, 1, ends, is_final=True).is_all
    assert texts(reader.before(ends, 9)) == in_order


def test_a_place_for_a_time_is_found_in_a_long_log_over_midnight(tmp_path: Path) -> None:
    clock = [(22 * 3600 + 5 * number) % 86400 for number in range(20_000)]  # 28 h, a line every 5 s
    lines = [f"{each // 3600:02}:{each // 60 % 60:02}:{each % 60:02} INFO line {n}" for n, each in enumerate(clock)]
    reader = reader_of(tmp_path, env="=== attempt 1 · 2026-01-31 22:00:00 · env\n" + "\n".join(lines) + "\n")
    ends = reader.extent().ends
    begin = datetime(2026, 1, 31, 22, 0, 0).timestamp()
    for number in (1, 3000, 19_000):
        cut = reader.at_time(begin + 5 * number, ends)
        assert texts(reader.after(cut, 1, ends)) == [lines[number]]


# --- narrowed --------------------------------------------------------------------------------------------------------


def selected(tmp_path: Path, text: str, *patterns: str, level: Level = Level.ALL) -> list[str]:
    """The lines of a log that pass."""
    reader = reader_of(tmp_path, api=text)
    return texts(reader.after((0,), 20, reader.extent().ends, line_tests(level, *patterns)))


@pytest.mark.parametrize(
    ("patterns", "lines"),
    [(["loss"], ["Loss 1", "loss 2", "LOSS 3"]), (["Loss"], ["Loss 1"]), ([r"loss \d", "3"], ["LOSS 3"])],
)
def test_only_matching_lines_are_read_and_a_capital_makes_case_count(
    tmp_path: Path, patterns: list[str], lines: list[str]
) -> None:
    assert selected(tmp_path, "Loss 1\nother\nloss 2\nLOSS 3\n", *patterns) == lines


def test_colours_overwritten_states_and_ends_of_lines_hide_no_match_and_make_none(tmp_path: Path) -> None:
    text = "\x1b[32mINFO\x1b[0m: up\n10%|\r20%|\nab\nbc\n"
    patterns = ("INFO: up", "20%", "10%", r"b\s*b", "a[^z]*c", "^bc$")
    assert [len(selected(tmp_path, text, pattern)) for pattern in patterns] == [1, 1, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("pattern", "num"),
    [
        ("step=30", 1),
        ("batch delivered  step=303 groups=16", 1),
        (r"groups=1\d$", 1),
        ("STEP=30", 0),
        ('"step"', 0),
        ("level", 0),
        ("plain", 1),
        (r"^03:33:31 batch", 1),
    ],
)
def test_lines_in_json_are_searched_in_the_form_in_which_they_are_shown(tmp_path: Path, pattern: str, num: int) -> None:
    line = {"time": "2026-01-01T03:33:31", "level": "info", "event": "batch delivered", "step": 303, "groups": 16}
    assert len(selected(tmp_path, f"plain text\n{json.dumps(line)}\n", pattern)) == num


@pytest.mark.parametrize(
    "pattern",
    [
        r"colou?r",
        r"x*colour",
        r"co+lour",
        r"c\wlour",
        r"\x63olour",
        r"gr[ae]y|colour",
        r"colou{1}r",
        r"RED|Colour",
        r"(x)?our",
    ],
)
def test_an_expression_finds_the_same_with_and_without_its_short_cut(tmp_path: Path, pattern: str) -> None:
    flags = re.IGNORECASE if pattern == pattern.lower() else 0
    expected = [line for line in ("a Colour", "a colour") if re.search(pattern, line, flags)]
    assert expected
    assert selected(tmp_path, "a Colour\na colour\nnone\n", pattern) == expected


def test_errors_are_selected_without_warnings_and_with_their_indented_lines(tmp_path: Path) -> None:
    text = (
        "INFO fine\nWARNING careful\nERROR bad\n  more of it\n"
        'Traceback (most recent call last):\n  File "x"\nValueError: no\nINFO no terror here\n{"level": "error"}\n'
    )
    errors = selected(tmp_path, text, level=Level.ERRORS)
    assert [each.split()[0] for each in errors] == ["ERROR", "more", "Traceback", "File", "ValueError:", '{"level":']
    assert len(selected(tmp_path, text, level=Level.WARNINGS)) == len(errors) + 1


@pytest.mark.parametrize("pattern", ["foo(", "[a", "*", r"a\\(", "a{99999999999}", "(" * 3000])
def test_an_incomplete_expression_is_reported_as_such(pattern: str) -> None:
    with pytest.raises(InvalidPattern, match="not yet a regular expression"):
        line_tests(Level.ALL, pattern)


def test_a_search_runs_in_pieces_and_continues_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_reader, "BUDGET_BYTES", 100_000)
    filler = "".join(f"line {number:08}\n" for number in range(60_000))
    reader = reader_of(tmp_path, api=f"needle 1\n{filler}needle 2\n")
    extent, tests = reader.extent(), line_tests(Level.ALL, "needle")
    first = reader.before(extent.ends, 5, tests)
    assert (texts(first), first.is_all) == (["needle 2"], False)
    found, cut, num_pieces = list[str](), first.cut, 1
    while not found:
        piece = reader.before(cut, 5, tests)
        assert piece.cut < cut
        found, cut, num_pieces = texts(piece), piece.cut, num_pieces + 1
    assert found == ["needle 1"]
    assert num_pieces > 2
    counter = MatchCount(reader, tests, extent)
    while not counter.go_on(extent.ends):
        assert counter.num_matches == 1
    assert (counter.num_matches, counter.number_at(extent.ends), counter.number_at((0,))) == (2, 2, 0)


# --- times -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "=== attempt 1 · 2026-01-31 12:00:00 · python",
        '{"time": "2026-01-31T12:00:00", "level": "info"}',
        "12:00:00 INFO a",
        "[12:00:00] a",
        "INFO 01-31 12:00:00 [core.py:12] a",
        "(EngineCore pid=12) ERROR 01-31 12:00:00 [core.py:12] a",
        "[I0131 12:00:00.000 a.cc:1] a",
        "2026/01/31 12:00:00 a",
        "31/Jan/2026:12:00:00 GET /",
        "Jan 31 12:00:00 host a",
        "\x1b[32m12:00:00\x1b[0m INFO a",
        f'{{"ts": {NOON}}}',
    ],
)
def test_times_are_read_in_the_usual_formats(line: str) -> None:
    assert time_of(line.encode(), NOON + 3600) == NOON


@pytest.mark.parametrize(
    "line", ["", "Step 1/120", "100%|###| 20/20 [00:05<00:00]", "port 12:34", "2026-13-45 12:00:00", "ratio 1:2:3"]
)
def test_what_is_no_time_is_none(line: str) -> None:
    assert time_of(line.encode(), NOON) is None


def test_a_time_zone_is_applied() -> None:
    utc, plus_two = time_of(b"2026-01-31T12:00:00Z a", NOON), time_of(b"2026-01-31T14:00:00+02:00 a", NOON)
    assert utc is not None
    assert utc == plus_two


def test_a_typed_time_is_the_last_such_moment_or_so_long_ago() -> None:
    assert typed_time("11:00", NOON) == NOON - 3600
    assert typed_time("13:00:05", NOON) == NOON + 3605 - 86400
    assert typed_time("2026-01-30 12:00", NOON) == NOON - 86400
    assert typed_time("-1h30m", NOON) == NOON - 5400
    for nonsense in ("25:00", "soon", "-", "12:61"):
        with pytest.raises(InvalidTime, match="type 14:03:05"):
            typed_time(nonsense, NOON)


@pytest.mark.parametrize("fails", ["from the start", "later"])
def test_a_log_that_a_disk_cannot_read_hides_no_other_and_ends_no_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """As a share that went away, or a link to /proc/self/mem in a folder from elsewhere: the screen of logs crashed."""
    reader = reader_of(tmp_path, api="one\ntwo\n", trainer="three\n")
    if fails == "later":
        ends = reader.extent().ends
        trainer = (tmp_path / "trainer.log").stat().st_ino

        def fails_in_one(descriptor: int, start: int, max_bytes: int) -> Part:
            if os.fstat(descriptor).st_ino == trainer:
                raise OSError(errno.EIO, "Input/output error")
            return read_part(descriptor, start, max_bytes)

        monkeypatch.setattr(window, "read_part", fails_in_one)
    else:
        (tmp_path / "trainer.log").unlink()
        (tmp_path / "trainer.log").symlink_to("/proc/self/mem")
        ends = reader.extent().ends
    for found in (reader.before(ends, 10), reader.after((0, 0), 10, ends)):
        assert texts(found) == ["one", "two"]
        assert found.is_all
    reader.last_lines_begin(ends)
    reader.at_time(NOON, ends)
