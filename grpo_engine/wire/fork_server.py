"""How services that fork what works are restarted in place.

The fork server of an inference server (`grpo_engine.server.fork_server`), and the launcher of a trainer's ranks
(`grpo_engine.ranks.restarting`), for which a rank stands in place of the inference server.
"""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path

from grpo_engine.wire.codec import Message, write_json_atomically

RESTART_SIGNAL = signal.SIGHUP
"""Sent to the fork server by the supervisor, or by a person, to restart the inference server."""
ASKED_WITHIN_S = 30.0
"""For the supervisor to ask for the next server after one was killed: it ends the services that follow it first, or may
be gone itself."""

log = logging.getLogger(__name__)


class Restarts(Message):
    """Written by the fork server when the last inference server has no process left; read by the supervisor.

    Once the file has changed, only the next inference server answers requests, if there is one: see `killed_by`.
    """

    pid: int
    """Of the fork server."""
    num_restarts: int
    killed_by: str | None = None
    """The signal that ended the inference server, e.g. `SIGKILL`: the fork server waits to be asked for the next one,
    and exits as the inference server did when it is not asked soon."""


def tell_supervisor(file: Path, num_restarts: int, killed_by: str | None = None) -> None:
    """Write what this process has to say, as `Restarts`; a disk that is full is logged."""
    now = Restarts(pid=os.getpid(), num_restarts=num_restarts, killed_by=killed_by)
    try:
        write_json_atomically(file, now)
    except OSError as error:  # the supervisor then stops and starts this service after its grace
        log.warning("%s: cannot tell the supervisor: %s", file, error.strerror)
