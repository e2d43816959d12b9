"""Metrics parsed from a program's output and written to `metrics.jsonl`, for trainers that write no such file.

A line that matches `step` opens a step; the values after it belong to that step. A step is written when the next one
opens, when the service has exited, or after a second without a value if it has all metrics that steps usually have.
If more values follow, the whole step is written once more; readers take the newer line.

A new attempt that counts from 1 again is written as it counts, behind the steps of the attempt before: readers take the
newer line of a step, as for a trainer that resumed from a checkpoint. A supervisor that takes over reads the attempt
from its start and writes what the file does not have yet.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from grpo_engine.wire.codec import to_line, write_atomically
from grpo_engine.wire.metrics import MetricsLine
from grpo_engine.wire.run_folder import METRICS_FILE, console_offset_file, service_log
from grpo_tui.run_files.log_file import read_part, searched_lines
from grpo_tui.services.base import ConsoleMetric, Launch

STEP = "step"
POLICY_VERSION = "policy_version"
POLL_S = 1.0
MOST_STEPS = 2**63 - 1
"""Largest step and policy version, as in `MetricsLine`."""
MAX_STEPS = 1_000_000
"""Written of an attempt: a service that floods its log with steps must not fill the disk, or the memory of readers."""
REST_WITHIN_S = 5.0
"""For what a service has printed when it exits: a service that floods its log must not hold up the end of its run."""
MAX_PART_BYTES = 1 << 20
"""The log is read in parts of this size; a longer line is read in pieces."""

ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-Z\\-~])")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step, as parsed."""

    step: int
    policy_version: int
    metrics: Mapping[str, float]
    """Finite numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenSteps:
    """Steps of an attempt that the file already has."""

    steps: tuple[int, ...] = ()
    """In the order in which they were written, each once."""
    last: MetricsLine | None = None


# --- lines to steps; pure ------------------------------------------------------------------------------------------


class StepReader:
    """Parses lines into steps."""

    def __init__(
        self,
        console: Mapping[str, ConsoleMetric],
        *,
        report: Callable[[str], None],
        written: WrittenSteps | None = None,
    ) -> None:
        """Read nothing yet.

        Args:
            console: patterns by metric, `step` among them; a `policy_version` among them is no metric; without it, the
                step is the policy version.
            report: called once per metric with a message about a value that cannot be kept.
            written: steps that the lines begin with, and that are not to be returned again.
        """
        self._step_pattern = re.compile(console[STEP].pattern)
        self._metrics = [(name, re.compile(m.pattern), m.scale) for name, m in console.items() if name != STEP]
        self._report = report
        self._reported: set[str] = set()
        self._written = written or WrittenSteps()
        self._last_places = {step: place for place, step in enumerate(self._written.steps)}
        self._num_reread = 0
        """How many of the written steps were read again."""
        last = self._written.last
        self._policy_version = None if POLICY_VERSION not in console else last.policy_version if last else 0
        self._step: int | None = None
        self._is_skipped = False
        """Whether this step is among the written ones and not the last of them."""
        self._values: dict[str, float] = {}
        self._names: set[str] = set()
        """Metrics that were printed in this step, also those whose values could not be kept."""
        self._given: dict[str, float] | None = None
        """Values of this step that were returned."""
        self._usual_names: set[str] | None = None
        """Metrics that all steps so far have had."""
        self._is_quiet = True

    def read(self, line: str) -> list[StepRecord]:
        """Read one whole line; return the step that it ends, if any."""
        line = ANSI.sub("", line)
        ended = []
        opening = self._step_pattern.search(line)
        step = None if opening is None or opening[1] is None else self._whole(STEP, opening[1], 1.0)
        if step is not None and step != self._step:
            ended = self._close()
            self._open(step)
        if not self._is_skipped:
            for name, pattern, scale in self._metrics:
                if (match := pattern.search(line)) and match[1] is not None:
                    self._take(name, match[1], scale)
        return ended

    def settle(self) -> list[StepRecord]:
        """The current step, if no value came since the last call and it has all metrics that steps usually have."""
        was_quiet, self._is_quiet = self._is_quiet, True
        is_whole = self._usual_names is None or self._usual_names <= self._names
        return self._give() if was_quiet and is_whole else []

    def end(self) -> list[StepRecord]:
        """After the last line: the current step."""
        if self._step is None and self._names:
            self._report(
                f"{', '.join(sorted(self._names))} printed without a step, so not kept: no line matched "
                f"step = {self._step_pattern.pattern!r}; correct that pattern"
            )
        return self._give()

    def _take(self, name: str, text: str, scale: float) -> None:
        self._is_quiet = False
        if name == POLICY_VERSION:
            version = self._whole(name, text, scale)
            self._policy_version = self._policy_version if version is None else version
            return
        self._names.add(name)
        value = self._number(name, text, scale)
        if value is not None and self._step is not None:
            self._values[name] = value

    def _whole(self, name: str, text: str, scale: float) -> int | None:
        """Parse a step or version; anything else is reported once each."""
        number = self._number(name, text, scale)
        if number is None or 0 <= round(number) <= MOST_STEPS:
            return None if number is None else round(number)
        self._refuse(name, f"{text}, not between 0 and 2^63-1", "the line opens no step" if name == STEP else "ignored")
        return None

    def _number(self, name: str, text: str, scale: float) -> float | None:
        """Parse a finite number; anything else is reported once per metric."""
        try:
            number = float(text) * scale
        except ValueError:
            self._refuse(name, f"{text!r}, which is not a number", "narrow the first group of its pattern")
            return None
        if math.isfinite(number):
            return number
        self._refuse(name, text, "left out of the metrics")
        return None

    def _refuse(self, name: str, what: str, therefore: str) -> None:
        if name not in self._reported:
            self._reported.add(name)
            at = "" if self._step is None else f" at step {self._step}"
            self._report(f"{name} is {what}{at}: {therefore} (reported once)")

    def _open(self, step: int) -> None:
        self._step, self._values, self._names, self._given = step, {}, set(), None
        self._is_skipped = False
        if self._last_places.get(step, -1) < self._num_reread:
            return
        self._num_reread = 1 + self._written.steps.index(step, self._num_reread)
        self._is_skipped = self._num_reread < len(self._written.steps)
        if not self._is_skipped and self._written.last is not None:
            self._values = dict(self._written.last.metrics)
            self._names, self._given = set(self._values), dict(self._values)

    def _close(self) -> list[StepRecord]:
        if self._step is not None and self._names:
            self._usual_names = self._names if self._usual_names is None else self._usual_names & self._names
        return self._give()

    def _give(self) -> list[StepRecord]:
        if self._step is None or not self._names or self._values == self._given:
            return []
        self._given = dict(self._values)
        version = self._step if self._policy_version is None else self._policy_version
        return [StepRecord(step=self._step, policy_version=version, metrics=self._given)]


# --- from a log to a file ------------------------------------------------------------------------------------------


class ConsoleMetrics:
    """Follows the output of one attempt and appends its steps to `metrics.jsonl`."""

    def __init__(
        self, launch: Launch, *, attempt: int, log_offset: int, run_folder: Path, notice: Callable[[str], None]
    ) -> None:
        """Read nothing yet.

        Args:
            log_offset: where in the log the attempt begins.
            notice: called on the event loop with messages for people.
        """
        self._console = launch.console
        self._log = service_log(run_folder, launch.name)
        self._offset = log_offset
        self._metrics_file = run_folder / METRICS_FILE
        self._mark = console_offset_file(run_folder, launch.name, attempt)
        self._notice = notice
        self._messages: list[str] = []
        self._reader: StepReader | None = None
        self._unwritten: list[StepRecord] = []
        self._num_steps = 0
        self._is_full = False
        self._is_fault_reported = False

    async def run(self, ended: asyncio.Event) -> None:
        """Write steps as they are printed; once `ended`, read the rest and return.

        When cancelled it has written whole lines only, and the next supervisor continues behind them.
        """
        while not ended.is_set():
            has_more = await self._look(is_over=False)
            with suppress(TimeoutError):
                async with asyncio.timeout(0 if has_more else POLL_S):
                    await ended.wait()
        rest_until_s = time.monotonic() + REST_WITHIN_S
        while await self._look(is_over=True):
            if time.monotonic() > rest_until_s:
                self._notice("it printed faster than its output is read: metrics of its last steps are left out")
                return

    async def _look(self, *, is_over: bool) -> bool:
        """Read for a while; return whether there is more."""
        has_more = await asyncio.to_thread(self._read_on, is_over=is_over)
        while self._messages:
            self._notice(self._messages.pop(0))
        return has_more

    def _read_on(self, *, is_over: bool) -> bool:
        """Read new lines and write their steps; while a step cannot be written, the log is not read further."""
        until_s = time.monotonic() + POLL_S
        if self._is_full:
            return False
        try:
            reader = self._reader = self._reader or self._begin()
            self._write()
            has_more = False
            while not has_more and not self._is_full and (lines := self._new_lines(is_over=is_over)):
                for line in lines:
                    self._unwritten.extend(reader.read(line))
                self._write()
                has_more = time.monotonic() > until_s
            if not has_more:
                self._unwritten.extend(reader.end() if is_over else reader.settle())
                self._write()
            self._is_fault_reported = False
            return has_more
        except OSError as error:
            if not self._is_fault_reported:
                self._messages.append(f"metrics cannot be written: {error}; they are written once that is fixed")
            self._is_fault_reported = True
            return False

    def _begin(self) -> StepReader:
        written = written_steps(self._metrics_file, marked_offset(self._mark, self._metrics_file))
        self._num_steps = len(written.steps)
        return StepReader(self._console, report=self._messages.append, written=written)

    def _new_lines(self, *, is_over: bool) -> list[str]:
        """The next whole lines of the log; a last line without its end only when the service has exited."""
        self._offset, part = new_part(self._log, self._offset)
        ended = 1 + max(part.rfind(b"\n"), part.rfind(b"\r"))
        is_open_end = len(part) < MAX_PART_BYTES
        if is_over if is_open_end else not ended:
            ended = len(part)
        self._offset += ended
        return list(searched_lines(part[:ended])) if ended else []

    def _write(self) -> None:
        if not self._unwritten:
            return
        del self._unwritten[max(0, MAX_STEPS - self._num_steps) :]
        at = time.time()
        lines = (
            MetricsLine(time=at, step=read.step, policy_version=read.policy_version, metrics=dict(read.metrics))
            for read in self._unwritten
        )
        append_lines(self._metrics_file, b"".join(map(to_line, lines)))
        self._num_steps += len(self._unwritten)
        self._unwritten.clear()
        if self._num_steps >= MAX_STEPS and not self._is_full:
            self._is_full = True
            self._messages.append(f"it printed {MAX_STEPS:,} steps: metrics of further ones are left out")


def new_part(log: Path, offset: int) -> tuple[int, bytes]:
    """Where the next part of the log begins (later than asked for where lines were dropped), and the part."""
    try:
        with log.open("rb") as file:
            part = read_part(file.fileno(), offset, MAX_PART_BYTES, with_header=False)
            return part.offset, part.data
    except FileNotFoundError:
        return offset, b""


def marked_offset(mark: Path, metrics_file: Path) -> int:
    """Where in the file the lines of an attempt begin: its size when the attempt was first read, stored in `mark`."""
    try:
        return int(mark.read_bytes())
    except (FileNotFoundError, ValueError):
        offset = metrics_file.stat().st_size if metrics_file.exists() else 0
        write_atomically(mark, str(offset).encode())
        return offset


def written_steps(metrics_file: Path, offset: int) -> WrittenSteps:
    """The steps in the file from an offset on."""
    steps: list[int] = []
    last: MetricsLine | None = None
    with suppress(FileNotFoundError), metrics_file.open("rb") as file:
        file.seek(offset)
        for line in file:
            with suppress(ValidationError):  # torn by a crash or a full disk
                read = MetricsLine.model_validate_json(line)
                steps += [read.step] if last is None or read.step != last.step else []
                last = read
    return WrittenSteps(steps=tuple(steps), last=last)


def append_lines(path: Path, lines: bytes) -> None:
    """Append whole lines; a torn line before it, from a crash or a full disk, is ended first."""
    with path.open("ab+") as file:
        if file.tell() and (file.seek(-1, 2), file.read(1))[1] != b"\n":
            lines = b"\n" + lines
        file.write(lines)
