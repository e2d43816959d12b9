"""Settings of `grpo-engine check`: the trainer's own, so that the check uses what will train. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from grpo_engine.flags import Flag
from grpo_engine.train.config import TrainConfig


class CheckConfig(TrainConfig):
    """Settings of a training run and of its check."""

    prompts_file: Annotated[Path | None, Flag(("--prompts",))] = None
    """Questions to sample with: a text file of one a line, or JSONL with `prompt`, `question` or `messages`; unset: a
    few built-in ones."""
    as_json: Annotated[bool, Flag(("--json",))] = False
    """Print one JSON object instead of text."""
    check_samples: int = Field(4, ge=2)
    """Completions of each question."""
    check_tokens: int = Field(48, ge=2)
    """Longest completion."""
    check_timeout_s: float = Field(60.0, gt=0)
    """Seconds within which the inference server must answer."""

    @model_validator(mode="after")
    def _has_a_server(self) -> Self:
        if self.bridge.samples_in_process:
            raise ValueError(
                f"weight_bridge_mode {self.bridge.mode} has no inference server to check: alignment/… of its first "
                "step in metrics.jsonl says how far trainer and engine differ"
            )
        return self
