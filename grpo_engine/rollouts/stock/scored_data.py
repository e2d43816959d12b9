"""Groups as stock Atropos environments may send them: numbers as text, as floats, or as booleans.

The stock API converts such values, and its trainer then reads integers; here they are converted before validation. A
group of any other form passes unchanged. An empty list in place of an optional table means "absent"; `validation` reads
it so.
"""

from __future__ import annotations

import json
from typing import Any

_NOT_NUMERIC = frozenset({"messages", "generation_params", "overrides", "group_overrides", "images", "truncated"})
"""Keys of a group whose values are passed on as they are."""


def parse_json(body: bytes) -> Any:
    """Parse a body that the strict decoder refused; NaN and infinities are left to the bounds of the fields.

    Raises:
        ValueError, RecursionError: it is not JSON in UTF-8, or nested too deeply.
    """
    # From bytes, json would also accept UTF-16 and UTF-32.
    return json.loads(body.decode())


def with_numbers(group: Any) -> Any:
    """The group with 1 and 0 in place of booleans in its numeric fields; text is converted by msgspec's lax mode."""
    if not isinstance(group, dict):
        return group
    return {key: value if key in _NOT_NUMERIC else _numbers(value) for key, value in group.items()}


def _numbers(value: Any) -> Any:
    if isinstance(value, list):
        return [_numbers(each) for each in value]
    return int(value) if isinstance(value, bool) else value
