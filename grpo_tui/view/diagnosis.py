"""What is wrong with a run, its cause, and the flag that fixes it. Pure.

The rules are in `training_rules.py` (from metrics), `service_rules.py`, `disk_rules.py` and
`machine_rules.py` (from the status document)
and `stall_rules.py` (from both); each yields wire `Warning`s with an id that stays the same while the cause lasts. The
verdict on alignment, from recorded tokens, is in `grpo_engine.diagnosis`.
"""

from __future__ import annotations

from collections.abc import Sequence

from grpo_engine.diagnosis.evidence import RunSettings
from grpo_engine.wire.metrics import MetricsLine
from grpo_engine.wire.supervisor import RunStatus, Warning
from grpo_tui.view.disk_rules import disks
from grpo_tui.view.machine_rules import machines, unreported_machines
from grpo_tui.view.service_rules import SERVICE_RULES
from grpo_tui.view.stall_rules import stalls
from grpo_tui.view.training_rules import EXPLAINED_BY, TRAINING_RULES, Measurements

GRAVITY = {"error": 0, "warning": 1, "info": 2}
UNKNOWN_SETTINGS = RunSettings()


def diagnose(
    history: Sequence[MetricsLine],
    status: RunStatus | None,
    settings: RunSettings = UNKNOWN_SETTINGS,
    *,
    now: float | None = None,
) -> list[Warning]:
    """All warnings about a run, the most severe first.

    Args:
        history: lines of `metrics.jsonl` in order of their steps; may be thinned, except for the newest.
        status: the newest status document, or None where there is none.
        settings: those of the run, by which metrics are judged.
        now: Unix time of `status`; None: nothing is said about how long the last step is ago.
    """
    found: list[Warning] = []
    if status is not None:
        for service_rule in SERVICE_RULES:
            found += service_rule(status)
        found += disks(status)
        found += machines(status)
    if status is not None and now is not None:
        found += stalls(history, status, now)
        found += unreported_machines(status, now)
    if history:
        measured = Measurements(history, settings)
        for training_rule in TRAINING_RULES:
            found += training_rule(measured)
    ids = {warning.id for warning in found}
    found = [warning for warning in found if ids.isdisjoint(EXPLAINED_BY.get(warning.id, ()))]
    return sorted(found, key=lambda warning: GRAVITY[warning.severity])


def merged_warnings(
    status: RunStatus | None, own: tuple[Warning, ...], lines: Sequence[MetricsLine], now: float
) -> tuple[Warning, ...]:
    """The supervisor's warnings and our own, each id once, the most severe first."""
    by_id = {warning.id: warning for warning in (status.warnings if status else [])}
    stalled = () if status is None else (*stalls(lines, status, now), *unreported_machines(status, now))
    for warning in (*diagnose((), status), *stalled, *own):
        by_id.setdefault(warning.id, warning)
    return tuple(sorted(by_id.values(), key=lambda warning: GRAVITY[warning.severity]))
