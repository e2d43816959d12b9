"""Progress of a start without output: the bytes that its processes read and write, as counted by the kernel."""

from __future__ import annotations

import subprocess
from pathlib import Path

from stage import python

from grpo_tui.supervisor.progress import Movement, Progress

WRITER = """
import sys
with open(sys.argv[1], "wb", buffering=0) as file:
    for size in sys.stdin:
        left = int(size)
        while left: left -= file.write(bytes(min(left, 2**20)))
        print("written", flush=True)
"""
"""Writes as many bytes as each line of its input says, and answers."""


def test_a_download_without_output_is_progress_and_polling_is_not(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("Starting to load model m\n")
    start_up = Progress(log, 0, [("Starting to load model", "fetching the model")])
    with subprocess.Popen(
        python(WRITER, tmp_path / "model"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def written(num_bytes: int) -> Movement | None:
            print(num_bytes, file=process.stdin, flush=True)
            assert process.stdout.readline() == "written\n"
            return start_up.look(pids=[process.pid])

        assert written(0) == Movement("fetching the model")
        assert written(4096) is None
        assert written(2**20) == Movement("fetching the model")
        assert start_up.look(pids=[process.pid]) is None
        assert written(200 * 2**20) == Movement("fetching the model, 0.2 GB written")
        process.stdin.close()
    assert start_up.look(pids=[process.pid]) is None


def test_a_process_that_has_exited_is_ignored(tmp_path: Path) -> None:
    with subprocess.Popen(python("")) as process:
        process.wait()
    assert Progress(tmp_path / "absent.log", 0, ()).look(pids=[process.pid]) is None
