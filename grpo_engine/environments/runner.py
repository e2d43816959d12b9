"""The environment's loop: keep generating as many groups as the trainer will need, and post the finished ones.

One task polls the rollout API for the trainer's step and starts workers. Each worker turns one item into one group, or
a game into one group per seat that the policy plays. One task posts finished groups, several per request if available.
All items for which there is room are sampled concurrently, so that the inference server batches them. An evaluation has
priority: no item is started while one of its prompts has not been sent.

Where the opponent of a game is trained too, by a trainer of its own, a game is begun when both trainers have room for
its groups: they take their batches from the same games.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence

from grpo_engine.environments.clients import RolloutApi
from grpo_engine.environments.config import EnvironmentConfig
from grpo_engine.environments.evaluator import Evaluator
from grpo_engine.environments.generating import GroupGenerator
from grpo_engine.environments.inference_servers import InferenceServers
from grpo_engine.environments.sampling.policy import Opponent
from grpo_engine.environments.sampling.prompts import Tokenizer
from grpo_engine.environments.tasks.concurrency import first_error, gather_all
from grpo_engine.environments.tasks.multi_turn import MultiTurnTask
from grpo_engine.environments.tracking import NoTracker, start_tracker
from grpo_engine.environments.trainer_link import Outbox, TrainerLink
from grpo_engine.errors import GrpoError
from grpo_engine.serving.reporting import Waiting
from grpo_engine.trackers import Tracker
from grpo_engine.wire.log_lines import ENVIRONMENT_READY
from grpo_engine.wire.rollouts import MASKED_LABEL, EnvironmentStatus, ScoredGroup
from grpo_engine.wire.supervisor import WaitsFor

log = logging.getLogger(__name__)

_MIN_ASK_S = 0.02
"""Least interval between two status requests."""
ASK_EVERY_S = 0.1
"""Interval of status requests to an API that answers at once, as stock ones do."""
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
        opponent_api: RolloutApi | None = None,
        *,
        progress: Progress | None = None,
        outbox: Outbox | None = None,
        ask_every_s: float = ASK_EVERY_S,
    ) -> None:
        """
        Args:
            opponent: plays the other seats of a game.
            opponent_api: of the trainer that trains the opponent; None: it is not trained here.
            progress: of several environments together; None: of this one alone.
            outbox: of several environments, which the caller posts; None: its own.
            ask_every_s: interval of status requests while nothing changes here.
        """
        self._config = config
        self._inference = inference
        self._opponent = opponent
        self._groups = GroupGenerator(config, tokenizer, inference, opponent)
        self._workers: set[asyncio.Task[None]] = set()
        self._has_news = asyncio.Event()
        self._progress = progress or Progress()
        self._ask_every_s = ask_every_s
        notify = self._has_news.set
        evaluator = Evaluator(config, tokenizer, api, inference, opponent=opponent, notify=notify)
        self._own = TrainerLink(
            config,
            api,
            evaluator,
            notify=notify,
            outbox=outbox,
            limit_of_servers=inference.queues.limit,
        )
        self._posts_itself = outbox is None
        self._other: TrainerLink | None = None
        if opponent is not None and opponent_api is not None:
            of_other = _from_the_other_side(config)
            evaluator = Evaluator(
                of_other,
                opponent.tokenizer,
                opponent_api,
                opponent.inference,
                opponent=Opponent(tokenizer=tokenizer, inference=inference),
                notify=notify,
            )
            self._other = TrainerLink(
                of_other,
                opponent_api,
                evaluator,
                notify=notify,
                limit_of_servers=opponent.inference.queues.limit,
            )
        self._links = [self._own, *([self._other] if self._other else [])]
        self._tracker: Tracker = NoTracker()

    async def run(self) -> None:
        """Run until `total_steps` are reached; cancel it to end sooner.

        Raises:
            GrpoError: a server refuses a request, or a setting conflicts with the trainer's.
        """
        config = self._config
        for link in self._links:
            await link.api.limits()
        for servers in self._all_servers:
            await servers.wait_until_healthy()
        log.info(ENVIRONMENT_READY.text, config.registered_name(), config.group_size)
        await gather_all(link.register() for link in self._links)
        if config.use_wandb:
            self._tracker = await asyncio.to_thread(start_tracker, config, await self._own.api.wandb_info())
        try:
            async with asyncio.TaskGroup() as tasks:
                background: list[asyncio.Task[None]] = []
                if self._posts_itself:
                    background.append(tasks.create_task(self._own.outbox.post(self._progress.posted)))
                if self._other is not None:
                    background.append(tasks.create_task(self._other.outbox.post(lambda groups: None)))
                if self._config.max_batches_offpolicy is None:
                    background.extend(tasks.create_task(servers.queues.watch()) for servers in self._all_servers)
                await self._keep_generating(tasks)
                for task in (*background, *self._workers):
                    task.cancel()
                for link in self._links:
                    link.evaluator.cancel()
        except* GrpoError as group:
            raise first_error(group) from None
        finally:
            self._tracker.close()
            self._groups.close()
            for link in self._links:
                await link.disconnect()

    def waiting(self) -> Waiting | None:
        """What keeps it from going on."""
        for link in self._links:
            if link.api.registers_since is not None:
                return Waiting(what=WaitsFor.TRAINER, since=link.api.registers_since)
            if link.api.posts_since is not None:
                return Waiting(what=WaitsFor.ROLLOUT_API, since=link.api.posts_since)
        for servers in self._all_servers:
            if servers.num_open:
                return Waiting(what=WaitsFor.INFERENCE, since=servers.answered_at)
        is_scoring = self._workers or any(link.evaluator.is_running for link in self._links)
        what = WaitsFor.REWARDS if is_scoring else WaitsFor.TRAINER
        return Waiting(what=what, since=self._inference.answered_at)

    @property
    def _all_servers(self) -> list[InferenceServers]:
        """Those of the policy, and of its opponent."""
        return [self._inference, *([self._opponent.inference] if self._opponent else [])]

    # --- generating ------------------------------------------------------------------------------------------------

    async def _keep_generating(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            asked_at = time.monotonic()
            self._has_news.clear()  # what comes while the status is on its way may be missing in it
            before = [link.status for link in self._links]
            await gather_all(self._update(link) for link in self._links)
            status = self._own.status
            assert status is not None
            if self._is_done():
                log.info("trainer is at step %d of %d: done", status.current_step, self._config.total_steps)
                self._track(status.current_step)
                return
            for link in self._links:
                link.follow_evaluation(tasks)
            for _ in range(self._room()):
                self._begin_item(tasks)
            self._progress.log_periodically(status, (self._groups.progress(), self._inference.progress()))
            await self._pause(asked_at, is_unchanged=before == [link.status for link in self._links])

    def _is_done(self) -> bool:
        """Whether `total_steps` are reached, and an opponent's trainer needs no more either."""
        is_measured = not any(link.is_evaluation_to_come for link in self._links)
        return self._own.is_done and is_measured and (self._other is None or self._other.has_last_batch)

    async def _update(self, link: TrainerLink) -> None:
        has_next_step = await link.update_status(len(self._workers), may_hold=len(self._links) == 1)
        if has_next_step:
            await link.update_limits()
            if link is self._own and link.status is not None:
                self._track(link.status.current_step)

    @property
    def _needing(self) -> list[TrainerLink]:
        """The trainers that get groups: of two, not one that has its last batch, whose policy plays on as it is."""
        return [link for link in self._links if not link.has_last_batch] or self._links[:1]

    def _room(self) -> int:
        """Items to start now: as many as each of those has room for."""
        return min(link.room(len(self._workers)) for link in self._needing)

    def _begin_item(self, tasks: asyncio.TaskGroup) -> None:
        links = self._needing
        for link in links:
            link.begin_item()
        worker = tasks.create_task(self._generate(links))
        self._workers.add(worker)
        worker.add_done_callback(self._workers.discard)

    def _track(self, step: int) -> None:
        self._tracker.log(self._progress.metrics() | self._own.evaluator.take_own_metrics(), step)

    async def _pause(self, asked_at: float, *, is_unchanged: bool) -> None:
        """Wait before the next status request."""
        passed = time.monotonic() - asked_at
        await asyncio.sleep(max(0.0, _MIN_ASK_S - passed))
        is_one_of_many = self._ask_every_s > ASK_EVERY_S  # whose queue changes all the time, with nothing new to do
        waits = is_unchanged or (is_one_of_many and bool(self._workers))
        # An API that held its answer has waited already.
        longest = self._ask_every_s if self._workers else ASK_EVERY_S
        if waits and passed < longest and not self._has_news.is_set():
            try:
                async with asyncio.timeout(self._ask_every_s):
                    await self._has_news.wait()
            except TimeoutError:
                return

    async def _generate(self, links: Sequence[TrainerLink]) -> None:
        """Sample one item and queue its groups for posting."""
        of_other: list[ScoredGroup] = []
        if self._other is None:
            own = await self._groups.next(self._own.longest)
        else:
            own, of_other = await self._groups.next_of_both(self._own.longest, self._other.longest)
        self._progress.num_too_long = self._groups.num_too_long
        self._progress.num_not_finite = self._groups.num_not_finite
        for link in links:
            num_dropped = link.end_item(own if link is self._own else of_other)
            if link is self._own:
                self._progress.num_dropped += num_dropped


