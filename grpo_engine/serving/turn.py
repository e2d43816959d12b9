"""The turn of a service that its supervisor started while others, which it needs, are not ready yet.

Such a process imports its modules and reads files at once. Until its turn it opens no port, touches no GPU and asks no
other service; then it reads a byte from a pipe of its keeper. A process that anything else started begins at once.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import TypeVar

from grpo_engine.importing import collecting_nothing
from grpo_engine.wire.environment_variables import GATE_VARIABLE
from grpo_engine.wire.log_lines import PREPARED

PreparedT = TypeVar("PreparedT")

log = logging.getLogger(__name__)


def begin_in_turn(
    prepare: Callable[[], PreparedT | None], environment: MutableMapping[str, str], *, always: bool = False
) -> PreparedT | None:
    """Return when it is this process's turn; where that is later, what `prepare` has returned, which is called first.

    Args:
        prepare: what can be done before; its errors are logged only, since the service runs into them at its turn.
        environment: of this process; the variable is removed, so that no process below it takes it for its own.
        always: prepare also where the turn has come, for processes that are forked from this one.
    """
    descriptor = environment.pop(GATE_VARIABLE, None)
    if descriptor is None:
        return _prepared(prepare) if always else None
    prepared = _prepared(prepare)
    log.info(PREPARED.text, _age_s())
    sys.stderr.flush()
    byte = os.read(int(descriptor), 1)
    os.close(int(descriptor))
    if not byte:
        log.error("its keeper has ended before its turn came; this process exits too")
        raise SystemExit(1)
    return prepared


def _prepared(prepare: Callable[[], PreparedT | None]) -> PreparedT | None:
    try:
        with collecting_nothing():
            return prepare()
    except Exception as error:  # a missing package, file or model: reported by what needs it, when its turn comes
        log.info("cannot prepare everything before its turn: %s: %s", type(error).__name__, error)
        return None


def _age_s() -> float:
    """Seconds since this process was started."""
    start_ticks = int(Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / os.sysconf("SC_CLK_TCK")
