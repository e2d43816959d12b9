"""Where things are: profiles, runs, and the daemon's socket. Path arithmetic and folder listings; starts nothing."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
import time
from contextlib import suppress
from pathlib import Path

from grpo_engine.errors import ConfigError, GrpoError
from grpo_engine.python_command import is_of_others

LOGS = Path("logs")
"""Runs are below the current folder."""
PROFILES = Path("profiles")
INSTALLED_PROFILES = Path(__file__).parent / "profiles"
"""Copies in the package, for machines without a checkout."""
ALWAYS_SHORT = Path("/tmp")
"""For sockets and temporary files where the path of the other folder is too long."""
REGISTRATION = ".run"
"""Ending of the files that `grpo_tui.supervisor.registered` writes."""
QUEUED = ".queue"
"""Ending of the files of `grpo_tui.client.start_queue`, also in `host_folder`."""
HOST_LOCK_FILE = "start.lock"
"""In `host_folder`: locked while a run is started, whatever folder of runs it is in."""
MAX_SOCKET_PATH_BYTES = 107
"""`sun_path` of a unix socket has 108 bytes, one for the terminating NUL."""


def profile_folders() -> list[Path]:
    """Folders in which a profile name is looked up, the nearest first."""
    checkout = Path(__file__).parents[1] / "profiles"
    return [folder for folder in (PROFILES, checkout, INSTALLED_PROFILES) if folder.is_dir()]


def available_profiles() -> dict[str, Path]:
    """Every profile by name; a nearer folder takes precedence, but not with what other users put there."""
    found: dict[str, Path] = {}
    for folder in profile_folders():
        for path in sorted(folder.glob("*.toml")):
            if folder != PROFILES or not is_of_others(path, Path()):
                found.setdefault(path.stem, path)
    return found


def new_run_id(name: str, now: float | None = None) -> str:
    """`tiny-cpu-1121-041503-7f3a`: readable, sortable within a name, short enough for one line.

    It begins with the name that the run was given, or that of its profile. It identifies processes and shared memory on
    the whole machine, where another folder may start a run of the same name in the same second: hence four random
    digits.
    """
    return f"{name}-{time.strftime('%m%d-%H%M%S', time.localtime(now))}-{secrets.token_hex(2)}"


def is_run_id_of(profile_name: str, run_id: str) -> bool:
    """Whether `new_run_id` made this id for a profile of this name; a second run of the same second has `.2` behind."""
    return re.fullmatch(rf"{re.escape(profile_name)}-\d{{4}}-\d{{6}}-[0-9a-f]{{4}}(\.\d+)?", run_id) is not None


def is_name(name: str) -> bool:
    """Whether a run or sweep may be called so."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]{0,63}", name, re.ASCII) is not None


def checked_name(name: str, *, option: str) -> str:
    """A name of a run or sweep, of which a folder can be made.

    Raises:
        ConfigError: it has other characters, or too many.
    """
    if not is_name(name):
        raise ConfigError(
            f"{option} {name}: use letters, digits, '-', '_' and '.', at most 64, a letter or digit first"
        )
    return name


def name_of_run(run_id: str) -> str:
    """The name that a run id begins with."""
    return re.sub(r"-\d{4}-\d{6}-[0-9a-f]{4}(\.\d+)?$", "", run_id)


SETTINGS_SUFFIXES = frozenset({".json", ".toml"})
"""Of files in the folder of a run or sweep that say what it runs."""


class ForeignFolder(GrpoError):
    """A folder of a run or sweep that another user owns or may write to: it is only read."""


def require_own(run_folder: Path, *, reader: str = "grpo-tui attach --read-only") -> None:
    """Refuse to act on a run or sweep whose plan somebody else may have written.

    Args:
        reader: the command that only reads it.

    Raises:
        ForeignFolder: another user owns the folder, or a file of settings in it, or may write to one of them.
        FileNotFoundError: there is no such folder.
    """
    status = run_folder.stat()
    if status.st_uid != os.getuid():
        raise ForeignFolder(f"{run_folder} belongs to user {status.st_uid}: it can be read only (`{reader}`)")
    if not is_own(status):
        raise ForeignFolder(
            f"{run_folder} has mode {status.st_mode & 0o777:04o}, so that other users may change what it runs: "
            f"`chmod -R go-w {run_folder}` after you have checked it; until then it can be read only"
        )
    for file in run_folder.iterdir():
        with suppress(FileNotFoundError):  # removed meanwhile, or a link to nothing
            if file.suffix in SETTINGS_SUFFIXES and not is_own(file.stat()):
                raise ForeignFolder(
                    f"{file} belongs to another user, or others may write to it, and so change what it runs: `chmod -R "
                    f"go-w {run_folder}` after you have checked it; until then it can be read only"
                )


