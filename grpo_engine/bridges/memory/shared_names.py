"""Names below /dev/shm: who owns shared memory, and so who removes it.

Under a supervisor (`GRPO_TUI_RUN` is set) the supervisor removes every `grpo-<run>-*` when the run ends. Without
one the creating process does, and a later process removes what a killed one left.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from grpo_engine.bridges.memory.shared_tensors import SEGMENT_PREFIX
from grpo_engine.bridges.memory.weight_lock import SHARED_MEMORY
from grpo_engine.errors import BridgeError
from grpo_engine.processes import ProcessIdentity
from grpo_engine.wire.environment_variables import RUN_VARIABLE

BY_HAND = "hand"
_ADAPTERS = "adapters"
_STAGING = "staging"
_POLICY = "policy@"


def run_of(environment: Mapping[str, str]) -> str | None:
    """The run that this process belongs to; None without a supervisor."""
    return environment.get(RUN_VARIABLE) or None


def stem_of(run: str | None) -> str:
    """Prefix of the names of all shared memory of a run."""
    return f"{SEGMENT_PREFIX}{run or BY_HAND}-"


def adapters_name(run: str | None) -> str:
    """A name for this process's adapter folder; another one at each call."""
    return f"{stem_of(run)}{_ADAPTERS}{_of_this_process()}"


def staging_name(run: str | None) -> str:
    """A name for memory through which this process hands over weights; another one at each call."""
    return f"{stem_of(run)}{_STAGING}{_of_this_process()}"


def _of_this_process() -> str:
    """The end of a name: by whom it is, after what no other user can know, who would take the name first."""
    me = ProcessIdentity.of_this_process()
    return f"-{secrets.token_hex(8)}-{me.pid}-{me.start_ticks}"


def remove_stale_staging(run: str | None) -> None:
    """Remove such memory of processes that have exited."""
    for path, trainer in _of_processes(run, _STAGING):
        if not trainer.is_alive():
            path.unlink(missing_ok=True)


def own_or_free(path: Path) -> Path:
    """A folder for the same purpose that no other user has made: the path itself, or one beside it of a longer name,
    which later processes find again."""
    if not os.path.lexists(path) or _is_own(path):
        return path
    return min(own_entries(path.parent, f"{path.name}."), default=path.with_name(f"{path.name}.{secrets.token_hex(8)}"))


def make_own_folder(path: Path) -> None:
    """Create a folder below /dev/shm that other users cannot read.

    Raises:
        BridgeError: another user has created one of this name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise BridgeError(
            f"{path}: owned by another user or no folder, so weights there cannot be trusted: have its owner remove it"
        )
    path.chmod(0o700)


def remove_stale_adapters(run: str | None) -> None:
    """Remove the adapter folders of processes that have exited."""
    for folder, trainer in _of_processes(run, _ADAPTERS):
        if not trainer.is_alive():
            shutil.rmtree(folder, ignore_errors=True)


def adapter_name(policy_version: int) -> str:
    """Name of a version's adapter, at the server and of its folder."""
    return f"{_POLICY}{policy_version:06d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftAdapter:
    """An adapter that a trainer has written."""

    path: Path
    policy_version: int


def newest_adapter(run: str | None) -> LeftAdapter | None:
    """The newest complete adapter of a running trainer of this run in shared memory; None if there is none.

    Always None without a supervisor, where adapters of several servers share one prefix.
    """
    if run is None:
        return None
    adapters = [
        LeftAdapter(path=path, policy_version=int(number))
        for folder, trainer in _of_processes(run, _ADAPTERS)
        if trainer.is_alive()
        for path in folder.glob(f"{_POLICY}*")
        if _is_number(number := path.name.removeprefix(_POLICY))
    ]
    return max(adapters, key=lambda adapter: adapter.policy_version, default=None)


def _of_processes(run: str | None, kind: str) -> Iterator[tuple[Path, ProcessIdentity]]:
    """Each of this user with the process that created it: any user may make such a name, and knows our processes."""
    for path in own_entries(SHARED_MEMORY, f"{stem_of(run)}{kind}-"):
        pid, start_ticks = path.name.rsplit("-", 2)[1:]
        if _is_number(pid) and _is_number(start_ticks):
            yield path, ProcessIdentity(int(pid), int(start_ticks))


def own_entries(folder: Path, stem: str) -> Iterator[Path]:
    """What this user has made there under names that begin so, without links."""
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:  # one at a time, which `glob` does not do: any user may make a million such names
            if entry.name.startswith(stem) and _is_own(entry):
                yield Path(entry.path)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def _is_own(path: Path | os.DirEntry[str]) -> bool:
    """Whether this user made it, and no link is in its place."""
    try:
        found = os.lstat(path)
    except OSError:  # removed meanwhile
        return False
    return found.st_uid == os.geteuid() and not stat.S_ISLNK(found.st_mode)
