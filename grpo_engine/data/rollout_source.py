"""What the training loop asks of whatever gives it groups: a rollout API, or engines in the trainer's own process.

A source says of each batch who has sampled it. It delivers whole batches, oldest group first. One that keeps groups
(the rollout API) delivers each once, under a lease by which a restarted trainer acknowledges what it has in its
journal; one that samples on request keeps none, and has no leases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from grpo_engine.retrying import never
from grpo_engine.wire.rollouts import EvaluationOrder, EvaluationState, ScoredGroup


class RolloutSource(Protocol):
    """Groups to train on, and evaluations of the policy that samples them."""

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
        """Say what the run needs; called once, before all others but those of the context manager.

        Args:
            batch_size: sequences in each batch.
            max_token_len: longest sequence.
            is_served: inference has the weights of the first step, and may sample before a batch is asked for.
            stop: ends a wait.

        Raises:
            GrpoError: there will be no groups.
        """

    def resume_after(self, lease: str) -> None:
        """Acknowledge the batch of this lease of an earlier trainer, so that it is not delivered again."""

    def next_batch(
        self,
        timeout_s: float,
        *,
        policy_version: int | None = None,
        stop: Callable[[], bool] = never,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> list[ScoredGroup] | None:
        """The next batch; None when `stop()` became true first.

        Args:
            policy_version: the version that inference serves now.
            meanwhile: called about once a second where it waits.

        Raises:
            GrpoError: none within `timeout_s`, or there can be none.
        """

    @property
    def lease(self) -> str:
        """Name of the last batch; empty where there are no leases."""

    @property
    def environments(self) -> Mapping[int, str]:
        """Names of the last batch's environments, by the ids in its groups."""

    def time_metrics(self) -> Mapping[str, float]:
        """Who waited for whom before the last batch, by the names of `metrics.jsonl`."""

    def mark_used(self) -> None:
        """The last batch was trained on, or cannot be."""

    def report_served(self, lease: str, policy_version: int) -> None:
        """The batch of this lease was trained on, and inference serves the new version now."""

    def evaluation(self, order: EvaluationOrder, wait_s: float = 0.0) -> EvaluationState:
        """The state of an evaluation, which begins with the first call; asked again until it is over.

        Args:
            wait_s: how long the answer may take while it is not.

        Raises:
            GrpoError: it cannot be made, or asked for now.
        """

    def close_evaluation(self, order: EvaluationOrder) -> None:
        """An evaluation is over, or is given up."""
