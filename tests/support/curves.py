"""What two runs of the same training have alike: the lines of `metrics.jsonl` without times and memory."""

from __future__ import annotations

import re
from pathlib import Path

from grpo_engine.wire.metrics import MetricsLine

OF_THE_MACHINE = re.compile(
    r"\w+/(\d+/)?(\w+_time|tokens_per_second|busy_fraction|gpu_memory_gb)|(time|memory|sync)/\w+|rollout/stale_groups"
)
"""Names of metrics that differ between two runs of the same training: times, memory, which servers took the weights,
and stale groups, of which a step that is repeated from the journal knows nothing."""


def curve(run_folder: Path) -> list[tuple[int, int, dict[str, float]]]:
    """Step, version and every other metric."""
    lines = map(MetricsLine.model_validate_json, (run_folder / "metrics.jsonl").read_text().splitlines())
    return [
        (line.step, line.policy_version, {k: v for k, v in line.metrics.items() if not OF_THE_MACHINE.fullmatch(k)})
        for line in lines
    ]
