"""Rules of diagnosis over the machines of a cluster: which is lost or does not answer, what ran there, what follows."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from grpo_engine.wire.supervisor import ENDED_RUN_STATES, RunStatus, Warning
from grpo_tui.view.format import names_text
from grpo_tui.view.machines import UP

STALE_S = 15.0
"""Without news of any machine for so long, the broker reports nothing: it sends every second."""


def machines(status: RunStatus) -> Iterator[Warning]:
    """Machines that are lost or silent, and those that were lost while something of theirs is still missing."""
    if status.state in ENDED_RUN_STATES or status.is_ending:
        return
    up = {service.name for service in status.services if service.state in UP}
    for machine in status.machines:
        where = f"{machine.name} ({machine.address})"
        missing = [name for name in machine.lost_services if name not in up]
        if machine.state == "lost":
            yield Warning(
                id=f"machine-lost:{machine.name}",
                severity="error" if missing else "warning",
                text=f"{where} is lost since {_clock(machine.since)}: {_ran(machine.lost_services)} ran there",
                hint=machine.next,
            )
        elif machine.lost_at is not None and missing:
            yield Warning(
                id=f"machine-lost:{machine.name}",
                severity="error",
                text=f"{where} was lost at {_clock(machine.lost_at)}: {_ran(machine.lost_services)} ran there; "
                + ("it joins again" if machine.is_joining else "it is back"),
                hint=machine.next or "; ".join(_started(name, status) for name in missing),
            )
        elif machine.state == "silent" and not machine.is_joining:
            yield Warning(
                id=f"machine-silent:{machine.name}",
                severity="error",
                text=f"{where}, silent since {_clock(machine.since)}, runs {_ran(machine.services)}",
                hint=machine.next,
            )


def unreported_machines(status: RunStatus, now: float) -> Iterator[Warning]:
    """A broker that reports nothing: what is shown of the machines is old."""
    answers = [machine.answered_at for machine in status.machines if machine.answered_at is not None]
    if status.state in ENDED_RUN_STATES or status.is_ending or not answers or now - max(answers) < STALE_S:
        return
    yield Warning(
        id="machines-unreported",
        severity="warning",
        text=f"what is shown of the machines is of {_clock(max(answers))}: nothing was reported since then",
        hint="`grpo-tui logs machines` is the log of what reports them, and `grpo-tui restart machines` starts it "
        "again; services go on meanwhile",
    )


def _ran(services: Iterable[str]) -> str:
    names = list(services)
    return names_text(names) if names else "nothing of the run"


def _started(name: str, status: RunStatus) -> str:
    """What a service that ran there does now."""
    where = [each.name for each in status.machines if each.state != "lost" and name in each.services]
    state = next((each.state for each in status.services if each.name == name), "gone")
    return f"{name} is {state}" + (f" on {' and '.join(where)}" if where else "")


def _clock(moment: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(moment))
