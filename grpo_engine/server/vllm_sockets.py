"""The folder of the sockets by which vLLM's processes talk: they leave them lying, however they end.

A server has a folder of its own for them, which goes with it. Whoever starts servers one after the other (`standby.py`)
makes it and removes it, so it goes with a server that was killed too; what a killed standby left goes with the next
start. A folder that the user names is left alone.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path

from grpo_engine.errors import GrpoError
from grpo_engine.server.config import ServerConfig
from grpo_engine.wire.supervisor import MAX_TEMPORARY_FOLDER_BYTES

FOLDER_VARIABLE = "VLLM_RPC_BASE_PATH"
_PREFIX = "v-"


@contextmanager
def sockets_of_a_server(config: ServerConfig, environment: MutableMapping[str, str]) -> Iterator[None]:
    """Where vLLM's servers are started, have the next one put its sockets into a folder that ends with this context.

    Raises:
        GrpoError: the folder cannot be made.
    """
    if config.engine != "vllm" or environment.get(FOLDER_VARIABLE):
        yield
        return
    base = _base()
    _remove_left(base)
    try:
        folder, lock = _locked_folder(base)
    except OSError as error:
        words = f"no folder for vLLM's sockets can be made in {base}: {error.strerror}"
        raise GrpoError(f"{words}; mend that, or set TMPDIR to a folder of yours") from None
    environment[FOLDER_VARIABLE] = str(folder)
    try:
        yield
    finally:
        del environment[FOLDER_VARIABLE]
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _base() -> Path:
    """The temporary folder, unless a socket in it would have a longer name than the kernel takes."""
    own = Path(tempfile.gettempdir())
    return own if len(os.fsencode(own)) <= MAX_TEMPORARY_FOLDER_BYTES else Path("/tmp")


def _locked_folder(base: Path) -> tuple[Path, int]:
    """A new folder, and the lock on it, which the kernel lets go of when nobody of the server lives any more."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        with suppress(FileNotFoundError):  # taken for one that was left, before it was locked
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.exists():
                return folder, lock
            os.close(lock)


def _remove_left(base: Path) -> None:
    """Remove the folders of servers that were killed with those who would have removed them."""
    for folder in base.glob(f"{_PREFIX}????????"):
        with suppress(OSError):  # another user's, no folder, of a server that lives, or just removed by another one
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _holds_only_sockets(folder):
                    shutil.rmtree(folder)
            finally:
                os.close(lock)


def _holds_only_sockets(folder: Path) -> bool:
    """Whether it can be one of ours: somebody else's may have such a name."""
    content = list(folder.iterdir())
    return folder.stat().st_uid == os.getuid() and content != [] and all(path.is_socket() for path in content)
