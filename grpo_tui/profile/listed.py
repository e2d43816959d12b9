"""The profiles that are offered by name, read within bounds: a folder of them may be somebody else's work."""

from __future__ import annotations

import errno
from dataclasses import dataclass, field
from pathlib import Path

from grpo_engine.config import RawTable, parsed_table, read_file
from grpo_engine.errors import ConfigError
from grpo_tui.paths import available_profiles

MAX_LISTED_BYTES = 8 << 20
"""Of all together: to parse a megabyte may take more than a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedProfile:
    """A profile, whether or not it can be read."""

    name: str
    path: Path
    content: bytes = b""
    table: RawTable = field(default_factory=dict)
    error: OSError | ConfigError | None = None


def listed_profiles() -> list[ListedProfile]:
    """Every profile that can be started by name; blocks while it reads. Where they are too long together, the longest
    ones are not read."""
    paths = available_profiles()
    room = MAX_LISTED_BYTES
    found: dict[str, ListedProfile] = {}
    for name in sorted(paths, key=lambda name: _length(paths[name])):
        found[name] = _read(name, paths[name], room)
        room -= len(found[name].content)
    return [found[name] for name in paths]


def _length(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read(name: str, path: Path, room: int) -> ListedProfile:
    content = b""
    try:
        content = read_file(path)
        if len(content) > room:
            content = b""
            raise OSError(errno.EFBIG, f"the profiles here have more than {MAX_LISTED_BYTES:,} bytes together")
        return ListedProfile(name=name, path=path, content=content, table=parsed_table(content, path))
    except (OSError, ConfigError) as error:
        return ListedProfile(name=name, path=path, content=content, error=error)
