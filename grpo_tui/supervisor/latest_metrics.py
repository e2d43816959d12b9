"""The latest value of every metric of a run, from the end of its `metrics.jsonl`."""

from __future__ import annotations

import json
import math
from pathlib import Path

from grpo_tui.paths import METRICS_FILE

TAIL_BYTES = 64 * 1024
"""Some hundred steps of metrics: enough for the latest value of names that do not come with every step."""


def latest_metrics(folder: Path) -> dict[str, float]:
    """The latest value of every metric, and `step`; empty before the first step. Reads the end of the file alone."""
    latest: dict[str, float] = {}
    for line in _last_lines(folder / METRICS_FILE):
        try:
            record = json.loads(line)
            values = {name: float(value) for name, value in record["metrics"].items()}
            step = float(record["step"])
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # the first line of the tail is cut, and the last may be half-written
        latest |= {name: value for name, value in values.items() if math.isfinite(value)}
        latest["step"] = step
    return latest


def _last_lines(path: Path) -> list[bytes]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
            return file.read(TAIL_BYTES).splitlines()
    except FileNotFoundError:
        return []
