"""The environment's loop: keep generating as many groups as the trainer will need, and post the finished ones.

One task polls the rollout API for the trainer's step and starts workers. Each worker turns one item into one group, or
a game into one group per seat that the policy plays. One task posts finished groups, several per request if available.
All items for which there is room are sampled concurrently, so that the inference server batches them. An evaluation has
priority: no item is started while one of its prompts has not been sent.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence

from grpo_engine.environments.ahead import Ahead
from grpo_engine.environments.clients import BatchLimits, Demand, RolloutApi
from grpo_engine.environments.config import EnvironmentConfig
from grpo_engine.environments.evaluator import Evaluator
from grpo_engine.environments.generating import GroupGenerator
from grpo_engine.environments.inference_servers import InferenceServers
from grpo_engine.environments.peers import UnknownEnvironment
from grpo_engine.environments.sampling.policy import Opponent
from grpo_engine.environments.sampling.prompts import Tokenizer, room_for_completion
from grpo_engine.environments.tasks.concurrency import first_error
from grpo_engine.environments.tracking import NoTracker, start_tracker
from grpo_engine.errors import ConfigError, GrpoError
from grpo_engine.serving.reporting import Waiting
from grpo_engine.trackers import Tracker
from grpo_engine.wire.log_lines import ENVIRONMENT_READY
from grpo_engine.wire.rollouts import MASKED_LABEL, EnvironmentStatus, RegisterEnvironmentRequest, ScoredGroup
from grpo_engine.wire.supervisor import WaitsFor

log = logging.getLogger(__name__)

_MIN_ASK_S = 0.02
"""Least interval between two status requests."""
_HOLD_S = 5.0
"""Time for which the API may hold its answer while nothing changes."""
_ASK_EVERY_S = 0.1
"""Interval of status requests to an API that answers at once, as stock ones do."""
_MAX_GROUPS_A_POST = 64
_MAX_TOKENS_A_POST = 1_000_000
"""About 35 MB: groups that accumulate while the API is down must stay below its body limit."""
_PROGRESS_EVERY_S = 10.0
_PROGRESS_GROUPS = 64
"""Groups that the averages in a progress line go over."""


class Runner:
    """Runs one environment."""

    def __init__(
        self,
        config: EnvironmentConfig,
        tokenizer: Tokenizer,
        api: RolloutApi,
        inference: InferenceServers,
        opponent: Opponent | None = None,
    ) -> None:
        self._config = config
        self._api = api
        self._inference = inference
        self._opponent = opponent
        self._groups = GroupGenerator(config, tokenizer, inference, opponent)
        self._ahead = Ahead(
            group_size=config.group_size,
            groups_per_item=self._groups.num_per_item,
            max_workers=config.max_workers,
            max_batches_offpolicy=config.max_batches_offpolicy,
            min_batch_allocation=config.min_batch_allocation,
        )
        self._limits = BatchLimits(batch_size=-1, max_token_len=-1)
        self._env_id: int | None = None
        self._workers: set[asyncio.Task[None]] = set()
        self._finished: asyncio.Queue[ScoredGroup] = asyncio.Queue()
        self._num_unposted = 0
        """Groups that are being generated, or finished and not yet posted."""
        self._has_news = asyncio.Event()
        self._progress = Progress()
        self._evaluator = Evaluator(config, tokenizer, api, inference, opponent=opponent, notify=self._has_news.set)
        self._tracker: Tracker = NoTracker()

    async def run(self) -> None:
        """Run until `total_steps` are reached; cancel it to end sooner.

        Raises:
            GrpoError: a server refuses a request, or a setting conflicts with the trainer's.
        """
        config = self._config
        await self._api.limits()
        for servers in self._all_servers:
            await servers.wait_until_healthy()
        log.info(ENVIRONMENT_READY.text, config.registered_name(), config.group_size)
        await self._register()
        if config.use_wandb:
            self._tracker = await asyncio.to_thread(start_tracker, config, await self._api.wandb_info())
        try:
            async with asyncio.TaskGroup() as tasks:
                posting = tasks.create_task(self._post_finished())
                await self._keep_generating(tasks)
                posting.cancel()
                for worker in self._workers:
                    worker.cancel()
                self._evaluator.cancel()
        except* GrpoError as group:
            raise first_error(group) from None
        finally:
            self._tracker.close()
            self._groups.close()
            if self._env_id is not None:
                await self._api.disconnect(self._env_id)

    def waiting(self) -> Waiting | None:
        """What keeps it from going on."""
        if self._api.registers_since is not None:
            return Waiting(what=WaitsFor.TRAINER, since=self._api.registers_since)
        if self._api.posts_since is not None:
            return Waiting(what=WaitsFor.ROLLOUT_API, since=self._api.posts_since)
        for servers in self._all_servers:
            if servers.num_open:
                return Waiting(what=WaitsFor.INFERENCE, since=servers.answered_at)
        what = WaitsFor.REWARDS if self._workers or self._evaluator.is_running else WaitsFor.TRAINER
        return Waiting(what=what, since=self._inference.answered_at)

    @property
    def _all_servers(self) -> list[InferenceServers]:
        """Those of the policy, and of its opponent."""
        return [self._inference, *([self._opponent.inference] if self._opponent else [])]

    async def _register(self) -> None:
        """Register, and fetch the trainer's limits."""
        config = self._config
        answer = await self._api.register(
            RegisterEnvironmentRequest(
                max_token_length=config.max_token_length,
                desired_name=config.registered_name(),
                weight=config.weight,
                group_size=config.group_size,
                min_batch_allocation=config.min_batch_allocation,
                evaluates=self._evaluator.is_able,
                takes_slots=True,
            )
        )
        self._env_id = answer.env_id
        log.info("registered as %s (id %s), step %s", answer.wandb_name, answer.env_id, answer.starting_step)
        await self._update_limits()

    async def _update_limits(self) -> None:
        self._limits = await self._api.limits()
        if 0 < self._limits.batch_size < self._config.group_size:
            raise ConfigError(
                f"group_size ({self._config.group_size}) is more than the trainer's batch_size "
                f"({self._limits.batch_size}): no group fits into a batch; lower group_size or raise batch_size"
            )

    # --- generating ------------------------------------------------------------------------------------------------

    async def _keep_generating(self, tasks: asyncio.TaskGroup) -> None:
        status: EnvironmentStatus | None = None
        while True:
            asked_at = time.monotonic()
            before, status = status, await self._status(status)
            is_done = self._is_done(status)
            if is_done and not status.is_evaluation_to_come:
                log.info("trainer is at step %d of %d: done", status.current_step, self._config.total_steps)
                self._track(status.current_step)
                return
            if before is not None and before.current_step != status.current_step:
                await self._update_limits()
                self._track(status.current_step)
            self._follow_evaluation(status, tasks)
            num_begun = 0 if is_done else self._room(status)
            for _ in range(num_begun):
                self._num_unposted += self._groups.num_per_item
                worker = tasks.create_task(self._generate())
                self._workers.add(worker)
                worker.add_done_callback(self._workers.discard)
            self._progress.log_periodically(status, (self._groups.progress(), self._inference.progress()))
            await self._pause(asked_at, is_unchanged=before == status)

    def _is_done(self, status: EnvironmentStatus) -> bool:
        total_steps = self._config.total_steps
        return total_steps is not None and status.current_step >= total_steps

    def _track(self, step: int) -> None:
        self._tracker.log(self._progress.metrics() | self._evaluator.take_own_metrics(), step)

    async def _status(self, known: EnvironmentStatus | None) -> EnvironmentStatus:
        """Request the status; the API may hold its answer while nothing can change on this side.

        It may not while groups are being generated, or while there is room for more of them.
        """
        assert self._env_id is not None
        is_idle = self._num_unposted == 0 and not self._evaluator.is_running
        may_hold = is_idle and known is not None and not known.is_evaluation_to_come
        if known is not None and known.may_start is None and self._room(known):
            may_hold = False
        demand = Demand(
            sampled=self._num_unposted,
            wanted_items=0 if known is None or self._is_done(known) else self._idle_workers(known),
            groups_per_item=self._groups.num_per_item,
        )
        wait_s = _HOLD_S if may_hold else 0.0
        try:
            return await self._api.status(self._env_id, known=known, wait_s=wait_s, demand=demand)
        except UnknownEnvironment:
            log.warning("the rollout API no longer knows this environment; registering again")
            await self._register()
            return await self._api.status(self._env_id, demand=demand)

    async def _pause(self, asked_at: float, *, is_unchanged: bool) -> None:
        """Wait before the next status request."""
        self._has_news.clear()
        passed = time.monotonic() - asked_at
        await asyncio.sleep(max(0.0, _MIN_ASK_S - passed))
        if is_unchanged and passed < _ASK_EVERY_S and not self._has_news.is_set():
            try:
                async with asyncio.timeout(_ASK_EVERY_S):
                    await self._has_news.wait()
            except TimeoutError:
                return

    def _follow_evaluation(self, status: EnvironmentStatus, tasks: asyncio.TaskGroup) -> None:
        assert self._env_id is not None
        longest = room_for_completion(self._config, self._limits.max_token_len)
        order = status.evaluation or self._evaluator.own_order(status.current_step)
        self._evaluator.follow(order, env_id=self._env_id, longest=longest, tasks=tasks)

    def _room(self, status: EnvironmentStatus) -> int:
        """Items to start now."""
        return self._ahead.startable(
            status,
            self._limits.batch_size,
            num_unposted=self._num_unposted,
            idle_workers=self._idle_workers(status),
        )

    def _idle_workers(self, status: EnvironmentStatus) -> int:
        """Items that could be sampled besides those that are; none while prompts of an evaluation are not sent."""
        if self._evaluator.has_unstarted_prompts:
            return 0
        return self._ahead.idle_workers(status.env_weight, len(self._workers))

    async def _generate(self) -> None:
        """Sample one item and queue its groups for posting."""
        longest = room_for_completion(self._config, self._limits.max_token_len)
        groups = await self._groups.next(longest)
        num_dropped = self._groups.num_per_item - len(groups)
        self._progress.num_dropped += num_dropped
        self._progress.num_too_long = self._groups.num_too_long
        self._num_unposted -= num_dropped
        for group in groups:
            self._finished.put_nowait(group)
        if num_dropped:
            self._has_news.set()

    # --- posting ---------------------------------------------------------------------------------------------------

    async def _post_finished(self) -> None:
        while True:
            groups = [await self._finished.get()]
            num_tokens = _num_tokens(groups[0])
            while len(groups) < _MAX_GROUPS_A_POST and num_tokens < _MAX_TOKENS_A_POST and not self._finished.empty():
                groups.append(self._finished.get_nowait())
                num_tokens += _num_tokens(groups[-1])
            await self._api.post([group.model_copy(update={"env_id": self._env_id}) for group in groups])
            self._num_unposted -= len(groups)
            self._has_news.set()
            self._progress.posted(groups)


