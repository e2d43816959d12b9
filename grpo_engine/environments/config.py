"""Settings of an environment. Torch-free: the terminal side builds command lines from them.

Where a stock environment has the same setting (`--env.group_size`, `--env.weight`, …), it has the same name here,
without the `env.`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, AliasChoices, Field, field_validator, model_validator

from grpo_engine.config import Config
from grpo_engine.environments.items.curriculum import AnyCurriculum
from grpo_engine.environments.items.curriculum import spell_out as spell_out_curriculum
from grpo_engine.environments.tasks import AnyTask, spell_out
from grpo_engine.flags import Flag


def _without_v1(url: str) -> str:
    """Accept `…/v1`, as stock environments use it; the native routes are beside it."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url!r} is not a URL: write it like http://localhost:9001")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


Url = Annotated[str, AfterValidator(_without_v1)]


class EnvironmentConfig(Config):
    """An environment: its task, the model's tokenizer, sampling settings, and server addresses."""

    task: AnyTask
    """Items and rewards: a table with a `name`, or a short form such as sort6 or reasoning_gym:chain_sum."""
    model_name: Annotated[str, Flag(("--model-name", "--model", "--tokenizer-name"))]
    """Model whose tokenizer and chat template build the prompts: a folder, a hub name, or a locally made model."""
    group_size: int = Field(4, ge=1)
    """Completions of each item."""
    max_tokens: int = Field(256, ge=1)
    """Longest completion in tokens; prompt and completion never exceed max_token_length."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling; below 1 the log-probabilities differ from those of the trained policy."""

    # Addresses
    rollout_server_url: Url = "http://localhost:8000"
    """URL of the rollout API."""
    inference_url: Url = Field("http://localhost:9001", validation_alias=AliasChoices("inference_url", "base_url"))
    """URL of the inference server; a `/v1` at its end is ignored."""
    api_token: str | None = None
    """Token of the rollout API; unset: from $GRPO_API_TOKEN or $GRPO_API_TOKEN_FILE, which a
    supervisor sets, else none."""

    # How much
    max_batches_offpolicy: int = Field(3, ge=1)
    """Most batches that are generated ahead of the trainer."""
    max_workers: int = Field(64, ge=1)
    """Most groups that are generated concurrently."""
    total_steps: int | None = Field(None, ge=1)
    """Exit with code 0 when the trainer has fetched this many batches; unset: run until stopped."""
    max_token_length: int = Field(2048, ge=2)
    """Longest sequence in tokens, prompt included; a lower limit of the trainer applies."""

    # Evaluation: held-out items, sampled every eval_every steps of the trainer
    eval_temperature: float | None = Field(None, ge=0)
    """Sampling temperature in evaluations; 0: greedy; unset: as `temperature`."""
    eval_solved_from: float = 1.0
    """Reward from which a completion counts as solved, for pass@k."""

    # Prompts
    system_prompt: str | None = None
    """First message of every conversation."""
    chat_template: bool = True
    """Put each question into the model's chat template; off: plain text."""
    stop: tuple[str, ...] = ()
    """Stop strings of a completion, besides the end token."""
    seed: int = 0
    """Seed of the items and their order."""

    # Which items are sampled; see also the settings of the task
    curriculum: AnyCurriculum | None = Field(None, discriminator="name")
    """Order and difficulty of the items: rising, or python:module:object for your own; unset: the task as configured,
    shuffled. Evaluations ignore it."""
    easy_threshold: float | None = None
    """Mean reward of its last groups at which an item is too easy and seldom sampled, e.g. 1; unset: none."""
    hard_threshold: float | None = None
    """Mean reward of its last groups up to which an item teaches nothing and is seldom asked, e.g. 0; unset: none."""
    revisit_rate: float = Field(0.1, ge=0, le=1)
    """Share of its turns in which such an item is asked all the same, because the policy changes."""
    state_file: Path | None = None
    """JSON file that keeps the curriculum and the solve rates over a restart; unset: not kept."""

    # How it appears to the rollout API
    name: str | None = Field(None, validation_alias=AliasChoices("name", "wandb_name"))
    """Name of the environment; unset: the task's."""
    weight: float = Field(1.0, ge=0, validation_alias=AliasChoices("weight", "inference_weight"))
    """Share of the generation relative to the other environments."""
    min_batch_allocation: float | None = Field(None, ge=0, le=1)
    """Least share of every batch."""
    ensure_scores_are_not_same: bool = False
    """Drop groups whose scores are all equal. Stock drops them; here they are sent, because the mean reward
    would be biased without them: their advantage is zero anyway, and `reward/frac_zero_std` counts them."""

    worker_timeout: float = Field(600.0, gt=0)
    """Time limit for generating a group; then the request is repeated."""

    @field_validator("task", mode="before")
    @classmethod
    def _spell_out_task(cls, value: Any) -> Any:
        return spell_out(value)

    @field_validator("curriculum", mode="before")
    @classmethod
    def _spell_out_curriculum(cls, value: Any) -> Any:
        return spell_out_curriculum(value)

    @model_validator(mode="after")
    def _leaves_items_between_easy_and_hard(self) -> EnvironmentConfig:
        easy, hard = self.easy_threshold, self.hard_threshold
        if easy is not None and hard is not None and easy <= hard:
            raise ValueError(f"easy_threshold {easy} must be above hard_threshold {hard}: every item would be skipped")
        return self

    @model_validator(mode="after")
    def _leaves_room_for_a_prompt(self) -> EnvironmentConfig:
        if self.max_tokens >= self.max_token_length:
            raise ValueError(
                f"max_tokens {self.max_tokens} leaves no room for a prompt within max_token_length "
                f"{self.max_token_length}: lower max_tokens or raise max_token_length"
            )
        return self

    def registered_name(self) -> str:
        """Name in the rollout API and in metrics."""
        return self.name or self.task.label()
