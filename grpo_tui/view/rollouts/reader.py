"""Finds what the rollout screen asks for in `rollouts.jsonl`: groups of a filter, heads for a list, one group whole.

A filter is followed through the file from its newest group backwards, a bounded time a look, and then along with what
is added. Belongs to one screen; a look waits for the disk and is for a thread.
"""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path

from grpo_tui.view.rollouts.file import GroupHead, RolloutFile
from grpo_tui.view.rollouts.state import GroupFilter, GroupsRead

SEARCH_S = 0.15
"""How long a look may search; the next one goes on."""
HEADS_S = 0.03
"""How long a look may read heads: groups of many megabytes take their time."""
ROWS_AROUND = 80
"""Heads that are read before and after the chosen group."""


class RolloutReader:
    """Remembers the last filter and how far it was searched for."""

    def __init__(self, path: Path) -> None:
        self._file = RolloutFile(path)
        self._environments: set[str] = set()
        self._begin_search(GroupFilter())

    def look(self, wanted: GroupFilter, selected: int | None, *, until: float | None = None) -> GroupsRead:
        """What the file holds now.

        Args:
            selected: the group to read; None: the newest.
            until: Unix seconds; later groups do not count. None: all do.
        """
        generation = self._file.generation
        total = self._file.refresh()
        if until is not None:
            total = self._file.num_until(until)
        if wanted != self._filter or generation != self._file.generation:
            self._begin_search(wanted)
        found = self._found(total)
        chosen = _nearest(found, selected, is_rising=wanted.prompt_key is not None)
        place = found.index(chosen) if chosen is not None else 0
        around = found[max(0, place - ROWS_AROUND) : place + ROWS_AROUND]
        heads = self._heads_in_time(sorted(around, key=lambda index: abs(index - (chosen or 0))))
        self._environments |= {head.environment for head in heads.values() if head and head.environment}
        return GroupsRead(
            filter=wanted,
            total=total,
            found=found,
            num_looked_at=self._high - self._low if not wanted.is_open else total,
            is_searching=self._file.is_behind or (not wanted.is_open and self._low > 0),
            has_all_heads=len(heads) == len(around),
            heads=heads,
            chosen=chosen,
            group=None if chosen is None else self._file.read(chosen),
            environments=tuple(sorted(self._environments)),
            generation=self._file.generation,
        )

    def _heads_in_time(self, nearest_first: list[int]) -> dict[int, GroupHead | None]:
        """As many as can be read in a look, one at least; what was read is remembered, and the next look has more."""
        heads: dict[int, GroupHead | None] = {}
        deadline = time.monotonic() + HEADS_S
        for index in nearest_first:
            if heads and time.monotonic() > deadline:
                break
            heads[index] = self._file.head(index)
        return heads

    def _begin_search(self, wanted: GroupFilter) -> None:
        self._filter = wanted
        self._matches: deque[int] = deque()
        """The newest first."""
        self._low = self._high = len(self._file)
        """Groups from `_low` up to `_high` were looked at."""

    def _found(self, total: int) -> range | tuple[int, ...]:
        if self._filter.is_open:
            return range(total - 1, -1, -1)
        self._search()
        found = tuple(index for index in self._matches if index < total)
        return found[::-1] if self._filter.prompt_key is not None else found

    def _search(self) -> None:
        deadline = time.monotonic() + SEARCH_S
        while time.monotonic() < deadline:
            if self._high < len(self._file):
                if self._takes(self._high):
                    self._matches.appendleft(self._high)
                self._high += 1
            elif self._low > 0:
                self._low -= 1
                if self._takes(self._low):
                    self._matches.append(self._low)
            else:
                return

    def _takes(self, index: int) -> bool:
        needle = self._filter.text.casefold()
        if not self._file.may_hold(index, needle):
            return False
        head = self._file.head(index)
        if head is None:
            return False
        if head.environment:
            self._environments.add(head.environment)
        if not self._filter.takes(head):
            return False
        return not needle or any(needle in text.casefold() for text in self._file.texts(index))


def _nearest(found: range | tuple[int, ...], selected: int | None, *, is_rising: bool) -> int | None:
    """The selected group, else the next older one that is there, else the oldest; with none selected the newest."""
    if not found:
        return None
    if selected is None:
        return found[-1] if is_rising else found[0]
    if selected in found:
        return selected
    older = [index for index in found if index < selected]
    return max(older, default=min(found))
