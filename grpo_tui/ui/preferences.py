"""Saved preferences of the user: the theme, and whether the first hint was read.

They are in `$XDG_CONFIG_HOME/grpo-tui/screen.json`. If it is missing or damaged, defaults apply.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from grpo_engine.wire.codec import write_json_atomically


class Preferences(BaseModel):
    """The file's content."""

    model_config = ConfigDict(frozen=True)

    theme: str | None = None
    """Its name; None if none was chosen."""
    has_read_hint: bool = False


def preferences_file(environ: Mapping[str, str] = os.environ) -> Path:
    """The path of the file."""
    base = environ.get("XDG_CONFIG_HOME")
    home = os.path.expanduser("~")  # as it is written, where the user has none: then nothing is kept
    return (Path(base) if base else Path(home if os.path.isabs(home) else "/") / ".config") / "grpo-tui" / "screen.json"


def read_preferences(path: Path) -> Preferences:
    """The saved preferences; defaults if the file is missing or damaged."""
    try:
        return Preferences.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return Preferences()


def write_preferences(path: Path, preferences: Preferences) -> None:
    """Save preferences.

    Raises:
        OSError: the folder or the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomically(path, preferences.model_dump())
