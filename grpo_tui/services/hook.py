"""A hook: a command that is run on an event of a service or of the run."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from grpo_engine.config import Config
from grpo_tui.services.base import ARGV


class HookEvent(StrEnum):
    """Events that a hook can run on; each of a service, and of the run as a whole."""

    READY = "ready"
    """A service is ready; every service is."""
    FAILED = "failed"
    """An attempt of a service has failed, whether it is restarted or not; the run is over and has failed."""
    RESTARTED = "restarted"
    """A service is ready again in a later attempt. (Of services alone.)"""
    FINISHED = "finished"
    """A service has exited with code 0; the run is over and has not failed."""


class Hook(Config):
    """One `[[hooks]]` table of a profile."""

    on: tuple[HookEvent, ...] = Field(min_length=1)
    """Events at which it runs."""
    services: tuple[str, ...] = ()
    """Services whose events it runs on; empty: all of them, and the run."""
    argv: ARGV
    """Program and arguments; never a shell string. Runs in the folder of the profile, and finds in its environment
    GRPO_TUI_RUN, GRPO_TUI_RUN_FOLDER and GRPO_TUI_HOOK_EVENT, _SERVICE (empty for the run), _ATTEMPT, _STATE, _WHY and
    _EXIT_CODE. Processes that it leaves behind are killed; its output is in `hooks.log`."""
    timeout_s: float = Field(30.0, gt=0)
    """Seconds after which it is killed with all that it started."""
