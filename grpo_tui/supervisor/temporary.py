"""The temporary folder of a run: TMPDIR of its services, removed with everything in it when the run is over.

It lies in our own temporary folder, under a name short enough for the paths of the sockets that vLLM makes in it.
Caches that programs keep in a temporary folder from run to run (compiled code, vocabularies) stay outside.
"""

from __future__ import annotations

import errno
import getpass
import hashlib
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from grpo_engine.errors import GrpoError
from grpo_engine.models.local import cache_folder
from grpo_engine.wire.supervisor import MAX_TEMPORARY_FOLDER_BYTES
from grpo_tui.paths import ALWAYS_SHORT, temporary_folder
from grpo_tui.services.base import Launch

FOLDER, COMPILED_CODE = "TMPDIR", "TORCHINDUCTOR_CACHE_DIR"
CHANCE_BYTES = len("-12345678")
CHANCE = re.compile(r"[a-z0-9_]{8}")
"""The end that `mkdtemp` gives a name."""
OF_TORCH = "torchinductor_{user}"
OF_OTHERS = ("{user}", "data-gym-cache", "tiktoken-rs-cache")
"""The caches of CUTLASS and FlashAttention, of tiktoken and of its Rust port in the temporary folder."""
REMOVE_ROUNDS = 3
log = logging.getLogger(__name__)


class TakenFolder(GrpoError):
    """Something that is not ours is where the temporary folder of the run was."""


@dataclass(frozen=True, slots=True)
class TemporaryFolder:
    """The temporary folder of a run that goes on."""

    path: Path | None
    """None where none could be made: what services leave behind is then not removed."""

    @classmethod
    def open(cls, run: str, known: Path | None) -> TemporaryFolder:
        """The folder that an earlier supervisor of the run made (`known`), or a new one."""
        try:
            return cls(known or make_folder(run))
        except OSError as error:
            log.warning("no temporary folder for the run can be made (%s): what services leave is not removed", error)
            return cls(None)

    def with_variables(self, launch: Launch) -> Launch:
        """A launch with TMPDIR set to this folder, and with its folders inside, unless its profile sets them."""
        if self.path is None:
            return launch
        inside = {name: str(self.path / folder) for name, folder in launch.env_in_temporary.items()}
        return replace(launch, env={**variables(self.path), **inside, **launch.env})

    def restore(self, warn: Callable[[str], None]) -> None:
        """Make the folder again if it was removed; `warn` takes why that is impossible.

        Raises:
            TakenFolder: another user has taken its name, and would read and write what services put there.
        """
        if self.path is None:
            return
        try:
            restore_folder(self.path)
        except FileExistsError:
            raise TakenFolder(
                f"{self.path}, its TMPDIR, was removed, and is not a folder of this user now: remove what is there, or "
                "end the run and start it anew"
            ) from None
        except OSError as error:
            warn(f"{self.path}, TMPDIR of the services, was removed and cannot be made again: {error}")


def make_folder(run: str) -> Path:
    """Make the folder of a run, accessible to our user only.

    Raises:
        OSError: the disk is full, or the parent folder is not writable.
    """
    base = next((base for base in _bases() if _fits(base / _stem(run, base))), ALWAYS_SHORT)
    folder = Path(tempfile.mkdtemp(prefix=f"{_stem(run, base)}-", dir=base))
    _link_kept(folder)
    return folder


def restore_folder(folder: Path) -> None:
    """Make it again if it was removed, as cleaners of /tmp do after days.

    Raises:
        OSError: the disk is full, or another user took its name.
    """
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if not _is_ours(folder):
            raise
    else:
        _link_kept(folder)


def variables(folder: Path) -> dict[str, str]:
    """Environment variables of the services of the run."""
    named = {FOLDER: str(folder)}
    cache = _compiled_code()
    if COMPILED_CODE not in os.environ and cache is not None:  # the cache itself, as compiled code contains its path
        named[COMPILED_CODE] = str(cache)
    return named


def remove_folders(run: str, known: Path | None) -> tuple[list[str], list[str]]:
    """Remove the folder of a run that is over, and others of its name; only our own user's.

    Returns the removed folders that were not empty, and a line for each file that could not be removed.
    """
    removed, left = [], []
    named = {path for base in _bases() for path in _named(base, f"{_stem(run, base)}-")}
    for folder in sorted(named | ({known} if known is not None else set())):
        if not _is_ours(folder):
            continue
        _move_kept(folder)
        try:
            was_empty = not any(folder.iterdir())
            _remove(folder)
        except OSError as error:
            left.append(f"{error.filename or folder}: {error.strerror or error}")
        else:
            removed += [] if was_empty else [str(folder)]
    return removed, left


def _remove(folder: Path) -> None:
    """Remove a folder in which a process that is ending may still make and remove files.

    Raises:
        OSError: a file cannot be removed, or the folder still changes.
    """
    for num_left in reversed(range(REMOVE_ROUNDS)):
        try:
            shutil.rmtree(folder)
            return
        except OSError as error:
            if num_left == 0 or error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                raise
        if not folder.exists():
            return


def _named(base: Path, stem: str) -> Iterator[Path]:
    """The folders of a run, also where another user has made a million files of such names."""
    with suppress(OSError), os.scandir(base) as entries:
        for entry in entries:  # not of a run whose longer name begins with this one
            is_named = entry.name.startswith(stem) and CHANCE.fullmatch(entry.name.removeprefix(stem))
            if is_named and entry.is_dir(follow_symlinks=False):
                yield Path(entry.path)


def _bases() -> tuple[Path, ...]:
    return (temporary_folder(), ALWAYS_SHORT)


def _stem(run: str, base: Path) -> str:
    """The start of the folder's name: the run's name, or a hash of one that is too long."""
    stem = f"grpo-{run}"
    return stem if _fits(base / stem) else f"grpo-{hashlib.blake2b(run.encode(), digest_size=4).hexdigest()}"


def _fits(folder: Path) -> bool:
    return len(os.fsencode(folder)) + CHANCE_BYTES <= MAX_TEMPORARY_FOLDER_BYTES


def _is_ours(folder: Path) -> bool:
    try:
        return folder.lstat().st_uid == os.getuid() and folder.is_dir() and not folder.is_symlink()
    except OSError:
        return False


def _compiled_code() -> Path | None:
    """The cache of compiled code that our server uses too; None where it cannot be made: torch then has one in TMPDIR.

    Never the place that it has in /tmp by default, where another user can put code first.
    """
    try:
        folder = cache_folder(os.environ) / "inductor"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError, GrpoError):  # no home, or one that other users may write to
        return None
    return folder


def _kept(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Each cache: its path in the temporary folder, and where it is kept."""
    if (cache := _compiled_code()) is not None:
        yield folder / OF_TORCH.format(user=_user()), cache  # headers are read here whatever the variable says
    for name in OF_OTHERS:
        own = name.format(user=_user())
        yield folder / own, folder.parent / own


def _link_kept(folder: Path) -> None:
    for link, place in _kept(folder):
        if _is_ours(place):
            with suppress(OSError):  # a file system without links: the cache is built again
                link.symlink_to(place)


def _move_kept(folder: Path) -> None:
    """Move out the caches that this run was the first to build, and remove our links."""
    for made, place in _kept(folder):
        with suppress(OSError):  # none was built, or another run built it first
            if made.is_symlink():
                made.unlink()
            elif any(made.iterdir()) and not place.exists():
                made.rename(place)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid_{os.getuid()}"  # the name that torch uses
