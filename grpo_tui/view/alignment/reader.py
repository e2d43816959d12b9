"""Reads the groups of a window from `rollouts.jsonl` and says what they mean; meant to be asked in a thread.

Bounded: where a window has more tokens than are looked at, every 2nd, 4th, 8th … of its groups is taken.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from grpo_engine.diagnosis.alignment import diagnose_alignment
from grpo_engine.diagnosis.evidence import Evidence, RunSettings
from grpo_engine.diagnosis.token_differences import GroupTokens, alignment_numbers, group_tokens
from grpo_engine.wire.metrics import MetricsLine
from grpo_engine.wire.run_folder import ROLLOUTS_FILE
from grpo_tui.view.alignment.ratios import ratios
from grpo_tui.view.alignment.state import LAST_STEPS, Measured, Window, began_with, trained_version
from grpo_tui.view.rollouts.file import RolloutFile
from grpo_tui.view.run_settings import read_settings

MAX_TOKENS = 40_000
"""Of one look: half a second of a core, and far more than a histogram needs."""
MAX_GROUPS = 256
MAX_CACHED_TOKENS = 4 * MAX_TOKENS


class AlignmentReader:
    """Remembers the groups that it has read; made for one thread at a time."""

    def __init__(self, run_folder: Path) -> None:
        self._run_folder = run_folder
        self._file = RolloutFile(run_folder / ROLLOUTS_FILE)
        self._settings = RunSettings()
        self._groups: OrderedDict[tuple[int, int, int | None], GroupTokens] = OrderedDict()
        self._looked_at: tuple[object, ...] | None = None

    @property
    def settings(self) -> RunSettings:
        """Of the run, as they were at the last look."""
        return self._settings

    def look(
        self, window: Window, until_step: int | None, lines: Sequence[MetricsLine], *, until_time: float | None = None
    ) -> Measured | None:
        """Measure a window; None where nothing has changed since the last look.

        Args:
            until_step: the last step that is looked at; None is the newest.
            lines: of `metrics.jsonl`, in order of their steps.
            until_time: Unix seconds; groups written later do not count. None: all count.
        """
        while self._file.refresh() and self._file.is_behind:
            pass
        num = len(self._file) if until_time is None else self._file.num_until(until_time)
        newest = self._step_before(num)
        last = newest if until_step is None or newest is None else min(until_step, newest)
        indices = self._window(window, last, num) if last is not None else range(0)
        began = began_with(lines)
        if self._is_same(
            self._file.generation, indices, newest, window, until_step, began, newest and trained_version(newest, lines)
        ):
            return None
        if newest is None:
            return Measured(numbers=None, why_none=self._why_none(num))
        self._settings = read_settings(self._run_folder)
        groups = self._read(self._taken(indices, lines), lines)
        numbers = alignment_numbers(groups)
        if numbers is None:
            why = "the recorded groups have no log-probs of trainer and inference for the same tokens"
            return Measured(numbers=None, num_groups_known=len(indices), newest_step=newest, why_none=why)
        settings = self._settings
        judged = numbers.sequence_differences if settings.clips_sequences else numbers.differences
        return Measured(
            numbers=numbers,
            ratios=ratios(judged, settings.clip_low, settings.clip_high),
            findings=diagnose_alignment(Evidence(numbers=numbers, settings=settings, began=began)),
            num_groups_known=len(indices),
            newest_step=newest,
        )

    def _is_same(self, *looked_at: object) -> bool:
        is_same = looked_at == self._looked_at
        self._looked_at = looked_at
        return is_same

    def _why_none(self, num: int) -> str:
        path = self._run_folder / ROLLOUTS_FILE
        if num == 0 and not path.exists():
            return f"there is no {ROLLOUTS_FILE} yet: our trainer writes it after its first step, others never do"
        return f"{ROLLOUTS_FILE} has no group yet that can be read"

    def _step_before(self, num: int) -> int | None:
        """The step of the newest readable group before this one."""
        heads = (self._file.head(index) for index in range(num - 1, -1, -1))
        return next((head.step for head in heads if head is not None), None)

    def _window(self, window: Window, last: int, num: int) -> range:
        first = {Window.ALL: 0, Window.LAST: last - LAST_STEPS + 1, Window.ONE: last}[window]
        low, high = self._first_from(first, num), self._first_from(last + 1, num)
        if low == high and window is Window.ONE:  # that step recorded nothing: the one before it did
            return self._window(window, self._step_before(low) or last, num) if low else range(0)
        return range(low, high)

    def _first_from(self, step: int, num: int) -> int:
        """The first group of this step or a later one; steps rise along the file."""
        low, high = 0, num
        while low < high:
            middle = (low + high) // 2
            head = next((head for index in range(middle, high) if (head := self._file.head(index))), None)
            if head is None or head.step >= step:
                high = middle
            else:
                low = head.index + 1
        return low

    def _taken(self, indices: range, lines: Sequence[MetricsLine]) -> list[int]:
        """So many of the groups, evenly, as have about `MAX_TOKENS` together; the newest is among them."""
        newest = self._read([indices[-1]], lines) if indices else []
        size = max(1, len(newest[0].training)) if newest else 1
        stride = 1
        while len(indices) // stride > max(1, min(MAX_GROUPS, MAX_TOKENS // size)):
            stride *= 2
        return sorted({*(index for index in indices if index % stride == 0), *indices[-1:]})

    def _read(self, indices: Sequence[int], lines: Sequence[MetricsLine]) -> list[GroupTokens]:
        return [group for index in indices if (group := self._group(index, lines)) is not None]

    def _group(self, index: int, lines: Sequence[MetricsLine]) -> GroupTokens | None:
        head = self._file.head(index)
        if head is None:
            return None
        key = (self._file.generation, index, trained_version(head.step, lines))
        if key not in self._groups:
            line = self._file.read(index)
            if line is None:
                return None
            self._groups[key] = group_tokens(line, key[2])
            while len(self._groups) > 1 and self._num_cached > MAX_CACHED_TOKENS:
                self._groups.popitem(last=False)
        self._groups.move_to_end(key)
        return self._groups[key]

    @property
    def _num_cached(self) -> int:
        return sum(len(group.training) for group in self._groups.values())
