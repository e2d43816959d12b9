"""Settings of models that are checked without loading one: names, layer filters, adapter and optimizer settings.

Torch-free and offline, so that a profile is checked before any process starts. Whether a hub id exists is found out
when the model is loaded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from grpo_engine.config import Config, did_you_mean
from grpo_engine.errors import ConfigError
from grpo_engine.installed import installed_version
from grpo_engine.models.local import LOCAL_MODELS, missing_source

DtypeName = Literal["float32", "bfloat16", "float16", "auto"]
"""Of a model's parameters; auto: as in its checkpoint."""

OptimizerName = Literal["adamw", "adamw_8bit", "adafactor"]

BLOCK_8BIT = 256
"""Numbers of an optimizer's 8-bit state that share a scale, as in bitsandbytes."""

MasterKind = Literal["float32", "stochastic_rounding"]
"""How updates below bf16's resolution accumulate."""

LOCAL_PREFIX = "local/"
"""Models with this prefix are created on this machine; a folder of that name is given as `./local/…`."""

FIRST_BITSANDBYTES_ON_CPUS = (0, 50)
"""First release with 8-bit optimizers for CPUs."""

SPLITTABLE = ("llama", "qwen2", "qwen3")
"""Families (`model_type` of config.json) of which the trainer can have one part on each tensor parallel rank."""
MOST_RANKS = 1024
"""Tensor parallel ranks of a model: messages and plans name each."""

_HUB_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?")
_LONGEST_PART = 255
"""NAME_MAX of Linux."""


class LoraSettings(Config):
    """A low-rank adapter, as PEFT and vLLM know it."""

    rank: int = Field(16, ge=1)
    """Rank of the two factors. vLLM serves 1, 8, 16, 32, 64, 128, 256, 320 and 512 without padding."""
    alpha: int = Field(32, ge=1)
    """The update is scaled by alpha / rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """0: with dropout, trainer and server log-probs differ on every token even with equal weights."""
    target_modules: tuple[str, ...] = Field(("q_proj", "v_proj"), min_length=1)
    """Names of the linear layers with an adapter."""
    layer_indices: str | None = None
    """Adapters only on these layers, as in `20-31` or `0-3,28-31`; unset: all."""

    @field_validator("layer_indices")
    @classmethod
    def _is_a_layer_filter(cls, text: str | None) -> str | None:
        if text is not None:
            parse_layer_indices(text)
        return text


class OptimizerSettings(Config):
    """The optimizer and its settings."""

    name: OptimizerName = "adamw"
    """adamw_8bit needs bitsandbytes, on a CPU 0.50 or newer."""
    lr: float = Field(1e-5, gt=0)
    """Learning rate; a schedule may change it between steps."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the averages of gradient and squared gradient; adafactor has none."""
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled, on matrices only: norms and biases never decay. 0 by default: RL starts from a trained model, and
    decay would pull it towards zero, not towards that model."""
    adafactor_scale_parameter: bool = False
    """Multiply the learning rate by each parameter's own size."""
    adafactor_relative_step: bool = False
    """Let adafactor choose the learning rate by step count; `lr` is then without effect."""


def lacking_for_optimizer(name: OptimizerName, *, on_cpu: bool) -> tuple[str, str] | None:
    """What must be installed before this optimizer can run here, and how; None if nothing is missing."""
    if name != "adamw_8bit":
        return None
    version = installed_version("bitsandbytes")
    if version is None:
        return "adamw_8bit needs bitsandbytes, which is not installed", "pip install bitsandbytes, or choose adamw"
    if on_cpu and tuple(int(part) for part in version.split(".")[:2]) < FIRST_BITSANDBYTES_ON_CPUS:
        what = f"adamw_8bit runs on a CPU from bitsandbytes 0.50 on, and {version} is installed"
        return what, "pip install -U bitsandbytes, or choose adamw"
    return None


def why_not_splittable(config: Mapping[str, Any], num_ranks: int) -> str | None:
    """Why a model cannot be trained over so many tensor parallel ranks; None if it can.

    Args:
        config: of the model, as in its config.json.
    """
    family = config.get("model_type")
    if family not in SPLITTABLE:
        return (
            f"a model of type {family} cannot be trained on the memory of several tensor parallel ranks, only "
            f"{', '.join(SPLITTABLE)}: set tensor_parallel_size to 1, or choose bridge mode broadcast"
        )
    if not (uneven := _uneven_parts(config, num_ranks)):
        return None
    fitting = [str(n) for n in range(1, min(num_ranks, MOST_RANKS + 1)) if not _uneven_parts(config, n)]
    return (
        f"{' and '.join(uneven)} cannot be divided among {num_ranks} tensor parallel ranks: set tensor_parallel_size "
        f"to {' or '.join(fitting)}"
    )


def _uneven_parts(config: Mapping[str, Any], num_ranks: int) -> list[str]:
    """What of a model cannot be divided evenly among so many ranks."""
    heads = config.get("num_attention_heads") or 0
    key_heads = config.get("num_key_value_heads") or heads
    sizes = {"attention heads": heads, "units of the MLP": config.get("intermediate_size") or 0}
    uneven = [f"{size} {what}" for what, size in sizes.items() if size % num_ranks]
    if key_heads % num_ranks and num_ranks % max(key_heads, 1):
        uneven.append(f"{key_heads} heads of keys and values")
    return uneven


def check_model_name(name: str) -> str | None:
    """What is wrong with a model's name; None if nothing is found without loading it.

    A name that looks like a path must be a model folder; a hub id (`gpt2`, `owner/name`) is not checked further.
    """
    if not name.strip():
        return "the name of the model is empty: give a hub id (owner/name), a folder, or a local/… model"
    if name.startswith(LOCAL_PREFIX):
        if name not in LOCAL_MODELS:
            return f"{name!r} is not made here{did_you_mean(name, LOCAL_MODELS)}: there is {', '.join(LOCAL_MODELS)}"
        return missing_source(name)
    if any(len(part.encode()) > _LONGEST_PART for part in name.split("/")):
        return f"{name[:40]!r}… has a part of more than {_LONGEST_PART} bytes, which no file system and no hub has"
    folder = Path(os.path.expanduser(name))
    if folder.is_dir():
        return None if (folder / "config.json").is_file() else f"{folder} is no model folder: it has no config.json"
    if folder.exists():
        return f"{folder} is a file: give the folder of a model"
    if is_hub_id(name):
        return None
    return f"{name!r} is neither a folder that exists nor a hub id (owner/name)"


def is_hub_id(name: str) -> bool:
    """Whether `name` could be the id of a model on the hub: `name` or `owner/name`."""
    parts = name.split("/")
    return len(parts) <= 2 and all(_HUB_NAME.fullmatch(part) for part in parts)


def is_from_hub(name: str) -> bool:
    """Whether a model is loaded from the hub: it is no folder, and not made here."""
    return not name.startswith(LOCAL_PREFIX) and not os.path.exists(os.path.expanduser(name)) and is_hub_id(name)


def parse_layer_indices(text: str) -> tuple[int, ...]:
    """Read a layer filter: `20-31` or `0-3,28-31` → ascending indices, each once; both ends are included.

    Raises:
        ConfigError: not indices and ranges, or a range that runs backwards.
    """
    indices: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,5})\s*(?:-\s*(\d{1,5})\s*)?", part)
        if match is None:
            raise ConfigError(f"layer indices {text!r}: {part.strip()!r} is not an index or range, as in 0-3,28-31")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ConfigError(f"layer indices {text!r}: {part.strip()} runs backwards: write {last}-{first}")
        indices.update(range(first, last + 1))
    return tuple(sorted(indices))
