"""Detects an environment that sends no requests to the inference server while groups are needed. Pure.

Time is an argument, in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

REPEAT_AFTER_S = 600.0
"""Interval of warnings about the same silence."""


class SilenceDetector:
    """Silence of one environment."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since: float | None = None
        self._reported_at: float | None = None
        self._was_registered: bool | None = None

    @property
    def is_reported(self) -> bool:
        """Whether the current silence was reported."""
        return self._reported_at is not None

    def note(self, now: float, *, is_wanted: bool, has_requested: bool, is_registered: bool | None) -> float | None:
        """Seconds of silence when a warning is due, else None; a registration ends a silence too."""
        if has_requested or not is_wanted or is_registered != self._was_registered:
            self._since = self._reported_at = None
            self._was_registered = is_registered
            if has_requested or not is_wanted:
                return None
        if self._since is None:
            self._since = now
        if now - self._since < self._limit_s or (
            self._reported_at is not None and now - self._reported_at < REPEAT_AFTER_S
        ):
            return None
        self._reported_at = now
        return now - self._since


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """State of both servers and the environment during a silence."""

    file: str
    pid: int
    inference_url: str
    rollout_server_url: str
    queued: int
    """Sequences."""
    batch_size: int
    is_server_healthy: bool
    is_registered: bool | None
    """None: unknown, as with stock APIs."""
    uses_wandb: bool
    other_peers: tuple[str, ...]
    """`address:port` of its connections to other servers."""
    counters: str | None
    """Text on the request counters of the server's `/metrics`; None if it has none."""


def silence_message(scene: Observation, silent_s: float) -> str:
    """The warning: what is wrong, what was checked, and what to do."""
    wanted = f"the trainer waits for groups ({scene.queued} of {scene.batch_size} sequences are queued)"
    if scene.is_registered is False:
        return (
            f"the environment has not registered with the rollout API {scene.rollout_server_url} for {silent_s:.0f} s, "
            f"while {wanted}: see its log lines above ('wait for trainer to start': until the trainer requests "
            "a batch), or it is still in setup()"
            + (", or waits for a trainer with a W&B project (use_wandb)" if scene.uses_wandb else "")
            + f"; if it registers elsewhere, look in {scene.file} for code that overwrites rollout_server_url"
        )
    if not scene.is_server_healthy:
        return (
            f"no request has reached the inference server {scene.inference_url} for {silent_s:.0f} s, while {wanted}: "
            "the server does not answer /health, and environments wait for it without limit: check its log, or correct "
            "--inference-url"
        )
    checked = f"process {scene.pid} and those below it have no connection there"
    if scene.counters is not None:
        checked += f", {scene.counters}"
    found = f"; they have connections to {', '.join(scene.other_peers)}" if scene.other_peers else ""
    return (
        f"no request has reached the inference server {scene.inference_url} for {silent_s:.0f} s, while {wanted}: "
        f"{checked}{found}. Its settings file names this server, so the environment's code sets another address (ports "
        f"9004 to 9007 if it configures a single server): look for base_url, APIServerConfig and ServerManager "
        f"in {scene.file}, or start the inference server at that address"
    )
