"""Requests that are held: until a condition is true, or until the queue has room for more groups."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from grpo_engine.rollouts.config import ApiConfig
from grpo_engine.rollouts.state.api_state import ApiState
from grpo_engine.rollouts.validation import CheckedGroup, Refusal

MAX_HELD_POSTS = 256
MAX_HELD_BYTES = 1024**3
"""Posts that may wait for room at the same time, and their bytes in memory."""


class Waiters:
    """Tasks that wait for a condition; use it from one event loop.

    Hundreds may wait while hundreds of groups a second arrive, so a task is woken only when its condition is true.
    """

    def __init__(self) -> None:
        self._waiting: dict[object, tuple[Callable[[], bool], asyncio.Future[None]]] = {}
        """In the order in which they began to wait."""
        self.is_closed = False

    def notify(self) -> None:
        """Wake the tasks whose condition is now true; call it after every change."""
        for condition, woken in self._waiting.values():
            if not woken.done() and (self.is_closed or condition()):
                woken.set_result(None)

    def close(self) -> None:
        """End every wait, also later ones."""
        self.is_closed = True
        self.notify()

    async def until(self, condition: Callable[[], bool], deadline: float) -> bool:
        """Wait until `condition` holds or this is closed; False when neither is so by `deadline` on the loop's clock.

        Tasks that wait for the same condition resume in the order in which they began, and one may make the condition
        false for the next.
        """
        loop, key = asyncio.get_running_loop(), object()
        try:
            async with asyncio.timeout_at(deadline):
                while not (self.is_closed or condition()):
                    self._waiting[key] = condition, loop.create_future()
                    await self._waiting[key][1]
        except TimeoutError:
            return False
        finally:
            self._waiting.pop(key, None)
        return True


class Admission:
    """Holds posts while the queue is full, and refuses them after `hold_s`."""

    def __init__(self, config: ApiConfig, waiters: Waiters, state: Callable[[], ApiState]) -> None:
        self._config = config
        self._waiters = waiters
        self._state = state
        self.num_held = 0
        """Posts that wait for room."""
        self.num_ever_held = 0
        self._held_bytes = 0

    async def wait_for_room(
        self, groups: Sequence[CheckedGroup], is_sender_gone: Callable[[], Awaitable[bool]] | None
    ) -> None:
        """Return once the queue has room for these groups.

        Raises:
            Refusal: 503 when there is no room within `hold_s`, 400 when the sender closed its connection meanwhile.
        """
        has_room = partial(self._has_room, {(group.env_id, group.num_sequences) for group in groups})
        if has_room():
            return
        num_bytes = sum(len(group.body) for group in groups)
        is_too_much = self.num_held >= MAX_HELD_POSTS or self._held_bytes + num_bytes > MAX_HELD_BYTES
        if self._waiters.is_closed or (self.num_held and is_too_much):
            raise self._full()
        self.num_held += 1
        self.num_ever_held += 1
        self._held_bytes += num_bytes
        deadline = asyncio.get_running_loop().time() + self._config.hold_s
        try:
            while not has_room() or self._waiters.is_closed:
                if not await self._waiters.until(has_room, deadline) or self._waiters.is_closed:
                    raise self._full()
                if is_sender_gone is not None and await is_sender_gone():
                    raise Refusal(400, "the connection was closed while this waited for room: send it again", "hung_up")
        finally:
            self.num_held -= 1
            self._held_bytes -= num_bytes

    def _has_room(self, sizes: set[tuple[int | None, int]]) -> bool:
        """Whether groups of these environments and numbers of sequences are admitted now."""
        config, state = self._config, self._state()
        if config.buffer != "once":  # it makes room for them
            return True
        batch_size = state.run.request.batch_size if state.run else 0
        sequences = state.num_waiting_sequences()
        # Whatever the limits: with room for less than two batches, leftovers could keep every batch from forming. What
        # is buffered makes no batch, and is bounded.
        if state.queue.num_sequences < max(1, 2 * batch_size):
            return True
        if sequences < config.max_queued_sequences and state.num_waiting_bytes() < config.max_queued_bytes:
            return True
        # The queue makes no batch as it is: admit environments whose groups could complete one.
        return state.selection.is_stuck and all(self._may_complete(env_id, size) for env_id, size in sizes)

    def _may_complete(self, env_id: int | None, size: int) -> bool:
        """Whether less than a batch of its environment is queued, or of groups of its size where that is its own."""
        state = self._state()
        assert state.run is not None
        batch_size, queue = state.run.request.batch_size, state.queue
        if env_id is None:
            return queue.sequences_by_environment[None] < batch_size
        record = state.environments.records.get(env_id)
        if record is None:
            return False
        is_less = queue.sequences_by_environment[env_id] < batch_size
        return is_less or (size == record.group_size and queue.sequences_in_groups_of(size, env_id) < batch_size)

    def _full(self) -> Refusal:
        waiting = self._state().num_waiting_sequences()
        return Refusal(503, f"the queue is full: {waiting} sequences wait for the trainer; send it again later", "full")
