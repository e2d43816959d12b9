"""Whose files are: those that output is appended to, and those from which a program goes on."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from grpo_engine.errors import ConfigError


def open_own_file(path: Path, what: str) -> int:
    """Open a file to append to, or make it; returns its descriptor.

    Args:
        what: begins the error, e.g. `--redirect-output out.log`.

    Raises:
        ConfigError: the file cannot be opened, is a link or no regular file, or others own it or may read or write it.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        why = "it is a link" if error.errno == errno.ELOOP else error.strerror
        raise ConfigError(f"{what}: cannot be opened: {why}; choose a file in a folder of your own") from error
    os.set_blocking(descriptor, True)
    if fault := _not_for_output(os.fstat(descriptor)):
        os.close(descriptor)
        raise ConfigError(f"{what}: {fault}")
    return descriptor


def foreign_owner(path: Path) -> str | None:
    """`belongs to user 4711`, of a path that another user than this one and root may have laid there; None: of none.

    Who makes it, or a folder on the way to it, first in a folder that all users may write to, decides what is in it.
    Elsewhere whoever owns the parent folder has let them: a container's root is given folders of the user who runs it.
    """
    named, real = Path(os.path.abspath(path)), Path(os.path.realpath(path))
    for each in {named, *named.parents, real, *real.parents}:
        try:
            owner, parent = each.lstat().st_uid, each.parent.stat()
        except OSError:  # there is none, or whoever opens it says why not
            continue
        if owner not in (0, os.geteuid()) and parent.st_mode & stat.S_IWOTH:
            return f"{'' if each == named else f'{each} '}belongs to user {owner}"
    return None


def _not_for_output(status: os.stat_result) -> str | None:
    """Why a file is not taken for the output of services; None where it is."""
    if stat.S_ISCHR(status.st_mode) and status.st_rdev == os.stat(os.devnull).st_rdev:
        return None
    if not stat.S_ISREG(status.st_mode):
        return "not a regular file; choose another"
    if status.st_uid != os.geteuid():
        return f"belongs to user {status.st_uid}; choose a file in a folder of your own"
    if status.st_mode & 0o077:
        return f"has mode {status.st_mode & 0o777:04o}, so that others may read or change it: `chmod 600` it"
    return None
