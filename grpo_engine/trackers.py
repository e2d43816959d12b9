"""Trackers of metrics (Weights & Biases and its like), as trainers and environments use them: failures are logged once.

Imports none of them: who starts a run of a tracker does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit, urlunsplit

from grpo_engine.config import Config
from grpo_engine.python_command import others_may_write
from grpo_engine.wire.secrets import masked_argv, masked_settings

log = logging.getLogger(__name__)


MAX_REASON_CHARACTERS = 1000
"""Of what a tracker, or its server, says of a failure."""


_END_OF_WANDB = {"WANDB_FINISH_TIMEOUT": "120", "WANDB_FINISH_TIMEOUT_RAISES": "true"}
"""By default wandb waits for a server that no longer answers without end, and the run with it. What was not sent stays
on the disk, for `wandb sync`."""


class Tracker(Protocol):
    """A destination of metrics."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the metrics of one step."""

    def close(self) -> None:
        """Flush and close."""


class RunTracker:
    """A run of Weights & Biases, or of a library with the same API."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send one step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Wait until all metrics were sent."""
        self._run.finish()


class FaultTolerant:
    """A tracker whose failures are not raised: the first is logged, and it gets no more metrics."""

    def __init__(self, name: str, tracker: Tracker, *, instead: str) -> None:
        """
        Args:
            instead: where the metrics are found, for the message.
        """
        self._name = name
        self._tracker = tracker
        self._instead = instead
        self._has_failed = False

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Forward one step, unless an earlier one failed."""
        if not self._has_failed:
            self._try(lambda: self._tracker.log(metrics, step), f"at step {step}")

    def close(self) -> None:
        """Close the tracker, also after a failure: earlier metrics may still be sent."""
        log.info("waiting until %s has sent its metrics", self._name)  # for as long as its library waits for a server
        self._try(self._tracker.close, "at the end")

    def _try(self, call: Callable[[], None], when: str) -> None:
        try:
            call()
        except Exception as error:  # networks, disks and services raise any class
            if not self._has_failed:
                log.error(
                    "%s failed %s and gets no more metrics (%s); the run continues, %s",
                    self._name,
                    when,
                    failure(error),
                    self._instead,
                )
            self._has_failed = True


def failure(error: Exception) -> str:
    """What a library of a tracker raised, as a message shows it: its server may have written it."""
    return f"{type(error).__name__}: {str(error)[:MAX_REASON_CHARACTERS]}"


def set_up_wandb(wandb: Any, folder: Path | None) -> None:
    """Load the settings of wandb, with a limit for its end.

    They are read in `folder` instead of a working directory that other users may write to.
    `base_url` in `./wandb/settings` says where the API key is sent, and a run is written to `./wandb` (wandb 0.31,
    `_WandbSetup._load_settings`, `Settings.root_dir`).

    Args:
        wandb: the module.
        folder: one that no other user may write to; None: a new one.
    """
    for name, value in _END_OF_WANDB.items():
        os.environ.setdefault(name, value)
    here = Path.cwd()
    read = [here / "wandb", here / ".wandb"]
    if not any(others_may_write(each) for each in (here, *read)):
        return
    for file in (each / "settings" for each in read):
        if os.path.lexists(file):
            log.warning("%s is ignored: other users may write to a folder above it: use ~/.config/wandb", file)
    with contextlib.chdir(folder or tempfile.mkdtemp(prefix="grpo-wandb-")):
        wandb.setup()


@contextlib.contextmanager
def masked_command_line() -> Iterator[None]:
    """Within, a library that sends the command line of this process sees it without secrets (wandb 0.31: `_args`)."""
    given = sys.argv
    sys.argv = masked_argv(given)
    try:
        yield
    finally:
        sys.argv = given


def public_settings(config: Config) -> dict[str, Any]:
    """The settings as they are uploaded: URLs without user and query, and no token or key."""
    settings = config.model_dump(mode="json", exclude={"api_token", "api_key"})
    return {name: _with_bare_urls(value) for name, value in masked_settings(settings).items()}


def _with_bare_urls(value: Any) -> Any:
    match value:
        case str():
            return _bare_url(value)
        case list():
            return [_with_bare_urls(each) for each in value]
        case dict():
            return {key: _with_bare_urls(each) for key, each in value.items()}
        case _:
            return value


def _bare_url(text: str) -> str:
    if "://" not in text:
        return text
    parts = urlsplit(text)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
