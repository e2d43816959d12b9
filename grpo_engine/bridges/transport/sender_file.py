"""The note by which an inference server that starts finds the trainer that will send it weights.

On one machine the process that it names is looked at. Between machines of a cluster, which have the folder in common,
the trainer touches the note once a second.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from grpo_engine.processes import AnyProcess, ProcessIdentity
from grpo_engine.wire.codec import read_whole, write_json_atomically
from grpo_engine.wire.handover import HandoverSender
from grpo_engine.wire.run_folder import HANDOVER_SENDER
from grpo_engine.wire.tcp_sockets import is_of_cluster, machine_address

_TOUCH_S = 1.0
_GONE_AFTER_S = 15.0
"""Without a touch. File systems of a network show it some seconds late."""


class SenderFile:
    """The note of this process."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / HANDOVER_SENDER
        self._is_closed = threading.Event()

    def announce(self) -> None:
        """Name this process as the sender."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        me = ProcessIdentity.of_this_process()
        note = HandoverSender(pid=me.pid, start_ticks=me.start_ticks, address=machine_address())
        write_json_atomically(self.path, note)
        if is_of_cluster():
            threading.Thread(target=self._touch, name="sender-file", daemon=True).start()

    def close(self) -> None:
        """Remove it: this process sends no more."""
        self._is_closed.set()
        self.path.unlink(missing_ok=True)

    def _touch(self) -> None:
        while not self._is_closed.wait(_TOUCH_S):
            with suppress(OSError):
                os.utime(self.path)


class DistantSender:
    """A trainer on another machine."""

    def __init__(self, path: Path, note: HandoverSender) -> None:
        self._path, self._note = path, note
        self._touched_ns = 0
        self._seen_at_s = time.monotonic()

    @property
    def pid(self) -> int:
        """On its machine."""
        return self._note.pid

    def is_alive(self) -> bool:
        """Whether the note is still its own, and was touched since the last time or not long ago."""
        try:
            touched_ns = self._path.stat().st_mtime_ns
            is_own = HandoverSender.model_validate_json(read_whole(self._path)) == self._note
        except FileNotFoundError:
            return False
        except (OSError, ValidationError):  # it is not reachable now
            touched_ns, is_own = self._touched_ns, True
        now_s = time.monotonic()
        if touched_ns != self._touched_ns:
            self._touched_ns, self._seen_at_s = touched_ns, now_s
        return is_own and now_s - self._seen_at_s < _GONE_AFTER_S


def sender_of(path: Path) -> AnyProcess | None:
    """The running trainer that a note names, on this machine or another one."""
    try:
        note = HandoverSender.model_validate_json(read_whole(path))
    except (OSError, ValidationError):
        return None
    is_here = note.address == machine_address()
    sender: AnyProcess = ProcessIdentity(note.pid, note.start_ticks) if is_here else DistantSender(path, note)
    return sender if sender.is_alive() else None
