"""Checkpoints: everything needed to go on as if nothing had happened, and a model that anybody can load.

    <save_path>/step_<n>/   model.safetensors, config.json, tokenizer …   what `from_pretrained` reads
                            trainer.pt                                    masters, optimizer, random numbers
                            checkpoint.json                               written last; a folder without it is none

A checkpoint is written beside its place and renamed, so a crash never leaves half of one under the real name.
"""

from __future__ import annotations

import logging
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from grpo_engine.errors import CheckpointError
from grpo_engine.wire.codec import Message, write_json_atomically

MARKER = "checkpoint.json"
TRAINER_STATE = "trainer.pt"
STEP_FOLDER = re.compile(r"step_(\d+)")

log = logging.getLogger(__name__)


class CheckpointMarker(Message):
    """What a checkpoint is of."""

    step: int
    policy_version: int
    model_name: str
    bridge: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """The part of a checkpoint that only a trainer needs."""

    marker: CheckpointMarker
    masters: dict[str, Any]
    optimizer: dict[str, Any]
    torch_rng: torch.Tensor
    """uint8, torch's CPU generator."""
    cuda_rng: torch.Tensor | None
    """uint8, the generator of the trainer's GPU; None without one."""


def save(
    save_path: Path, state: TrainerState, write_model: Callable[[Path], None], *, keep: int, name: str | None = None
) -> Path:
    """Write a checkpoint of `state`, and remove all but the newest `keep`.

    Args:
        write_model: writes an HF-loadable model into the folder it is given.
        name: folder name; `step_<n>` unless said.
    """
    final = save_path / (name or f"step_{state.marker.step}")
    beside = save_path / f".{final.name}.partial"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    write_model(beside)
    content = {
        "masters": state.masters,
        "optimizer": state.optimizer,
        "torch_rng": state.torch_rng,
        "cuda_rng": state.cuda_rng,
    }
    torch.save(content, beside / TRAINER_STATE)
    write_json_atomically(beside / MARKER, state.marker)
    if final.exists():
        shutil.rmtree(final)  # an older run's, or the same step again after a resume
    beside.rename(final)
    log.info("checkpoint saved: %s", final)
    for old in _steps(save_path)[:-keep]:
        if save_path / f"step_{old}" != final:  # the newest is the one just made, whatever stood there before
            shutil.rmtree(save_path / f"step_{old}")
    return final


def set_aside(save_path: Path) -> None:
    """Move an earlier run's checkpoints out of the way of one that starts anew; none is deleted."""
    if newest(save_path) is None:
        return
    aside = save_path.with_name(f"{save_path.name}-until-{time.strftime('%m%d-%H%M%S')}")
    save_path.rename(aside)
    log.info("earlier checkpoints are now in %s", aside)


def newest(save_path: Path) -> Path | None:
    """The newest complete checkpoint below `save_path`; None when there is none."""
    steps = _steps(save_path)
    return save_path / f"step_{steps[-1]}" if steps else None


def load(folder: Path, *, model_name: str) -> TrainerState:
    """Read the trainer's part of a checkpoint.

    Raises:
        CheckpointError: it is incomplete, unreadable, or of another model.
    """
    try:
        marker = CheckpointMarker.model_validate_json((folder / MARKER).read_bytes())
    except (OSError, ValidationError) as error:
        raise CheckpointError(
            f"{folder}: not a complete checkpoint: {error}; remove the folder to start anew"
        ) from None
    if marker.model_name != model_name:
        raise CheckpointError(
            f"{folder}: of model {marker.model_name!r}, but this run trains {model_name!r}; "
            "choose another --save-path, or --no-resume to start anew"
        )
    try:
        content = torch.load(folder / TRAINER_STATE, map_location="cpu", weights_only=True)
        return TrainerState(marker=marker, **content)
    except Exception as error:  # whatever a damaged file makes torch's readers raise
        raise CheckpointError(
            f"{folder / TRAINER_STATE}: unreadable ({type(error).__name__}: {error}); "
            f"remove {folder} to go on from the checkpoint before it"
        ) from error


def _steps(save_path: Path) -> list[int]:
    """Steps of the complete checkpoints, ascending."""
    if not save_path.is_dir():
        return []
    matches = ((STEP_FOLDER.fullmatch(folder.name), folder) for folder in save_path.iterdir())
    return sorted(int(match[1]) for match, folder in matches if match and (folder / MARKER).is_file())
