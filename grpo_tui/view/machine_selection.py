"""Which machine's row is selected, and which machines are folded. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from grpo_engine.wire.supervisor import RunStatus
from grpo_tui.view.machines import MachineRow, machine_rows
from grpo_tui.view.viewer import Viewer


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSelected:
    """The row of a machine was clicked."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFolded:
    """The services of a machine are hidden or shown again, or those of all machines."""

    name: str | None
    """None: all machines."""
    is_folded: bool | None = None
    """None: the other way round; all machines are folded unless all are."""


def at_machine(viewer: Viewer, status: RunStatus | None, name: str | None) -> Viewer:
    """Select the row of a machine, if there is one of that name; the log stays that of the service before."""
    is_there = any(row.name == name for row in machine_rows(status))
    return replace(viewer, machine=name) if is_there else viewer


def at_known_machine(viewer: Viewer, status: RunStatus | None) -> Viewer:
    """A machine that has left is no longer selected."""
    is_known = viewer.machine is None or any(row.name == viewer.machine for row in machine_rows(status))
    return viewer if is_known else replace(viewer, machine=None)


def at_service(viewer: Viewer, status: RunStatus | None, service: str | None) -> Viewer:
    """Select the row of a service: its machine is unfolded, since keys act on it."""
    machine = _machine_of(service, status)
    hidden = viewer.folded if machine is None else viewer.folded - {machine.name}
    return replace(viewer, machine=None, folded=hidden)


def folded(viewer: Viewer, status: RunStatus | None, change: MachineFolded, selected: str | None) -> Viewer:
    """Fold or unfold machines; where that hides the selected service, its machine is selected."""
    names = {row.name for row in machine_rows(status)} if change.name is None else {change.name}
    is_folded = not names <= viewer.folded if change.is_folded is None else change.is_folded
    after = replace(viewer, folded=viewer.folded | names if is_folded else viewer.folded - names)
    machine = _machine_of(selected, status)
    if viewer.machine is None and machine is not None and machine.name in after.folded:
        return replace(after, machine=machine.name)
    return after


def _machine_of(service: str | None, status: RunStatus | None) -> MachineRow | None:
    rows = machine_rows(status)
    return next((row for row in rows if any(each.name == service for each in row.services)), None)
