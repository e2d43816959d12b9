"""Reads the runs of a sweep into its table, and writes that into its folder: `results.json` and two CSV files."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from grpo_engine.errors import PeerError
from grpo_engine.wire.codec import write_atomically
from grpo_engine.wire.supervisor import ENDED_RUN_STATES
from grpo_tui.client.local import look_at, stored_status
from grpo_tui.run_files.metrics import all_steps
from grpo_tui.sweeps.files import RESULTS_FILE
from grpo_tui.sweeps.folder import PointRun, Sweep
from grpo_tui.sweeps.grid import masked_swept
from grpo_tui.sweeps.results import PointResult, SettingsResult, by_settings, measured, to_csv
from grpo_tui.view.diagnosis import diagnose
from grpo_tui.view.metrics.summary import WINDOW
from grpo_tui.view.run_settings import read_settings

POINTS_FILE, SETTINGS_FILE = "points.csv", "results.csv"


def result_of(run: PointRun) -> PointResult:
    """What a point came to, or has come to by now."""
    point = run.point
    result: dict[str, Any] = {"point": point.number, "settings": point.settings, "seed": point.seed}
    result |= {"state": str(run.state), "reason": run.reason}
    if run.folder is None:
        return PointResult(**result)
    lines = all_steps(run.folder)
    try:
        status = stored_status(look_at(run.folder))
    except PeerError:  # its supervisor was killed before it wrote anything
        status = None
    if status is not None and status.started_at is not None:
        until = status.ended_at or (lines[-1].time if lines and status.state in ENDED_RUN_STATES else time.time())
        hours = max(0.0, until - status.started_at) / 3600
        result["hours"] = hours if math.isfinite(hours) else None
    warnings = diagnose(lines, status, read_settings(run.folder))
    return PointResult(
        **result,
        **measured(lines),
        run=run.folder.name,
        folder=str(run.folder),
        warnings=tuple(warning.id for warning in warnings if warning.severity != "info"),
    )


def document(sweep: Sweep, points: Sequence[PointResult]) -> dict[str, Any]:
    """What `results.json` holds and `--json` prints."""
    return {
        "sweep": sweep.name,
        "profile": str(sweep.profile_path),
        "folder": str(sweep.folder),
        "reward_window": WINDOW,
        "settings": [_record(each) for each in by_settings(points)],
        "points": [_record(each) for each in points],
    }


def _record(row: PointResult | SettingsResult) -> dict[str, Any]:
    return {**asdict(row), "settings": masked_swept(row.settings)}


def write_table(sweep: Sweep, points: Sequence[PointResult]) -> None:
    """Write the three files.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    texts = {
        RESULTS_FILE: json.dumps(document(sweep, points), indent=1) + "\n",
        POINTS_FILE: to_csv(points),
        SETTINGS_FILE: to_csv(by_settings(points)),
    }
    for name, text in texts.items():
        write_atomically(sweep.folder / name, text.encode(), mode=0o600)
