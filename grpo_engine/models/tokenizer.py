"""Loads the tokenizer of a model; for most models without torch, since an environment only tokenizes.

`AutoTokenizer` imports torch, dynamo and the models of transformers (5.19): two thirds of the CPU time in which an
environment starts, and 350 MB. All that it does with the models below is to choose a class.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
from transformers.utils import cached_file

from grpo_engine.models.sources import read_source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_CLASSES = {
    ("llama", "PreTrainedTokenizerFast"): "PreTrainedTokenizerFast",
    ("llama", "TokenizersBackend"): "PreTrainedTokenizerFast",
    ("qwen2", "Qwen2Tokenizer"): "Qwen2Tokenizer",
    ("qwen3", "Qwen2Tokenizer"): "Qwen2Tokenizer",
}
"""Kind of model and class in `tokenizer_config.json` → what `AutoTokenizer` loads, in transformers 5.5 to 5.19."""


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, as `AutoTokenizer` loads it; one without a padding token pads with its end token.

    Raises:
        ModelError: it cannot be found or read.
    """
    tokenizer: PreTrainedTokenizerBase = read_source(name, _read)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _read(source: str) -> Any:
    kind = getattr(transformers, _known_class(source) or "AutoTokenizer")
    return kind.from_pretrained(source, trust_remote_code=False)


def _known_class(source: str) -> str | None:
    """The class that `AutoTokenizer` would choose; None where it has to be asked, which also reports what is wrong."""
    with suppress(OSError, ValueError):
        model, tokenizer = (_settings(source, file) for file in ("config.json", "tokenizer_config.json"))
        if "auto_map" not in tokenizer:
            return TOKENIZER_CLASSES.get((str(model.get("model_type")), str(tokenizer.get("tokenizer_class"))))
    return None


def _settings(source: str, file: str) -> dict[str, Any]:
    read = json.loads(Path(str(cached_file(source, file))).read_text(encoding="utf-8"))
    return read if isinstance(read, dict) else {}
