"""Whether a start-up gets on, and what it is at: by its log, its GPU memory, and what its processes read and write.

One `Progress` an attempt, looked at with every question whether it is ready: a look costs a stat, and reads only what
was added to the log. Reading and writing count because a model that is being downloaded says nothing in a log file:
the hub shows its progress to terminals alone, and vLLM switches it off altogether.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_tui.supervisor.capped_log import place, read_part

MAX_PART_BYTES = 64 * 1024
"""So much of what was added to the log is read in one look, from its end: the last phase is the one that counts."""
MAX_LINE_BYTES = 4096
WRITTEN_BYTES, READ_BYTES = 2**20, 2**24
"""So much must have been written or read to count: a process that hangs still polls and signals, some KB a minute."""
LINE_ENDS = re.compile(rb"[\r\n]+")
STILL = re.compile(rb'No available shared memory broadcast block found in|"GET /\S* HTTP/')
"""Lines that a hanging service writes as well: vLLM's executor every minute that its workers do not answer, and a web
server at every question of ours."""


@dataclass(frozen=True, slots=True)
class Movement:
    """The start-up moved since the last look."""

    phase: str | None
    """What it is at, e.g. `loading weights, 2 of 4 shards`; None when its log does not tell."""


class Progress:
    """Follows the start-up of one attempt."""

    def __init__(self, log: Path, log_offset: int, phases: Sequence[tuple[str, str]]) -> None:
        """Look at nothing yet.

        Args:
            log_offset: where in `log` this attempt begins, as absolute offset (see `capped_log.py`).
            phases: as `Launch.phases`; `{0}` in the words stands for the expression's first group. Of a line, the first
                expression that is found counts; of the log, the last line.
        """
        self._log = log
        self._offset = log_offset
        self._seen = (0, 0)
        """Size and time of the log when it was last read."""
        self._phases = [(re.compile(pattern), words) for pattern, words in phases]
        self._phase: str | None = None
        self._unended = b""
        """The last line of the log, which may go on."""
        self._gpu_memory_bytes = 0
        self._io = _InputOutput()

    def look(self, gpu_memory_bytes: int | None = None, pids: Iterable[int] = ()) -> Movement | None:
        """What happened since the last look; None when nothing moved.

        Args:
            gpu_memory_bytes: what the service holds; None where nobody knows.
            pids: its processes, as far as they are known.
        """
        has_moved = self._read_log()
        if gpu_memory_bytes is not None:
            has_moved |= gpu_memory_bytes > self._gpu_memory_bytes
            self._gpu_memory_bytes = gpu_memory_bytes
        has_moved |= self._io.has_moved(pids)
        return Movement(self._words()) if has_moved else None

    def _read_log(self) -> bool:
        part = self._added()
        if not part:
            return False
        lines = LINE_ENDS.split(self._unended + part)
        self._unended = lines[-1][-MAX_LINE_BYTES:]
        phase = next(filter(None, map(self._phase_of, reversed(lines))), None)
        if phase is not None and phase != self._phase:
            self._phase = phase
            self._io.begin_phase()
        return any(line.strip() and not STILL.search(line) for line in lines)

    def _added(self) -> bytes:
        """What was written to the log since the last look, at most the end of it."""
        try:
            stat = self._log.stat()
            if (stat.st_size, stat.st_mtime_ns) == self._seen:
                return b""
            self._seen = stat.st_size, stat.st_mtime_ns
            with self._log.open("rb", buffering=0) as file:
                end = place(file.fileno()).end
                newest = max(self._offset, end - MAX_PART_BYTES)
                part = read_part(file.fileno(), newest, MAX_PART_BYTES, with_header=False)
        except OSError:
            return b""
        self._offset = part.end
        return part.data

    def _phase_of(self, line: bytes) -> str | None:
        text = line.decode(errors="replace")
        found = ((pattern.search(text), words) for pattern, words in self._phases)
        return next((words.format(*match.groups(default="")) for match, words in found if match), None)

    def _words(self) -> str | None:
        written_bytes = self._io.written_in_phase_bytes
        if self._phase is None or written_bytes < 100 * WRITTEN_BYTES:
            return self._phase
        return f"{self._phase}, {written_bytes / 1e9:.1f} GB written"


class _InputOutput:
    """What processes read and write, in all, as the kernel counts it."""

    def __init__(self) -> None:
        self._counts: dict[int, tuple[int, int]] = {}
        self._read_bytes = self._written_bytes = 0
        """Since they last counted as a movement."""
        self.written_in_phase_bytes = 0

    def begin_phase(self) -> None:
        """Count for another phase."""
        self.written_in_phase_bytes = 0

    def has_moved(self, pids: Iterable[int]) -> bool:
        """Whether enough was read or written since this was last so. A process counts from its own start."""
        for pid in pids:
            before, now = self._counts.get(pid, (0, 0)), _read_and_written(pid)
            if now is None:
                self._counts.pop(pid, None)
                continue
            self._counts[pid] = now
            self._read_bytes += max(0, now[0] - before[0])
            written_bytes = max(0, now[1] - before[1])
            self._written_bytes += written_bytes
            self.written_in_phase_bytes += written_bytes
        if self._written_bytes < WRITTEN_BYTES and self._read_bytes < READ_BYTES:
            return False
        self._read_bytes = self._written_bytes = 0
        return True


def _read_and_written(pid: int) -> tuple[int, int] | None:
    """Bytes that a process read, from files or into mapped memory, and wrote; None when it is gone or not ours."""
    try:
        with open(f"/proc/{pid}/io", "rb") as file:
            counts = dict(line.split(b": ") for line in file.read().splitlines())
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    return int(counts[b"rchar"]) + int(counts[b"read_bytes"]), int(counts[b"wchar"])
