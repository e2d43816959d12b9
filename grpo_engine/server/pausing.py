"""A pause: who requested it, and when it ends without a resume, so that a trainer that exited never blocks a server.

Time is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass

from grpo_engine.errors import DataError
from grpo_engine.processes import AnyProcess, ProcessIdentity
from grpo_engine.server.engine import WeightsBusy

_TRAINER_WAIT_S = 600.0
"""For the trainer to publish its weights: it may be writing a large checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """No batch begins while it lasts."""

    owner: AnyProcess | None
    """The process that will resume; None: it gave no pid."""
    until: float
    """Monotonic seconds."""

    @classmethod
    def requested(cls, owner_pid: int | None, timeout_s: float, now: float) -> Pause:
        """The pause that a client asks for.

        Raises:
            DataError: there is no process `owner_pid`.
        """
        owner = None if owner_pid is None else ProcessIdentity.of(owner_pid)
        if owner_pid is not None and owner is None:
            raise DataError(f"owner_pid {owner_pid}: no such process on this machine")
        return cls(owner=owner, until=now + timeout_s)

    @classmethod
    def until_published(cls, trainer: AnyProcess, now: float) -> Pause:
        """The pause of a server that started without the weights that `trainer` wrote into the previous server."""
        return cls(owner=trainer, until=now + _TRAINER_WAIT_S)

    @property
    def owner_text(self) -> str:
        """The owner as messages name it."""
        return f"process {self.owner.pid}" if self.owner else "a client without owner_pid"

    def why_over(self, now: float) -> str | None:
        """Why the pause has ended without a resume; None while it lasts."""
        if now >= self.until:
            return f"the pause of {self.owner_text} reached its time limit"
        if self.owner is not None and not self.owner.is_alive():
            return f"{self.owner_text} paused and exited"
        return None

    def check_may_follow(self, current: Pause | None, now: float) -> None:
        """Let only the owner of the current pause replace it.

        Raises:
            WeightsBusy: another process has paused the engine.
        """
        if current is not None and current.owner != self.owner and current.why_over(now) is None:
            raise WeightsBusy(f"already paused by {current.owner_text}; wait until it resumes")
