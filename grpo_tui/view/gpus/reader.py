"""Reads the memory plan of the profile and earlier memory samples from the run folder. Blocks: run it in a thread."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

from grpo_engine.errors import PeerError
from grpo_engine.wire.run_folder import TIMELINE_FILE
from grpo_engine.wire.supervisor import UsageSampled, read_from_daemon
from grpo_tui.run_files.opening import open_file
from grpo_tui.run_files.resolved import read_resolved
from grpo_tui.run_files.timeline import USAGE_START
from grpo_tui.view.gpus.rules import memory_plan
from grpo_tui.view.gpus.state import MAX_MOMENTS, MemoryPlan

MAX_BYTES = 64 << 20
"""Twice what the supervisor keeps."""
PARSED_BYTES = 16 << 20
"""Of all samples together, which take twenty times as much; `MAX_MOMENTS` of eight GPUs, with three processes on each,
have 6 MB."""


def read_memory_plan(run_folder: Path) -> MemoryPlan:
    """The memory plan in `resolved.json`; where that is missing or damaged, an empty one with a note."""
    try:
        return memory_plan(read_resolved(run_folder))
    except ValueError as error:
        return MemoryPlan(note=str(error))


def read_samples(run_folder: Path, most: int = MAX_MOMENTS) -> tuple[UsageSampled, ...]:
    """The samples of the timeline, evenly thinned to about `most`, long ones to fewer; none where there is no timeline.

    Damaged lines are passed over, half a last one too.
    """
    try:
        with open_file(run_folder / TIMELINE_FILE) as file:
            lines = [line for line in BytesIO(file.read(MAX_BYTES)) if line.startswith(USAGE_START)]
    except OSError:
        return ()
    stride = max(1, -(-len(lines) // most), -(-sum(map(len, lines)) // PARSED_BYTES))
    samples = []
    for line in lines[::stride]:
        try:
            sample = read_from_daemon(line)
        except PeerError:
            continue
        if isinstance(sample, UsageSampled):
            samples.append(sample)
    return tuple(samples)
