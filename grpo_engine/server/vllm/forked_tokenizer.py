"""The model's tokenizer, which the fork server loads for the servers that it forks.

Else each server would load it, vLLM in it once more, and vLLM's engine core: 0.25 s each time on two cores.
"""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from grpo_engine.models.loading import load_tokenizer, resolve_model
from grpo_engine.models.stored_weights import checkpoint_folder

Stamp = tuple[tuple[str, int, int], ...]
"""Name, time of the last change (ns) and size of each file that is no weights."""

_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth")
_loaded: dict[str, tuple[Stamp, Any]] = {}
"""By the model's name."""

logger = logging.getLogger(__name__)


def preload_tokenizer(model_name: str) -> None:
    """Load the tokenizer of a model on this machine, here and in vLLM's cache.

    One that cannot be loaded is left to the server, which reports it.
    """
    folder = checkpoint_folder(model_name)
    if folder is None:
        return
    stamp = _stamp(folder)
    try:
        tokenizer = load_tokenizer(model_name)
        _load_in_vllm(resolve_model(model_name))
    except Exception as error:  # vLLM raises many types
        logger.debug("the tokenizer of %s cannot be loaded ahead: %s: %s", model_name, type(error).__name__, error)
        return
    _loaded[model_name] = (stamp, tokenizer)


def tokenizer_of(model_name: str) -> Any:
    """The tokenizer; loaded again if its files have changed since they were loaded.

    Raises:
        ModelError: it cannot be found or read.
    """
    if (found := _loaded.get(model_name)) is not None:
        stamp, tokenizer = found
        folder = checkpoint_folder(model_name)
        if folder is not None and _stamp(folder) == stamp:
            return tokenizer
        from vllm.tokenizers import cached_get_tokenizer

        cached_get_tokenizer.cache_clear()
    return load_tokenizer(model_name)


def _load_in_vllm(model: str) -> None:
    """Load it as vLLM's default settings do; with others, vLLM does not find it in its cache, and loads its own."""
    from vllm.tokenizers import cached_tokenizer_from_config

    cached_tokenizer_from_config(
        SimpleNamespace(  # vLLM's own configuration takes seconds
            skip_tokenizer_init=False,
            tokenizer=model,
            runner_type="generate",
            tokenizer_mode="auto",
            tokenizer_revision=None,
            trust_remote_code=False,
        )
    )


def _stamp(folder: Path) -> Stamp:
    files = [(path.name, path.stat()) for path in sorted(folder.iterdir()) if path.suffix not in _WEIGHTS]
    return tuple((name, status.st_mtime_ns, status.st_size) for name, status in files)
