"""Start a daemon before its run is known, so that it loads its modules while its starter loads its own.

Hence this module opens with nothing that takes long to load; what `supervise` needs is loaded while the daemon loads.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from grpo_engine.errors import GrpoError

if TYPE_CHECKING:
    from pathlib import Path

HELLO_WITHIN_S = 20.0
"""A daemon says hello within 0.3 s; a machine that is starting eight engines may take its time."""
HELLO_POLL_S = 0.01
TALK_BYTES_MAX = 1 << 20
"""What a daemon may say before it has loaded: warnings, or the traceback of a broken program."""


class StartFailed(GrpoError):
    """The daemon of a run did not come up."""


class NewDaemon:
    """A daemon that was started and waits to be told its run; told nothing, it ends with this context."""

    def __init__(self) -> None:
        self._talk = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as this object, which closes it
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "grpo_tui.supervisor.daemon", "-"],
            stdin=subprocess.PIPE,
            stdout=self._talk,
            stderr=self._talk,
            start_new_session=True,
        )

    def __enter__(self) -> NewDaemon:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # what was told its run has left this process behind by then
        self._process.communicate()
        self._talk.close()

    def wait_until_loaded(self) -> None:
        """Return once it can be told its run at any moment.

        Raises:
            StartFailed: it ends instead, e.g. because its program is broken; with its last words.
        """
        from grpo_tui.supervisor.lock import LOADED

        deadline = time.monotonic() + HELLO_WITHIN_S
        while LOADED.encode() not in os.pread(self._talk.fileno(), TALK_BYTES_MAX, 0):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise StartFailed(f"a new supervisor cannot be started: {self._own_words()}")
            time.sleep(HELLO_POLL_S)

    def supervise(self, folder: Path) -> bool:
        """Tell it its run and wait until it says hello; False when the run was over before it could.

        Raises:
            StartFailed: it did not come up; with its last words.
        """
        from grpo_tui.client.local import is_over
        from grpo_tui.client.socket import answers

        with suppress(BrokenPipeError):
            self._process.communicate(os.fsencode(folder) + b"\n")
        deadline = time.monotonic() + HELLO_WITHIN_S
        while self._process.returncode == 0 and time.monotonic() < deadline:
            if answers(folder):
                return True
            if is_over(folder):
                return False
            time.sleep(HELLO_POLL_S)
        raise StartFailed(f"the supervisor of {folder.name} did not come up: {self._last_words(folder)}")

    def _last_words(self, folder: Path) -> str:
        from grpo_tui.paths import SUPERVISOR_LOG

        log = folder / SUPERVISOR_LOG
        logged = log.read_text(errors="replace").splitlines() if log.exists() else []
        return "\n".join([f"{log} ends with:", *logged[-8:], self._own_words()])

    def _own_words(self) -> str:
        from grpo_tui.supervisor.lock import LOADED

        self._talk.seek(0)
        words = self._talk.read().decode(errors="replace").removeprefix(LOADED)
        return "\n".join(words.splitlines()[-8:])
