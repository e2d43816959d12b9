"""What a run folder says of the sweep that the run is a point of. Written and read by `grpo_tui.sweeps`."""

from __future__ import annotations

from pydantic import Field

from grpo_engine.wire.codec import Message


class SweepMark(Message):
    """The point of a sweep that a run is. Example: point 3 of `lr`, ended early at step 20."""

    sweep: str
    """The name of the sweep: of its folder in `logs/sweeps`."""
    id: str
    """Tells sweeps of one name from each other, where the folder of the first was deleted."""
    point: int = Field(ge=1)
    pruned: str | None = None
    """Why the sweep ended the run before its last step; None where it did not."""
