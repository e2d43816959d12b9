"""How far what is painted runs ahead of what the terminal shows, so that a slow line is sent no more than it carries.

Nobody tells a program how slow its line is: ssh takes in megabytes, and a key that was held for five seconds is seen
five seconds late. So the terminal is asked now and then where its cursor is, in a place that says which question it
was; it answers when it has come so far. Pure: time and what the terminal says come in.
"""

from __future__ import annotations

from dataclasses import dataclass

ASKED_AFTER = 2000
"""Characters between two questions: a quiet screen asks every ten seconds."""
QUEUE_S = 0.15
"""So much longer than the quickest answer one may take before the line counts as full."""
MAX_AHEAD = 24_000
"""Characters that may be on their way whatever the line: some three frames."""
GIVE_UP_S = 2.0
"""Then something is painted all the same: the answer may have been lost."""
FIRST_ANSWER_S = 1.0
"""A terminal that has not answered by then may never do."""
MARK_ROW = 2
"""In the first row an answer would read like a key: ctrl and F3."""
NUM_MARKS = 20
"""Columns that say which question it was; fewer than the narrowest terminal has."""


@dataclass(frozen=True, slots=True)
class Question:
    """One that is on its way."""

    mark: int
    asked_at: float
    num_characters: int
    """Sent since the question before."""


class LinePace:
    """What was asked and what was answered; times are seconds of one clock that does not go back."""

    def __init__(self) -> None:
        self._open: list[Question] = []
        """Not answered yet; the oldest first."""
        self._next_mark = 1
        self._num_unasked = 0
        self._painted_at = 0.0
        self._quickest_s: float | None = None
        self._is_leaving = False

    def painted(self, num_characters: int, now: float) -> str:
        """What is to be sent after so many characters: a question, or nothing."""
        self._painted_at = now
        self._num_unasked += num_characters
        if self._is_leaving or self._num_unasked < ASKED_AFTER or len(self._open) == NUM_MARKS:
            return ""
        mark, self._next_mark = self._next_mark, self._next_mark % NUM_MARKS + 1
        self._open.append(Question(mark, now, self._num_unasked))
        self._num_unasked = 0
        return f"\x1b[{MARK_ROW};{mark}H\x1b[6n"

    def answered(self, row: int, column: int, now: float) -> None:
        """The terminal has come as far as the question of that place (from 1 on), and past those before it."""
        place = next((place for place, each in enumerate(self._open) if (MARK_ROW, each.mark) == (row, column)), None)
        if place is None:
            return
        took_s = now - self._open[place].asked_at
        self._quickest_s = took_s if self._quickest_s is None else min(took_s, self._quickest_s)
        del self._open[: place + 1]

    def is_full(self, now: float) -> bool:
        """Whether the line holds more than it should; never for a terminal that does not answer."""
        if self._quickest_s is None or not self._open or now - self._painted_at > GIVE_UP_S:
            return False
        num_ahead = self._num_unasked + sum(each.num_characters for each in self._open)
        return num_ahead > MAX_AHEAD or now - self._open[0].asked_at > self._quickest_s + QUEUE_S

    def ask_no_more(self) -> None:
        """The terminal goes to another program soon."""
        self._is_leaving = True

    def owes_an_answer(self, now: float) -> bool:
        """Whether an answer may still come, which would look like typed by the person to whoever reads then."""
        return bool(self._open) and (self._quickest_s is not None or now - self._open[0].asked_at < FIRST_ANSWER_S)
