"""The recorded runs of tests/recorded: unpack one, and read its events."""

from __future__ import annotations

import tarfile
from pathlib import Path

from grpo_engine.wire.supervisor import Event, Snapshot, read_from_daemon

RECORDED = sorted((Path(__file__).parents[1] / "recorded").glob("*.tar.gz"))


def unpacked(archive: Path, logs: Path) -> Path:
    """Unpack a recording below `logs`; returns the folder of the run."""
    with tarfile.open(archive) as tar:
        tar.extractall(logs, filter="data")
    (folder,) = logs.iterdir()
    return folder


def events_of(folder: Path) -> list[Snapshot | Event]:
    """All snapshots and events of its timeline."""
    messages = map(read_from_daemon, (folder / "events.jsonl").read_bytes().splitlines())
    return [message for message in messages if isinstance(message, Snapshot | Event)]
