"""The choices of `grpo-tui` without a profile: runs of this folder to attach to, and profiles to start."""

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
from typing import Any

from grpo_engine.config import read_table
from grpo_engine.errors import ConfigError, PeerError
from grpo_engine.wire.supervisor import RunState
from grpo_tui.client.local import Run, age_words, runs, stored_status
from grpo_tui.paths import LOGS, PROFILES, available_profiles, new_run_id

MAX_ENDED_RUNS = 5
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
"""Is there while the driver is loaded, in containers with a GPU too."""
EDITORS = ("nano", "vim", "vi")
"""Where neither VISUAL nor EDITOR names one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunChoice:
    """A run in `logs/`."""

    folder: Path
    is_live: bool
    state: RunState | None
    """None if its files cannot be read."""
    words: tuple[str, ...]
    """Its description, a line each."""

    @property
    def name(self) -> str:
        """Its id."""
        return self.folder.name


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileChoice:
    """A profile to start, or to attach to a running run of."""

    name: str
    path: Path
    description: str
    words: tuple[str, ...]
    """The comment that opens the file: hardware, memory, when to choose it."""
    error: str | None = None
    """Why it cannot be read."""
    lack: str | None = None
    """What this machine lacks for it."""


Choice = RunChoice | ProfileChoice


def run_choices(logs: Path = LOGS) -> list[RunChoice]:
    """Live runs, newest first, then the latest ended ones. Blocks while it reads."""
    known = runs(logs)
    live = [run for run in known if run.is_live]
    ended = [run for run in known if not run.is_live]
    return [_run_choice(run) for run in (*live, *ended[:MAX_ENDED_RUNS])]


def profile_choices() -> list[ProfileChoice]:
    """Every profile that can be started by name, those that can run on this machine first. Blocks while it reads."""
    choices = [_profile_choice(name, path) for name, path in available_profiles().items()]
    return sorted(choices, key=lambda choice: (choice.error is not None, choice.lack is not None))


def matching(choices: Sequence[Choice], typed: str) -> list[Choice]:
    """The choices that contain every typed word, in any order and case."""
    words = typed.lower().split()
    return [choice for choice in choices if all(word in _searched(choice) for word in words)]


def plan_of(name: str, overrides: Sequence[str] = ()) -> str:
    """The plan of a profile as text.

    Raises:
        ConfigError: the profile is wrong.
    """
    from grpo_tui.profile.loading import load
    from grpo_tui.profile.plan import make_plan, plan_text

    loaded = load(name, list(overrides))
    return plan_text(make_plan(loaded, run_folder=LOGS / new_run_id(loaded.name), python=sys.executable), loaded)


@contextmanager
def own_copy(choice: ProfileChoice) -> Iterator[Path]:
    """Yield a profile's file in `./profiles`, which takes precedence over an installed one of the same name.

    A copy made for this is removed again if it was not changed, so that updates of the installed one still apply.

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
    """The command line of the user's editor."""
    said = shlex.split(environment.get("VISUAL") or environment.get("EDITOR") or "")
    found = (name for name in EDITORS if shutil.which(name, path=environment.get("PATH", os.defpath)))
    return said or [next(found, EDITORS[-1])]


def _run_choice(run: Run) -> RunChoice:
    try:
        status = stored_status(run)
    except PeerError as error:
        return RunChoice(folder=run.folder, is_live=run.is_live, state=None, words=(str(error),))
    services = ", ".join(f"{service.name} {service.state}" for service in status.services)
    lasted = age_words(status.started_at, status.ended_at)
    words = (f"profile {status.profile}", f"{'for' if run.is_live else 'lasted'} {lasted}", services)
    return RunChoice(folder=run.folder, is_live=run.is_live, state=status.state, words=words)


def _profile_choice(name: str, path: Path) -> ProfileChoice:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            head = itertools.takewhile(lambda line: line.startswith("#"), file)
            words = tuple(_paragraphs(line.removeprefix("#").removeprefix(" ").rstrip() for line in head))
        table = read_table(path)
        description = str(table.get("description", ""))
    except (OSError, ConfigError) as error:
        reason = str(error).splitlines()[0]
        return ProfileChoice(name=name, path=path, description="cannot be read", words=(reason,), error=reason)
    return ProfileChoice(name=name, path=path, description=description, words=words, lack=_lack(table))


def _lack(table: Mapping[str, Any]) -> str | None:
    """What this machine lacks for a profile, as far as that is seen without starting anything; `doctor` checks all."""
    model = table.get("model")
    if isinstance(model, dict) and model.get("device") == "cuda" and not NVIDIA_DRIVER.exists():
        return "needs an NVIDIA GPU, and this machine has no driver"
    return None


def _paragraphs(lines: Iterable[str]) -> list[str]:
    """Join indented lines to the line before them."""
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
