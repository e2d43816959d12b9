"""The profiles that can be started by name, what this machine lacks for each, and their files in an editor."""

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

from grpo_engine.installed import has_gpu_driver, is_installed
from grpo_engine.models.local import missing_source
from grpo_tui.paths import LOGS, PROFILES, new_run_id
from grpo_tui.profile.listed import ListedProfile, listed_profiles
from grpo_tui.view.format import shortened

SMALLEST = "tiny-cpu"
"""Runs on every machine, in a minute: `enter` starts the first of the list."""
EDITORS = ("nano", "vim", "vi")
"""Where neither VISUAL nor EDITOR names one."""
MAX_HEAD_BYTES, MAX_DESCRIPTION = 16_384, 500
"""Of what a profile, which may be somebody else's work, says of itself."""


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
    """What this machine lacks for it: `needs a GPU`."""
    lack_note: str = ""
    """How that was found, or what installs it."""


def profile_choices() -> list[ProfileChoice]:
    """Every profile that can be started by name, those that can run on this machine first. Blocks while it reads."""
    choices = [_profile_choice(listed) for listed in listed_profiles()]
    return sorted(choices, key=lambda one: (one.error is not None, one.lack is not None, one.name != SMALLEST))


def matching(choices: Sequence[ProfileChoice], typed: str) -> list[ProfileChoice]:
    """The choices that contain every typed word, in any order and case: first that name, then those with it in theirs.

    The first is the one that enter starts.
    """
    words = typed.lower().split()
    found = [choice for choice in choices if all(word in _searched(choice) for word in words)]
    return sorted(found, key=lambda one: ([one.name.lower()] != words, any(w not in one.name.lower() for w in words)))


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
    with own.open("xb") as file:  # not through a link to nothing, which another user may have put there
        file.write(content)
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


def _profile_choice(listed: ListedProfile) -> ProfileChoice:
    name, path = listed.name, listed.path
    if listed.error is not None:
        reason = str(getattr(listed.error, "strerror", None) or listed.error).splitlines()[0]
        return ProfileChoice(name=name, path=path, description="cannot be read", words=(reason,), error=reason)
    begin = listed.content[:MAX_HEAD_BYTES].decode(errors="replace").splitlines()
    head = itertools.takewhile(lambda line: line.startswith("#"), begin)
    words = tuple(_paragraphs(line.removeprefix("#").removeprefix(" ").rstrip() for line in head))
    description = shortened(str(listed.table.get("description", "")), MAX_DESCRIPTION)
    lack, note = _lack(listed.table)
    return ProfileChoice(name=name, path=path, description=description, words=words, lack=lack, lack_note=note)


def _lack(table: Mapping[str, Any]) -> tuple[str | None, str]:
    """What this machine lacks for a profile, as far as that is seen without starting anything; `doctor` checks all."""
    model = table.get("model")
    if isinstance(model, dict) and model.get("device") == "cuda" and not has_gpu_driver():
        return "needs a GPU", "no GPU driver is loaded here"
    name = model.get("name") if isinstance(model, dict) else None
    if isinstance(name, str) and (source := missing_source(name)) is not None:
        return "needs its model", source
    services = table.get("services")
    found = [one for one in services.values() if isinstance(one, dict)] if isinstance(services, dict) else []
    needs_vllm = any(one.get("kind") == "inference" and one.get("engine", "vllm") == "vllm" for one in found)
    if needs_vllm and not is_installed("vllm"):
        return "needs vLLM", "it is not installed: pip install 'grpo-tui[vllm]'"
    for one in found:
        if one.get("kind") == "atropos_environment" and isinstance(python := one.get("python"), str):
            path = Path(os.path.expandvars(python)).expanduser()
            is_fixed = path.is_absolute() or path.parts[:1] == ("$ATROPOS_VENV",)  # others are beside the profile
            if is_fixed and not path.exists():
                return "needs Atropos", f"there is no {path}: docs/environments.md says how it is installed"
    cluster = table.get("cluster")
    if isinstance(cluster, dict) and cluster.get("kind") == "ray" and not is_installed("ray"):
        return "needs Ray", "it is not installed: pip install 'grpo-tui[ray]'"
    return None, ""


def _paragraphs(lines: Iterable[str]) -> list[str]:
    """Join indented lines to the line before them."""
    told: list[str] = []
    for line in lines:
        if told and line.startswith(" "):
            told[-1] += " " + line.strip()
        else:
            told.append(line)
    return told


def _searched(choice: ProfileChoice) -> str:
    return " ".join((choice.name, choice.description, *choice.words)).lower()
