"""One run on paper: the training loop in the order of `train.loop`, with the real state of the rollout API."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from grpo_engine.errors import GrpoError
from grpo_engine.retrying import never
from grpo_engine.rollouts.state.api_state import ApiState
from grpo_engine.rollouts.state.records import Lease, Stored
from grpo_engine.simulate.clock import Clock
from grpo_engine.simulate.figures import Figures
from grpo_engine.simulate.generation import Environments
from grpo_engine.simulate.layout import Layout
from grpo_engine.simulate.servers import Request, make_servers
from grpo_engine.wire.rollouts import IdleTimes, RegisterRequest

_NOTHING_S = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer step."""

    ended_at: float
    waited_s: float
    """From the request for the batch to its arrival."""
    trained_s: float
    updated_s: float
    generation_s: float
    """In which environments had something to do, since the batch before: the mean over them."""
    since_s: float
    """Seconds since the batch before."""
    num_tokens: int
    """Of completions."""
    staleness_mean: float
    """Over tokens."""
    staleness_max: int
    num_dropped: int
    """Groups that were too old, since the batch before."""

    @property
    def trainer_busy(self) -> float:
        """`train/busy_fraction`."""
        worked = self.trained_s + self.updated_s
        return worked / (self.waited_s + worked)

    @property
    def generation_busy(self) -> float:
        """`rollout/busy_fraction`."""
        return self.generation_s / self.since_s if self.since_s else 1.0


class NoBatch(GrpoError):
    """The simulated run stands still: the rules let no batch form."""


class TooLong(GrpoError):
    """A simulated run has not come to its end in the time for it."""


def simulate(layout: Layout, figures: Figures, *, is_late: Callable[[], bool] = never) -> list[Step]:
    """The steps of one run, without those at its start.

    Args:
        is_late: whether the time for it has passed.

    Raises:
        NoBatch: no batch can form.
        TooMany: too many sequences are sampled ahead.
        TooLong: it was late before the last step.
    """
    return _Run(layout, figures).steps(is_late)[layout.num_warmup :]


