"""What the GPU screen knows beyond the status document. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuView:
    """What the GPU screen knows beyond the status document."""


class GpuChange:
    """Base of all that changes it."""


def after(gpus: GpuView, change: GpuChange) -> GpuView:
    """What it is after a change."""
    return gpus
