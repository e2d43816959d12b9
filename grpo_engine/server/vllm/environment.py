"""Environment variables of vLLM's processes: those that vLLM and torch read at import, and our own.

Imports neither of them, so that it can be called before. Values that the user set are kept.
"""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path

from grpo_engine.compilers import CODE_CACHES, settle_assembler
from grpo_engine.errors import ConfigError
from grpo_engine.models.local import cache_folder
from grpo_engine.python_command import others_may_fill
from grpo_engine.server.config import ServerConfig

logger = logging.getLogger(__name__)

_WITHOUT_WHOLE_PROGRAMS = {
    "VLLM_USE_AOT_COMPILE": "0",
    "VLLM_USE_STANDALONE_COMPILE": "0",
    "VLLM_DISABLE_COMPILE_CACHE": "1",
}
"""With any of these, vLLM cannot keep a compiled model as one program."""
_NO_LAUNCH_OVERLAP = "VLLM_LORA_DISABLE_PDL"
_BLACKWELL = 10


def settle_environment(config: ServerConfig, environment: MutableMapping[str, str]) -> None:
    """Set the variables of vLLM and torch; a second call changes nothing.

    Raises:
        ConfigError: no temporary folder of this user's alone can be made.
    """
    environment.setdefault("VLLM_NO_USAGE_STATS", "1")
    # SageMaker's package, which vLLM's routes import, sets the root logger to this level, else to ERROR.
    environment.setdefault("SAGEMAKER_CONTAINER_LOG_LEVEL", config.log_level)
    # Read when the first tensor is made; on a CPU a fork inherits the value of its parent.
    if config.threads is not None:
        environment["OMP_NUM_THREADS"] = str(config.threads)
        environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # otherwise it binds one thread to every core
    environment.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    caches = cache_folder(environment)
    environment.setdefault("VLLM_CACHE_ROOT", str(caches / "vllm"))
    for variable, folder in CODE_CACHES.items():  # else in /tmp
        environment.setdefault(variable, str(caches / folder))
    settle_assembler(environment)
    _settle_temporary_folder(environment)
    if config.enable_lora and _NO_LAUNCH_OVERLAP not in environment and _has_blackwell(environment):
        # Grid dependency control in vLLM's adapter kernels (PDL): Triton fails to compile it for Blackwell.
        environment[_NO_LAUNCH_OVERLAP] = "1"
        logger.info("Blackwell GPU: adapter kernels run without grid dependency control (%s=1)", _NO_LAUNCH_OVERLAP)
    if _is_on_cpu(config):
        # vLLM (seen with 0.32) stores a compiled model that it cannot load, and so compiles at every start. Inductor's
        # own cache does load: a restart takes 3 s, not 6.
        environment.setdefault("VLLM_USE_AOT_COMPILE", "0")
    environment.setdefault("INSTANTTENSOR_BACKEND", "BUFFERED")  # from the page cache, not around it
    # A compiled model stored as one program loads in 0.3 s, not 3: vLLM's default with torch 2.12 and newer.
    if not any(environment.get(name) == value for name, value in _WITHOUT_WHOLE_PROGRAMS.items()):
        environment.setdefault("VLLM_USE_MEGA_AOT_ARTIFACT", "1")


def _settle_temporary_folder(environment: MutableMapping[str, str]) -> None:
    """Give vLLM a temporary folder of this user's alone, as services of a run have one.

    It waits without a limit for a lock there whose name is that of the model, and loads code that it has compiled there
    under a name that is always the same (`VLLM_USE_NCCL_SYMM_MEM`): in `/tmp` another user may have either first.

    Raises:
        ConfigError: it cannot be made.
    """
    base = Path(tempfile.gettempdir())
    if others_may_fill(base) is None:
        return
    try:
        own = _own_folder(base / f"grpo-vllm-{os.geteuid()}")
    except OSError as error:
        raise ConfigError(
            f"{base}: all users may write to it, and no folder of your own can be made there: {error.strerror}; set "
            "TMPDIR to a folder of yours"
        ) from None
    environment["TMPDIR"] = str(own)
    tempfile.tempdir = None  # what this process has found before


def _own_folder(folder: Path) -> Path:
    """The same folder for all servers of a user, or one of another name where somebody else has made it first."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    with suppress(FileNotFoundError):  # theirs, and removed since
        status = folder.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077:
            return folder
    return Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))


def _has_blackwell(environment: Mapping[str, str]) -> bool:
    from grpo_engine.server.vllm.requirements import visible_gpus

    return any(gpu.generation >= _BLACKWELL for gpu in visible_gpus(environment) or ())


def _is_on_cpu(config: ServerConfig) -> bool:
    from grpo_engine.server.vllm.requirements import installed_vllm

    try:
        return config.device == "cpu" or (config.device == "auto" and installed_vllm().is_for_cpu)
    except ConfigError:  # not installed: `check_vllm` reports it
        return False
