"""The folder of the sockets by which vLLM's processes talk: they leave them lying, however they end.

A server has a folder of its own for them, which goes with it. Whoever starts servers one after the other (`standby.py`)
makes it and removes it, so it goes with a server that was killed too. A folder that the user names is left alone.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path

from grpo_engine.errors import GrpoError
from grpo_engine.server.config import ServerConfig

FOLDER_VARIABLE = "VLLM_RPC_BASE_PATH"
_PREFIX, _LONGEST_PATH_BYTES = "v-", 107
_LONGEST_BELOW = len(f"/{_PREFIX}12345678/123e4567-e89b-12d3-a456-426614174000")


@contextmanager
def sockets_of_a_server(config: ServerConfig, environment: MutableMapping[str, str]) -> Iterator[None]:
    """Where vLLM's servers are started, have the next one put its sockets into a folder that ends with this context.

    Raises:
        GrpoError: the folder cannot be made.
    """
    if config.engine != "vllm" or environment.get(FOLDER_VARIABLE):
        yield
        return
    try:
        folder = tempfile.mkdtemp(prefix=_PREFIX, dir=_base())
    except OSError as error:
        words = f"no folder for vLLM's sockets can be made in {_base()}: {error.strerror}"
        raise GrpoError(f"{words}; mend that, or set TMPDIR to a folder of yours") from None
    environment[FOLDER_VARIABLE] = folder
    try:
        yield
    finally:
        del environment[FOLDER_VARIABLE]
        shutil.rmtree(folder, ignore_errors=True)


def _base() -> Path:
    """The temporary folder, unless a socket in it would have a longer name than the kernel takes."""
    own = Path(tempfile.gettempdir())
    return own if len(os.fsencode(own)) + _LONGEST_BELOW <= _LONGEST_PATH_BYTES else Path("/tmp")