def _from_the_other_side(config: EnvironmentConfig) -> EnvironmentConfig:
    """The settings of an environment as its opponent's trainer sees them."""
    assert isinstance(config.task, MultiTurnTask)
    return config.model_copy(
        update={
            "task": config.task.as_others_play(),
            "model_name": config.opponent_model_name or config.model_name,
            "steps_per_eval": 0,
        }
    )


class Progress:
    """Counts since the start and averages over the last groups, for a periodic log line."""

    def __init__(self) -> None:
        self.num_groups = 0
        self.num_dropped = 0
        """Groups with equal scores, where those are dropped, or whose seat never had a turn."""
        self.num_too_long = 0
        """Items whose prompt leaves no room for a completion."""
        self.num_not_finite = 0
        """Items with a log-probability that is not finite."""
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
            "step %d: %d groups sent, %d queued; last %d: reward %.3f, %.1f tokens%s%s%s%s",
            status.current_step,
            self.num_groups,
            status.self_queue_size,
            len(self._rewards),
            sum(self._rewards) / len(self._rewards),
            sum(self._lengths) / len(self._lengths),
            f"; {self.num_dropped} dropped (equal scores)" if self.num_dropped else "",
            f"; {self.num_too_long} items too long" if self.num_too_long else "",
            f"; {self.num_not_finite} items without finite log-probabilities" if self.num_not_finite else "",
            "".join(f"; {text}" for text in more if text),
        )
