"""Settings of the rollout API. Torch-free: the terminal side builds command lines from them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AliasChoices, Field, model_validator

from grpo_engine.config import Config, LogLevel
from grpo_engine.flags import Flag
from grpo_engine.rollouts.state.buffering import Buffering, Kind, Sampling
from grpo_engine.wire.rollouts import Whole


class ApiConfig(Config):
    """The rollout API: address, store, and limits."""

    host: str = "127.0.0.1"
    """Address to listen on; on any but loopback other hosts can add training data, so set a token too."""
    port: int = Field(8000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    store: Annotated[Path | None, Flag(("--store", "--database"))] = Field(
        None, validation_alias=AliasChoices("store", "database")
    )
    """SQLite file with queue, step and environments; an existing one is resumed. Unset: a new rollouts.sqlite
    (rollouts-2.sqlite, …) in the current folder, or in the run folder under the supervisor. `:memory:`: not kept."""
    fresh: bool = False
    """Delete the content of the store first."""
    token: str | None = None
    """Token that requests must carry (`Authorization: Bearer …`), except those of /, /info, /health, /status and
    /metrics; unset: from token_file, $GRPO_API_TOKEN or $GRPO_API_TOKEN_FILE, which a supervisor sets, else none."""
    token_file: Path | None = None
    """File with that token in its first line, which keeps it out of process listings."""
    allow_without_token: bool = False
    """Require no token, also under a supervisor: for stock clients. Every user of this machine can then add training
    data and reset the run."""

    # Limits
    max_queued_sequences: int = Field(65536, ge=1)
    """Sequences that may be queued; beyond it posts are held, then refused with 503. Two batches always fit."""
    max_queued_bytes: int = Field(4 * 1024**3, ge=1)
    """Bytes of JSON that may be queued (on disk), with the same effect."""
    max_body_bytes: int = Field(256 * 1024**2, ge=1024)
    """Longest request body, before and after decompression; a longer one is refused with 413."""
    hold_s: float = Field(20.0, ge=0)
    """Seconds that a post is held for room before it is refused; stock clients retry a 503, three attempts in all."""

    max_staleness: Whole | None = Field(None, ge=0)
    """Groups whose oldest token is more than this many policy versions old are dropped. For groups without versions, as
    from stock environments, the batches since their arrival count. Unset: the trainer's bound, else none; of two bounds
    the stricter applies."""

    # What is delivered
    buffer: Kind = "once"
    """`once`: each group exactly once, oldest first; posts wait while the queue is full. `window`: each at most once,
    and the newest groups replace the oldest. `replay`: as `window`, and each up to buffer_uses times."""
    buffer_capacity: int | None = Field(None, ge=1)
    """Sequences in a window or replay buffer; two batches always fit. Unset: max_queued_sequences."""
    buffer_uses: int = Field(4, ge=1)
    """Batches of a replay buffer in which a group may be, one after the other."""
    buffer_sampling: Sampling | None = None
    """Which groups of a window or replay buffer make a batch: uniform (unset), newest, oldest, or advantage: likelier
    the larger their mean absolute advantage. What is too old is removed first, as max_staleness says."""

    # Time-outs
    lease_s: float = Field(120.0, gt=0)
    """Seconds after which a batch that was neither acknowledged nor followed by another request of the same client is
    offered to another one."""
    liveness_s: float = Field(30.0, gt=0)
    """Seconds without a request after which an environment counts as gone, and its share of each batch lapses."""
    share_wait_s: float = Field(60.0, ge=0)
    """Seconds that a batch waits for the guaranteed share of an environment that is connected but sends too little."""

    log_level: LogLevel = "info"
    """Least severe level that is logged."""
    access_log: bool = False
    """Log every request; environments send several per second."""

    @property
    def buffering(self) -> Buffering:
        """What the queue guarantees."""
        if self.buffer == "once":
            return Buffering()
        return Buffering(
            kind=self.buffer,
            max_sequences=self.buffer_capacity or self.max_queued_sequences,
            max_bytes=self.max_queued_bytes,
            max_uses=self.buffer_uses if self.buffer == "replay" else 1,
            sampling=self.buffer_sampling or "uniform",
        )

    @model_validator(mode="after")
    def _has_a_buffer_for_its_settings(self) -> ApiConfig:
        fields = type(self).model_fields  # a profile that is written out states defaults too
        given = {name for name in self.model_fields_set if getattr(self, name) != fields[name].default}
        if self.buffer == "once" and (unused := given & {"buffer_capacity", "buffer_sampling", "buffer_uses"}):
            raise ValueError(
                f"{', '.join(sorted(unused))}: no effect with buffer once: leave out, or set buffer to window or replay"
            )
        if self.buffer == "window" and "buffer_uses" in given:
            raise ValueError("buffer_uses: no effect with buffer window, which delivers a group once: set replay")
        return self

    @model_validator(mode="after")
    def _has_one_token(self) -> ApiConfig:
        if self.token and self.token_file:
            raise ValueError("token and token_file are both set: remove one")
        if self.allow_without_token and (self.token or self.token_file):
            raise ValueError("allow_without_token is set, and so is a token: remove one")
        return self
