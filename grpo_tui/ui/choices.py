"""What `grpo-tui` without a profile offers: runs of this folder to join or look at, and profiles to start."""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from grpo_engine.config import read_table
from grpo_engine.errors import ConfigError, PeerError
from grpo_engine.wire.supervisor import RunState
from grpo_tui.client.local import Run, age_words, runs, stored_status
from grpo_tui.paths import LOGS, PROFILES, available_profiles, new_run_id

MAX_ENDED_RUNS = 5
EDITORS = ("nano", "vim", "vi")
"""Where neither VISUAL nor EDITOR names one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunChoice:
    """A run that is there."""

    folder: Path
    is_live: bool
    state: RunState | None
    """None where its files do not tell."""
    words: tuple[str, ...]
    """What is known of it, a line each."""

    @property
    def name(self) -> str:
        """Its id."""
        return self.folder.name


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileChoice:
    """A profile that may be started, or that a run of may be joined."""

    name: str
    path: Path
    description: str
    words: tuple[str, ...]
    """The comment that opens the file: hardware, memory, when to choose it."""
    error: str | None = None
    """Why it cannot be read."""


Choice = RunChoice | ProfileChoice


def run_choices(logs: Path = LOGS) -> list[RunChoice]:
    """Live runs, the newest first, then the latest that ended. Blocks while it reads."""
    known = runs(logs)
    live = [run for run in known if run.is_live]
    ended = [run for run in known if not run.is_live]
    return [_told(run) for run in (*live, *ended[:MAX_ENDED_RUNS])]


def profile_choices() -> list[ProfileChoice]:
    """Every profile that a name can mean. Blocks while it reads."""
    return [_read(name, path) for name, path in available_profiles().items()]


def matching(choices: Sequence[Choice], typed: str) -> list[Choice]:
    """Those that hold every word that was typed, in any order and case."""
    words = typed.lower().split()
    return [choice for choice in choices if all(word in _searched(choice) for word in words)]


def plan_of(name: str, overrides: Sequence[str] = ()) -> str:
    """What a profile would start, in words.

    Raises:
        ConfigError: the profile is wrong.
    """
    from grpo_tui.profile.loading import load
    from grpo_tui.profile.plan import make_plan
    from grpo_tui.profile.plan_words import plan_text

    loaded = load(name, list(overrides))
    return plan_text(make_plan(loaded, run_folder=LOGS / new_run_id(loaded.name), python=sys.executable), loaded)


@contextmanager
def own_copy(choice: ProfileChoice) -> Iterator[Path]:
    """Within, a profile's file in `./profiles`, which comes before an installed one of that name.

    One that is copied there for it and stays as it was is removed again, so that updates of ours still arrive.

    Raises:
        OSError: it cannot be read or written.
    """
    own = PROFILES / choice.path.name
    if own.exists():
        yield own
        return
    had_folder, content = PROFILES.is_dir(), choice.path.read_bytes()
    PROFILES.mkdir(exist_ok=True)
    own.write_bytes(content)
    try:
        yield own
    finally:
        if own.exists() and own.read_bytes() == content:
            own.unlink()
            if not had_folder and not any(PROFILES.iterdir()):
                PROFILES.rmdir()


def editor_command(environment: Mapping[str, str]) -> list[str]:
    """The words that begin the user's editor."""
    said = shlex.split(environment.get("VISUAL") or environment.get("EDITOR") or "")
    found = (name for name in EDITORS if shutil.which(name, path=environment.get("PATH", os.defpath)))
    return said or [next(found, EDITORS[-1])]


def _told(run: Run) -> RunChoice:
    try:
        status = stored_status(run)
    except PeerError as error:
        return RunChoice(folder=run.folder, is_live=run.is_live, state=None, words=(str(error),))
    services = ", ".join(f"{service.name} {service.state}" for service in status.services)
    lasted = age_words(status.started_at, status.ended_at)
    words = (f"profile {status.profile}", f"{'for' if run.is_live else 'lasted'} {lasted}", services)
    return RunChoice(folder=run.folder, is_live=run.is_live, state=status.state, words=words)


def _read(name: str, path: Path) -> ProfileChoice:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            head = itertools.takewhile(lambda line: line.startswith("#"), file)
            words = tuple(_paragraphs(line.removeprefix("#").removeprefix(" ").rstrip() for line in head))
        description = str(read_table(path).get("description", ""))
    except (OSError, ConfigError) as error:
        reason = str(error).splitlines()[0]
        return ProfileChoice(name=name, path=path, description="cannot be read", words=(reason,), error=reason)
    return ProfileChoice(name=name, path=path, description=description, words=words)


def _paragraphs(lines: Iterable[str]) -> list[str]:
    """Lines without the breaks of the file: one that is indented goes on with the one before."""
    told: list[str] = []
    for line in lines:
        if told and line.startswith(" "):
            told[-1] += " " + line.strip()
        else:
            told.append(line)
    return told


def _searched(choice: Choice) -> str:
    described = choice.description if isinstance(choice, ProfileChoice) else ""
    return " ".join((choice.name, described, *choice.words)).lower()
