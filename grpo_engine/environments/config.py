"""Settings of an environment. Torch-free: the terminal side builds command lines from them.

Where a stock environment has the same setting (`--env.group_size`, `--env.weight`, …), it has the same name here,
without the `env.`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field, model_validator

from grpo_engine.config import Config, LogLevel, RawTable, checked_url
from grpo_engine.environments import stock_layout
from grpo_engine.environments.items.curriculum import AnyCurriculum
from grpo_engine.environments.items.curriculum import spell_out as spell_out_curriculum
from grpo_engine.environments.tasks import AnyTask, spell_out
from grpo_engine.environments.tasks.multi_turn import MultiTurnTask
from grpo_engine.flags import Flag
from grpo_engine.wire.inference import LEAST_TEMPERATURE, MAX_TEMPERATURE


def _without_v1(url: str) -> str:
    """Accept `…/v1`, as stock environments use it; the native routes are beside it."""
    return checked_url(url).rstrip("/").removesuffix("/v1").rstrip("/")


def _separated(value: Any) -> Any:
    """URLs of a list, or of a text in which commas separate them."""
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
        return value
    return [url.strip() for part in parts for url in part.split(",") if url.strip()]


def _named_once(urls: tuple[str, ...]) -> tuple[str, ...]:
    twice = [url for url in urls if urls.count(url) > 1]
    if twice:
        raise ValueError(f"{twice[0]} is named twice: name each server once")
    return urls


def _with_logprobs(server_type: str) -> str:
    if server_type != "vllm":
        raise ValueError(
            f"{server_type!r}: only 'vllm' asks /generate, which returns the log-probabilities that training needs: "
            "leave it out, or set vllm"
        )
    return server_type


Url = Annotated[str, AfterValidator(_without_v1)]
Urls = Annotated[tuple[Url, ...], BeforeValidator(_separated), AfterValidator(_named_once)]


class SamplingConfig(Config):
    """What is sampled: items of a task, completions of each, and the prompts that they are put into."""

    task: Annotated[AnyTask, BeforeValidator(spell_out)]
    """Items and rewards: a table with a `name`, or a short form such as sort6 or reasoning_gym:chain_sum."""
    group_size: int = Field(4, ge=2)
    """Completions of each item; a reward counts as its difference from the others, so there are at least two."""
    max_tokens: int = Field(256, ge=1)
    """Longest completion in tokens; prompt and completion never exceed max_token_length."""
    temperature: float = Field(1.0, ge=LEAST_TEMPERATURE, le=MAX_TEMPERATURE)
    """Sampling temperature."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling; below 1 the log-probabilities differ from those of the trained policy."""
    scoring_processes: int = Field(0, ge=0, le=256)
    """Processes that score completions, a group at a time each, where rewards take much CPU time; 0: threads of this
    process do. Not for games, which are scored as they are played."""

    # Evaluation: held-out items
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

    # Which items are sampled; see also the settings of the task
    curriculum: Annotated[AnyCurriculum | None, BeforeValidator(spell_out_curriculum)] = Field(
        None, discriminator="name"
    )
    """Order and difficulty of the items: rising, or python:module:object for your own; unset: the task as configured,
    shuffled. Evaluations ignore it."""
    easy_threshold: float | None = None
    """Mean reward of its last groups at which an item is too easy and seldom sampled, e.g. 1; unset: none."""
    hard_threshold: float | None = None
    """Mean reward of its last groups up to which an item teaches nothing and is seldom asked, e.g. 0; unset: none."""
    revisit_rate: float = Field(0.1, ge=0, le=1)
    """Share of its turns in which such an item is asked all the same, because the policy changes."""
    ensure_scores_are_not_same: bool = False
    """Drop groups whose scores are all equal. Stock drops them; here they are sent, because the mean reward
    would be biased without them: their advantage is zero anyway, and `reward/frac_zero_std` counts them."""

    @model_validator(mode="after")
    def _scores_elsewhere_what_is_scored_at_once(self) -> Self:
        if self.scoring_processes and isinstance(self.task, MultiTurnTask):
            raise ValueError(f"scoring_processes has no effect on {self.task.label()}, which is played: leave it out")
        return self

    @model_validator(mode="after")
    def _leaves_items_between_easy_and_hard(self) -> Self:
        easy, hard = self.easy_threshold, self.hard_threshold
        if easy is not None and hard is not None and easy <= hard:
            raise ValueError(f"easy_threshold {easy} must be above hard_threshold {hard}: every item would be skipped")
        return self

    @property
    def num_groups_per_item(self) -> int:
        """Groups that each item becomes: one, or one per seat of a game that the policy plays."""
        return self.task.num_seats() if isinstance(self.task, MultiTurnTask) else 1

    def check_files(self, folder: Path, search_path: Sequence[Path] = ()) -> None:
        """Check the files of the task and of the curriculum, as they will be read in the working directory `folder`.

        In well under a second, and without running the user's code. `search_path`: the folders of its PYTHONPATH.

        Raises:
            ConfigError: one is missing or malformed; the message begins with the setting.
        """
        self.task.check_files(folder, search_path)
        if self.curriculum is not None:
            self.curriculum.check_files(folder, search_path)


