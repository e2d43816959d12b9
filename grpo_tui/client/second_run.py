"""A start where runs are live: how their settings differ, and which ports a second run gets.

Reads only; `launch.py` starts and joins.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_engine.config import validated
from grpo_engine.errors import ConfigError, PeerError
from grpo_engine.wire.run_folder import PARENT_FILE
from grpo_engine.wire.secrets import masked_settings
from grpo_engine.wire.tcp_sockets import listening_sockets
from grpo_tui.client.local import Run, StartRefused, look_at, run_folders_anywhere, runs, unreadable_file
from grpo_tui.paths import ForeignFolder, require_own
from grpo_tui.profile.loaded import LoadedProfile
from grpo_tui.profile.loading import load
from grpo_tui.profile.model import Profile, profile_type
from grpo_tui.profile.moved_ports import choose, choose_open
from grpo_tui.profile.plan import Plan
from grpo_tui.run_files.resolved import flat, read_resolved
from grpo_tui.services.base import PLACES
from grpo_tui.supervisor.keeper.client import living_keepers

VALUE_CHARS = 60
"""Of a value in a message."""
MAX_CHANGES = 8
"""Settings that a message lists."""
ANY_PORT = range(1, 1 << 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRun:
    """A live run and its plan."""

    run: Run
    plan: Plan


def live_runs_of(loaded: LoadedProfile, logs: Path) -> Iterator[LiveRun]:
    """The live runs of a profile, the newest first. A profile is a file: one of the same name elsewhere is another.

    A branch has the settings of its parent's profile, and is none of its runs: it did not begin at the model.
    """
    for each in live_runs(logs):
        plan = each.plan
        file = plan.profile_file or plan.profile_folder / f"{plan.profile_name}.toml"  # as earlier versions wrote it
        if file == loaded.file and not (each.run.folder / PARENT_FILE).exists():
            yield each


def live_runs(logs: Path) -> Iterator[LiveRun]:
    """All live runs of a folder with their plans, the newest first."""
    for run in runs(logs):
        if run.is_live:
            yield LiveRun(run=run, plan=Plan.of(run.folder))


def live_runs_anywhere(logs: Path) -> list[LiveRun]:
    """Those, and the live runs of this user in other folders of this machine as far as their plans can be read."""
    found = list(live_runs(logs))
    for folder in run_folders_anywhere() - {live.run.folder for live in found}:
        with suppress(ForeignFolder, PeerError, OSError):  # of another user or version, or deleted
            require_own(folder)
            if unreadable_file(folder) is None and (run := look_at(folder)).is_live:
                found.append(LiveRun(run=run, plan=Plan.of(folder)))
    return found


def require_own_id(run: Run) -> None:
    """Refuse a copy of a live run's folder: processes, shared memory and temporary files are known by the run's id.

    Raises:
        StartRefused: a run of this id is live in another folder.
    """
    for folder in sorted(run_folders_anywhere()):
        if folder.name == run.id and folder != run.folder and look_at(folder).is_live:
            raise StartRefused(
                f"run {run.id} is live in {folder}, and {run.folder} has the same id, by which processes and shared "
                "memory are found: rename this folder, or start a new run at one of its checkpoints with "
                "`grpo-tui branch`"
            )


def differences(live: LiveRun, loaded: LoadedProfile) -> list[str]:
    """What a live run has otherwise than a start would have it: `key: its value there, its value here`, a line each.

    Ports that were chosen for the run are no difference. A setting that follows from another one is listed where no
    other is.
    """
    try:
        there = dict(flat(_profile(read_resolved(live.run.folder)).model_dump(mode="json")))
    except ValueError as error:
        return [str(error)]
    with suppress(ConfigError):  # a port that was chosen for the run is now in the profile
        plan = live.plan
        loaded = load(str(loaded.path), loaded.overrides, moved_ports=plan.moved_ports, chosen_ports=plan.chosen_ports)
    here = dict(flat(loaded.profile.model_dump(mode="json")))
    keys = [key for key in {**here, **there} if here.get(key, _UNSET) != there.get(key, _UNSET)]
    stated = [key for key in keys if not any(f"{key}.".startswith(f"{other}.") for other in loaded.passed_on)]
    return [_difference(key, _shown(key, there), _shown(key, here)) for key in stated or keys]


def refusal(run: Run, changes: Sequence[str]) -> StartRefused:
    """That a live run has other settings, which, and what can be done."""
    text = (
        f"run {run.id} of this profile is live with other settings:\n  "
        + "\n  ".join(_first(changes))
        + "\n--join joins it as it is; --new starts a second run beside it, with free ports"
    )
    return StartRefused(text, choices=("join", "new"))


def note_on(run: Run, changes: Sequence[str]) -> str:
    """That a run was joined which has other settings."""
    return f"{run.id} keeps its settings: " + "; ".join(_first(changes))


def free_ports(loaded: LoadedProfile, logs: Path) -> dict[int, int]:
    """A free port for each port that a profile states and any process listens on or a live run declares."""
    return choose(loaded.stated_ports, used_ports(logs))


def chosen_ports(loaded: LoadedProfile, moves: Mapping[int, int], logs: Path) -> dict[str, int]:
    """A free port for each service of a profile that has 0 for one.

    Args:
        moves: ports that the profile states, with those that are put in their place.
    """
    if not loaded.chosen_ports:
        return {}
    return choose_open(loaded.chosen_ports, {*used_ports(logs), *loaded.stated_ports, *moves.values()})


def used_ports(logs: Path) -> set[int]:
    """The ports that any process of this host listens on, a live run declares, or a start in the queue waits for."""
    from grpo_tui.client.start_queue import waiting_starts

    declared = {port for live in live_runs_anywhere(logs) for launch in live.plan.launches for port in launch.ports}
    declared |= {port for start in waiting_starts() for port in start.ports}
    return declared | {socket.port for socket in listening_sockets(ANY_PORT)}


def require_own_files(loaded: LoadedProfile, logs: Path) -> None:
    """Refuse to start beside a live run that writes the same file or folder: a store, or checkpoints to resume from.

    Raises:
        StartRefused: names the setting and the run.
    """
    own = _written_files(loaded.profile, loaded.file.parent)
    for live in live_runs_anywhere(logs) if own else ():
        with suppress(ValueError):  # its settings cannot be read
            theirs = _written_files(_profile(read_resolved(live.run.folder)), live.plan.profile_folder)
            for path in (path for path in own if path in theirs):
                raise StartRefused(
                    f"{own[path]}: {path} belongs to run {live.run.id}, which is live: choose another with "
                    f"`--set {own[path]}=…`, or leave it out for a place in the run folder"
                )


def require_own_ports(loaded: LoadedProfile, logs: Path, *, is_resumed: bool = False) -> None:
    """Refuse to start on the ports that a live run declares, which no start takes away.

    Raises:
        StartRefused: names the ports and the runs.
    """
    own = set(loaded.ports)
    taken = [
        f"port {port} is that of {launch.name} of run {live.run.id}, which is live"
        for live in live_runs_anywhere(logs)
        if live.run.has_daemon or any(living_keepers(live.run.folder))  # what else is left of a run, a start ends
        for launch in live.plan.launches
        for port in sorted(own.intersection(launch.ports))
    ]
    if taken:
        other = _OTHER_PORT if is_resumed else _FREE_PORTS
        hint = f"`grpo-tui down RUN` ends it; {other}"
        raise StartRefused("\n".join([*taken, hint]), choices=() if is_resumed else ("new",), reasons=taken)


def require_free_ports(loaded: LoadedProfile, *, take_ports: bool, is_resumed: bool = False) -> None:
    """Refuse to start where another process listens on a port, except one that a start ends.

    A socket that no process of this user has open may be closing: the start waits for it, or fails.

    Raises:
        StartRefused: names the ports and the processes.
    """
    from grpo_tui.supervisor.keeper.ports import port_holders

    owners = {each.words(): each.owner for each in port_holders(loaded.ports)}
    held = {
        words: owner
        for words, owner in owners.items()
        if not owner.is_left_over(None, None)
        and not (owner.process is None and owner.uid == os.getuid())
        and not (take_ports and owner.may_be_ended and owner.is_foreign)
    }
    if not held:
        return
    other = _OTHER_PORT if is_resumed else _FREE_PORTS
    can_take = any(owner.may_be_ended and owner.is_foreign for owner in held.values())
    hint = f"{other}; --take-ports ends what holds them" if can_take else other
    raise StartRefused("\n".join([*held, hint]), choices=() if is_resumed else ("new",), reasons=list(held))


def note_on_ports(moves: Mapping[int, int]) -> list[str]:
    """The ports of a profile that were replaced."""
    return (
        ["ports in use were replaced: " + ", ".join(f"{port} → {free}" for port, free in moves.items())]
        if moves
        else []
    )


_UNSET = object()
_FREE_PORTS = "--new starts the run on free ports"
_OTHER_PORT = "--set services.NAME.port=N takes another port"


def _first(changes: Sequence[str]) -> list[str]:
    rest = len(changes) - MAX_CHANGES
    return [*changes[:MAX_CHANGES], *([f"and {rest} more"] if rest > 0 else [])]


def _profile(document: Mapping[str, Any]) -> Profile:
    """The profile of a resolved document, also of one by an earlier version, which knew fewer settings.

    Raises:
        ConfigError: it has settings that this version does not know.
    """
    table = {key: value for key, value in document.items() if key not in ("profile", "file")}
    return validated(profile_type(table), table, where="")


def _written_files(profile: Profile, folder: Path) -> dict[Path, str]:
    """The files and folders that a profile names for one run alone to write, with the setting of each."""
    tables = [(f"services.{name}", folder / service.cwd, service) for name, service in profile.services.items()]
    bridge = [("bridge", folder, profile.bridge)] if profile.bridge is not None else []
    return {
        (base / path).resolve(): f"{name}.{key}"
        for name, base, table in [*tables, *bridge]
        for key, path in table
        if key in PLACES and path is not None
    }


def _difference(key: str, there: str, here: str) -> str:
    """Both values, unless they look the same: secrets, and what differs beyond the first characters."""
    return f"{key}: another value there" if there == here else f"{key}: {there} there, {here} here"


def _shown(dotted: str, settings: Mapping[str, Any]) -> str:
    value = settings.get(dotted)
    key = dotted.rpartition(".")[2]
    if value is None:
        return "unset"
    text = str(masked_settings({key: value})[key])
    return text if len(text) <= VALUE_CHARS else f"{text[: VALUE_CHARS - 1]}…"
