"""Whether two names mean the same model, without loading it. Torch-free and offline."""

from __future__ import annotations

from pathlib import Path

from grpo_engine.wire.codec import open_file

_COMPARED_BYTES = 4096
_SNAPSHOTS = "snapshots"


def is_same_model(one: str, other: str) -> bool:
    """Whether two names mean one model.

    True for equal names, for one folder or two with equal weight files (names, sizes, ends), and for a hub id
    (`owner/name`) and a folder of that name or the hub's local copy. A name may be what a server calls its model.
    """
    if one == other:
        return True
    try:
        folders = Path(one).expanduser(), Path(other).expanduser()
        if all(folder.is_dir() for folder in folders):
            return folders[0].resolve() == folders[1].resolve() or _look_alike(*folders)
    except (OSError, RuntimeError, ValueError):  # no name of a file, a home of no user, or weights that cannot be read
        return False
    return _last_name(one) == _last_name(other)


def _look_alike(one: Path, other: Path) -> bool:
    """Names, sizes and ends of the weight files: two models of one shape differ there."""
    weights = [_ends(folder) for folder in (one, other)]
    return weights[0] == weights[1] if any(weights) else _last_name(str(one)) == _last_name(str(other))


def _ends(folder: Path) -> dict[str, tuple[int, bytes]]:
    ends = {}
    for path in folder.glob("*.safetensors"):
        with open_file(path) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _COMPARED_BYTES))
            ends[path.name] = (size, file.read())
    return ends


def _last_name(name: str) -> str:
    """`owner/name`, `/models/name` and `…/models--owner--name/snapshots/<revision>` → `name`."""
    parts = Path(name).expanduser().parts
    if _SNAPSHOTS in parts[1:]:
        parts = parts[: parts.index(_SNAPSHOTS)]
    return parts[-1].rpartition("--")[2].lower() if parts else ""
