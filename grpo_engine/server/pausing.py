"""A pause: who asked for it, and when it ends by itself, so that a dead trainer never stops a server for good.

Pure; time comes in as an argument.
"""

from __future__ import annotations

from dataclasses import dataclass

from grpo_engine.bridges.process_identity import ProcessIdentity

_TRAINER_COMES_WITHIN_S = 600.0
"""It may be writing a large checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """No batch begins while it lasts."""

    owner: ProcessIdentity | None
    """Who will resume; None: nobody in particular."""
    until: float
    """Monotonic seconds."""

    @classmethod
    def until_it_comes(cls, trainer: ProcessIdentity, now: float) -> Pause:
        """Of a server that has begun without the weights that a trainer wrote into the one before it."""
        return cls(owner=trainer, until=now + _TRAINER_COMES_WITHIN_S)

    @property
    def owner_text(self) -> str:
        """The owner in words."""
        return f"process {self.owner.pid}" if self.owner else "somebody who gave no owner_pid"

    def is_over(self, now: float) -> str | None:
        """Why the pause has ended by itself; None while it lasts."""
        if now >= self.until:
            return f"the pause of {self.owner_text} reached its time limit"
        if self.owner is not None and not self.owner.is_alive():
            return f"{self.owner_text} paused and died"
        return None