def _num_tokens(group: ScoredGroup) -> int:
    return sum(map(len, group.tokens))


class Progress:
    """Counts since the start and averages over the last groups, for a periodic log line."""

    def __init__(self) -> None:
        self.num_groups = 0
        self.num_dropped = 0
        """Groups with equal scores, where those are dropped, or whose seat never had a turn."""
        self.num_too_long = 0
        """Items whose prompt leaves no room for a completion."""
        self._rewards: deque[float] = deque(maxlen=_PROGRESS_GROUPS)
        self._lengths: deque[float] = deque(maxlen=_PROGRESS_GROUPS)
        self._logged_at = time.monotonic()
        self._logged_groups = 0

    def posted(self, groups: Sequence[ScoredGroup]) -> None:
        """Count posted groups."""
        self.num_groups += len(groups)
        for group in groups:
            num_read = sum(labels.count(MASKED_LABEL) for labels in group.masks)
            self._rewards.append(sum(group.scores) / len(group.scores))
            self._lengths.append((sum(map(len, group.tokens)) - num_read) / len(group.tokens))

    def metrics(self) -> dict[str, float]:
        """Means over the last groups, by the names of the trainer's metrics; none before the first group."""
        if not self._rewards:
            return {}
        return {
            "reward/mean": sum(self._rewards) / len(self._rewards),
            "rollout/length_mean": sum(self._lengths) / len(self._lengths),
            "rollout/num_groups": float(self.num_groups),
        }

    def log_periodically(self, status: EnvironmentStatus, more: Sequence[str] = ()) -> None:
        """Log a line with `more` at its end, if there are new groups and the last line is old enough."""
        now = time.monotonic()
        if now - self._logged_at < _PROGRESS_EVERY_S or self.num_groups == self._logged_groups:
            return
        self._logged_at, self._logged_groups = now, self.num_groups
        log.info(
            "step %d: %d groups sent, %d queued; last %d: reward %.3f, %.1f tokens%s%s%s",
            status.current_step,
            self.num_groups,
            status.self_queue_size,
            len(self._rewards),
            sum(self._rewards) / len(self._rewards),
            sum(self._lengths) / len(self._lengths),
            f"; {self.num_dropped} dropped (equal scores)" if self.num_dropped else "",
            f"; {self.num_too_long} items too long" if self.num_too_long else "",
            "".join(f"; {text}" for text in more if text),
        )
