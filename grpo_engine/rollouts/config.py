"""Settings of the rollout API. Torch-free: the terminal side builds command lines from them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AliasChoices, Field, model_validator

from grpo_engine.config import Config
from grpo_engine.flags import Flag


class ApiConfig(Config):
    """The rollout API: an address, where groups are kept, and how much is accepted."""

    host: str = "127.0.0.1"
    """Address to listen on; anything but loopback lets others add training data, so give a token with it."""
    port: int = Field(8000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    store: Annotated[Path | None, Flag(("--store", "--database"))] = Field(
        None, validation_alias=AliasChoices("store", "database")
    )
    """SQLite file that keeps queue, step and environments, and is gone on with when it is there; unset: a new
    rollouts.sqlite (rollouts-2.sqlite, …) in the current folder, under the supervisor the run folder's; `:memory:`
    forgets everything at the end."""
    fresh: bool = False
    """Forget what the store holds from earlier."""
    token: str | None = None
    """Bearer token that every request but `GET /` and `GET /info` must carry; unset: token_file's, $GRPO_API_TOKEN,
    else none."""
    token_file: Path | None = None
    """File with that token in its first line, which keeps it out of lists of processes."""

    # How much is accepted
    max_queued_sequences: int = Field(65536, ge=1)
    """Sequences that may wait; beyond it posts are held, then refused with 503. Two batches are always let in."""
    max_queued_bytes: int = Field(4 * 1024**3, ge=1)
    """Bytes of JSON that may wait (on the disk), with the same consequence."""
    max_body_bytes: int = Field(256 * 1024**2, ge=1024)
    """Longest request body, before and after decompression; a longer one is refused with 413."""
    hold_s: float = Field(20.0, ge=0)
    """Seconds that a post waits for room before it is refused; stock clients try a 503 again, three times in all."""

    max_staleness: int | None = Field(None, ge=0)
    """Groups whose oldest token is older than so many policy versions are dropped instead of being handed out. Where a
    group carries no versions, as from stock environments, the batches count that were handed out since it came. Unset:
    what the trainer says, else no bound; of two bounds the stricter."""

    # Patience
    lease_s: float = Field(120.0, gt=0)
    """Seconds after which a batch that was neither acknowledged nor followed by another request of the same client is
    offered to another one."""
    liveness_s: float = Field(30.0, gt=0)
    """Seconds without a word after which an environment counts as gone, and its share of each batch lapses."""
    share_wait_s: float = Field(60.0, ge=0)
    """Seconds that a batch waits for the guaranteed share of an environment that is there but sends too little."""

    log_level: Literal["critical", "error", "warning", "info", "debug"] = "info"
    """Least severe log line that is written."""
    access_log: bool = False
    """Write a line for every request; environments ask several times a second."""

    @model_validator(mode="after")
    def _has_one_token(self) -> ApiConfig:
        if self.token and self.token_file:
            raise ValueError("token and token_file are both given: leave one out")
        return self
