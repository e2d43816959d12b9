"""Two screens on one run with many events: one is suspended and later quits, and the other is not affected."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from stage import open_stage
from terminal import DEADLINE_S, Terminal
from test_clients import supervised
from workplace import PYTHON

from grpo_engine.wire.run_folder import PLAN_FILE
from grpo_tui.supervisor.lock import take_lock
from grpo_tui.supervisor.report.broadcast import MAX_WAITING_LINES

pytestmark = pytest.mark.slow
MOST_NOTICES = 20 * MAX_WAITING_LINES
NOTICES_IN_A_ROUND = 200


async def test_a_suspended_viewer_delays_no_other_and_catches_up_and_one_may_quit(tmp_path: Path) -> None:
    folder = tmp_path / "logs" / "r"
    folder.mkdir(parents=True)
    (folder / PLAN_FILE).write_text("{}")  # by which runs are known
    environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}

    def viewer() -> Terminal:
        argv = [PYTHON, "-P", "-m", "grpo_tui", "attach", "r"]
        return Terminal(argv, cwd=tmp_path, environment={**environment, "XDG_RUNTIME_DIR": str(tmp_path)})

    with open_stage(folder) as stage, supervisor_lock(folder):
        async with supervised(stage) as supervisor:
            stopped, watching = viewer(), viewer()
            try:
                clients = supervisor.broadcast.clients
                await both_until(lambda: "ready" in stopped.text and "ready" in watching.text, stopped, watching)
                assert sum(each.is_watching for each in clients) == 2
                stopped.process.send_signal(signal.SIGSTOP)
                sent = 0
                while sum(each.is_watching for each in clients) == 2:
                    assert sent < MOST_NOTICES, "a viewer that does not read was not dropped"
                    for sent in range(sent + 1, sent + 1 + NOTICES_IN_A_ROUND):  # noqa: B020 - it continues its own count
                        supervisor.notice("info", f"news {sent} {'x' * 400}", None)
                    await both_until(lambda: f"news {sent} " in watching.text, watching)  # noqa: B023 - awaited at once
                    assert all(each.lines.qsize() <= MAX_WAITING_LINES for each in clients)
                supervisor.notice("info", "the last news", None)
                await both_until(lambda: "the last news" in watching.text, watching)
                stopped.process.send_signal(signal.SIGCONT)
                await both_until(lambda: sum(each.is_watching for each in clients) == 2, stopped, watching)
                supervisor.notice("info", "news for both", None)
                await both_until(
                    lambda: all("news for both" in each.text for each in (stopped, watching)), stopped, watching
                )
                watching.press("q")
                await both_until(lambda: watching.process.poll() is not None, stopped, watching)
                assert watching.process.returncode == 0
                supervisor.notice("info", "news for one", None)
                await both_until(lambda: "news for one" in stopped.text, stopped)
            finally:
                stopped.close()
                watching.close()


@contextmanager
def supervisor_lock(folder: Path) -> Iterator[None]:
    """Held by a supervisor's process; without it a screen whose connection closes starts another one."""
    lock = take_lock(folder)
    assert lock is not None
    try:
        yield
    finally:
        os.close(lock)


async def both_until(is_so: Callable[[], bool], *terminals: Terminal) -> None:
    """Show what is written, while the supervisor runs, until a condition holds."""
    deadline = time.monotonic() + 2 * DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline, "the condition did not become true:\n" + "\n".join(
            each.text for each in terminals
        )
        for terminal in terminals:
            terminal.listen(0.0)
        await asyncio.sleep(0.005)
