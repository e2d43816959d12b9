"""Checks of disk space and hub access for a profile: its model, and its checkpoints.

Sends no request. The size of a model that is not on disk is taken from its name: `Hermes-3-Llama-3.1-8B` has 8 × 10⁹
parameters.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from grpo_engine.diagnosis.finding import Finding
from grpo_engine.models.local import RANDOM_MODEL_BYTES, lacking_bytes
from grpo_tui.profile.hub import cache_state, hub_cache, hub_token
from grpo_tui.profile.model import Profile
from grpo_tui.services.trainer import Trainer

BYTES_PER_PARAMETER = 2
MASTER_BYTES = {"float32": 4, "stochastic_rounding": 0}
STATE_BYTES = {"adamw": 8, "adamw_8bit": 2, "adafactor": 0}
GATED_OWNERS = frozenset({"meta-llama", "google", "mistralai"})
"""Most of their models are gated: downloads need accepted terms and a token."""


def examine_model(profile: Profile, logs: Path) -> Iterator[Finding]:
    """Findings for the model of a profile, and for the checkpoints of its trainers."""
    if profile.model is None:
        return
    name = profile.model.name
    if name.startswith("local/"):
        yield from _generated(name)
    elif os.path.exists(os.path.expanduser(name)):
        yield Finding(id="model", severity="ok", text=name)
    else:
        yield from _from_hub(name)
    yield from _checkpoints(profile, name, logs)


def parameters_by_name(name: str) -> float | None:
    """Number of parameters by the name of a model; None where the name does not say."""
    found = re.findall(r"(?<![\w.])(\d+(?:\.\d+)?)([bm])(?![a-z0-9])", name.lower())
    return float(found[-1][0]) * {"b": 1e9, "m": 1e6}[found[-1][1]] if found else None


def _generated(name: str) -> Iterator[Finding]:
    lacking = lacking_bytes(name)
    if lacking:
        text = f"{name} needs {RANDOM_MODEL_BYTES[name] / 1e9:.0f} GB of disk, {lacking / 1e9:.1f} GB more than is free"
        hint = "free some, or set XDG_CACHE_HOME to a folder on a larger disk"
        yield Finding(id="model", severity="error", text=text, hint=hint)
    else:
        yield Finding(id="model", severity="ok", text=name)


def _from_hub(name: str) -> Iterator[Finding]:
    """What a download takes; whether it is needed, and the hub can be reached, is in `start_checks`."""
    state = cache_state(name)
    if state == "complete":
        return
    cache = hub_cache()
    existing = next(folder for folder in (cache, *cache.parents) if folder.is_dir())
    free, parameters = shutil.disk_usage(existing).free, parameters_by_name(name)
    size = 0.0 if parameters is None or state == "partial" else BYTES_PER_PARAMETER * parameters
    if free < size:
        yield Finding(
            id="disk",
            severity="error",
            text=f"{name} takes about {size / 1e9:.0f} GB; {cache} has {free / 1e9:.0f} GB free",
            hint="free some, or set HF_HOME to a folder on a larger disk",
        )
    if name.partition("/")[0] in GATED_OWNERS and hub_token() is None:
        yield Finding(
            id="model",
            severity="warning",
            text=f"models of {name.partition('/')[0]} are mostly gated, and no Hugging Face token is set",
            hint=f"accept the terms on https://huggingface.co/{name}, then `hf auth login` or export HF_TOKEN=…",
        )


def _checkpoints(profile: Profile, model: str, logs: Path) -> Iterator[Finding]:
    """Space for the kept checkpoints and one more: a new one is complete before an older one is removed."""
    size = RANDOM_MODEL_BYTES.get(model)
    parameters = parameters_by_name(model) if size is None else size / BYTES_PER_PARAMETER
    for key, service in profile.services.items():
        if not isinstance(service, Trainer) or parameters is None or service.train_layer_indices is not None:
            continue
        if service.bridge.trains_adapter or not service.save_checkpoints:
            continue
        masters = 0 if service.dtype == "float32" else MASTER_BYTES[service.master_weights]
        each = parameters * (BYTES_PER_PARAMETER + masters + STATE_BYTES[service.optimizer])
        saved = max(service.training_steps // service.checkpoint_interval, 1) if service.checkpoint_interval else 1
        count = min(saved, service.keep_checkpoints + 1)
        wanted = service.save_path or logs
        folder = next(folder for folder in (wanted.absolute(), *wanted.absolute().parents) if folder.is_dir())
        free = shutil.disk_usage(folder).free
        fewer = (
            *((f"services.{key}.keep_checkpoints=1",) if service.keep_checkpoints > 1 else ()),
            *((f"services.{key}.checkpoint_interval=0 for one at the end",) if count > 1 else ()),
        )
        remedies = (*fewer, f"services.{key}.save_path=… on a larger disk")
        if free < count * each:
            yield Finding(
                id="disk",
                severity="error",
                text=f"checkpoints of {key} take about {each / 1e9:.0f} GB each, {count} at a time; "
                f"{folder} has {free / 1e9:.0f} GB free",
                hint=f"--set {', or '.join(remedies)}",
            )
