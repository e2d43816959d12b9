"""Names below /dev/shm: whose memory it is, and so who removes it.

Under a supervisor (`GRPO_TUI_RUN` is set) it is the run's, whose end removes every `grpo-<run>-*`. By hand, whoever
made it does, and what a killed one left goes with the next.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from grpo_engine.bridges.fence import SHARED_MEMORY
from grpo_engine.bridges.process_identity import ProcessIdentity
from grpo_engine.bridges.shared_tensors import SEGMENT_PREFIX
from grpo_engine.errors import BridgeError

RUN_VARIABLE = "GRPO_TUI_RUN"
BY_HAND = "hand"
_ADAPTERS = "adapters"
_POLICY = "policy@"


def run_of(environment: Mapping[str, str]) -> str | None:
    """The run that this process belongs to; None when it was started by hand."""
    return environment.get(RUN_VARIABLE) or None


def stem_of(run: str | None) -> str:
    """How the names of all memory of a run begin."""
    return f"{SEGMENT_PREFIX}{run or BY_HAND}-"


def adapters_name(run: str | None) -> str:
    """Name of this process's folder of adapters."""
    me = ProcessIdentity.of_this_process()
    return f"{stem_of(run)}{_ADAPTERS}-{me.pid}-{me.start_ticks}"


def make_own_folder(path: Path) -> None:
    """Make a folder below /dev/shm that other users cannot read, where they may have made one of its name before.

    Raises:
        BridgeError: they have.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise BridgeError(f"{path}: not a folder of this user's, who would trust its weights: have its owner remove it")
    path.chmod(0o700)


def remove_left_adapters(run: str | None) -> None:
    """Remove the folders of adapters that dead processes left."""
    for folder, trainer in _adapter_folders(run):
        if not trainer.is_alive():
            shutil.rmtree(folder, ignore_errors=True)


def adapter_name(policy_version: int) -> str:
    """Name of the adapter of a version, to the server and as a folder."""
    return f"{_POLICY}{policy_version:06d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftAdapter:
    """One that a trainer handed over."""

    path: Path
    policy_version: int


def newest_adapter(run: str | None) -> LeftAdapter | None:
    """The newest that a living trainer of this run has put into shared memory, whole; None where there is none.

    Nor is there by hand, where the adapters of several servers bear one name.
    """
    if run is None:
        return None
    adapters = [
        LeftAdapter(path=path, policy_version=int(number))
        for folder, trainer in _adapter_folders(run)
        if trainer.is_alive()
        for path in folder.glob(f"{_POLICY}*")
        if (number := path.name.removeprefix(_POLICY)).isdigit()
    ]
    return max(adapters, key=lambda adapter: adapter.policy_version, default=None)


def _adapter_folders(run: str | None) -> Iterator[tuple[Path, ProcessIdentity]]:
    """Each with the process that made it."""
    for folder in SHARED_MEMORY.glob(f"{stem_of(run)}{_ADAPTERS}-*-*"):
        pid, start_ticks = folder.name.rsplit("-", 2)[1:]
        if pid.isdigit() and start_ticks.isdigit():
            yield folder, ProcessIdentity(int(pid), int(start_ticks))
