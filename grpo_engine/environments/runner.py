"""The environment's loop: keep as many groups in the making as the trainer will want, and post those that are done.

One task asks the rollout API how far the trainer is and starts makers; each maker turns one item into one group, or a
game into one for each seat that the policy plays; one task posts what is done, several groups at once when several are.
All items for which there is room are asked at the same time, so that the inference server decodes them together. An
evaluation comes first: no item is begun while one of its prompts waits to be asked.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time

from grpo_engine.environments.config import EnvironmentConfig
from grpo_engine.environments.evaluating import Evaluator
from grpo_engine.environments.groups import scored_group
from grpo_engine.environments.item_source import ItemSource
from grpo_engine.environments.peers import BatchLimits, InferenceServer, RolloutApi, UnknownEnvironment
from grpo_engine.environments.policy import Policy, PromptTooLong
from grpo_engine.environments.progress import Progress
from grpo_engine.environments.prompts import Tokenizer, room_for_completion
from grpo_engine.environments.rolling_out import Rollouts, num_groups, roll_out, sample_rewards, with_words
from grpo_engine.environments.tasks.base import Item
from grpo_engine.environments.together import first_error
from grpo_engine.errors import ConfigError, GrpoError
from grpo_engine.wire.rollouts import EnvironmentStatus, RegisterEnvironmentRequest, ScoredGroup

log = logging.getLogger(__name__)

_MIN_ASK_S = 0.02
"""Between two questions for the state of the queue, however much happens."""
_HOLD_S = 5.0
"""For how long the API may hold its answer while nothing changes."""
_ASK_EVERY_S = 0.1
"""Between two questions to an API that answers at once, as stock ones do."""
_MAX_GROUPS_A_POST = 64
_MAX_TOKENS_A_POST = 1_000_000
"""Some 35 MB: what gathers while the API is away must not exceed what it takes at once."""
_MAX_SKIPPED_ITEMS = 100
"""Items in a row that are too long; more of them means that the limit, not the item, is wrong."""


class Runner:
    """One environment at work."""

    def __init__(
        self, config: EnvironmentConfig, tokenizer: Tokenizer, api: RolloutApi, inference: InferenceServer
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._api = api
        self._inference = inference
        self._source = ItemSource(config)
        self._num_groups = num_groups(config.task)
        """Groups that an item becomes."""
        self._limits = BatchLimits(batch_size=-1, max_token_len=-1)
        self._env_id: int | None = None
        self._makers: set[asyncio.Task[None]] = set()
        self._done: asyncio.Queue[ScoredGroup] = asyncio.Queue()
        self._num_unposted = 0
        """Groups in the making, or made and not yet posted."""
        self._has_news = asyncio.Event()
        self._progress = Progress()
        self._evaluator = Evaluator(config, tokenizer, api, inference, tell=self._has_news.set)

    async def run(self) -> None:
        """Work until `total_steps` are reached; cancel it to end sooner.

        Raises:
            GrpoError: a server refuses, or a setting cannot work with the trainer's.
        """
        config = self._config
        await self._api.limits()
        await self._inference.wait_until_healthy()
        log.info("environment ready: %s, group size %d", config.registered_name(), config.group_size)
        await self._join()
        try:
            async with asyncio.TaskGroup() as tasks:
                posting = tasks.create_task(self._post_what_is_done())
                await self._keep_making(tasks)
                posting.cancel()
                for maker in self._makers:
                    maker.cancel()
                self._evaluator.give_up()
        except* GrpoError as group:
            raise first_error(group) from None
        finally:
            self._source.save()
            if self._env_id is not None:
                await self._api.disconnect(self._env_id)

    async def _join(self) -> None:
        """Register, and learn the trainer's limits."""
        config = self._config
        answer = await self._api.register(
            RegisterEnvironmentRequest(
                max_token_length=config.max_token_length,
                desired_name=config.registered_name(),
                weight=config.weight,
                group_size=config.group_size,
                min_batch_allocation=config.min_batch_allocation,
                evaluates=self._evaluator.is_able,
            )
        )
        self._env_id = answer.env_id
        log.info("registered as %s (id %s), step %s", answer.wandb_name, answer.env_id, answer.starting_step)
        await self._learn_limits()

    async def _learn_limits(self) -> None:
        self._limits = await self._api.limits()
        if 0 < self._limits.batch_size < self._config.group_size:
            raise ConfigError(
                f"group_size ({self._config.group_size}) is more than the trainer's batch_size "
                f"({self._limits.batch_size}): no group fits into a batch; lower the one or raise the other"
            )

    # --- making ----------------------------------------------------------------------------------------------------

    async def _keep_making(self, tasks: asyncio.TaskGroup) -> None:
        status: EnvironmentStatus | None = None
        while True:
            asked_at = time.monotonic()
            before, status = status, await self._status(status)
            total_steps = self._config.total_steps
            is_done = total_steps is not None and status.current_step >= total_steps
            if is_done and not status.is_evaluation_to_come:
                log.info("trainer is at step %d of %d: done", status.current_step, total_steps)
                return
            if before is not None and before.current_step != status.current_step:
                await self._learn_limits()
            self._follow_evaluation(status, tasks)
            num_begun = 0 if is_done else self._room(status)
            for _ in range(num_begun):
                self._num_unposted += self._num_groups
                maker = tasks.create_task(self._make())
                self._makers.add(maker)
                maker.add_done_callback(self._makers.discard)
            self._progress.say_now_and_then(status, self._source.told())
            await self._pause(asked_at, is_unchanged=before == status)

    async def _status(self, known: EnvironmentStatus | None) -> EnvironmentStatus:
        """Ask for the state of the queue, and let the API hold its answer while only it can have news.

        It can not while groups are in the making, whose end is news too, nor while there is room for more of them.
        """
        assert self._env_id is not None
        is_idle = self._num_unposted == 0 and not self._evaluator.is_at_work
        may_hold = is_idle and known is not None and not known.is_evaluation_to_come and not self._room(known)
        wait_s = _HOLD_S if may_hold else 0.0
        try:
            return await self._api.status(self._env_id, known=known, wait_s=wait_s)
        except UnknownEnvironment:
            log.warning("the rollout API no longer knows this environment; registering again")
            await self._join()
            return await self._api.status(self._env_id)

    async def _pause(self, asked_at: float, *, is_unchanged: bool) -> None:
        """Let something happen before the next question."""
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
        self._evaluator.follow(status.evaluation, env_id=self._env_id, longest=longest, tasks=tasks)

    def _room(self, status: EnvironmentStatus) -> int:
        """Items to start now: up to `max_batches_offpolicy` batches of groups ahead, counting those in the making.

        Others' groups count too, except against the guaranteed share: no batch forms without that.
        """
        config, batch_size = self._config, self._limits.batch_size
        if self._evaluator.needs_everything:
            return 0
        num_ahead = status.queue_size + self._num_unposted
        wanted = config.max_batches_offpolicy * batch_size // config.group_size
        num_items = (wanted - num_ahead) // self._num_groups
        if num_items < 1 and num_ahead * config.group_size < batch_size:
            num_items = 1  # of more groups than there is room for; without it the trainer would wait for ever
        share = math.ceil(wanted * (config.min_batch_allocation or 0))
        num_items = max(num_items, math.ceil((share - status.self_queue_size - self._num_unposted) / self._num_groups))
        workers = max(1, round(config.max_workers * min(1.0, status.env_weight)))
        return max(0, min(num_items, max(1, workers // self._num_groups) - len(self._makers)))

    async def _make(self) -> None:
        """Turn one item into its groups."""
        config = self._config
        item, of_seats = await self._roll_out_what_fits()
        self._source.result(item, sample_rewards(of_seats))
        groups = [
            scored_group(spoken.conversations, spoken.rewards, temperature=config.temperature)
            for spoken in map(with_words, of_seats)
            if self._is_wanted(spoken)
        ]
        num_dropped = self._num_groups - len(groups)
        self._progress.num_dropped += num_dropped
        self._num_unposted -= num_dropped
        for group in groups:
            self._done.put_nowait(group)
        if num_dropped:
            self._has_news.set()

    def _is_wanted(self, spoken: Rollouts) -> bool:
        """Whether there is something to compare."""
        if len(spoken.conversations) < min(2, self._config.group_size):
            return False
        return not self._config.ensure_scores_are_not_same or len(set(spoken.rewards)) > 1

    async def _roll_out_what_fits(self) -> tuple[Item, list[Rollouts]]:
        """The next item that leaves room to say something, and what was said.

        Raises:
            ConfigError: so many in a row leave none that the limit must be wrong.
        """
        config = self._config
        longest = room_for_completion(config, self._limits.max_token_len)
        policy = Policy(
            config=config,
            tokenizer=self._tokenizer,
            inference=self._inference,
            temperature=config.temperature,
            longest=longest,
        )
        for _ in range(_MAX_SKIPPED_ITEMS):
            item = self._source.next()
            try:
                return item, await roll_out(policy, item, config.group_size)
            except PromptTooLong as error:
                self._progress.num_too_long += 1
                num_tokens = error.num_tokens
        raise ConfigError(
            f"max_token_length: {_MAX_SKIPPED_ITEMS} prompts in a row leave no room within {longest} tokens "
            f"(the last has {num_tokens}): raise it, or the trainer's seq_len"
        )

    # --- posting ---------------------------------------------------------------------------------------------------

    async def _post_what_is_done(self) -> None:
        while True:
            groups = [await self._done.get()]
            num_tokens = _num_tokens(groups[0])
            while len(groups) < _MAX_GROUPS_A_POST and num_tokens < _MAX_TOKENS_A_POST and not self._done.empty():
                groups.append(self._done.get_nowait())
                num_tokens += _num_tokens(groups[-1])
            await self._api.post([group.model_copy(update={"env_id": self._env_id}) for group in groups])
            self._num_unposted -= len(groups)
            self._has_news.set()
            self._progress.posted(groups)


def _num_tokens(group: ScoredGroup) -> int:
    return sum(map(len, group.tokens))
