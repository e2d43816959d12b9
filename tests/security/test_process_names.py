"""Names of processes on the machine that are no text: any user may give a process any bytes as its name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from workplace import Workplace

from grpo_engine.wire.environment_variables import RUN_FOLDER_VARIABLE, RUN_VARIABLE
from grpo_tui.keeper_process import read_stat
from grpo_tui.supervisor.keeper.proc import living, marker, uid_of

NOBODY = 65534
NAMED = """
import ctypes, os, signal, sys
os.setuid(int(sys.argv[1]))
ctypes.CDLL(None).prctl(15, bytes.fromhex(sys.argv[2]), 0, 0, 0)
print("up", flush=True)
signal.pause()
"""


@contextmanager
def named(name: bytes, uid: int) -> Iterator[int]:
    """A process with this name; its pid."""
    argv = [sys.executable, "-I", "-S", "-c", NAMED, str(uid), name.hex()]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "up\n"
            yield process.pid
        finally:
            process.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("name", [b"\xff\xfe", "模型服务器".encode()[:14], b"\nUid:\t1\t1\t", b"a) R 1 ("])
def test_the_user_and_marker_of_a_process_with_any_name_are_read(name: bytes) -> None:
    with named(name, os.getuid()) as pid:
        assert uid_of(pid) == os.getuid()
        assert marker(pid) is None
        stat = read_stat(pid)
        assert stat is not None
        assert stat.parent == os.getpid()
        assert pid in {each.pid for each in living()}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_a_setuid_program_that_another_user_has_started_belongs_to_no_run_of_root() -> None:
    """Whoever ran `GRPO_TUI_RUN_FOLDER=… su` kept root from starting a run: one was live whose folder was deleted."""
    program = f"import os; os.setresuid({NOBODY}, 0, 0); print(flush=True); input()"
    marks = {RUN_VARIABLE: "theirs", RUN_FOLDER_VARIABLE: "/nowhere/theirs"}
    argv = [sys.executable, "-I", "-S", "-c", program]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=marks) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert (uid_of(process.pid), marker(process.pid)) == (0, None)
        process.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
@pytest.mark.slow
def test_a_process_of_another_user_whose_name_is_no_text_neither_blocks_a_start_nor_ends_a_supervisor(
    workplace: Workplace,
) -> None:
    with named(b"\xff\xfe", NOBODY):
        workplace.profile(workplace.recorded(restart='"never"'))
        workplace.succeed("up", "--profile", "p", "--detach", "--wait", "ready")
        workplace.succeed("down")
