"""Settings of `grpo-engine export`. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from grpo_engine.config import Config
from grpo_engine.flags import Flag


class ExportConfig(Config):
    """What is exported, and where to."""

    checkpoint: Path
    """The checkpoint: a folder `step_…` below the trainer's --save-path."""
    folder: Path
    """Where the model is written: a new or empty folder."""
    merge_lora: bool = False
    """Merge the adapter of a LoRA run into its base model; without it the folder holds the adapter, and names the base
    model."""
    card: Path | None = None
    """A model card, which becomes README.md."""
    device: Annotated[str, Flag(("--device",))] = "cpu"
    """Where the model is merged and checked: `cpu`, or `cuda` where a GPU is free."""
