"""Numbers as people read them: bytes, durations, percentages, metric values. Unknown is a dash, never 0."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_engine.diagnosis.text import UNKNOWN as UNKNOWN
from grpo_engine.diagnosis.text import count_text as count_text
from grpo_engine.diagnosis.text import number_text as number_text
from grpo_engine.diagnosis.text import with_key as with_key

SPARK_BARS = "▁▂▃▄▅▆▇█"
KIBI = 1024
BYTE_UNITS = ("B", "K", "M", "G", "T", "P")
MINUTE_S = 60
HOUR_S = 3600
DAY_S = 86400
MOST_S = 9999 * DAY_S
"""Longest duration that is shown; the plan of a run from elsewhere may say infinity."""


def bytes_text(num_bytes: int | None) -> str:
    """At most six characters, in powers of 1024: `–`, `812B`, `9.5M`, `36.2G`, `1.0T`."""
    if num_bytes is None:
        return UNKNOWN
    value = float(num_bytes)
    for unit in BYTE_UNITS:
        if abs(value) < KIBI or unit == BYTE_UNITS[-1]:
            break
        value /= KIBI
    if unit in ("B", "K") or (unit == "M" and abs(value) >= 100):
        return f"{value:.0f}{unit}"
    return f"{value:.1f}{unit}"


def duration_text(seconds: float | None) -> str:
    """At most six characters: `–`, `0.4s`, `12s`, `3m05s`, `1h02m`, `2d03h`."""
    if seconds is None:
        return UNKNOWN
    seconds = _bounded(seconds)
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < MINUTE_S:
        return f"{whole}s"
    if whole < HOUR_S:
        return f"{whole // MINUTE_S}m{whole % MINUTE_S:02d}s"
    if whole < DAY_S:
        return f"{whole // HOUR_S}h{whole % HOUR_S // MINUTE_S:02d}m"
    return f"{whole // DAY_S}d{whole % DAY_S // HOUR_S:02d}h"


def clock_text(seconds: float | None) -> str:
    """A duration that ticks once a second and no faster: `–`, `4s`, `3m05s`."""
    if seconds is None:
        return UNKNOWN
    return duration_text(seconds) if seconds >= 9.95 else f"{int(_bounded(seconds))}s"


def _bounded(seconds: float) -> float:
    """From 0 to `MOST_S`; 0 where it is no number."""
    return min(max(0.0, seconds), MOST_S)


def age_text(seconds: float | None) -> str:
    """A duration that ticks once a minute after its first: `–`, `4s`, `12m`, `1h02m`; for rows that hold still."""
    if seconds is None or seconds < MINUTE_S - 0.5 or seconds >= HOUR_S:  # which a clock rounds to a minute
        return clock_text(seconds)
    return f"{max(1, int(seconds) // MINUTE_S)}m"


def percent_text(percent: float | None) -> str:
    """`–`, `0%`, `87%`, `1523%`; the argument is in percent already."""
    return UNKNOWN if percent is None else f"{percent:.0f}%"


def whole_text(value: float) -> str:
    """A count in at most eight characters: `64`, `123,456`, `1.235M`, `12.35G`."""
    size, unit = abs(value), ""
    for unit_size, name in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if size >= unit_size:
            value, unit = value / unit_size, name
            break
    return f"{value:.4g}{unit}" if unit else f"{value:,.0f}"


def span_text(first: int, last: int) -> str:
    """`7`, `7–9`."""
    return str(first) if first == last else f"{first}–{last}"


def shortened(text: str, width: int, ellipsis: str = "…") -> str:
    """`text` in at most `width` characters, its end replaced by an ellipsis where it is longer."""
    if len(text) <= width:
        return text
    return text[: max(0, width - len(ellipsis))] + ellipsis[:width]


def names_text(names: Sequence[str]) -> str:
    """`env`, `env and trainer`, `api, env and trainer`."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
