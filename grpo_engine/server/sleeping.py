"""Whether an engine sleeps, and for whom: what may follow what; and the turn in which a server loads.

    awake ── sleep ──► asleep ── wake_up ──► weights ── woken ──► awake

A pause ends when its owner exits; sleep does not, since the weights are gone: requests wait until a trainer wakes the
server, or the server is restarted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from grpo_engine.bridges.memory.turn_lock import TurnLock
from grpo_engine.errors import BridgeError, DataError
from grpo_engine.processes import AnyProcess, ProcessIdentity
from grpo_engine.server.config import ServerConfig
from grpo_engine.server.engine import EngineUnavailable, WeightsBusy
from grpo_engine.server.pausing import Pause
from grpo_engine.wire.inference import SleepState
from grpo_engine.wire.log_lines import WAITING_FOR_STEP

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sleep:
    """An engine that is not awake."""

    owner: AnyProcess
    """The trainer that put it to sleep, and will wake it."""
    state: SleepState = "asleep"
    since: float = field(default_factory=time.time)
    """Unix seconds."""

    @classmethod
    def asked(cls, owner_pid: int, current: Sleep | None, pause: Pause | None) -> Sleep:
        """The sleep that a trainer asks for.

        Raises:
            DataError: there is no process `owner_pid`.
            WeightsBusy: the engine sleeps for another trainer, which runs, or is paused by one.
        """
        owner = ProcessIdentity.of(owner_pid)
        if owner is None:
            raise DataError(f"owner_pid {owner_pid}: no such process on this machine")
        if current is not None and current.owner != owner and current.owner.is_alive():
            raise WeightsBusy(f"asleep for process {current.owner.pid}, which trains: end it, or start another server")
        if pause is not None and pause.owner != owner and pause.why_over(time.monotonic()) is None:
            raise WeightsBusy(f"paused by {pause.owner_text}; wait until it resumes")
        return cls(owner=owner)

    @property
    def words(self) -> str:
        """For people."""
        if self.state == "weights":
            return f"taking weights from process {self.owner.pid}"
        if self.owner.is_alive():
            return f"asleep while process {self.owner.pid} computes a step; requests wait"
        return f"asleep, and process {self.owner.pid}, which trained, has exited; requests wait for the next trainer"


def require_awake(current: Sleep | None) -> None:
    """Refuse what would change, or use, weights that are not there.

    Raises:
        WeightsBusy: the engine is not awake.
    """
    if current is not None:
        raise WeightsBusy(current.words)


def require(current: Sleep | None, state: SleepState, action: str) -> Sleep:
    """The sleep, in this state.

    Raises:
        BridgeError: it is another one, as of a server that was restarted meanwhile.
    """
    if current is None or current.state != state:
        now = "awake" if current is None else current.state
        raise BridgeError(f"{action}: the server is {now}, not {state}")
    return current


def require_possible(can_sleep: bool) -> None:
    """Refuse to put a server to sleep that was started without.

    Raises:
        BridgeError: it was.
    """
    if not can_sleep:
        raise BridgeError("this server was started without sleep mode: start it with --enable-sleep-mode")


class LoadingTurn:
    """The turn lock while a server loads; none where it takes no turns with a trainer."""

    def __init__(self, config: ServerConfig) -> None:
        folder = config.handover if config.enable_sleep_mode else None
        self._lock = None if folder is None else TurnLock(folder)

    def take(self, is_closing: Callable[[], bool]) -> None:
        """Wait until the trainer computes no step.

        Raises:
            EngineUnavailable: the server is closing.
        """
        if self._lock is not None and not self._lock.take(is_stopping=is_closing, when_held=_log_waiting):
            raise EngineUnavailable("the server is shutting down")

    def give_back(self) -> None:
        """The memory is free again, or as large as it stays."""
        if self._lock is not None:
            self._lock.give_back()


def _log_waiting() -> None:
    logger.info(WAITING_FOR_STEP.text)
