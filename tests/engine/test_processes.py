"""Process identity, process trees and how they are ended, with real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil
import pytest

from grpo_engine.processes import ProcessIdentity, ProcessTree, descendants, kill, running, terminate

IGNORES_TERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "


@contextmanager
def child(code: str, **settings: object) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A Python program that prints a pid first; killed at the end."""
    process = subprocess.Popen([sys.executable, "-ISc", code], stdout=subprocess.PIPE, text=True, **settings)  # type: ignore[call-overload]
    try:
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_an_identity_is_more_than_an_id() -> None:
    me = ProcessIdentity.of_this_process()
    assert me.is_alive()
    assert not ProcessIdentity(me.pid, me.start_ticks + 1).is_alive()


def test_a_zombie_is_gone_and_still_a_descendant_until_it_is_reaped() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert ProcessIdentity.of(pid) is None
    assert running(pid) == []
    assert pid in {each.pid for each in descendants(os.getpid())}
    os.waitpid(pid, 0)
    assert pid not in {each.pid for each in descendants(os.getpid())}


def test_a_later_process_with_the_same_pid_gets_no_signal() -> None:
    with child("print(0, flush=True); import signal; signal.pause()") as (process, _):
        (identity,) = running(process.pid)
        ProcessIdentity(identity.pid, identity.start_ticks + 1).send_signal(9)
        assert identity.is_alive()
        identity.send_signal(9)
        assert process.wait(60) == -9


@pytest.mark.parametrize("settings", [{"process_group": 0}, {"start_new_session": True}])
def test_sigkill_follows_sigterm_after_the_grace_period_for_the_whole_group(
    settings: dict[str, object],
) -> None:
    code = f"import os; {IGNORES_TERM} pid = os.fork(); pid and print(pid, flush=True); signal.pause()"
    with child(code, **settings) as (process, grandchild):
        tree = ProcessTree([process.pid])
        assert {each.pid for each in tree.living()} == {process.pid, grandchild}
        assert not terminate(tree.living, grace_s=0.05)
        assert kill(tree.living, within_s=60) == ()
        with suppress(psutil.NoSuchProcess):
            assert psutil.Process(grandchild).status() == psutil.STATUS_ZOMBIE


def test_a_tree_keeps_a_process_that_lost_its_parent_after_it_was_seen() -> None:
    code = (
        "import os, signal\n"
        "if os.fork() == 0:\n"
        "    os.setsid(); print(os.getpid(), flush=True); signal.pause()\n"
        "signal.pause()"
    )
    with child(code, process_group=0) as (process, orphan):
        tree = ProcessTree([process.pid])
        process.kill()
        process.wait()
        assert [each.pid for each in tree.living()] == [orphan]
        assert terminate(tree.living, grace_s=10)


def test_processes_that_survive_sigkill_are_returned_after_the_limit() -> None:
    me = ProcessIdentity.of_this_process()
    stuck = ProcessIdentity(me.pid, me.start_ticks + 1)  # gets no signal
    assert list(kill(lambda: [stuck], within_s=0.0)) == [stuck]
