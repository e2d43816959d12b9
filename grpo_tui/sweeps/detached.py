"""Starts the command that works on a sweep as a process of its own session, which no terminal ends."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence

from grpo_engine.errors import GrpoError
from grpo_engine.python_command import module_command
from grpo_tui.sweeps.folder import SWEEP_LOG, Sweep, holder

POLL_S = 0.05
SHOWN_BYTES = 4000
"""Of what it printed, where it ended at once."""


def start_detached(sweep: Sweep, options: Sequence[str] = ()) -> int:
    """Go on with a sweep in the background; returns the pid once that works on it.

    Args:
        options: further ones of `sweep resume`.

    Raises:
        GrpoError: it ended at once, with what it printed; or its log cannot be written.
    """
    try:
        return _start(sweep, options)
    except OSError as error:
        raise GrpoError(f"{sweep.folder / SWEEP_LOG} cannot be written: {error.strerror or error}") from None


def _start(sweep: Sweep, options: Sequence[str]) -> int:
    argv = module_command("grpo_tui", "sweep", "resume", sweep.name, *options)
    with (sweep.folder / SWEEP_LOG).open("ab") as log:
        began = log.tell()
        process = subprocess.Popen(
            argv, cwd=sweep.logs.parent, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    while process.poll() is None:
        if holder(sweep) == process.pid:
            return process.pid
        time.sleep(POLL_S)
    if process.returncode == 0:  # nothing was left to do
        return process.pid
    with (sweep.folder / SWEEP_LOG).open("rb") as log:
        log.seek(began)
        printed = log.read()[-SHOWN_BYTES:].decode(errors="replace").strip()
    raise GrpoError(f"sweep {sweep.name} ended at once (exit code {process.returncode}): {printed or 'no output'}")
