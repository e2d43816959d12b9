"""A rollout source in the trainer's own process: takes problems of a task, samples and scores them when asked.

Every batch is sampled by the weights that were published last, so nothing is stale, nothing is queued, and there is
nothing to acknowledge: a restarted trainer repeats the steps of its journal, and samples what follows.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

from grpo_engine.bridges.transport.in_process import InProcessBridge
from grpo_engine.colocate.rounds import RoundInference, SamplingStopped
from grpo_engine.environments.config import EnvironmentConfig
from grpo_engine.environments.generating import GroupGenerator
from grpo_engine.environments.measuring import HeldOutMeasure
from grpo_engine.environments.sampling.prompts import Tokenizer
from grpo_engine.environments.sampling.scoring import end_scoring
from grpo_engine.environments.tasks.concurrency import gather_all
from grpo_engine.errors import DataError
from grpo_engine.retrying import never
from grpo_engine.wire.metrics import SAMPLING_SPEED
from grpo_engine.wire.rollouts import EvaluationOrder, EvaluationState, NamedAnswer, ScoredGroup

log = logging.getLogger(__name__)

ENVIRONMENT_ID = 0
"""Of the only environment."""


class OwnSource:
    """See `grpo_engine.data.rollout_source.RolloutSource`."""

    def __init__(
        self, config: EnvironmentConfig, tokenizer: Tokenizer, inference: RoundInference, bridge: InProcessBridge
    ) -> None:
        """Sample nothing yet.

        Args:
            config: the task, with its state file.
            bridge: wakes the engines.
        """
        self._config = config
        self._tokenizer = tokenizer
        self._inference = inference
        self._bridge = bridge
        self._loop = asyncio.Runner()
        self._generator: GroupGenerator | None = None
        self._measure = HeldOutMeasure(config, tokenizer, inference)
        self._num_groups = 0
        self._times: dict[str, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._generator is not None:
            self._generator.close()
        self._loop.close()
        end_scoring()

    def register(
        self,
        *,
        batch_size: int,
        max_token_len: int,
        checkpoint_dir: str,
        save_checkpoint_interval: int,
        starting_step: int,
        num_steps: int,
        eval_every: int = 0,
        max_staleness: int | None = None,
        is_served: bool = False,
        wandb_group: str = "",
        wandb_project: str = "",
        stop: Callable[[], bool] = never,
    ) -> None:
        """Take the place in the items that the state file has.

        Raises:
            ConfigError: the curriculum cannot be loaded.
        """
        self._num_groups = batch_size // self._config.group_size
        self._generator = GroupGenerator(self._config, self._tokenizer, self._inference)

    def resume_after(self, lease: str) -> None:
        """Nothing to acknowledge."""

    @property
    def lease(self) -> str:
        """None."""
        return ""

    @property
    def environments(self) -> Mapping[int, str]:
        """The task by its name."""
        return {ENVIRONMENT_ID: self._config.registered_name()}

    def next_batch(
        self,
        timeout_s: float,
        *,
        policy_version: int | None = None,
        stop: Callable[[], bool] = never,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> list[ScoredGroup] | None:
        """Sample a batch; `stop()` takes effect between two rounds.

        Raises:
            DataError: so many groups were left out that there was no batch within `timeout_s`.
            GrpoError: an engine, the task or its reward fails.
        """
        if stop():
            return None
        self._bridge.wake()
        num_tokens, began = self._inference.num_tokens, time.perf_counter()
        self._inference.begin(stop)
        try:
            groups = self._loop.run(self._whole_batch(began + timeout_s))
        except SamplingStopped:
            return None
        seconds = time.perf_counter() - began
        self._times = {SAMPLING_SPEED: (self._inference.num_tokens - num_tokens) / seconds}
        return [group.model_copy(update={"env_id": ENVIRONMENT_ID}) for group in groups]

    def time_metrics(self) -> Mapping[str, float]:
        """How fast the last batch was sampled, its rewards included."""
        return self._times

    def mark_used(self) -> None:
        """Nothing keeps the batch."""

    def report_served(self, lease: str, policy_version: int) -> None:
        """Nothing waits for it."""

    def evaluation(self, order: EvaluationOrder, wait_s: float = 0.0) -> EvaluationState:
        """Make an evaluation; it is over when this returns."""
        name = self._config.registered_name()
        answers = []
        if self._measure.is_able:
            self._bridge.wake()
            self._inference.begin()
            answer = self._loop.run(
                self._measure.answer(order, longest=self._config.max_token_length, env_id=ENVIRONMENT_ID)
            )
            answers.append(NamedAnswer(environment=name, desired_name=name, answer=answer))
        unable = [] if self._measure.is_able else [name]
        return EvaluationState(order=order, is_over=True, answers=answers, waiting_for=[], missing=[], unable=unable)

    def close_evaluation(self, order: EvaluationOrder) -> None:
        """Nothing is open."""

    async def _whole_batch(self, deadline: float) -> list[ScoredGroup]:
        assert self._generator is not None, "register() comes first"
        generator, longest = self._generator, self._config.max_token_length
        groups: list[ScoredGroup] = []
        while len(groups) < self._num_groups:
            if time.perf_counter() > deadline:
                raise DataError(
                    f"task {self._config.task.label()}: {len(groups)} of {self._num_groups} groups within "
                    "batch_timeout_s, since the others were left out: look at ensure_scores_are_not_same, or at the "
                    "rewards in rollouts.jsonl"
                )
            num_items = math.ceil((self._num_groups - len(groups)) / generator.num_per_item)
            for more in await gather_all(generator.next(longest) for _ in range(num_items)):
                groups += more
        return groups[: self._num_groups]
