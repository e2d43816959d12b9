"""The newest report that the supervisor wrote about a failure of a service, beside the logs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class CrashReport:
    """One report."""

    path: Path
    text: str


def newest_report(run_folder: Path, service: str) -> CrashReport | None:
    """The report on the latest attempt of a service that failed; None when there is none. Blocks while it reads.

    Raises:
        OSError: it is there and cannot be read.
    """
    name = re.compile(rf"crash-{re.escape(service)}-(\d+)\.txt")
    paths = run_folder.iterdir() if run_folder.is_dir() else ()
    attempts = {int(found[1]): path for path in paths if (found := name.fullmatch(path.name))}
    if not attempts:
        return None
    path = attempts[max(attempts)]
    return CrashReport(path=path, text=path.read_text(encoding="utf-8", errors="replace"))
