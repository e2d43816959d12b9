"""Whether an environment from which groups are wanted asks the inference server for any, and what to say if not. Pure.

Time comes in as an argument, in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

AGAIN_AFTER_S = 600.0
"""Between two lines about the same silence."""


class Silence:
    """Of one environment."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since: float | None = None
        self._told_at: float | None = None
        self._was_registered: bool | None = None

    @property
    def is_told(self) -> bool:
        """Whether something was said about a silence that lasts."""
        return self._told_at is not None

    def note(self, now: float, *, is_wanted: bool, has_asked: bool, is_registered: bool | None) -> float | None:
        """Seconds of silence, at the moments when they are worth a line; having registered is a sign of life too."""
        if has_asked or not is_wanted or is_registered != self._was_registered:
            self._since = self._told_at = None
            self._was_registered = is_registered
            if has_asked or not is_wanted:
                return None
        if self._since is None:
            self._since = now
        if now - self._since < self._limit_s or (self._told_at is not None and now - self._told_at < AGAIN_AFTER_S):
            return None
        self._told_at = now
        return now - self._since


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What was seen when an environment was silent."""

    file: str
    pid: int
    inference_url: str
    rollout_server_url: str
    queued: int
    """Sequences."""
    batch_size: int
    is_server_well: bool
    is_registered: bool | None
    """None: the API does not say, as stock ones."""
    uses_wandb: bool
    elsewhere: tuple[str, ...]
    """`address:port` of its open connections to others than the inference server and the API."""
    counters: str | None
    """What the server's `/metrics` counts, in words; None where it has none."""


def words(scene: Scene, silent_s: float) -> str:
    """What is wrong, where it was looked, and what to do."""
    wanted = f"the trainer waits for groups ({scene.queued} of {scene.batch_size} sequences are there)"
    if scene.is_registered is False:
        return (
            f"the environment has not registered with the rollout API {scene.rollout_server_url} for {silent_s:.0f} s, "
            f"while {wanted}: its own lines above say why ('wait for trainer to start': until the trainer asks for "
            "a batch), or it is still in its setup()"
            + (", or waits for a trainer with a W&B project (use_wandb)" if scene.uses_wandb else "")
            + f"; if it registers somewhere else, look in {scene.file} for what overwrites rollout_server_url"
        )
    if not scene.is_server_well:
        return (
            f"no request has reached the inference server {scene.inference_url} for {silent_s:.0f} s, while {wanted}: "
            "the server does not answer /health, and environments wait until it does, without limit: look at its log, "
            "or correct --inference-url"
        )
    looked = f"process {scene.pid} and those below it have no connection there"
    if scene.counters is not None:
        looked += f", {scene.counters}"
    found = f"; they have connections to {', '.join(scene.elsewhere)}" if scene.elsewhere else ""
    return (
        f"no request has reached the inference server {scene.inference_url} for {silent_s:.0f} s, while {wanted}: "
        f"{looked}{found}. Its settings file names this server, so the environment uses an address of its own (ports "
        f"9004 to 9007 where a single server is made by hand): look for base_url, APIServerConfig and ServerManager "
        f"in {scene.file}, or start the inference server where it asks"
    )
