"""Loads models and tokenizers by name: hub id (`owner/name`), folder, or `local/…` (see `local.py`).

Code that a model brings is never run, and no question is asked. Errors of the libraries become a `ModelError` and
its cause. Models on weights of another process are in `shared.py`.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from grpo_engine.errors import ModelError, UnusableModel
from grpo_engine.models.config import LOCAL_PREFIX, DtypeName, check_model_name
from grpo_engine.models.local import RANDOM_MODEL_BYTES, local_model_folder, make_once
from grpo_engine.models.shared import load_model_on_shared, log_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "is_at_hand",
    "load_config",
    "load_model",
    "load_model_on_shared",
    "load_tokenizer",
    "modeling_module",
    "resolve_model",
    "torch_dtype",
]

LoadedT = TypeVar("LoadedT")

log = logging.getLogger(__name__)


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
    folder = Path(name).expanduser()
    return str(folder.resolve()) if folder.is_dir() else name


def is_at_hand(name: str) -> bool:
    """Whether a model can be read without being made first."""
    return not name.startswith(LOCAL_PREFIX) or local_model_folder(name).is_dir()


def load_config(name: str) -> PreTrainedConfig:
    """The configuration of a model.

    Raises:
        ModelError: it cannot be found or read.
    """
    return _load(name, partial(AutoConfig.from_pretrained, trust_remote_code=False))


def modeling_module(name: str) -> str | None:
    """The module of transformers that `load_model` imports for a model; None where the model brings its own.

    Raises:
        ModelError: its configuration cannot be found or read.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = load_config(name).model_type
    return f"transformers.models.{kind}.modeling_{kind}" if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else None


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model; one without a padding token pads with its end token.

    Raises:
        ModelError: it cannot be found or read.
    """
    tokenizer = _load(name, partial(AutoTokenizer.from_pretrained, trust_remote_code=False))
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(
    name: str, *, dtype: DtypeName, device: str | torch.device, attn_implementation: str | None = None
) -> PreTrainedModel:
    """A causal language model with parameters of `dtype` on `device`, in evaluation mode (no dropout).

    Args:
        attn_implementation: as transformers names it (`sdpa`, `flash_attention_2`, `eager`); None: its own choice.

    Raises:
        ModelError: it cannot be found or read.
    """
    began = time.perf_counter()
    kwargs = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    model = _load(
        name,
        lambda source: AutoModelForCausalLM.from_pretrained(
            source, dtype=torch_dtype(dtype), trust_remote_code=False, **kwargs
        ),
    )
    read = time.perf_counter()
    model = model.to(device).eval()
    log.debug(
        "loaded %s from %s as %s: read in %.2f s, on %s after %.2f s, attention %s",
        *(name, resolve_model(name), type(model).__name__, read - began),
        *(model.device, time.perf_counter() - began, model.config._attn_implementation),
    )
    log_tensors(model)
    return model


def torch_dtype(name: DtypeName) -> torch.dtype | str:
    """The torch type of that name; `auto` stays a word, which transformers understands.

    Raises:
        ModelError: no such type.
    """
    match name:
        case "float32":
            return torch.float32
        case "bfloat16":
            return torch.bfloat16
        case "float16":
            return torch.float16
        case "auto":
            return "auto"
    raise ModelError(f"dtype {name!r} is none of float32, bfloat16, float16, auto")


def _load(name: str, read: Callable[[str], LoadedT]) -> LoadedT:
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
