"""Reads what was sampled of memory before the screen was there, from the timeline of the run. Blocks: for a thread."""

from __future__ import annotations

from pathlib import Path

from grpo_engine.errors import PeerError
from grpo_engine.wire.supervisor import UsageSampled, read_from_daemon
from grpo_tui.paths import TIMELINE_FILE
from grpo_tui.supervisor.timeline import USAGE_START
from grpo_tui.view.gpu_view import MAX_MOMENTS

MAX_BYTES = 64 << 20
"""Twice what a daemon keeps."""


def read_samples(run_folder: Path, most: int = MAX_MOMENTS) -> tuple[UsageSampled, ...]:
    """The samples of the timeline, evenly thinned to about `most`; none where there is no timeline.

    Damaged lines are passed over, half a last one too.
    """
    try:
        with (run_folder / TIMELINE_FILE).open("rb") as file:
            lines = [line for line in file.readlines(MAX_BYTES) if line.startswith(USAGE_START)]
    except OSError:
        return ()
    stride = max(1, -(-len(lines) // most))
    samples = []
    for line in lines[::stride]:
        try:
            sample = read_from_daemon(line)
        except PeerError:
            continue
        if isinstance(sample, UsageSampled):
            samples.append(sample)
    return tuple(samples)
