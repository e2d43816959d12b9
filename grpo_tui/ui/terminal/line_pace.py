"""How far the output is ahead of the terminal, so that a slow connection is sent no more than it carries.

A program cannot see the bandwidth of its terminal: ssh buffers megabytes, and a key that was held for five seconds is
seen five seconds late. So the cursor position is queried (CSI 6n) after every 2,000 characters, at a column that
identifies the query; the answer shows how far the terminal has read. Pure: times and answers are arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

ASKED_AFTER = 2000
"""Characters between two queries: a quiet screen sends one every ten seconds."""
QUEUE_S = 0.15
"""The connection counts as full if an answer takes this much longer than the quickest one."""
MAX_AHEAD = 24_000
"""Most characters in flight on any connection: about three frames."""
GIVE_UP_S = 2.0
"""After this time without an answer painting goes on: the answer may be lost."""
FIRST_ANSWER_S = 1.0
"""A terminal that has not answered by then is taken as one that never does."""
MARK_ROW = 2
"""In the first row an answer would read like a key: ctrl and F3."""
NUM_MARKS = 20
"""Columns that identify a query; fewer than the narrowest terminal has."""


@dataclass(frozen=True, slots=True)
class Question:
    """One query without an answer yet."""

    mark: int
    asked_at: float
    num_characters: int
    """Sent since the query before."""


class LinePace:
    """Tracks queries and answers; times are seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._open: list[Question] = []
        """Not answered yet; the oldest first."""
        self._next_mark = 1
        self._num_unasked = 0
        self._painted_at = 0.0
        self._quickest_s: float | None = None
        self._is_leaving = False

    def painted(self, num_characters: int, now: float) -> str:
        """Count painted characters; returns the query to send after them, or nothing."""
        self._painted_at = now
        self._num_unasked += num_characters
        if self._is_leaving or self._num_unasked < ASKED_AFTER or len(self._open) == NUM_MARKS:
            return ""
        mark, self._next_mark = self._next_mark, self._next_mark % NUM_MARKS + 1
        self._open.append(Question(mark, now, self._num_unasked))
        self._num_unasked = 0
        return f"\x1b[{MARK_ROW};{mark}H\x1b[6n"

    def answered(self, row: int, column: int, now: float) -> None:
        """Record the answer to the query at this place (from 1 on); earlier queries count as answered."""
        place = next((place for place, each in enumerate(self._open) if (MARK_ROW, each.mark) == (row, column)), None)
        if place is None:
            return
        took_s = now - self._open[place].asked_at
        self._quickest_s = took_s if self._quickest_s is None else min(took_s, self._quickest_s)
        del self._open[: place + 1]

    def is_full(self, now: float) -> bool:
        """Whether too much is in flight; never for a terminal that does not answer."""
        if self._quickest_s is None or not self._open or now - self._painted_at > GIVE_UP_S:
            return False
        num_ahead = self._num_unasked + sum(each.num_characters for each in self._open)
        return num_ahead > MAX_AHEAD or now - self._open[0].asked_at > self._quickest_s + QUEUE_S

    def stop_queries(self) -> None:
        """Send no more queries: another program will read the terminal soon."""
        self._is_leaving = True

    def expects_answer(self, now: float) -> bool:
        """Whether an answer may still arrive; the next program would read it as typed input."""
        return bool(self._open) and (self._quickest_s is not None or now - self._open[0].asked_at < FIRST_ANSWER_S)
