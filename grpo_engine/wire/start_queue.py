"""What a start that waits for ports and GPUs says of itself. Written by the command, read by other starts and `ps`."""

from __future__ import annotations

from grpo_engine.wire.codec import Message


class QueuedStart(Message):
    """A start in the queue of this user on this host. Example: `p`, run `lr-high`, for port 8000 and GPU 0."""

    pid: int
    """Of the command that waits."""
    profile: str
    name: str | None = None
    """That the run is to have, where it was given one."""
    since: float
    """When it came, in seconds since the epoch."""
    ports: list[int] = []
    """That no later start may take before it."""
    gpus: list[int] = []
    shares_gpus: bool = False
    """Whether it uses the GPUs beside others."""
