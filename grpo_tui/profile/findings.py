"""What a check before a start found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check: how it went, in words, and what to do when it did not go well."""

    check: str
    level: Literal["ok", "note", "problem"]
    text: str
    hint: str = ""
