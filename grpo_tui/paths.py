"""Where things are: profiles, runs, and the daemon's socket. Path arithmetic and folder listings; starts nothing."""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import tempfile
import time
from pathlib import Path

from grpo_engine.errors import GrpoError

LOGS = Path("logs")
"""Runs are below the current folder."""
PROFILES = Path("profiles")
INSTALLED_PROFILES = Path(__file__).parent / "profiles"
"""Copies in the package, for machines without a checkout."""
ALWAYS_SHORT = Path("/tmp")
"""For sockets and temporary files where the path of the other folder is too long."""
MAX_SOCKET_PATH_BYTES = 107
"""`sun_path` of a unix socket has 108 bytes, one for the terminating NUL."""


def profile_folders() -> list[Path]:
    """Folders in which a profile name is looked up, the nearest first."""
    checkout = Path(__file__).parents[1] / "profiles"
    return [folder for folder in (PROFILES, checkout, INSTALLED_PROFILES) if folder.is_dir()]


def available_profiles() -> dict[str, Path]:
    """Every profile by name; a nearer folder takes precedence."""
    found: dict[str, Path] = {}
    for folder in profile_folders():
        for path in sorted(folder.glob("*.toml")):
            found.setdefault(path.stem, path)
    return found


def new_run_id(profile_name: str, now: float | None = None) -> str:
    """`tiny-cpu-1121-041503-7f3a`: readable, sortable within a profile, short enough for one line.

    It identifies processes and shared memory on the whole machine, where another folder may start a run of the same
    profile in the same second: hence four random digits.
    """
    return f"{profile_name}-{time.strftime('%m%d-%H%M%S', time.localtime(now))}-{secrets.token_hex(2)}"


class ForeignFolder(GrpoError):
    """A run folder that another user owns or may write to: it is only read."""


def require_own(run_folder: Path) -> None:
    """Refuse to act on a run whose plan somebody else may have written.

    Raises:
        ForeignFolder: another user owns the folder or may write to it.
        FileNotFoundError: there is no such folder.
    """
    status = run_folder.stat()
    if status.st_uid != os.getuid():
        raise ForeignFolder(
            f"{run_folder} belongs to user {status.st_uid}: it can be read only (`grpo-tui attach --read-only`)"
        )
    if status.st_mode & 0o022:
        raise ForeignFolder(
            f"{run_folder} has mode {status.st_mode & 0o777:04o}, so that other users may change what it runs: "
            f"`chmod -R go-w {run_folder}` after you have checked it; until then it can be read only"
        )


def runtime_folder() -> Path:
    """The folder for sockets, created with mode 0700: `$XDG_RUNTIME_DIR/grpo-tui` or `/tmp/grpo-<uid>`.

    Raises:
        GrpoError: it cannot be created, belongs to another user, or is open to others.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and os.access(base, os.W_OK):
        return _own_folder(Path(base) / "grpo-tui")
    return _own_folder(Path(tempfile.gettempdir()) / f"grpo-{os.getuid()}")


def socket_path(run_folder: Path) -> Path:
    """The supervisor's socket for a run: named by a digest of the run folder, which may be longer than a socket's
    path.

    Raises:
        GrpoError: its folder cannot be created, belongs to another user, or is open to others.
    """
    digest = hashlib.blake2b(str(run_folder.resolve()).encode(), digest_size=8).hexdigest()
    path = runtime_folder() / f"{digest}.sock"
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        path = _own_folder(ALWAYS_SHORT / f"grpo-{os.getuid()}") / f"{digest}.sock"
    return path


def registration_path(run_folder: Path) -> Path:
    """The file that shows, outside the run folder, that a supervisor of this user started the run; holds the boot id.

    Raises:
        GrpoError: as `socket_path`.
    """
    return socket_path(run_folder).with_suffix(".run")


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
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or not stat.S_ISDIR(status.st_mode):
        raise GrpoError(
            f"{folder}, the folder for sockets, has mode {status.st_mode & 0o777:04o} and belongs to user "
            f"{status.st_uid}; it must be yours with mode 0700: `chmod 700` or remove it, or set XDG_RUNTIME_DIR"
        )
    return folder
