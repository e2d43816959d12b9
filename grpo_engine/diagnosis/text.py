"""Numbers as people read them in findings, warnings and tables. An unknown value is a dash, never 0."""

from __future__ import annotations

import math

UNKNOWN = "–"


def number_text(value: float | None) -> str:
    """A metric in at most eight characters, four digits that matter: `0.8731`, `1.2e-05`, `12,345`, `-0.021`."""
    if value is None:
        return UNKNOWN
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 1e6 or size < 1e-3:
        return f"{value:.1e}"
    if size >= 1e4:
        return f"{value:,.0f}"
    digits = max(0, 3 - math.floor(math.log10(size)))
    return f"{value:.{min(digits, 4)}f}"


def with_key(words: str, key: str) -> str:
    """What to do, with the key of the screen that does it: commands print the same words, where there are no keys."""
    return f"{words} ({key} on the screen)"


RESTART_INFERENCE = with_key("`grpo-tui restart vllm`", "v")
"""Where the name of the server is not known."""


def count_text(count: int, noun: str) -> str:
    """`1 restart`, `3 restarts`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
