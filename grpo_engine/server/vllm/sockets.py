"""The folder of the sockets through which vLLM's processes communicate: vLLM does not remove them when it exits.

Each server gets its own folder, which is removed after it. The fork server creates and removes it, so that it is also
removed after a killed server; the folder of a killed fork server is removed at the next start. A folder that the user
sets is left alone.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path

from grpo_engine.bridges.memory.shared_names import own_entries
from grpo_engine.errors import GrpoError
from grpo_engine.server.config import ServerConfig
from grpo_engine.wire.supervisor import MAX_TEMPORARY_FOLDER_BYTES

FOLDER_VARIABLE = "VLLM_RPC_BASE_PATH"
_PREFIX = "v-"
_MADE_CHARACTERS = 8
"""Of the end that `mkdtemp` gives a name."""


@contextmanager
def socket_folder(config: ServerConfig, environment: MutableMapping[str, str]) -> Iterator[None]:
    """Set the folder for the sockets of the next vLLM server, and remove it at the end of the block.

    Raises:
        GrpoError: the folder cannot be created.
    """
    if config.engine != "vllm" or environment.get(FOLDER_VARIABLE):
        yield
        return
    base = _base()
    _remove_stale(base)
    try:
        folder, lock = _locked_folder(base)
    except OSError as error:
        raise GrpoError(
            f"{base}: cannot create a folder for vLLM's sockets: {error.strerror}; set TMPDIR to a writable folder"
        ) from None
    environment[FOLDER_VARIABLE] = str(folder)
    try:
        yield
    finally:
        del environment[FOLDER_VARIABLE]
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _base() -> Path:
    """The temporary folder, unless the path of a socket in it would be longer than the kernel allows."""
    own = Path(tempfile.gettempdir())
    return own if len(os.fsencode(own)) <= MAX_TEMPORARY_FOLDER_BYTES else Path("/tmp")


def _locked_folder(base: Path) -> tuple[Path, int]:
    """A new folder with a lock on it, which the kernel releases when the last process of the server exits."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        with suppress(FileNotFoundError):  # removed as stale before it was locked
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.exists():
                return folder, lock
            os.close(lock)


def _remove_stale(base: Path) -> None:
    """Remove the folders of servers that were killed together with their fork servers."""
    for folder in own_entries(base, _PREFIX):
        if len(folder.name) != len(_PREFIX) + _MADE_CHARACTERS:
            continue
        with suppress(OSError):  # no folder, of a running server, or just removed by another one
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _holds_only_sockets(folder):
                    shutil.rmtree(folder)
            finally:
                os.close(lock)


def _holds_only_sockets(folder: Path) -> bool:
    """Whether this is a folder of vLLM's sockets; another program's may have such a name."""
    content = list(folder.iterdir())
    return folder.stat().st_uid == os.getuid() and content != [] and all(path.is_socket() for path in content)
