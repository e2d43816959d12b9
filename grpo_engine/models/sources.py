"""Where a model is read from, by its name: hub id (`owner/name`), folder, or `local/…` (see `local.py`). Torch-free.

Errors of the libraries become a `ModelError` and its cause.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from grpo_engine.errors import ModelError, UnusableModel
from grpo_engine.models.config import LOCAL_PREFIX, check_model_name
from grpo_engine.models.local import RANDOM_MODEL_BYTES, local_model_folder, make_once

LoadedT = TypeVar("LoadedT")


def resolve_model(name: str) -> str:
    """What transformers and vLLM can load `name` from: an absolute folder, or a hub id as it is.

    A `local/…` model is created here on first use, which takes a minute or two.

    Raises:
        UnusableModel: no such folder or local model, or its source package is not installed.
    """
    problem = check_model_name(name)
    if problem is not None:
        raise UnusableModel(f"model {problem}" if problem.startswith("'") else problem)
    if name.startswith(LOCAL_PREFIX):
        return str(make_once(name, lambda folder: _make_apart(name, folder)))
    folder = Path(os.path.expanduser(name))
    return str(folder.resolve()) if folder.is_dir() else name


def is_at_hand(name: str) -> bool:
    """Whether a model can be read without being made first."""
    return not name.startswith(LOCAL_PREFIX) or local_model_folder(name).is_dir()


def read_source(name: str, read: Callable[[str], LoadedT]) -> LoadedT:
    """What a function of transformers reads of a model, from its folder or hub id.

    Raises:
        ModelError: it cannot be found or read.
    """
    source = resolve_model(name)
    try:
        return read(source)
    except (OSError, ValueError, KeyError, ImportError) as error:  # what transformers raises for a bad source
        first_line = str(error).strip().partition("\n")[0].rstrip(".")
        what = f"model {name!r} cannot be loaded: {first_line}"
        if Path(source).is_dir():
            raise UnusableModel(f"{what}; check the files in that folder") from error
        raise ModelError(
            f"{what}; without a hub, give the folder of a downloaded model, or a local/… model such as local/tiny"
        ) from error


def _make_apart(name: str, folder: Path) -> None:
    """Create a local model in a new interpreter.

    Training leaves threads and a CUDA context in a process, and vLLM later forks its engine from this one:
    "Cannot re-initialize CUDA in forked subprocess".
    """
    code = f"from pathlib import Path; from {__name__} import _recipe; _recipe({name!r})(Path({str(folder)!r}))"
    made = subprocess.run([sys.executable, "-P", "-c", code], stderr=subprocess.PIPE, text=True)
    if made.returncode != 0:
        last_words = "\n".join(made.stderr.strip().splitlines()[-5:]) or f"exit code {made.returncode}"
        raise ModelError(f"{name} could not be created:\n{last_words}")


def _recipe(name: str) -> Callable[[Path], None]:
    if name == "local/tiny":
        from grpo_engine.models.tiny import make_tiny

        return make_tiny
    if name in RANDOM_MODEL_BYTES:
        from grpo_engine.models.random_models import make_random

        return lambda folder: make_random(name, folder)
    from grpo_engine.models.smollm2 import make_smollm2

    return make_smollm2
