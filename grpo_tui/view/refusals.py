"""Who is in the way of a service that was not started, read from the supervisor's words for it. Pure.

The words are `port 9001 is held by pid 4242 (user ann): python app.py`, several joined by semicolons, as
`grpo_tui.supervisor.ports` and `preflight` say them; a command line may hold semicolons too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from grpo_engine.wire.supervisor import ServiceStatus

NEXT_OBSTACLE = re.compile(r"; (?=port \d+ is held by |GPU \d+ has |pid \d+ \([^)]*\) holds a port)")
PORT_HOLDER = re.compile(r"port \d+ is held by ")
STRANGER = re.compile(r"port \d+ is held by pid (?P<pid>\d+) \(user (?P<user>[^)]*)\): ")
"""Processes of runs are told otherwise: `grpo-tui down` is for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle:
    """One reason why a service was not started."""

    words: str
    is_port: bool
    pid: int | None = None
    """Of a process that holds a port and belongs to no run."""
    user: str | None = None

    def may_be_ended_by(self, user: str) -> bool:
        """Whether `take_ports` ends it: never a process of another user or of a run, never a holder of a GPU alone."""
        return self.pid is not None and self.user == user


def obstacles(service: ServiceStatus) -> tuple[Obstacle, ...]:
    """What is in the way of a service; nothing unless its start was refused."""
    if not service.is_refused or not service.why:
        return ()
    return tuple(_obstacle(words) for words in NEXT_OBSTACLE.split(service.why))


def _obstacle(words: str) -> Obstacle:
    is_port = PORT_HOLDER.match(words) is not None
    stranger = STRANGER.match(words)
    if stranger is None:
        return Obstacle(words=words, is_port=is_port)
    return Obstacle(words=words, is_port=is_port, pid=int(stranger["pid"]), user=stranger["user"])
