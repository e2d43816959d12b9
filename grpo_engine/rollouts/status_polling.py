"""Status requests of environments: long polling, and the slots that are granted with the answers. Nothing is stored."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from grpo_engine.rollouts.backpressure import Waiters
from grpo_engine.rollouts.idle_clock import IdleClock
from grpo_engine.rollouts.state.api_state import ApiState
from grpo_engine.rollouts.state.slots import Demand
from grpo_engine.wire.rollouts import EnvironmentReport, EnvironmentStatus

MAX_HELD = 20_000
"""Reports that are held at a time, as many as environments register: each change of the state looks at all of them.
Beyond it, requests are answered at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _StatusRequest:
    """A request of an environment for its status."""

    report: EnvironmentReport
    number: int
    """Of its requests for slots."""


class StatusPolling:
    """Answers status requests, and holds them while there is no news."""

    def __init__(
        self, waiters: Waiters, idle: IdleClock, state: Callable[[], ApiState], *, now: Callable[[], float]
    ) -> None:
        self._waiters = waiters
        self._now = now
        self._idle = idle
        self._state = state
        self._num_asked: dict[int, int] = {}
        """Requests of each environment for slots."""
        self._num_held = 0
        """Reports in requests that are held."""

    async def statuses(
        self, reports: Sequence[EnvironmentReport], *, wait_s: float = 0.0, says_idle: bool = False
    ) -> list[EnvironmentStatus | None]:
        """Step, queue and evaluation as each environment sees them; None for an id that is not registered.

        Args:
            wait_s: hold the answer up to this long while there is no news for any of them; that it may start groups is
                news too.
            says_idle: whether they have nothing to do when, and only when, they wait.
        """
        deadline = asyncio.get_running_loop().time() + wait_s
        requests = [self._numbered(report) for report in reports]
        state = self._state()
        for report in reports:
            if report.limit is not None:
                state.report_limit(report.env_id, report.limit)
        statuses = [state.environment_status(report.env_id, self._now()) for report in reports]
        for report in reports if says_idle else ():
            if report.env_id in state.environments.records:
                self._idle.note(report.env_id)
        # All of them, not up to the first that frees slots.
        freed = {state.report_sampling(each.env_id, each.sampled) for each in reports if each.sampled is not None}
        if True in freed:
            self._waiters.notify()
            # Those that wait take the slots first: an environment of which all groups are dropped would take them
            # again without end, and others lack the last of a batch.
            await asyncio.sleep(0)

        def is_any_news() -> bool:
            return any(map(self._is_news, requests))

        if wait_s <= 0 or self._num_held + len(reports) > MAX_HELD or is_any_news():
            return [self._granted(request, status) for request, status in zip(requests, statuses, strict=True)]
        self._num_held += len(reports)
        with contextlib.ExitStack() as stack:
            for report in reports:
                stack.enter_context(self._idle.waiting(report.env_id))
            try:
                await self._waiters.until(is_any_news, deadline)
            finally:
                self._num_held -= len(reports)
        return [self._granted(request, self._status_after_wait(request.report.env_id)) for request in requests]

    def _numbered(self, report: EnvironmentReport) -> _StatusRequest:
        if report.env_id not in self._state().environments.records:  # any number of ids could be asked for
            return _StatusRequest(report=report, number=0)
        has_demand = report.sampled is not None
        number = self._num_asked[report.env_id] = self._num_asked.get(report.env_id, 0) + has_demand
        return _StatusRequest(report=report, number=number)

    def _startable(self, request: _StatusRequest) -> int | None:
        """Groups that its environment may start; None where it did not ask, or has asked again since then: a later
        request knows more of what it samples."""
        report = request.report
        if report.sampled is None or self._num_asked.get(report.env_id, 0) != request.number:
            return None
        demand = Demand(
            num_sampled=report.sampled, num_items=report.wanted_items, groups_per_item=report.groups_per_item
        )
        return self._state().num_startable(report.env_id, demand, self._now())

    def _is_news(self, request: _StatusRequest) -> bool:
        if self._startable(request):
            return True
        status = self._state().environment_status(request.report.env_id, self._now(), is_heard=False)
        return status is None or request.report.is_news(status)

    def _granted(self, request: _StatusRequest, status: EnvironmentStatus | None) -> EnvironmentStatus | None:
        num_groups = self._startable(request)
        if status is None or num_groups is None:
            return status
        self._state().grant_slots(request.report.env_id, num_groups)
        return status.model_copy(update={"may_start": num_groups})

    def _status_after_wait(self, env_id: int) -> EnvironmentStatus | None:
        """The environment may have disconnected: a request from before must not mark it as connected again."""
        state = self._state()
        record = state.environments.records.get(env_id)
        is_heard = record is not None and record.is_connected
        return state.environment_status(env_id, self._now(), is_heard=is_heard)
