"""When a line of a log was written, where it says so, in the usual formats; and the time that a person types. Pure.

Times without a zone are of this machine's, as those that write logs have it. A time without a date is taken to be the
nearest to a reference, which is right as long as the reference is less than twelve hours off.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, timezone

LOOKED_AT_BYTES = 160
"""A line says its time at its beginning, if at all."""
DAY_S = 86400.0
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")

_CLOCK = rb"(?P<h%d>\d\d):(?P<m%d>\d\d):(?P<s%d>\d\d(?:[.,]\d+)?)"
_MONTH = "|".join(MONTHS).encode()


def _clock(number: int) -> bytes:
    return _CLOCK % (number, number, number)


_TIME = re.compile(
    rb"(?P<Y1>\d{4})[-/](?P<M1>\d\d)[-/](?P<D1>\d\d)[T ]" + _clock(1) + rb"(?P<Z1>Z|[+-]\d\d:?\d\d)?"  # ISO 8601
    rb"|(?<!\d)(?P<M2>\d\d)-(?P<D2>\d\d) " + _clock(2) +  # vLLM: `INFO 11-21 23:54:18`
    rb"|(?<![A-Za-z])[IWEF](?P<M3>\d\d)(?P<D3>\d\d) " + _clock(3) +  # glog: `I1121 23:54:18.123456`
    rb"|(?P<D4>\d\d)/(?P<N4>" + _MONTH + rb")/(?P<Y4>\d{4}):" + _clock(4) + rb"(?: (?P<Z4>[+-]\d{4}))?"  # web servers
    rb"|^(?P<N5>" + _MONTH + rb") +(?P<D5>\d\d?) " + _clock(5) +  # syslog
    rb"|^[\[(]?(?:[A-Z]+:? +)?[\[(]?" + _clock(6) + rb"(?![:\d])"  # a clock alone, first or behind the level
    rb'|"(?:time|ts|timestamp)": ?(?P<epoch>\d{10}(?:\.\d+)?)'
)  # fmt: skip
_COLOUR = re.compile(rb"\x1b\[[0-9;:]*m")
_TYPED = re.compile(
    r"(?:(?P<Y>\d{4})-(?P<M>\d\d?)-(?P<D>\d\d?)[T ]+)?(?P<h>\d\d?):(?P<m>\d\d)(?::(?P<s>\d\d(?:[.,]\d+)?))?$"
)
_AGO = re.compile(r"-\s*((?:\d+(?:\.\d+)?\s*[dhms]\s*)+)$")
_UNITS_S = {"d": DAY_S, "h": 3600.0, "m": 60.0, "s": 1.0}


class InvalidTime(ValueError):
    """What was typed is no time; the message says what would be one."""


def time_of(line: bytes, reference: float) -> float | None:
    """Seconds since the epoch at which a line was written; None where it does not say.

    Args:
        reference: a time near it, for the day or the year where the line leaves that out.
    """
    start = line[:LOOKED_AT_BYTES]
    if b":" not in start and b'"t' not in start:
        return None
    found = _TIME.search(_COLOUR.sub(b"", start) if b"\x1b" in start else start)
    if found is None:
        return None
    if found["epoch"]:
        return float(found["epoch"])
    number = next(number for number in "123456" if found["h" + number])
    parts = found.groupdict()
    clock = int(parts["h" + number]), int(parts["m" + number]), float(parts["s" + number].replace(b",", b"."))
    named = parts.get("N" + number)
    month = MONTHS.index(named.decode()) + 1 if named else int(parts.get("M" + number) or 0)
    day, year, zone = (parts.get(letter + number) for letter in "DYZ")
    try:
        if not day:
            return _nearest_day(clock, reference)
        if not year:
            return _nearest_year(month, int(day), clock, reference)
        return _moment(int(year), month, int(day), clock, _zone(zone))
    except (ValueError, OverflowError):  # 2026-13-45 only looks like a date
        return None


def typed_time(text: str, now: float) -> float:
    """The time that a person means by `14:03:05`, `14:03`, `2026-01-31 14:03`, `-10m` or `-1h30m`.

    Args:
        now: what `-10m` counts from; a clock alone is the last such moment before it.

    Raises:
        InvalidTime: with a message for that person.
    """
    text = text.strip()
    if ago := _AGO.match(text):
        amounts = re.findall(r"(\d+(?:\.\d+)?)\s*([dhms])", ago[1])
        return now - sum(float(amount) * _UNITS_S[unit] for amount, unit in amounts)
    found = _TYPED.match(text)
    try:
        if found is None:
            raise ValueError
        clock = int(found["h"]), int(found["m"]), float((found["s"] or "0").replace(",", "."))
        if found["Y"]:
            return _moment(int(found["Y"]), int(found["M"]), int(found["D"]), clock, None)
        today = datetime.fromtimestamp(now)
        time = _moment(today.year, today.month, today.day, clock, None)
        return time if time <= now else time - DAY_S
    except (ValueError, OverflowError):
        raise InvalidTime(
            f"{text!r} is not a time: type 14:03:05, 14:03, 2026-01-31 14:03, or -10m for ten minutes ago"
        ) from None


def _moment(year: int, month: int, day: int, clock: tuple[int, int, float], zone: timezone | None) -> float:
    hours, minutes, seconds = clock
    whole = int(seconds)
    return datetime(year, month, day, hours, minutes, whole, tzinfo=zone).timestamp() + (seconds - whole)


def _zone(said: bytes | None) -> timezone | None:
    if not said:
        return None
    if said == b"Z":
        return UTC
    digits = said[1:].replace(b":", b"")
    offset = timedelta(hours=int(digits[:2]), minutes=int(digits[2:]))
    return timezone(-offset if said[:1] == b"-" else offset)


def _nearest_day(clock: tuple[int, int, float], reference: float) -> float:
    day = datetime.fromtimestamp(reference)
    time = _moment(day.year, day.month, day.day, clock, None)
    return time + DAY_S * round((reference - time) / DAY_S)


def _nearest_year(month: int, day: int, clock: tuple[int, int, float], reference: float) -> float:
    year = datetime.fromtimestamp(reference).year
    times = [_moment(each, month, day, clock, None) for each in (year - 1, year, year + 1) if _exists(each, month, day)]
    return min(times, key=lambda time: abs(time - reference))


def _exists(year: int, month: int, day: int) -> bool:
    return not (month == 2 and day == 29) or (year % 4 == 0 and (year % 100 != 0 or year % 400 == 0))
