"""Settings of the rollout API. Torch-free: the terminal side builds command lines from them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from grpo_engine.config import Config

IN_MEMORY = Path(":memory:")
"""The `database` that is forgotten at the end."""

DEFAULT_DATABASE = Path("rollouts.sqlite")
"""In the current folder; a supervised API gets one in its run folder."""


class ApiConfig(Config):
    """The rollout API: an address, where groups are kept, and how much is accepted."""

    host: str = "127.0.0.1"
    """Address to listen on; anything but loopback lets others add training data, so give a token with it."""
    port: int = Field(8000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    database: Path | None = None
    """SQLite file that keeps queue, step and environments across restarts; unset: rollouts.sqlite in the current
    folder; `:memory:` forgets everything at the end."""
    fresh: bool = False
    """Forget what the database holds from earlier."""
    token: str | None = None
    """Bearer token that every request but `GET /` and `GET /info` must carry; unset: $GRPO_API_TOKEN, else none."""

    # How much is accepted
    max_queued_sequences: int = Field(16384, ge=1)
    """Sequences that may wait; beyond it posts are held, then refused with 503. Two batches are always let in."""
    max_queued_bytes: int = Field(2 * 1024**3, ge=1)
    """Bytes of JSON that may wait, with the same consequence."""
    max_body_bytes: int = Field(256 * 1024**2, ge=1024)
    """Longest request body, before and after decompression; a longer one is refused with 413."""
    hold_s: float = Field(20.0, ge=0)
    """Seconds that a post waits for room before it is refused; stock clients try a 503 again, three times in all."""

    # Patience
    lease_s: float = Field(120.0, gt=0)
    """Seconds after which a batch that was neither acknowledged nor followed by another request of the same client is
    offered to another one."""
    liveness_s: float = Field(30.0, gt=0)
    """Seconds without a word after which an environment counts as gone, and its share of each batch lapses."""

    log_level: Literal["critical", "error", "warning", "info", "debug"] = "info"
    """Least severe log line that is written."""
    access_log: bool = False
    """Write a line for every request; environments ask several times a second."""
