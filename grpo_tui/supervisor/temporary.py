"""The temporary folder of a run: its services have it as TMPDIR, as jobs of a batch system have one, and it goes with
the run, whatever was left in it and by whom.

It lies in the folder that is temporary for us, under a name short enough for the sockets that vLLM makes below it.
What programs keep from run to run in what is temporary (compiled code, vocabularies) stays outside.
"""

from __future__ import annotations

import getpass
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from glob import escape
from pathlib import Path

from grpo_engine.models.local import cache_folder
from grpo_engine.wire.supervisor import MAX_TEMPORARY_FOLDER_BYTES

FOLDER, COMPILED_CODE = "TMPDIR", "TORCHINDUCTOR_CACHE_DIR"
CHANCE_BYTES = len("-12345678")
ALWAYS_SHORT = Path("/tmp")
OF_TORCH = "torchinductor_{user}"
OF_OTHERS = ("{user}", "data-gym-cache", "tiktoken-rs-cache")
"""What CUTLASS and FlashAttention, tiktoken and its edition in Rust keep in the temporary folder."""


def make_folder(run: str) -> Path:
    """Make the folder of a run, ours alone.

    Raises:
        OSError: the disk is full, or nobody may write there.
    """
    base = next((base for base in _bases() if _fits(base / _stem(run, base))), ALWAYS_SHORT)
    folder = Path(tempfile.mkdtemp(prefix=f"{_stem(run, base)}-", dir=base))
    _link_kept(folder)
    return folder


def make_anew(folder: Path) -> None:
    """Make it again where somebody removed it: cleaners of /tmp do, after days.

    Raises:
        OSError: the disk is full, or another user took its name.
    """
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if not _is_ours(folder):
            raise
    else:
        _link_kept(folder)


def variables(folder: Path) -> dict[str, str]:
    """What a service is to find in its environment, where its profile does not say otherwise."""
    named = {FOLDER: str(folder)}
    if COMPILED_CODE not in os.environ:  # not through our link: it stands in what is kept
        named[COMPILED_CODE] = str(_compiled_code())
    return named


def remove_folders(run: str, known: Path | None) -> tuple[list[str], list[str]]:
    """Remove the folder of a run that is over, and whatever else bears its name there; only our own user's.

    Returns what was removed of those that held something, and what could not be removed, with why; both in words.
    """
    removed, left = [], []
    named = {path for base in _bases() for path in base.glob(f"{escape(_stem(run, base))}-*")}
    for folder in sorted(named | ({known} if known is not None else set())):
        if not _is_ours(folder):
            continue
        _move_kept(folder)
        try:
            was_empty = not any(folder.iterdir())
            shutil.rmtree(folder)
        except OSError as error:
            left.append(f"{error.filename or folder}: {error.strerror or error}")
        else:
            removed += [] if was_empty else [str(folder)]
    return removed, left


def _bases() -> tuple[Path, ...]:
    return (Path(tempfile.gettempdir()), ALWAYS_SHORT)


def _stem(run: str, base: Path) -> str:
    """How the name begins: with the run's, or what stands for one that is too long."""
    stem = f"grpo-{run}"
    return stem if _fits(base / stem) else f"grpo-{hashlib.blake2b(run.encode(), digest_size=4).hexdigest()}"


def _fits(folder: Path) -> bool:
    return len(os.fsencode(folder)) + CHANCE_BYTES <= MAX_TEMPORARY_FOLDER_BYTES


def _is_ours(folder: Path) -> bool:
    try:
        return folder.lstat().st_uid == os.getuid() and folder.is_dir() and not folder.is_symlink()
    except OSError:
        return False


def _compiled_code() -> Path:
    """Where our server keeps compiled code too; where torch would, when there is no room for that."""
    try:
        folder = cache_folder(os.environ) / "inductor"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # no home
        return Path(tempfile.gettempdir()) / OF_TORCH.format(user=_user())
    return folder


def _kept(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Where a program looks for what it keeps, and where that is."""
    yield folder / OF_TORCH.format(user=_user()), _compiled_code()  # headers, wherever the variable points
    for name in OF_OTHERS:
        own = name.format(user=_user())
        yield folder / own, folder.parent / own


def _link_kept(folder: Path) -> None:
    for link, place in _kept(folder):
        if _is_ours(place):
            with suppress(OSError):  # a file system without links: it is made again
                link.symlink_to(place)


def _move_kept(folder: Path) -> None:
    """Keep what this run was the first to make, and take our links away."""
    for made, place in _kept(folder):
        with suppress(OSError):  # none was made, or another run was sooner
            if made.is_symlink():
                made.unlink()
            elif any(made.iterdir()) and not place.exists():
                made.rename(place)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid_{os.getuid()}"  # as torch says
