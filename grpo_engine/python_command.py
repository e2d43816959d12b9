"""Keeps code of other users out of our processes: command line, environment, whose a folder or file is."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

SEARCH_PATHS = (
    *("PATH", "PYTHONPATH", "LD_LIBRARY_PATH"),
    *("LIBRARY_PATH", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH"),  # of the compilers that torch and Triton call
)
"""Variables in which an empty entry is the working directory; `export PYTHONPATH=$PYTHONPATH:/mine` makes one."""


def module_command(module: str, *arguments: str, python: str | None = None) -> tuple[str, ...]:
    """The command line that runs a module of ours, by this interpreter or another.

    With `-P`: `-m` alone puts the working directory first on the path of modules, where another user may have put a
    module that would be run.
    """
    return (python or sys.executable, "-P", "-m", module, *arguments)


def without_empty_entries(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment variables for a process in another working directory, which is none of its search paths by chance."""
    kept = dict(environment)
    for name in SEARCH_PATHS:
        if name in kept and not (entries := [entry for entry in kept[name].split(os.pathsep) if entry]):
            del kept[name]
        elif name in kept:
            kept[name] = os.pathsep.join(entries)
    return kept


def others_may_write(folder: str | os.PathLike[str]) -> bool:
    """Whether another user, but root, may put files into a folder; False where there is none."""
    try:
        status = os.stat(folder)
    except FileNotFoundError:
        return False
    except OSError:  # a link that another user made, to where we may not look
        return True
    return status.st_uid not in (0, os.geteuid()) or bool(status.st_mode & 0o022)


def others_may_rename_in(folder: Path) -> bool:
    """Whether another user, but root, may rename our files in a folder, and so put one in the place of another."""
    return others_may_write(folder) and (
        not (status := folder.stat()).st_mode & stat.S_ISVTX or status.st_uid not in (0, os.geteuid())
    )


def is_of_others(file: Path, working_directory: Path) -> bool:
    """Whether a stranger made a file, a link to it or its folder, or every user may write to one of them.

    No stranger is who owns the working directory, unless every user may write to it: root of a container works in a
    folder of its host. Nor are members of our group: with a umask of 002 they may write to all that a user makes.
    """
    try:
        found = (os.stat(file), os.stat(file.parent))
        uids = {os.lstat(file).st_uid, *(status.st_uid for status in found)}
        here = os.stat(working_directory)
    except OSError:  # gone, or a link that another user made, to where we may not look
        return True
    known = {0, os.geteuid()} | (set() if here.st_mode & 0o002 else {here.st_uid})
    return not uids <= known or any(status.st_mode & 0o002 for status in found)


def others_may_fill(folder: Path) -> str | None:
    """Why another user, but root, may have files of his in a folder; None: he may not.

    It is his, or he may put one of his in its place, as all users may write to a folder above. A folder above may be
    another user's, as one that a container has from its host is.
    """
    for each in (folder, *folder.absolute().parents):
        try:
            status = os.stat(each)
        except OSError:  # there is none, or none that we can use
            continue
        is_own = status.st_uid in (0, os.geteuid())
        if each == folder and not is_own:
            return f"{folder} belongs to user {status.st_uid}"
        if status.st_mode & 0o002 and not (status.st_mode & stat.S_ISVTX and is_own and each != folder):
            return f"all users may write to {each}"
    return None
