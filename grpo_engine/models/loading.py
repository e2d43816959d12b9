"""Loads models and their configurations by name: see `sources.py`; tokenizers are in `tokenizer.py`.

Code that a model brings is never run, and no question is asked. Models on weights of another process: `shared.py`.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import TYPE_CHECKING

import torch

from grpo_engine.errors import ModelError
from grpo_engine.models.auto import AutoConfig, AutoModelForCausalLM
from grpo_engine.models.config import DtypeName
from grpo_engine.models.shared import load_model_on_shared, log_tensors
from grpo_engine.models.sources import is_at_hand, read_source, resolve_model
from grpo_engine.models.tokenizer import load_tokenizer
from grpo_engine.wire.log_lines import WEIGHTS_LOADING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

__all__ = [
    "fitting_length",
    "is_at_hand",
    "load_config",
    "load_model",
    "load_model_on_shared",
    "load_tokenizer",
    "modeling_module",
    "resolve_model",
    "torch_dtype",
]

log = logging.getLogger(__name__)


def load_config(name: str) -> PreTrainedConfig:
    """The configuration of a model.

    Raises:
        ModelError: it cannot be found or read.
    """
    return read_source(name, partial(AutoConfig.from_pretrained, trust_remote_code=False))


def fitting_length(pretrained: PreTrainedConfig, length: int, setting: str) -> int:
    """`length`, or the number of positions of a model that has a table of fewer, with a warning.

    Models that compute positions (rotary ones) have no last one.
    """
    config = pretrained.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or getattr(config, "rope_parameters", None) or length <= limit:
        return length
    log.warning("%s %d: %s has only %d positions; using that", setting, length, pretrained.name_or_path, limit)
    return limit


def modeling_module(name: str) -> str | None:
    """The module of transformers that `load_model` imports for a model; None where the model brings its own.

    Raises:
        ModelError: its configuration cannot be found or read.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = load_config(name).model_type
    return f"transformers.models.{kind}.modeling_{kind}" if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else None


def load_model(
    name: str, *, dtype: DtypeName, device: str | torch.device, attn_implementation: str | None = None
) -> PreTrainedModel:
    """A causal language model with parameters of `dtype` on `device`, in evaluation mode (no dropout).

    Args:
        attn_implementation: as transformers names it (`sdpa`, `flash_attention_2`, `eager`); None: its own choice.

    Raises:
        ModelError: it cannot be found or read.
    """
    log.info(WEIGHTS_LOADING.text, name)
    began = time.perf_counter()
    kwargs = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    model = read_source(
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
