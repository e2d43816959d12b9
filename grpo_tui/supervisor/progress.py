"""Whether a start-up makes progress, and its phase: from its log, its GPU memory, and the I/O of its processes.

One `Progress` per attempt, evaluated after every readiness probe: it costs a stat, and reads only what was added to the
log. I/O counts because a download logs nothing: the hub shows its progress bar on terminals only, and vLLM disables it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_tui.run_files.log_file import place, read_part

MAX_PART_BYTES = 64 * 1024
"""Read at most from the end of what was added to the log: the last phase counts."""
MAX_LINE_BYTES = 4096
WRITTEN_BYTES, READ_BYTES = 2**20, 2**24
"""I/O that counts as progress: a process that hangs still reads and writes some KB a minute."""
LINE_ENDS = re.compile(rb"[\r\n]+")
NO_PROGRESS = re.compile(rb'No available shared memory broadcast block found in|"GET /\S* HTTP/')
"""Lines that a hanging service logs too: vLLM's executor once a minute while its workers do not answer, and a web
server at every probe."""


@dataclass(frozen=True, slots=True)
class Movement:
    """The start-up made progress since the last check."""

    phase: str | None
    """E.g. `loading weights, 2 of 4 shards`; None when its log shows none."""


class Progress:
    """Follows the start-up of one attempt."""

    def __init__(self, log: Path, log_offset: int, phases: Sequence[tuple[str, str]]) -> None:
        """Read nothing yet.

        Args:
            log_offset: where in `log` this attempt begins, as absolute offset (see `grpo_tui.run_files.log_file`).
            phases: as `Launch.phases`; `{0}` in the text is the expression's first group. In a line the first
                expression that matches counts, in the log the last line.
        """
        self._log = log
        self._offset = log_offset
        self._seen = (0, 0)
        """Size and time of the log when it was last read."""
        self._phases = [(re.compile(pattern), words) for pattern, words in phases]
        self._phase: str | None = None
        self._unended = b""
        """The last line of the log, which may be incomplete."""
        self._gpu_memory_bytes = 0
        self._io = _InputOutput()

    def look(self, gpu_memory_bytes: int | None = None, pids: Iterable[int] = ()) -> Movement | None:
        """The progress since the last check; None when there was none.

        Args:
            gpu_memory_bytes: GPU memory of the service; None where unknown.
            pids: its known processes.
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
        return any(line.strip() and not NO_PROGRESS.search(line) for line in lines)

    def _added(self) -> bytes:
        """What was written to the log since the last check, at most its end."""
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
    """The I/O of processes in total, as the kernel counts it."""

    def __init__(self) -> None:
        self._counts: dict[int, tuple[int, int]] = {}
        self._read_bytes = self._written_bytes = 0
        """Since they last counted as progress."""
        self.written_in_phase_bytes = 0

    def begin_phase(self) -> None:
        """Start counting for a new phase."""
        self.written_in_phase_bytes = 0

    def has_moved(self, pids: Iterable[int]) -> bool:
        """Whether enough was read or written since it last was. A process counts from its own start."""
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
    """Bytes that a process read, from files or into mapped memory, and wrote; None if it ended or is not ours."""
    try:
        with open(f"/proc/{pid}/io", "rb") as file:
            counts = dict(line.split(b": ") for line in file.read().splitlines())
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    return int(counts[b"rchar"]) + int(counts[b"read_bytes"]), int(counts[b"wchar"])
