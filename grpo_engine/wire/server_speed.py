"""What an inference server measures of its own speed, for a simulation of other settings."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

from pydantic import Field

from grpo_engine.wire.codec import Message, write_json_atomically

Measured = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]

log = logging.getLogger(__name__)


class SpeedPoint(Message):
    """Steps of about as many sequences."""

    sequences: Measured
    """On average."""
    tokens_per_s: Measured
    """Of all of them together."""
    num_steps: Measured
    """That were measured."""


class ServerSpeeds(Message):
    """Written by the inference server beside its other files of the run."""

    points: list[SpeedPoint] = Field(default_factory=list, max_length=64)
    """By rising number of sequences."""
    recomputed_tokens: Measured = 0
    """Whose keys and values were computed again after weight updates."""
    recomputed_s: Measured = 0
    """Seconds from the updates until about all sequences had tokens again."""


def write_speeds(file: Path, speeds: ServerSpeeds) -> None:
    """Write it where the folder exists; a disk that is full is logged."""
    if not file.parent.is_dir():  # a server on another machine of a cluster
        return
    try:
        write_json_atomically(file, speeds, mode=0o600)
    except OSError as error:
        log.warning("%s: cannot be written: %s", file, error.strerror)
