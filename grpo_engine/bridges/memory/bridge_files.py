"""Finds and reads the bridge file, and checks whether its server runs. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from grpo_engine.errors import BridgeError
from grpo_engine.processes import ProcessIdentity
from grpo_engine.wire.bridge_file import FORMAT_VERSION, BridgeFile
from grpo_engine.wire.codec import first_fault, read_whole
from grpo_engine.wire.environment_variables import BRIDGE_FILE_VARIABLE, LOG_FOLDER_VARIABLE
from grpo_engine.wire.run_folder import BRIDGE_FILE

MAX_BYTES, MAX_MARKS = 512 << 20, 32 << 20
"""Of a file, in which a tensor of a rank takes about 300 bytes."""


def bridge_file_path(configured: Path | None, environment: Mapping[str, str]) -> Path:
    """The configured path, else $VLLM_BRIDGE_CONFIG_PATH, else the file in $LOGDIR or the working folder, as in
    Atropos."""
    if configured is not None:
        return configured.absolute()
    if path := environment.get(BRIDGE_FILE_VARIABLE):
        return Path(path).absolute()
    return Path(environment.get(LOG_FOLDER_VARIABLE) or ".").absolute() / BRIDGE_FILE


def read_bytes(path: Path) -> bytes:
    """The content of a bridge file, of a length that one can have.

    Raises:
        OSError: it cannot be read, is no regular file, or is longer.
    """
    return read_whole(path, max_bytes=MAX_BYTES, max_marks=MAX_MARKS)


def read_bridge_file(path: Path) -> BridgeFile:
    """Read a bridge file.

    Raises:
        BridgeError: it is missing, malformed, or of another format version.
    """
    try:
        file = BridgeFile.model_validate_json(read_bytes(path))
    except OSError as error:
        raise BridgeError(
            f"{path}: cannot be read: {error.strerror}; start the inference server with shared weights first, "
            "or point --vllm-config-path at its bridge file"
        ) from None
    except ValidationError as error:
        raise BridgeError(
            f"{path}: not a bridge file of this version: {first_fault(error)}; restart the inference server"
        ) from None
    if file.format_version != FORMAT_VERSION:
        raise BridgeError(
            f"{path}: format {file.format_version}, but this trainer reads {FORMAT_VERSION}; "
            "run server and trainer from the same installation"
        )
    return file


def is_server_alive(file: BridgeFile) -> bool:
    """Whether the server that wrote the file still runs."""
    return ProcessIdentity(file.pid, file.pid_start_ticks).is_alive()
