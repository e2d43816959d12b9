"""The note by which an inference server that starts finds the trainer that will send it weights."""

from __future__ import annotations

from pathlib import Path

from grpo_engine.processes import ProcessIdentity
from grpo_engine.wire.codec import write_json_atomically
from grpo_engine.wire.handover import HandoverSender
from grpo_engine.wire.run_folder import HANDOVER_SENDER


def announce_sender(folder: Path) -> Path:
    """Name this process as the sender; returns the file, which is removed when it no longer sends."""
    path = folder / HANDOVER_SENDER
    path.parent.mkdir(parents=True, exist_ok=True)
    me = ProcessIdentity.of_this_process()
    write_json_atomically(path, HandoverSender(pid=me.pid, start_ticks=me.start_ticks))
    return path
