"""An environment's link to one trainer: registration, limits, status and evaluations at its rollout API, and the groups
to post there.

An environment has one, and a second one where the opponent of a game is trained too.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence

from grpo_engine.environments.ahead import Ahead
from grpo_engine.environments.clients import RolloutApi
from grpo_engine.environments.config import EnvironmentConfig
from grpo_engine.environments.evaluator import Evaluator
from grpo_engine.environments.peers import UnknownEnvironment
from grpo_engine.environments.sampling.prompts import room_for_completion
from grpo_engine.environments.sampling.sample import num_groups
from grpo_engine.environments.status_requests import BatchLimits
from grpo_engine.errors import ConfigError
from grpo_engine.wire.environment_variables import RUN_VARIABLE, SERVICE_VARIABLE
from grpo_engine.wire.rollouts import (
    EnvironmentStatus,
    RegisterEnvironmentRequest,
    SamplingLimit,
    ScoredGroup,
    StatusRequest,
)

log = logging.getLogger(__name__)

_HOLD_S = 5.0
"""Time for which the API may hold its answer while nothing changes."""
_MAX_GROUPS_A_POST = 64
_MAX_TOKENS_A_POST = 1_000_000
"""About 35 MB: groups that accumulate while the API is down must stay below its body limit."""


class Outbox:
    """Finished groups that wait to be posted: of one environment, or of all in a process together."""

    def __init__(self, api: RolloutApi) -> None:
        self._api = api
        self._finished: asyncio.Queue[tuple[TrainerLink, ScoredGroup]] = asyncio.Queue()

    def put(self, link: TrainerLink, group: ScoredGroup) -> None:
        """Queue a group of an environment."""
        self._finished.put_nowait((link, group))

    async def post(self, posted: Callable[[Sequence[ScoredGroup]], None]) -> None:
        """Post finished groups until it is cancelled, several per request where there are several.

        Args:
            posted: called with what was posted.
        """
        while True:
            items = [await self._finished.get()]
            num_tokens = _num_tokens(items[0][1])
            while len(items) < _MAX_GROUPS_A_POST and num_tokens < _MAX_TOKENS_A_POST and not self._finished.empty():
                items.append(self._finished.get_nowait())
                num_tokens += _num_tokens(items[-1][1])
            await self._api.post([group.model_copy(update={"env_id": link.env_id}) for link, group in items])
            for link, _ in items:
                link.has_posted()
            posted([group for _, group in items])


class TrainerLink:
    """See above; `status` is that of the last request."""

    def __init__(
        self,
        config: EnvironmentConfig,
        api: RolloutApi,
        evaluator: Evaluator,
        *,
        notify: Callable[[], None],
        outbox: Outbox | None = None,
        limit_of_servers: Callable[[], SamplingLimit | None],
    ) -> None:
        """
        Args:
            config: settings from the side of the policy that is trained.
            notify: called when there may be room for further items.
            outbox: of several environments; None: its own.
            limit_of_servers: whether requests queue at the inference servers, as `ServerQueues.limit`.
        """
        self.outbox = outbox or Outbox(api)
        self.config = config
        self.api = api
        self.evaluator = evaluator
        self._notify = notify
        self._limit_of_servers = limit_of_servers
        self.num_per_item = num_groups(config.task)
        """Groups of each item, those that are dropped included."""
        self._ahead = Ahead(
            group_size=config.group_size,
            groups_per_item=self.num_per_item,
            max_workers=config.max_workers,
            max_batches_offpolicy=config.max_batches_offpolicy,
            min_batch_allocation=config.min_batch_allocation,
        )
        self._limits = BatchLimits(batch_size=-1, max_token_len=-1)
        self.env_id: int | None = None
        self._num_unposted = 0
        """Groups that are being generated, or finished and not yet posted."""
        self._num_posted_since = 0
        """Groups that were posted since the status was requested, which its queue may lack."""
        self.status: EnvironmentStatus | None = None

    @property
    def longest(self) -> int:
        """Tokens that a prompt and its completion may have together."""
        return room_for_completion(self.config, self._limits.max_token_len)

    @property
    def is_done(self) -> bool:
        """Whether the trainer has all batches that this environment sends."""
        total_steps = self.config.total_steps
        return total_steps is not None and self.status is not None and self.status.current_step >= total_steps

    @property
    def has_last_batch(self) -> bool:
        """Whether the trainer will fetch no other."""
        return self.is_done or (self.status is not None and bool(self.status.needs_no_more))

    @property
    def is_evaluation_to_come(self) -> bool:
        """Whether an evaluation after the last batch is not over."""
        return self.status is not None and bool(self.status.is_evaluation_to_come)

    # --- requests --------------------------------------------------------------------------------------------------

    async def register(self) -> None:
        """Register, and fetch the trainer's limits.

        Raises:
            ConfigError: no group fits into a batch of the trainer.
        """
        config = self.config
        answer = await self.api.register(
            RegisterEnvironmentRequest(
                max_token_length=config.max_token_length,
                desired_name=config.registered_name(),
                weight=config.weight,
                group_size=config.group_size,
                min_batch_allocation=config.min_batch_allocation,
                evaluates=self.evaluator.is_able,
                takes_slots=True,
                service=_service_of_run(),
            )
        )
        self.env_id = answer.env_id
        log.info("registered as %s (id %s), step %s", answer.wandb_name, answer.env_id, answer.starting_step)
        self._set_limits(await self.api.limits())

    async def update_limits(self) -> None:
        """Fetch the trainer's limits, unless they came with the status.

        Raises:
            ConfigError: no group fits into a batch of the trainer.
        """
        self._set_limits(await self.api.limits_at_status())

    def _set_limits(self, limits: BatchLimits) -> None:
        self._limits = limits
        if 0 < limits.batch_size < self.config.group_size:
            raise ConfigError(
                f"group_size ({self.config.group_size}) is more than the trainer's batch_size "
                f"({limits.batch_size}): no group fits into a batch; lower group_size or raise batch_size"
            )

    async def update_status(self, num_workers: int, *, may_hold: bool) -> bool:
        """Request the status; returns whether the trainer has gone on to another step since the last one.

        The API may hold its answer while nothing can change on this side: not while groups are being generated, or
        while there is room for more of them.

        Args:
            num_workers: items that are being sampled.
            may_hold: whether nothing else waits for the answer.
        """
        assert self.env_id is not None
        known, self._num_posted_since = self.status, 0
        is_idle = self._num_unposted == 0 and not self.evaluator.is_running
        may_hold = may_hold and is_idle and known is not None and not self.is_evaluation_to_come
        if known is not None and known.may_start is None and self.room(num_workers):
            may_hold = False
        request = StatusRequest(
            env_id=self.env_id,
            sampled=self._num_unposted,
            wanted_items=0 if known is None or self.is_done else self._idle_workers(num_workers),
            groups_per_item=self.num_per_item,
            limit=self._ahead.limit(
                idle_workers=self._idle_workers(num_workers) if known else 1, of_servers=self._limit_of_servers()
            ),
        )
        try:
            self.status = await self.api.status(_waiting(request, known) if may_hold and known else request)
        except UnknownEnvironment:
            log.warning("the rollout API no longer knows this environment; registering again")
            await self.register()
            self.status = await self.api.status(request.model_copy(update={"env_id": self.env_id}))
        self._log_change(known)
        return known is not None and known.current_step != self.status.current_step

    def _log_change(self, before: EnvironmentStatus | None) -> None:
        ahead = self.status.ahead if self.status is not None else None
        if ahead is not None and before is not None and ahead.batches != (number := self._ahead.batches(before)):
            log.info("now up to %d batches ahead of the trainer instead of %d: %s", ahead.batches, number, ahead.why)

    def follow_evaluation(self, tasks: asyncio.TaskGroup) -> None:
        """Start the evaluation that is ordered, if any."""
        assert self.env_id is not None
        assert self.status is not None
        order = self.status.evaluation or self.evaluator.own_order(self.status.current_step)
        self.evaluator.follow(order, env_id=self.env_id, longest=self.longest, tasks=tasks)

    async def disconnect(self) -> None:
        """Disconnect, if it has registered."""
        if self.env_id is not None:
            await self.api.disconnect(self.env_id)

    # --- groups ----------------------------------------------------------------------------------------------------

    def room(self, num_workers: int) -> int:
        """Items to start now, beside so many that are being sampled."""
        if self.status is None or self.is_done:
            return 0
        return self._ahead.startable(
            self.status,
            self._limits.batch_size,
            num_unposted=self._num_unposted + self._num_posted_since,
            idle_workers=self._idle_workers(num_workers),
        )

    def _idle_workers(self, num_workers: int) -> int:
        """Items that could be sampled besides those that are; none while prompts of an evaluation are not sent."""
        if self.evaluator.has_unstarted_prompts or self.status is None:
            return 0
        return self._ahead.idle_workers(self.status.env_weight, num_workers)

    def begin_item(self) -> None:
        """Count the groups of an item whose sampling begins."""
        self._num_unposted += self.num_per_item

    def end_item(self, groups: Sequence[ScoredGroup]) -> int:
        """Queue the groups of an item for posting; returns how many of them were dropped."""
        num_dropped = self.num_per_item - len(groups)
        self._num_unposted -= num_dropped
        for group in groups:
            self.outbox.put(self, group)
        if num_dropped:
            self._notify()
        return num_dropped

    def has_posted(self) -> None:
        """One of its groups was posted."""
        self._num_unposted -= 1
        self._num_posted_since += 1
        self._notify()


def _waiting(request: StatusRequest, known: EnvironmentStatus) -> StatusRequest:
    """The request of an environment that has nothing to do until there is news."""
    return request.model_copy(
        update={
            "wait_s": _HOLD_S,
            "current_step": known.current_step,
            "queue_size": known.queue_size,
            "evaluation": known.evaluation.id if known.evaluation else None,
        }
    )


def _num_tokens(group: ScoredGroup) -> int:
    return sum(map(len, group.tokens))


def _service_of_run() -> str | None:
    """The run and the service that this process is; None for one that no supervisor started."""
    run, service = (os.environ.get(name) for name in (RUN_VARIABLE, SERVICE_VARIABLE))
    return f"{run}/{service}" if run and service else None
