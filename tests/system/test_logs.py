"""Logs that are capped: the newest lines are kept, and every reader keeps its place."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import tempfile
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from stage import Stage, open_stage, python, until
from workplace import open_workplace, service

from grpo_tui.cli import follow
from grpo_tui.keeper_process import CAPPED
from grpo_tui.run_files.log_file import Part, Place, last_lines, place, read_part
from grpo_tui.supervisor import capped_log
from grpo_tui.supervisor.capped_log import LogCapper, cap
from grpo_tui.supervisor.keeper.client import Keeper
from grpo_tui.supervisor.probes import LogSearch
from grpo_tui.view.logs.tail import LogTail

COUNTER = """
import os, sys
count, line_bytes = int(sys.argv[1]), int(sys.argv[2])
for number in range(count): os.write(1, b"%0*d\\n" % (line_bytes - 1, number))
"""
"""Writes numbered lines, each with one system call, without a pause."""
COUNTER_WITH_LAST = f"""{COUNTER}
open(sys.argv[3]).read()
os.write(1, b"%0*d\\n" % (line_bytes - 1, count))
"""
"""The same, and then one more, once a pipe is closed."""
BURSTS = """
import os, sys
with open(sys.argv[1], "rb", buffering=0) as go:
    for first in range(0, 20_000, 1000):
        os.write(1, b"".join(b"%099d\\n" % number for number in range(first, first + 1000)))
        go.read(1)
"""
"""Writes a thousand numbered lines, twenty times, and waits after each thousand for a byte in a pipe."""
LIMIT_BYTES = 1_000_000


@pytest.fixture(params=["on disk", "in memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system that can remove blocks from a file, as on most disks, and one that cannot."""
    if request.param == "on disk":
        yield tmp_path
    else:
        with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="grpo-test-") as name:
            yield Path(name)


def read_all(path: Path, start: int = 0) -> Part:
    with path.open("rb") as file:
        return read_part(file.fileno(), start, 1 << 30, with_header=False)


def numbers(data: bytes) -> list[int]:
    return [int(line) for line in data.splitlines()]


def fill(path: Path, count: int, *, line_bytes: int = 100, start: str = "=== attempt 1 · then · python a.py\n") -> None:
    """Append numbered lines of the first attempt."""
    with path.open("ab") as file:
        file.write(start.encode())
        file.writelines(b"%0*d\n" % (line_bytes - 1, number) for number in range(count))


async def kept_while_capped(stage: Stage, keeper: Keeper, limit_bytes: int) -> None:
    capping = asyncio.create_task(LogCapper({stage.folder / "a.log": limit_bytes}).run())
    report = await keeper.exited()
    await until(lambda: (stage.folder / "a.log").stat().st_size <= limit_bytes)
    capping.cancel()
    assert report.code == 0


@pytest.mark.slow
async def test_a_log_that_is_capped_repeatedly_keeps_its_newest_lines_without_a_gap(stage: Stage) -> None:
    keeper = await stage.start(*python(COUNTER, 300_000, 100, stage.token))
    await kept_while_capped(stage, keeper, LIMIT_BYTES)
    path = stage.folder / "a.log"
    part = read_all(path)
    kept = numbers(part.data)
    assert kept == list(range(kept[0], 300_000))
    assert len(kept) >= LIMIT_BYTES // 2 // 100 - 100
    assert part.place.end == keeper.log_offset + 300_000 * 100
    assert part.offset == keeper.log_offset + kept[0] * 100
    lines = path.read_text().splitlines()
    assert CAPPED.match(lines[0].encode())
    assert lines[1].startswith("=== attempt 1 · ")
    assert lines[1].endswith(stage.token)


async def test_the_next_attempt_has_the_right_offset_in_a_capped_log(stage: Stage) -> None:
    path = stage.folder / "a.log"
    fill(path, 20_000)
    cap(path, LIMIT_BYTES)
    keeper = await stage.start(*python("print('of two')", stage.token), attempt=2)
    await keeper.exited()
    assert keeper.log_offset > 2_000_000
    assert read_all(path, keeper.log_offset).data == b"of two\n"
    assert last_lines(path, keeper.log_offset) == ("of two",)
    cap(path, 1)
    assert read_all(path, keeper.log_offset).data == b"of two\n"


