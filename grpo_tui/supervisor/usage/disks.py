"""Which of the file systems that a run writes to have little space left. Blocks: call it in a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from grpo_engine.serving.reporting import disk_space
from grpo_engine.wire.supervisor import DiskSpace

LOW_BYTES, LOW_SHARE = 1_000_000_000, 0.05
"""Little space is less than both."""
ENOUGH_FACTOR = 1.5
"""Of the limit: as much must be free again before the space counts as enough."""
SHARED_MEMORY = Path("/dev/shm")


class DiskWatch:
    """Measures a set of folders; a file system that several of them are on is listed once, by the first."""

    def __init__(self, folders: Iterable[Path], *, measure: Callable[[Path], DiskSpace | None] = disk_space) -> None:
        self._folders = list(folders)
        self._measure = measure
        self._low: set[int] = set()
        """Devices."""

    def low(self) -> list[DiskSpace]:
        """The file systems with little space left now."""
        spaces: dict[int, DiskSpace] = {}
        for folder in self._folders:
            if (space := self._measure(folder)) is not None:
                spaces.setdefault(space.device, space)
        self._low = {device for device, space in spaces.items() if self._is_low(space)}
        return [spaces[device] for device in spaces if device in self._low]

    def _is_low(self, space: DiskSpace) -> bool:
        limit_bytes = min(LOW_BYTES, LOW_SHARE * space.total_bytes)
        if space.device in self._low:
            limit_bytes *= ENOUGH_FACTOR
        return space.is_full or space.free_bytes < limit_bytes
