"""What is wrong with a run, its cause, and the flag that fixes it. Pure.

The rules are in `training_rules.py` (from metrics) and `service_rules.py` (from the status document); each yields wire
`Warning`s with an id that stays the same while the cause lasts. The verdict on alignment, from recorded tokens, is in
`grpo_engine.diagnosis`.
"""

from __future__ import annotations

from collections.abc import Sequence

from grpo_engine.wire.metrics import MetricsLine
from grpo_engine.wire.supervisor import RunStatus, Warning
from grpo_tui.view.service_rules import SERVICE_RULES
from grpo_tui.view.training_rules import EXPLAINED_BY, TRAINING_RULES, Measurements

GRAVITY = {"error": 0, "warning": 1, "info": 2}


def diagnose(history: Sequence[MetricsLine], status: RunStatus | None) -> list[Warning]:
    """All warnings about a run, the most severe first.

    Args:
        history: lines of `metrics.jsonl` in order of their steps; may be thinned, except for the newest.
        status: the newest status document, or None where there is none.
    """
    found: list[Warning] = []
    if status is not None:
        for service_rule in SERVICE_RULES:
            found += service_rule(status)
    if history:
        measured = Measurements(history)
        for training_rule in TRAINING_RULES:
            found += training_rule(measured)
    ids = {warning.id for warning in found}
    found = [warning for warning in found if ids.isdisjoint(EXPLAINED_BY.get(warning.id, ()))]
    return sorted(found, key=lambda warning: GRAVITY[warning.severity])
