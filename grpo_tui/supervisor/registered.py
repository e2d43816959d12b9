"""Which runs this user has on this host: a file for each, whose folder they are in; a live one's plan is its lease.

What a run has leased, its ports and GPUs, stands in the plan in its folder, and ends with its last process: a file here
only says where to look. It is written under the lock of all starts, which the run's supervisor inherits until it has
locked the run, so that no start overlooks another one, whoever is killed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from grpo_engine.wire.codec import write_atomically
from grpo_tui.paths import REGISTRATION, host_folder, registration_path
from grpo_tui.supervisor.state_file import boot_id


def register(run_folder: Path) -> None:
    """Say that this user has a run in this folder.

    Raises:
        OSError: the disk is full.
    """
    content = f"{boot_id()}\n{run_folder.resolve()}"
    write_atomically(registration_path(run_folder), os.fsencode(content), mode=0o600)


def is_registered(run_folder: Path) -> bool:
    """Whether a run of this user was started in this folder since the machine was booted."""
    return run_folder.resolve() in registered_folders([registration_path(run_folder)])


def registered_folders(files: list[Path] | None = None) -> set[Path]:
    """The folders of all runs that were registered since the machine was booted, and not removed."""
    found = set()
    for file in host_folder().glob(f"*{REGISTRATION}") if files is None else files:
        with suppress(OSError):
            boot, _, folder = os.fsdecode(file.read_bytes()).partition("\n")
            if boot == boot_id() and folder:
                found.add(Path(folder))
    return found


def forget_ended(is_live: Callable[[Path], bool]) -> None:
    """Remove the files of runs that have ended, were killed, or are of before the last boot; under the host's lock."""
    for file in host_folder().glob(f"*{REGISTRATION}"):
        folders = registered_folders([file])
        if not any(map(is_live, folders)):
            file.unlink(missing_ok=True)
    for unfinished in host_folder().glob(f".*{REGISTRATION}.*.tmp"):  # whoever wrote it held the lock, and was killed
        unfinished.unlink(missing_ok=True)
