"""Where things are: profiles, runs, and the daemon's socket. Path arithmetic and folder listings; starts nothing."""

from __future__ import annotations

import hashlib
import os
import secrets
import tempfile
import time
from pathlib import Path

from grpo_engine.errors import GrpoError

LOGS = Path("logs")
"""Runs live below the folder in which a command was typed."""
PROFILES = Path("profiles")
INSTALLED_PROFILES = Path(__file__).parent / "profiles"
"""Copies that travel with the package, for a machine without a checkout."""
MAX_SOCKET_PATH_BYTES = 107
"""`sun_path` of a unix socket holds 108 bytes with its end mark."""

STATE_FILE = "state.json"
RESOLVED_FILE = "resolved.json"
PLAN_FILE = "plan.json"
METRICS_FILE = "metrics.jsonl"
ROLLOUTS_FILE = "rollouts.jsonl"
TIMELINE_FILE = "events.jsonl"
SUPERVISOR_LOG = "supervisor.log"
KEEPERS = "keepers"
BRIDGE_FILE = "vllm_bridge_config.json"
HANDOVER_FOLDER = "handover"
"""`current` in it is the newest checkpoint that the trainer handed to inference."""


def profile_folders() -> list[Path]:
    """Folders in which a profile name is looked up, the nearest first."""
    checkout = Path(__file__).parents[1] / "profiles"
    return [folder for folder in (PROFILES, checkout, INSTALLED_PROFILES) if folder.is_dir()]


def available_profiles() -> dict[str, Path]:
    """Every profile by name; a name in the nearer folder hides the same name further away."""
    found: dict[str, Path] = {}
    for folder in profile_folders():
        for path in sorted(folder.glob("*.toml")):
            found.setdefault(path.stem, path)
    return found


def new_run_id(profile_name: str, now: float | None = None) -> str:
    """`tiny-cpu-1121-041503-7f3a`: readable, sortable within a profile, short enough for one line.

    Processes and shared memory of a run are known by it on the whole machine, where another folder may start a run of
    the same profile in the same second: hence the four digits of chance.
    """
    return f"{profile_name}-{time.strftime('%m%d-%H%M%S', time.localtime(now))}-{secrets.token_hex(2)}"


def runtime_folder() -> Path:
    """The folder for sockets, 0700 and ours, made if need be: `$XDG_RUNTIME_DIR/grpo-tui` or `/tmp/grpo-<uid>`.

    Raises:
        GrpoError: it cannot be made; or it belongs to somebody else, or others may enter it.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and os.access(base, os.W_OK):
        folder = Path(base) / "grpo-tui"
    else:
        folder = Path(tempfile.gettempdir()) / f"grpo-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise GrpoError(
            f"{folder}, the folder for sockets, cannot be made: {error.strerror}; "
            "remove what is there or set XDG_RUNTIME_DIR to a folder of yours"
        ) from None
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise GrpoError(
            f"{folder}, the folder for sockets, has mode {status.st_mode & 0o777:04o} and belongs to user "
            f"{status.st_uid}; it must be yours alone: `chmod 700` or remove it, or set XDG_RUNTIME_DIR"
        )
    return folder


def socket_path(run_folder: Path) -> Path:
    """The daemon's socket for a run: named by a digest of the run folder, so that any depth of folders fits."""
    digest = hashlib.blake2b(str(run_folder.resolve()).encode(), digest_size=8).hexdigest()
    path = runtime_folder() / f"{digest}.sock"
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        path = Path("/tmp") / f"grpo-{os.getuid()}" / f"{digest}.sock"
        path.parent.mkdir(mode=0o700, exist_ok=True)
    return path