def is_own(folder: os.stat_result) -> bool:
    """Whether a folder belongs to this user, and no one else may write to it."""
    return folder.st_uid == os.getuid() and not folder.st_mode & 0o022


def runtime_folder() -> Path:
    """The folder for sockets, created with mode 0700: `$XDG_RUNTIME_DIR/grpo-tui` or `/tmp/grpo-<uid>`.

    Raises:
        GrpoError: it cannot be created, belongs to another user, or is open to others.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and os.access(base, os.W_OK):
        return _own_folder(Path(base) / "grpo-tui")
    return _own_folder(temporary_folder() / f"grpo-{os.getuid()}")


def temporary_folder() -> Path:
    """The folder for temporary files: the first of those that `tempfile` tries which we may write to.

    `tempfile` takes the next one where a disk is full, and raises where all are: commands would then look for the runs
    of this host in another folder, and start on their GPUs.
    """
    named = filter(None, map(os.environ.get, ("TMPDIR", "TEMP", "TMP")))
    folders = map(os.path.abspath, (*named, "/tmp", "/var/tmp", "/usr/tmp"))
    usable = (each for each in folders if os.path.isdir(each) and os.access(each, os.W_OK | os.X_OK))
    return Path(next(usable, ALWAYS_SHORT))


def socket_path(run_folder: Path) -> Path:
    """The supervisor's socket for a run: named by a digest of the run folder, which may be longer than a socket's
    path.

    Raises:
        GrpoError: its folder cannot be created, belongs to another user, or is open to others.
    """
    digest = _digest(run_folder)
    path = runtime_folder() / f"{digest}.sock"
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        path = _own_folder(ALWAYS_SHORT / f"grpo-{os.getuid()}") / f"{digest}.sock"
    return path


def broker_socket(run_folder: Path) -> Path:
    """The socket of the broker of a run on a cluster.

    Raises:
        GrpoError: as `socket_path`.
    """
    return socket_path(run_folder).with_suffix(".broker")


def registration_path(run_folder: Path) -> Path:
    """The file that shows, outside the run folder, that this user started the run: `grpo_tui.supervisor.registered`.

    Raises:
        GrpoError: as `host_folder`.
    """
    return host_folder() / f"{_digest(run_folder)}{REGISTRATION}"


def host_folder() -> Path:
    """The folder that all sessions of this user on this host share, whatever their `$XDG_RUNTIME_DIR`.

    Raises:
        GrpoError: neither it nor the folder for sockets can be used.
    """
    try:
        return _own_folder(temporary_folder() / f"grpo-{os.getuid()}")
    except GrpoError:  # another user made a folder of this name
        return runtime_folder()


def _digest(run_folder: Path) -> str:
    return hashlib.blake2b(str(run_folder.resolve()).encode(), digest_size=8).hexdigest()


def _own_folder(folder: Path) -> Path:
    """Create it with mode 0700, or check that it is so."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise GrpoError(
            f"{folder}, the folder for sockets, cannot be created: {error.strerror}; "
            "remove what is there or set XDG_RUNTIME_DIR to a folder of yours"
        ) from None
    if status.st_uid != os.getuid():
        from grpo_engine.wire.tcp_sockets import user_name  # here: a command that starts a run loads little first

        raise GrpoError(
            f"{folder}, the folder for sockets, belongs to user {user_name(status.st_uid)}, who made it before you "
            "could: set XDG_RUNTIME_DIR to a folder of yours with a short path, in all your sessions"
        )
    if status.st_mode & 0o077 or not stat.S_ISDIR(status.st_mode):
        raise GrpoError(
            f"{folder}, the folder for sockets, has mode {status.st_mode & 0o777:04o} and belongs to user "
            f"{status.st_uid}; it must be yours, and a folder with mode 0700: "
            "`chmod 700` or remove it, or set XDG_RUNTIME_DIR"
        )
    return folder
