"""Keeps code of other users out of our processes: the command line of each, and whose a folder of modules is."""

from __future__ import annotations

import os
import sys


def module_command(module: str, *arguments: str, python: str | None = None) -> tuple[str, ...]:
    """The command line that runs a module of ours, by this interpreter or another.

    With `-P`: `-m` alone puts the working directory first on the path of modules, where another user may have put a
    module that would be run.
    """
    return (python or sys.executable, "-P", "-m", module, *arguments)


def others_may_write(folder: str | os.PathLike[str]) -> bool:
    """Whether another user, but root, may put files into a folder; False where there is none."""
    try:
        status = os.stat(folder)
    except FileNotFoundError:
        return False
    except OSError:  # a link that another user made, to where we may not look
        return True
    return status.st_uid not in (0, os.geteuid()) or bool(status.st_mode & 0o022)