class _Run:
    def __init__(self, layout: Layout, figures: Figures) -> None:
        self._layout, self._figures = layout, figures
        self._clock, self._random = Clock(), Random(layout.seed)
        self._state = ApiState(
            Stored(run=None, environments=[], leases=[], groups=[], latest_body=None),
            lease_s=math.inf,
            liveness_s=math.inf,
            share_wait_s=math.inf,
            now=0.0,
            buffering=layout.buffering,
            random=Random(layout.seed),
        )
        self._servers = make_servers(self._clock, figures.server, layout.num_servers)
        self._sampled: dict[int, Request] = {}
        """Groups in the queue, or in the batch, by id."""
        self._environments = Environments(
            self._clock,
            self._state,
            layout,
            figures,
            self._servers,
            random=self._random,
            on_post=self._posted,
        )
        self._steps: list[Step] = []
        self._version = 0
        self._lease = ""
        self._asked_at: float | None = None
        """Since when the trainer waits for a batch."""
        self._num_dropped = 0

    def steps(self, is_late: Callable[[], bool]) -> list[Step]:
        """Run to the last step."""
        layout = self._layout

        def is_over() -> bool:
            if is_late():
                raise TooLong(f"{len(self._steps)} of {layout.num_steps + layout.num_warmup} steps were simulated")
            return len(self._steps) >= layout.num_steps + layout.num_warmup

        self._state.register(
            RegisterRequest(
                wandb_group="",
                wandb_project="",
                batch_size=layout.batch_size,
                max_token_len=1 << 40,
                checkpoint_dir="",
                save_checkpoint_interval=0,
                starting_step=0,
                num_steps=layout.num_steps + layout.num_warmup + 1,
                max_staleness=layout.max_staleness,
            ),
            0,
        )
        self._ask_for_batch()
        self._environments.start()
        if not self._clock.run_until(is_over):
            problem = self._state.why_no_batch(self._clock.now) or "environments may start no more groups"
            raise NoBatch(
                f"step {len(self._steps) + 1} gets no batch: {problem}: raise max_staleness, or lower batch_size"
            )
        return self._steps

    def _posted(self, group_id: int, request: Request) -> None:
        self._sampled[group_id] = request
        if self._asked_at is not None and self._state.queue.num_sequences >= self._layout.batch_size:
            self._ask_for_batch()

    def _ask_for_batch(self) -> None:
        now = self._clock.now
        if self._asked_at is None:
            self._asked_at = now
        handout = self._state.next_batch(
            client="trainer",
            ack=self._lease,
            lease_id=str(len(self._steps)),
            now=now,
            policy_version=self._version,
        )
        self._num_dropped += handout.num_never_used
        for group_id in handout.dropped:
            self._sampled.pop(group_id, None)
        if handout.lease is not None:
            lease, self._lease, began = handout.lease, handout.lease.id, self._asked_at
            self._asked_at = None
            idle = self._environments.idle.take()
            self._clock.after(self._figures.trainer.fetch_s, lambda: self._train(lease, began, idle))
        if handout.lease is not None or handout.dropped or handout.acknowledged:
            self._environments.wake()

    def _train(self, lease: Lease, began: float, idle: IdleTimes) -> None:
        waited = sum(idle.idle_s.values()) / len(idle.idle_s) if idle.idle_s else 0.0
        groups = [self._sampled[id_] for id_ in lease.group_ids]
        num_tokens = sum(group.num_tokens for group in groups)
        oldest = min(group.oldest_version or 0 for group in groups)
        versions = sum(group.version_tokens for group in groups) / num_tokens
        num_inputs = num_tokens + self._figures.lengths.prompt * sum(len(group.lengths) for group in groups)
        if self._layout.buffering.max_uses == 1:
            for id_ in lease.group_ids:
                del self._sampled[id_]
        trainer = self._figures.trainer
        alone_s = trainer.step_s(num_inputs, self._layout.num_ranks) * self._random.choice(trainer.variation)
        fetched, version, seconds = self._clock.now, self._version, 0.0

        def recorded(updated_s: float) -> None:
            self._steps.append(
                Step(
                    ended_at=self._clock.now,
                    waited_s=fetched - began,
                    trained_s=seconds,
                    updated_s=updated_s,
                    generation_s=max(0.0, idle.since_s - waited),
                    since_s=idle.since_s,
                    num_tokens=num_tokens,
                    staleness_mean=version - versions,
                    staleness_max=version - oldest,
                    num_dropped=self._num_dropped,
                )
            )
            self._num_dropped = 0
            self._clock.after(trainer.between_s, self._ask_for_batch)

        def published() -> None:
            self._report_served(lease)
            recorded(self._clock.now - fetched - seconds)

        def stepped() -> None:
            nonlocal seconds
            seconds = self._clock.now - fetched
            self._version += 1
            if self._version % self._layout.update_every:
                published()
            else:
                self._update(published)

        self._compute(alone_s, stepped)

    def _compute(self, alone_s: float, done: Callable[[], None]) -> None:
        """Train for so many seconds of the devices alone; what servers on them take of it meanwhile comes on top."""
        if not self._layout.shares_device:
            self._clock.after(alone_s, done)
            return
        decoded_s = self._decoded_s()

        def passed() -> None:
            taken_s = (self._decoded_s() - decoded_s) * (1 - 1 / self._figures.trainer.beside_sampling)
            if taken_s > _NOTHING_S:
                self._compute(taken_s, done)
            else:
                done()

        self._clock.after(alone_s, passed)

    def _decoded_s(self) -> float:
        return sum(server.decoded_s() for server in self._servers) / len(self._servers)

    def _update(self, done: Callable[[], None]) -> None:
        """Pause all servers, write, and resume them with the new version."""
        num_running = len(self._servers)

        def written() -> None:
            for server in self._servers:
                server.resume(self._version)
            done()

        def paused() -> None:
            nonlocal num_running
            num_running -= 1
            if not num_running:
                self._clock.after(self._figures.update_s, written)

        for server in self._servers:
            server.pause(paused)

    def _report_served(self, lease: Lease) -> None:
        self._state.note_served(lease.id, self._version, self._clock.now)
        self._environments.wake()
