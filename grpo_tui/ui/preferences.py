"""What the screen remembers of a person between runs: the theme, and that the first hint was read.

One small file, `$XDG_CONFIG_HOME/grpo-tui/screen.json`. A missing or broken one is as good as none: the screen opens.
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
    """Its name; None where none was ever chosen."""
    has_read_hint: bool = False


def preferences_file(environ: Mapping[str, str] = os.environ) -> Path:
    """Where they stand."""
    base = environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "grpo-tui" / "screen.json"


def read_preferences(path: Path) -> Preferences:
    """What is remembered; the defaults where the file is missing or is not what it should be."""
    try:
        return Preferences.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return Preferences()


def write_preferences(path: Path, preferences: Preferences) -> None:
    """Remember.

    Raises:
        OSError: the folder or the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomically(path, preferences.model_dump())
