"""What the fork server reads of a model for the servers that it forks: its tokenizer and its parameters.

Else each server would load the tokenizer, vLLM in it twice more, and vLLM's engine core: 0.25 s each time on two cores;
and vLLM would copy it for its threads, which takes longer still. The fork server reads while it waits for its turn, and
looks again at the files' times when that has come.
"""

from __future__ import annotations

import copy
import inspect
import logging
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from grpo_engine.models.loading import load_config, load_tokenizer, resolve_model
from grpo_engine.models.stored_weights import checkpoint_folder
from grpo_engine.server.vllm.checkpoint import Parameters, parameters_of

Stamp = tuple[tuple[str, int, int], ...]
"""Name, time of the last change (ns) and size of each file that is no weights."""

_NUM_COPIES = 2
"""Of the tokenizer, in vLLM's pool: for one thread that renders prompts, as it is by default, and the event loop."""
_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReadModel:
    """What a server needs of a model's files before it has weights."""

    tokenizer: Any
    parameters: Parameters


_ahead: dict[str, tuple[Stamp, ReadModel]] = {}
"""By the model's name."""


def read_ahead(model_name: str) -> None:
    """Read a model on this machine, here and into vLLM's caches, unless it was read and its files are the same.

    What cannot be read is left to the server, which reports it.
    """
    folder = checkpoint_folder(model_name)
    if folder is None or _as_read(model_name) is not None:
        return
    stamp = _stamp(folder)
    try:
        _ahead[model_name] = (stamp, ReadModel(load_tokenizer(model_name), parameters_of(model_name)))
        _load_in_vllm(resolve_model(model_name), folder)
    except Exception as error:  # vLLM raises many types
        logger.debug("%s cannot be read ahead: %s: %s", model_name, type(error).__name__, error)


def read_model(model_name: str) -> ReadModel:
    """As it was read ahead; read now if its files have changed since.

    Raises:
        ModelError: it cannot be found or read.
    """
    return _as_read(model_name) or ReadModel(load_tokenizer(model_name), parameters_of(model_name))


def _as_read(model_name: str) -> ReadModel | None:
    """What was read ahead; None where that is nothing, or of other files than now, which vLLM then forgets too."""
    if (found := _ahead.get(model_name)) is None:
        return None
    stamp, read = found
    folder = checkpoint_folder(model_name)
    if folder is not None and _stamp(folder) == stamp:
        return read
    _empty_caches_of_vllm()
    return None


def _load_in_vllm(model: str, folder: Path) -> None:
    tokenizer = _tokenizer_of_vllm(model)
    _look_for_chat_template(model, folder, tokenizer)
    _make_pool(tokenizer)


def _look_for_chat_template(model: str, folder: Path, tokenizer: Any) -> None:
    """Have vLLM look for a template in a model's processor, and find none where the model has no processor.

    transformers takes the tokenizer for it then, and loads it once more.
    """
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
    from vllm.renderers import hf

    look, load = hf._try_get_processor_chat_template, hf.cached_get_processor  # 0.26 to 0.33
    names = inspect.signature(look).parameters
    defaults = {"trust_remote_code": False, "revision": None, "code_revision": None}
    if (
        load_config(model).model_type not in PROCESSOR_MAPPING_NAMES
        and "processor_class" not in tokenizer.init_kwargs
        and not any(folder.glob("*processor_config.json"))
    ):
        hf.cached_get_processor = lambda *_, **__: tokenizer
    try:
        look(tokenizer, **{name: value for name, value in defaults.items() if name in names})
    finally:
        hf.cached_get_processor = load


def _tokenizer_of_vllm(model: str) -> Any:
    """As vLLM's default settings load it; with others, vLLM does not find it in its cache, and loads its own."""
    from vllm.tokenizers import cached_tokenizer_from_config

    return cached_tokenizer_from_config(
        SimpleNamespace(  # vLLM's own configuration takes seconds
            skip_tokenizer_init=False,
            tokenizer=model,
            runner_type="generate",
            tokenizer_mode="auto",
            tokenizer_revision=None,
            trust_remote_code=False,
        )
    )


def _make_pool(tokenizer: Any) -> None:
    """Make vLLM's pool of copies of this tokenizer, for the renderer of each server that is forked.

    All of a pool is in a class that it gives to the tokenizer (`vllm/tokenizers/hf.py`, 0.26 to 0.33).
    """
    from vllm.renderers import hf

    make = hf.maybe_make_thread_pool
    pooled = copy.copy(tokenizer)
    make(pooled, _NUM_COPIES)
    if type(pooled) is type(tokenizer):  # vLLM makes no pool for one that is written in Python
        return
    backend, before = pooled._tokenizer, _state(pooled)

    def take_or_make(tokenizer: Any, copies: int = 1) -> Any:
        if copies != _NUM_COPIES or vars(tokenizer).get("_tokenizer") is not backend or _state(tokenizer) != before:
            return make(tokenizer, copies)
        tokenizer.__class__ = pooled.__class__
        return tokenizer

    hf.maybe_make_thread_pool = take_or_make


def _state(tokenizer: Any) -> tuple[int, dict[str, Any]]:
    """What a copy of it has, but for the tokens of its backend, of which only the number: with some settings vLLM adds
    some.
    """
    own = {name: value for name, value in vars(tokenizer).items() if name != "_tokenizer"}
    return tokenizer._tokenizer.get_vocab_size(), copy.deepcopy(own)


def _empty_caches_of_vllm() -> None:
    from vllm.renderers import hf
    from vllm.tokenizers import cached_get_tokenizer

    cached_get_tokenizer.cache_clear()
    hf._PROCESSOR_CHAT_TEMPLATES.clear()


def _stamp(folder: Path) -> Stamp:
    paths = (path for path in sorted(folder.iterdir()) if path.suffix not in _WEIGHTS and path.is_file())
    files = [(path.name, path.stat()) for path in paths]
    return tuple((name, status.st_mtime_ns, status.st_size) for name, status in files)
