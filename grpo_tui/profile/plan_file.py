"""The plan of a run and its file: launches in start order, independent of the profile.

A plan is all that the supervisor needs. It is written beside the run's logs, so that no supervisor reads a profile that
was edited in the meantime. Imports no engine settings, which keeps the supervisor small.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from grpo_engine.errors import PeerError
from grpo_engine.wire.codec import fail_fast, first_fault
from grpo_engine.wire.run_folder import PLAN_FILE
from grpo_engine.wire.secrets import masked_argv, masked_variables
from grpo_tui.run_files.whole_file import read_whole
from grpo_tui.services.base import ClusterPlan, Launch
from grpo_tui.services.hook import Hook

PLAN_VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Services in start order, as the supervisor starts them."""

    version: int = PLAN_VERSION
    profile_name: str
    profile_folder: Path
    """Where hooks run."""
    launches: tuple[Launch, ...]
    hooks: tuple[Hook, ...] = ()
    take_ports: bool = False
    """Whether foreign processes of the same user on a declared port are ended at a service's first start."""
    profile_file: Path | None = None
    """By which a later start recognises a run of its profile; None in plans of earlier versions."""
    moved_ports: Mapping[int, int] = field(default_factory=dict)
    """Ports of the profile that were in use when this run was started beside another, with those chosen instead."""
    chosen_ports: Mapping[str, int] = field(default_factory=dict)
    """By service: the free ports that were chosen where the profile has 0."""
    tags: tuple[str, ...] = ()
    """Words that a person gave the run."""
    notes: tuple[str, ...] = ()
    """What this machine lacks that the run goes on without, a sentence each."""
    cluster: ClusterPlan | None = None
    """Machines on which services with `num_devices` run; None: all run on this one."""

    def to_json(self) -> str:
        """The plan as JSON; `from_json` reads it."""
        return _PLAN.dump_json(self, indent=1, exclude_defaults=False).decode()

    @staticmethod
    def of(run_folder: Path) -> Plan:
        """The plan of a run.

        Raises:
            PeerError: missing, damaged, or of another version.
        """
        path = run_folder / PLAN_FILE
        try:
            text = read_whole(path).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise PeerError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
        return Plan.from_json(text, where=str(path))

    @staticmethod
    def from_json(text: str, *, where: str = "plan") -> Plan:
        """Read a plan that `to_json` wrote.

        Raises:
            PeerError: damaged, or of another version.
        """
        try:
            plan = _PLAN.validate_json(text)
        except ValidationError as error:
            raise PeerError(f"{where}: damaged, or of another version: {first_fault(error)}") from None
        if plan.version != PLAN_VERSION:
            raise PeerError(f"{where}: version {plan.version}, but this program reads {PLAN_VERSION}")
        return plan


_PLAN = fail_fast(TypeAdapter(Plan))


def shown_env(launch: Launch) -> dict[str, str]:
    """The environment variables of a launch without secrets, to which every value from a file counts."""
    return masked_variables(launch.env, launch.env_from_files)


def shown_command(launch: Launch) -> str:
    """Its command without secrets, which can be pasted into a shell; one flag per line."""
    first, *words = (shlex.quote(word) for word in masked_argv(launch.argv))
    return first + "".join(f" \\\n      {word}" if word.startswith("--") else f" {word}" for word in words)
