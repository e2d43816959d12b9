"""Log lines that are JSON objects, as the rollout API writes them, in the form in which people read them. Pure."""

from __future__ import annotations

import json

MESSAGE_NAMES = ("event", "message", "msg")
LEVEL_NAMES = ("level", "levelname", "severity")
TIME_NAMES = ("time", "timestamp", "ts")
QUIET_LEVELS = ("info", "debug")


def readable(text: str) -> str:
    """`03:33:31 batch delivered  step=303 groups=16` for a JSON object with a message; any other line as it is."""
    if not (text.startswith("{") and text.endswith("}")):
        return text
    try:
        return _told(text).encode(errors="ignore").decode()  # JSON may escape half a character
    except (ValueError, RecursionError):
        return text


def _told(text: str) -> str:
    """Raises ValueError where it is no JSON, and RecursionError where its values are nested deeper than can be told."""
    fields = json.loads(text)
    message = _taken(fields, MESSAGE_NAMES)
    if not isinstance(message, str) or not message:
        return text
    time, level = _taken(fields, TIME_NAMES), _taken(fields, LEVEL_NAMES)
    clock = time.partition("T")[2] or time if isinstance(time, str) else ""
    loud = level.upper() if isinstance(level, str) and level.lower() not in QUIET_LEVELS else ""
    told = " ".join(f"{name}={_value(value)}" for name, value in fields.items())
    return "  ".join(filter(None, (" ".join(filter(None, (clock, loud, message))), told))).replace("\n", "\\n")


def _taken(fields: dict[str, object], names: tuple[str, ...]) -> object:
    """The first of these fields that there is, taken out."""
    name = next((name for name in names if name in fields), None)
    return fields.pop(name) if name is not None else None


def _value(value: object) -> str:
    if isinstance(value, dict):
        return ",".join(f"{name}:{_value(each)}" for name, each in value.items()) or "-"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False) if " " in value or not value else value
    return json.dumps(value, ensure_ascii=False)