class EnvironmentConfig(SamplingConfig):
    """An environment: its task, the model's tokenizer, sampling settings, and server addresses."""

    foreign_tables: ClassVar[tuple[str, ...]] = stock_layout.TABLES

    model_name: Annotated[str, Flag(("--model-name", "--model", "--tokenizer-name"))]
    """Model whose tokenizer and chat template build the prompts: a folder, a hub name, or a locally made model."""
    seed: int = 0
    """Seed of the items and their order."""
    state_file: Path | None = None
    """JSON file that keeps the place in the items, the curriculum and the solve rates over a restart; unset: not kept,
    and the items begin again."""

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
    opponent_urls: Annotated[Urls, Flag(("--opponent-url", "--opponent-urls"))] = Field(
        (), validation_alias=AliasChoices("opponent_urls", "opponent_url")
    )
    """URLs of the inference servers of another policy, which plays the other seats of a game, as those that
    `policy_plays` of mafia leaves; its turns are not trained here. Unset: scripted players."""
    opponent_model_name: str | None = None
    """Model there, whose tokenizer builds its prompts; unset: model_name."""
    opponent_rollout_server_url: Url | None = None
    """URL of the rollout API of a trainer that trains the opponent: its seats of every game are posted there, with the
    rewards of their own objective (`other_…` of the task). Unset: the opponent is not trained here."""
    api_token: str | None = None
    """Token of the rollout API; unset: from $GRPO_API_TOKEN or $GRPO_API_TOKEN_FILE, which a
    supervisor sets, else none."""
    api_key: str | None = None
    """Sent to the inference servers (`Authorization: Bearer …`), for a proxy that asks for one: ours need none. Unset:
    from $GRPO_INFERENCE_KEY, else none."""
    server_type: Annotated[str, AfterValidator(_with_logprobs)] = "vllm"
    """Type of the inference server, as stock environments have it: vllm, for log-probabilities of `/generate`."""

    # How much
    max_batches_offpolicy: int | None = Field(None, ge=1)
    """Most batches that are generated ahead of the trainer, unless its max_staleness is set, which then decides. Unset:
    between 1 and 8, from 3 on, as many as keep the trainer from waiting, and no more."""
    max_workers: int = Field(64, ge=1)
    """Most groups that are generated concurrently."""
    total_steps: int | None = Field(None, ge=1)
    """Exit with code 0 when the trainer has fetched this many batches; unset: run until stopped."""
    copies: int = Field(1, ge=1, le=10_000)
    """Environments in this process, each registered by a name of its own (`sort6-1`, `sort6-2`, …), with a seed of its
    own; they share connections. For more than some 250, start further processes with another name and seed."""
    max_token_length: int = Field(2048, ge=2)
    """Longest sequence in tokens, prompt included; a lower limit of the trainer applies."""

    seed_completions: bool = False
    """Send a seed with every request, made of `seed`, the place of the item and that of the turn, so that completions
    depend on these and the weights alone, and are those of a trainer that samples itself. vLLM samples such requests
    one by one: for comparisons."""
    interrupt: bool = False
    """When the weights change, end completions that are half sampled, and sample them again from their prompt with the
    new weights; off: they go on with the new weights, and each token carries its version. With it every completion is
    of one version, but long ones are given up more often, so that samples become shorter on average."""

    # Evaluations without an order of the trainer
    steps_per_eval: int = Field(0, ge=0)
    """Also evaluate at every so many steps of the trainer without its order, while it goes on: the weights may change
    meanwhile, and the result is in the log and in W&B; 0: never. `eval_every` of the trainer waits, and writes
    metrics."""
    steps_per_eval_prompts: int = Field(64, ge=1)
    """Held-out prompts of these evaluations, with one completion each."""

    # How it appears to the rollout API
    name: str | None = Field(None, validation_alias=AliasChoices("name", "wandb_name"))
    """Name of the environment; unset: the task's."""
    use_wandb: bool = False
    """Log mean reward, lengths and own evaluations to Weights & Biases, into the project and group with which the
    trainer has registered (needs the `trackers` extra)."""
    weight: float = Field(1.0, ge=0, validation_alias=AliasChoices("weight", "inference_weight"))
    """Share of the generation relative to the other environments."""
    min_batch_allocation: float | None = Field(None, ge=0, le=1)
    """Least share of every batch."""

    worker_timeout: float = Field(600.0, gt=0)
    """Time limit for generating a group; then the request is repeated."""
    log_level: LogLevel = "info"
    """Least severe level of the lines that are logged."""

    @classmethod
    def from_foreign(cls, table: RawTable) -> RawTable:
        """Settings as environments of Atropos write them (tables `env` and `openai`), by their names here."""
        return stock_layout.serve_settings(table)

    @model_validator(mode="after")
    def _has_seats_for_opponents(self) -> EnvironmentConfig:
        if self.opponent_urls and not (isinstance(self.task, MultiTurnTask) and self.task.num_other_seats()):
            raise ValueError(
                f"opponent_urls: task {self.task.label()} has no seat for another policy: leave them out, or choose a "
                "game in which the policy plays one side, as mafia with policy_plays town"
            )
        if self.opponent_model_name is not None and not self.opponent_urls:
            raise ValueError("opponent_model_name has no effect without opponent_urls, its servers: set both")
        if self.opponent_rollout_server_url is not None:
            if not self.opponent_urls:
                raise ValueError("opponent_rollout_server_url has no effect without opponent_urls: set both")
            if self.opponent_rollout_server_url == self.rollout_server_url:
                raise ValueError(
                    f"opponent_rollout_server_url {self.rollout_server_url} is that of the trained policy too: each "
                    "policy has a trainer and a rollout API of its own, so set the other one's"
                )
        return self

    @model_validator(mode="after")
    def _leaves_room_for_a_prompt(self) -> EnvironmentConfig:
        if self.max_tokens >= self.max_token_length:
            raise ValueError(
                f"max_tokens {self.max_tokens} leaves no room for a prompt within max_token_length "
                f"{self.max_token_length}: lower max_tokens or raise max_token_length"
            )
        return self

    @model_validator(mode="after")
    def _shares_of_copies_fit_into_a_batch(self) -> EnvironmentConfig:
        if self.copies > 1 and self.copies * (self.min_batch_allocation or 0) > 1:
            raise ValueError(
                f"min_batch_allocation {self.min_batch_allocation} is of each of {self.copies} copies, which together "
                "are more than a batch: lower one of them"
            )
        return self

    def of_copies(self) -> list[EnvironmentConfig]:
        """The settings of each copy: names, seeds and state files of their own."""
        if self.copies == 1:
            return [self]
        return [
            self.model_copy(
                update={
                    "copies": 1,
                    "name": f"{self.registered_name()}-{number}",
                    "seed": self.seed + number - 1,
                    "use_wandb": self.use_wandb and number == 1,
                    "state_file": self.state_file
                    and self.state_file.with_name(f"{self.state_file.stem}-{number}{self.state_file.suffix}"),
                }
            )
            for number in range(1, self.copies + 1)
        ]

    def registered_name(self) -> str:
        """Name in the rollout API and in metrics."""
        return self.name or self.task.label()
