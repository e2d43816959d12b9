"""Settings of a run of an Atropos environment. Torch-free: the terminal side builds command lines from them.

Settings that built-in environments share have the same name here; unset, the environment's default applies.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field, model_validator

from grpo_engine.config import Config, RawTable
from grpo_engine.environments import stock_layout
from grpo_engine.environments.config import Url, Urls
from grpo_engine.flags import Flag

OWN_SETTINGS = {
    "group_size": "group_size",
    "max_batches_offpolicy": "max_batches_offpolicy",
    "max_token_length": "max_token_length",
    "total_steps": "total_steps",
    "name": "wandb_name",
    "weight": "inference_weight",
    "min_batch_allocation": "min_batch_allocation",
    "ensure_scores_are_not_same": "ensure_scores_are_not_same",
    "worker_timeout": "worker_timeout",
    "rollout_server_url": "rollout_server_url",
}
"""Settings with a field here, and their names in Atropos below `env:`."""


def _table(value: Any) -> Any:
    """A table with plain values, as YAML writes them; from a command line, where it is JSON."""
    return json.loads(value if isinstance(value, str) else json.dumps(value, default=str))


Table = Annotated[dict[str, Any], BeforeValidator(_table)]


def _expanded(path: Path) -> Path:
    """Expand `~` and `$NAME`, which no shell does in a profile; an unset variable stays unchanged."""
    return Path(os.path.expanduser(os.path.expandvars(path)))


UserPath = Annotated[Path, AfterValidator(_expanded)]


class AtroposEnvConfig(Config):
    """An Atropos environment: its file, its Python, and server addresses."""

    foreign_tables: ClassVar[tuple[str, ...]] = stock_layout.TABLES

    file: UserPath
    """File of the environment: the one that is run as `python FILE serve`."""
    python: UserPath
    """Python that has atroposlib, e.g. ~/atropos/.venv/bin/python."""
    model_name: Annotated[str, Flag(("--model-name", "--model", "--tokenizer-name"))]
    """Model whose tokenizer and chat template build the prompts: a folder, a hub name, or a locally made model."""

    # Addresses
    rollout_server_url: Url = "http://127.0.0.1:8000"
    """URL of the rollout API."""
    inference_urls: Annotated[Urls, Flag(("--inference-url", "--inference-urls", "--base-url"))] = Field(
        ("http://127.0.0.1:9001",),
        min_length=1,
        validation_alias=AliasChoices("inference_urls", "inference_url", "base_url"),
    )
    """URLs of the inference servers, several after each other or separated by commas; a `/v1` at their end is
    ignored."""

    # How much
    group_size: int | None = Field(None, ge=2)
    """Completions of each item; unset: the environment's default."""
    max_batches_offpolicy: int | None = Field(None, ge=1)
    """Most batches that are generated ahead of the trainer; unset: the environment's default (3)."""
    max_token_length: int | None = Field(None, ge=2)
    """Longest sequence, or longest completion: environments differ; unset: the environment's default."""
    total_steps: int | None = Field(None, ge=-1)
    """Exit when the trainer has fetched this many batches (-1: its number of steps); unset: run until stopped, so that
    the trainer never waits for an environment that has exited."""

    # Registration
    name: str | None = Field(None, validation_alias=AliasChoices("name", "wandb_name"))
    """Name of the environment; unset: the environment's default, or that of its class where it has none."""
    weight: float | None = Field(None, ge=0, validation_alias=AliasChoices("weight", "inference_weight"))
    """Share of the generation relative to the other environments."""
    min_batch_allocation: float | None = Field(None, ge=0, le=1)
    """Least share of every batch."""
    ensure_scores_are_not_same: bool | None = None
    """Drop groups whose scores are all equal; unset: the environment's default (it drops them)."""
    worker_timeout: float | None = None
    """Time limit for generating a group; unset: the environment's default (600)."""

    # Other settings
    settings: Table = {}
    """More settings of the environment, by their names below `env:` in its YAML file."""
    server: Table = {}
    """More settings of its inference server, by their names below `openai:`, e.g. timeout."""

    # The runner
    yaml_file: Path | None = None
    """Path of its YAML file; unset: in a temporary folder."""
    silent_after_s: float = Field(60.0, gt=0)
    """Seconds without a request to the inference server, while the trainer waits for groups, after which a warning says
    what was checked."""

    @classmethod
    def from_foreign(cls, table: RawTable) -> RawTable:
        """Settings of a YAML file for `serve` (tables `env` and `openai`), by their names here."""
        return stock_layout.serve_tables(table, OWN_SETTINGS)

    @model_validator(mode="after")
    def _says_each_setting_once(self) -> AtroposEnvConfig:
        for name, theirs in OWN_SETTINGS.items():
            if theirs in self.settings:
                raise ValueError(f"settings.{theirs} is {name} here: set {name} = {self.settings[theirs]!r} instead")
        for theirs, name in {"base_url": "inference_urls", "model_name": "model_name"}.items():
            if theirs in self.server:
                raise ValueError(f"server.{theirs} is {name} here: set {name} = {self.server[theirs]!r} instead")
        return self
