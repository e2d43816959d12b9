"""Environments on paper: they ask the real state of the rollout API what they may start, and sample at the servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from random import Random

from grpo_engine.environments.ahead import Ahead, least_loaded
from grpo_engine.errors import GrpoError
from grpo_engine.rollouts.idle_clock import IdleClock
from grpo_engine.rollouts.state.api_state import ApiState
from grpo_engine.rollouts.state.slots import Demand
from grpo_engine.simulate.clock import Clock
from grpo_engine.simulate.figures import Figures
from grpo_engine.simulate.layout import Layout
from grpo_engine.simulate.servers import Request, Server
from grpo_engine.wire.rollouts import RegisterEnvironmentRequest, SamplingLimit

MOST_SEQUENCES = 1 << 18
"""Sampled and not trained on yet, at a time: to form a batch of as many takes 0.6 GB, of four times as many 4.7."""


class TooMany(GrpoError):
    """More is sampled ahead of the trainer than a simulation has room for."""


@dataclass(slots=True)
class _Load:
    """What an environment has sent to one server."""

    server: Server
    num_open_tokens: int = 0
    num_tokens: int = 0


@dataclass(slots=True)
class _Environment:
    id: int
    loads: list[_Load] = field(default_factory=list)
    num_unposted: int = 0
    idle: AbstractContextManager[None] | None = None
    """Open while it has nothing to do."""


class Environments:
    """All environments, and the queue that they post to."""

    def __init__(
        self,
        clock: Clock,
        state: ApiState,
        layout: Layout,
        figures: Figures,
        servers: Sequence[Server],
        *,
        random: Random,
        on_post: Callable[[int, Request], None],
    ) -> None:
        """
        Args:
            on_post: called with the id of a group in the queue, and how it was sampled.
        """
        self._clock = clock
        self._state = state
        self._layout = layout
        self._figures = figures
        self._servers = servers
        self._random = random
        self._on_post = on_post
        self._all: list[_Environment] = []
        self._num_sampling = 0
        """Sequences of all that are not posted yet."""
        self._hungry: dict[int, None] = {}
        """Those that would start more than they may, in the order in which they asked."""
        self.idle = IdleClock(lambda: clock.now)
        self._ahead = Ahead(
            group_size=layout.group_size,
            groups_per_item=1,
            max_workers=layout.max_workers,
            max_batches_offpolicy=layout.max_batches_offpolicy,
        )
        longest = figures.lengths.prompt + layout.group_size * max(
            (max(group) for group in figures.lengths.groups), default=round(figures.lengths.mean)
        )
        self._num_open_tokens = longest
        """An environment knows the limit of a request, and not its completions."""

    def start(self) -> None:
        """Register all, and let them ask."""
        for number in range(self._layout.num_environments):
            record = self._state.register_environment(
                RegisterEnvironmentRequest(
                    max_token_length=1,
                    desired_name=f"env{number}",
                    weight=1.0,
                    group_size=self._layout.group_size,
                    takes_slots=True,
                ),
                self._clock.now,
            )
            assert record is not None
            self._all.append(_Environment(record.id))
            self.idle.note(record.id)
        for environment in self._all:
            self._ask(environment)

    def wake(self) -> None:
        """Slots may be free, or the queue is shorter: ask for those that wait, in order.

        One that samples nothing is refused only where no slot is free, so nobody after it gets one either.
        """
        for id_ in list(self._hungry):
            environment = self._all[id_]
            if not self._ask(environment) and not environment.num_unposted:
                return

    def _ask(self, environment: _Environment) -> int:
        """Start as many items as the rules let it; returns their number."""
        num_started = self._num_startable(environment)
        for _ in range(num_started):
            self._begin(environment)
        is_full = self._idle_workers(environment) == 0
        if is_full:
            self._hungry.pop(environment.id, None)
        else:
            self._hungry[environment.id] = None
        if environment.num_unposted == 0 and environment.idle is None:
            self.idle.note(environment.id)
            environment.idle = self.idle.waiting(environment.id)
            environment.idle.__enter__()
        elif environment.num_unposted and environment.idle is not None:
            environment.idle.__exit__(None, None, None)
            environment.idle = None
        return num_started

    def _idle_workers(self, environment: _Environment) -> int:
        return self._ahead.idle_workers(1 / len(self._all), environment.num_unposted)

    def _num_startable(self, environment: _Environment) -> int:
        now, idle_workers = self._clock.now, self._idle_workers(environment)
        self._state.report_sampling(environment.id, environment.num_unposted)
        demand = Demand(num_sampled=environment.num_unposted, num_items=idle_workers, groups_per_item=1)
        granted = self._state.num_startable(environment.id, demand, now)
        if granted is not None:
            self._state.grant_slots(environment.id, granted)
            return granted
        of_servers = SamplingLimit.SERVERS if all(server.is_full for server in self._servers) else None
        limit = self._ahead.limit(idle_workers=idle_workers, of_servers=of_servers)
        if limit is not None:
            self._state.report_limit(environment.id, limit)
        status = self._state.environment_status(environment.id, now)
        assert status is not None
        return self._ahead.startable(
            status, self._layout.batch_size, num_unposted=environment.num_unposted, idle_workers=idle_workers
        )

    def _begin(self, environment: _Environment) -> None:
        self._num_sampling += self._layout.group_size
        num_ahead = self._num_sampling + self._state.queue.num_sequences
        if max(num_ahead, self._layout.batch_size) > MOST_SEQUENCES:
            raise TooMany(
                f"more than {MOST_SEQUENCES:,} sequences are sampled ahead of the trainer, too many to simulate: lower "
                "batch_size or max_staleness, or where that is unset max_batches_offpolicy"
            )
        if not environment.loads:
            first = self._random.randrange(len(self._servers))
            environment.loads = [_Load(server) for server in (*self._servers[first:], *self._servers[:first])]
        load = least_loaded(environment.loads)
        load.num_open_tokens += self._num_open_tokens
        load.num_tokens += self._num_open_tokens
        environment.num_unposted += 1

        def answered(request: Request) -> None:
            load.num_open_tokens -= self._num_open_tokens
            self._clock.after(self._figures.reward_s, lambda: self._post(environment, request))

        lengths = self._figures.lengths.draw(self._layout.group_size, self._random)
        load.server.submit(Request(lengths=lengths, on_answer=answered, prompt=self._figures.lengths.prompt))

    def _post(self, environment: _Environment, request: Request) -> None:
        placed = self._state.place(
            environment.id,
            self._layout.group_size,
            request.num_tokens,
            self._clock.now,
            policy_version=request.oldest_version,
            spread=self._random.random(),
        )
        self._state.evict()
        environment.num_unposted -= 1
        self._num_sampling -= self._layout.group_size
        self._on_post(placed.group.id, request)
        self._ask(environment)