@pytest.mark.slow
def test_readers_that_race_with_caps_never_mix_up_offsets(folder: Path) -> None:
    path = folder / "a.log"
    fill(path, 1, line_bytes=16, start="")
    is_over = threading.Event()
    faults: list[str] = []

    def read() -> None:
        with path.open("rb") as file:
            while not is_over.is_set():
                end = place(file.fileno()).end
                part = read_part(file.fileno(), end - 160, 160, with_header=False)
                whole = numbers(part.data[-part.offset % 16 :][: 16 * 5])
                expected = [-(-part.offset // 16) + each for each in range(len(whole))]
                if whole != expected:
                    faults.append(f"{part.place} {part.offset}: {whole}")

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    num_caps = number = 0
    with path.open("ab", buffering=0) as file:
        while num_caps < 30:
            for _ in range(200):
                file.write(b"".join(b"%015d\n" % each for each in range(number + 1, number + 51)))
                number += 50
            num_caps += cap(path, 300_000) > 0
    is_over.set()
    for reader in readers:
        reader.join()
    assert not faults


def test_a_reader_of_the_place_where_a_log_is_about_to_begin_reads_no_header(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "a.log"
    fill(path, 100_000, line_bytes=16, start="")
    collapse = capped_log._collapse
    parts: list[Part] = []

    def read_and_collapse(descriptor: int, num_bytes: int) -> None:
        reader = threading.Thread(target=lambda: parts.append(read_all(path, num_bytes)))
        readers.append(reader)
        reader.start()
        reader.join(0.01)  # the time in which it would read
        collapse(descriptor, num_bytes)

    readers: list[threading.Thread] = []
    monkeypatch.setattr(capped_log, "_collapse", read_and_collapse)
    cap(path, LIMIT_BYTES)
    readers[0].join()
    assert numbers(parts[0].data) == list(range(parts[0].offset // 16, 100_000))


def test_a_log_whose_blocks_cannot_be_removed_for_another_reason_is_unchanged(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int, num_bytes: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    path = folder / "a.log"
    fill(path, 20_000)
    content = path.read_bytes()
    monkeypatch.setattr(capped_log, "_collapse", fail)
    with pytest.raises(OSError, match="Input/output error"):
        cap(path, LIMIT_BYTES)
    assert path.stat().st_size == len(content)
    assert path.read_bytes()[:1_000_000] == content[:1_000_000]
    assert read_all(path).place == Place(0, 0, len(content))


@pytest.mark.slow
async def test_a_log_capped_by_copying_keeps_its_newest_lines_in_order_under_a_writer(folder: Path) -> None:
    pipe, ends = folder / "pipe", []
    os.mkfifo(pipe)

    def is_opened() -> bool:
        with suppress(OSError):  # the program has not opened it yet
            ends.append(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
        return bool(ends)

    with open_stage(folder) as stage:
        keeper = await stage.start(*python(COUNTER_WITH_LAST, 200_000, 100, pipe, stage.token))
        capping = asyncio.create_task(LogCapper({folder / "a.log": LIMIT_BYTES}).run())
        await until(is_opened)
        await until(lambda: (folder / "a.log").stat().st_size <= LIMIT_BYTES)
        capping.cancel()  # before the last line: what is appended as the file is cut is lost
        os.close(ends[0])
        await keeper.exited()
        whole = [line for line in read_all(stage.folder / "a.log").data.splitlines() if len(line) == 99]
        kept = [int(line) for line in whole]
        assert kept == sorted(set(kept))
        assert kept[-1] == 200_000
        assert len(kept) > LIMIT_BYTES // 2 // 100 - 100


def test_a_capped_log_starts_with_the_dropped_bytes_and_the_current_attempt(folder: Path) -> None:
    path = folder / "a.log"
    fill(path, 1000)
    fill(path, 20_000, start="=== attempt 2 · later · python a.py 'server up'\n")
    written_bytes = path.stat().st_size
    dropped_bytes = cap(path, LIMIT_BYTES)
    header, attempt, first, *_, last = path.read_bytes().splitlines()
    part = read_all(path)
    assert CAPPED.match(header)
    assert attempt.decode() == "=== attempt 2 · later · python a.py 'server up'"
    assert (len(first), int(last)) == (99, 19_999)
    assert part.data.startswith(first)
    assert (part.place.dropped, part.place.end) == (dropped_bytes, written_bytes)
    assert path.stat().st_size <= LIMIT_BYTES
    fill(path, 10_000, start="")
    dropped_bytes += cap(path, LIMIT_BYTES)
    assert path.read_bytes().splitlines()[1] == attempt
    assert read_all(path).place == Place(dropped_bytes, read_all(path).offset, written_bytes + 1_000_000)


def test_half_of_a_large_log_is_kept_or_four_megabytes_if_it_is_copied(folder: Path, tmp_path: Path) -> None:
    path = folder / "a.log"
    fill(path, 210_000)
    end = path.stat().st_size
    cap(path, 20_000_000)
    part = read_all(path)
    kept = numbers(part.data)
    assert kept == list(range(kept[0], 210_000))
    assert part.place.end == end
    sizes = (4 * 2**20, 10_000_000)[: 1 + (folder == tmp_path)]  # a disk may be of either kind
    assert min(abs(path.stat().st_size - size) for size in sizes) <= 4096


def test_the_attempt_is_found_among_many_short_ones_and_a_long_command_line_is_cut(folder: Path) -> None:
    path = folder / "a.log"
    for number in range(20_000):
        fill(path, 1, start=f"=== attempt {number} · then · python {'ä' * (number % 3000)}\n")
        if path.stat().st_size > LIMIT_BYTES:
            cap(path, LIMIT_BYTES)
            lines = path.read_bytes().splitlines()
            following = next(line for line in lines[2:] if line.startswith(b"=== attempt"))
            assert int(lines[1].split()[2]) == int(following.split()[2]) - 1
            assert len(lines[1]) <= 2000
            lines[1].decode()


def test_a_line_of_ten_megabytes_is_cut_with_a_note(folder: Path) -> None:
    path = folder / "a.log"
    fill(path, 1)
    with path.open("ab") as file:
        file.write(b"x" * 10_000_000 + b"\nend\n")
    cap(path, LIMIT_BYTES)
    header, attempt, rest, end = path.read_bytes().splitlines()
    assert header.decode().rstrip().endswith("the beginning of the line below is dropped too")
    assert attempt.startswith(b"=== attempt 1")
    assert (set(rest), end) == (set(b"x"), b"end")
    assert read_all(path).data == rest + b"\nend\n"
    assert [len(line) for line in LogTail(path).read().lines] == [3]
    assert len(last_lines(path, 0)[0]) == 400


def test_a_line_of_thirty_megabytes_is_read_whole_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    piece = bytes(range(14, 256)) * 1000
    with path.open("wb") as file:
        for _ in range(124):
            file.write(piece)
        file.write(b"\n")
    tracemalloc.start()
    try:
        forwards = sum(map(len, follow.grown(path, follow.Tail([]), lambda: False)))
        assert follow.tail(path, 1, lambda line: line.startswith(b"absent"), with_unfinished=True).lines == []
        assert len(LogTail(path).read().lines) <= 1
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert forwards == path.stat().st_size
    assert peak_bytes < 12_000_000


def test_a_log_probe_sees_no_line_of_an_earlier_attempt_however_often_the_log_is_capped(folder: Path) -> None:
    path = folder / "a.log"
    fill(path, 15_000, start="=== attempt 1 · then · python a.py\nserver up\n")
    with path.open("ab") as file:
        file.write(b"server up\n" * 1000)
    cap(path, LIMIT_BYTES)
    fill(path, 0, start="=== attempt 2 · now · python a.py 'server up'\n")
    with path.open("rb") as file:
        search = LogSearch(path, place(file.fileno()).end, "server up")
    assert not search.search().passed
    for _ in range(3):
        fill(path, 12_000, start="")
        cap(path, LIMIT_BYTES)
        assert not search.search().passed
    with path.open("ab") as file:
        file.write(b"server up\n")
    fill(path, 4000, start="")
    cap(path, LIMIT_BYTES)
    assert search.search().passed


def test_the_last_lines_of_an_attempt_exclude_earlier_attempts_and_header_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    fill(path, 15_000)
    offset = path.stat().st_size
    cap(path, LIMIT_BYTES)
    assert last_lines(path, offset) == ()
    with path.open("ab") as file:
        file.write(b"caf\xe9\n10%\r99%\rTraceback\n")
    assert last_lines(path, offset) == ("caf\ufffd", "Traceback")
    assert last_lines(tmp_path / "absent.log", 0) == ()


def test_the_screen_continues_across_a_cap_and_shows_what_was_dropped(folder: Path) -> None:
    path = folder / "a.log"
    fill(path, 15_000)
    tail = LogTail(path)
    tail.read()
    cap(path, LIMIT_BYTES)
    assert not tail.read().has_changed
    fill(path, 2, start="")
    chunk = tail.read()
    assert (chunk.is_restarted, [int(line) for line in chunk.lines]) == (False, [0, 1])
    fill(path, 3000, start="")
    cap(path, 200_000)
    chunk = tail.read()
    assert not chunk.is_restarted
    assert "skipped, too fast to show" in chunk.lines[0]
    assert [line.split()[1] for line in chunk.lines[1:3]] == ["capped", "attempt"]
    assert int(chunk.lines[-1]) == 2999


async def test_a_log_that_cannot_be_capped_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    fine, gone, odd = tmp_path / "fine.log", tmp_path / "deleted" / "gone.log", tmp_path / "odd.log"
    odd.mkdir()
    fill(fine, 15_000)
    capper = LogCapper({gone: LIMIT_BYTES, odd: 1, fine: LIMIT_BYTES})
    capping = asyncio.create_task(capper.run())
    await until(lambda: "fine.log" in caplog.text)  # logged by a thread, after the file has its new size
    capping.cancel()
    capper.cap(odd)
    assert [record.message.split(": ")[0] for record in caplog.records] == ["odd.log", "fine.log"]


def test_a_growing_log_is_checked_when_it_should_reach_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    capper = LogCapper({path: LIMIT_BYTES})
    assert capper.look() == 1.0
    fill(path, 9_990)
    assert (capper.look(), capper.too_long()) == (0.05, [])
    assert capper.look() == 1.0
    fill(path, 100)
    assert (capper.look(), capper.too_long()) == (0.05, [path])
    capper.cap(path)
    capper.look()
    assert (capper.look(), capper.too_long()) == (1.0, [])


# --- through the command line ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_logs_follows_a_service_across_caps_to_the_end_of_the_run(tmp_path: Path) -> None:
    go = tmp_path / "go"
    os.mkfifo(go)
    with open_workplace(tmp_path) as workplace:
        workplace.profile(service("a", BURSTS, go))
        workplace.grpo("up", "--profile", "p", "--detach")
        path = workplace.run_folder() / "a.log"
        seen: list[str] = []
        everything = ("logs", "a", "-n", "1000000", "-f")
        with (
            workplace.start(*everything) as following,
            workplace.start(*everything, "--grep", "999$") as grepping,
            go.open("r+b", buffering=0) as pipe,
        ):
            assert following.stdout is not None
            assert grepping.stdout is not None
            for line in following.stdout:
                seen.append(line)
                if line.endswith("999\n"):
                    assert grepping.stdout.readline() == line
                    cap(path, 300_000)
                    pipe.write(b".")
            assert grepping.stdout.read() == ""
        opening, *lines = seen
        assert opening.startswith("=== attempt 1 · ")
        assert [int(line) for line in lines] == list(range(20_000))
        assert workplace.status().services[0].exit_code == 0
        header, attempt, *shown = workplace.grpo("logs", "a", "-n", "1000000").stdout.splitlines(keepends=True)
        assert header.startswith("=== capped · dropped ")
        assert header == header.rstrip() + "\n"
        assert attempt == opening
        assert shown == lines[-len(shown) :]
