"""Which GPUs a launch takes, by their number in nvidia-smi. Pure, but for the inherited environment."""

from __future__ import annotations

import os
from collections.abc import Mapping

from grpo_tui.services.base import VISIBLE_DEVICES, Launch


def gpus_of(launch: Launch, uuids: Mapping[int, str], inherited: Mapping[str, str] = os.environ) -> list[int]:
    """The GPUs that a launch names; without any, a launch that plans GPU memory uses the first visible one.

    Args:
        uuids: of the GPUs of this machine, by number.
        inherited: environment that the launch extends.
    """
    if launch.gpus:
        return [index for index in launch.gpus if index in uuids]
    if not launch.plans_gpu_memory:
        return []
    listed = {**inherited, **launch.env}.get(VISIBLE_DEVICES)
    return sorted(uuids)[:1] if listed is None else _first(listed, uuids)


def _first(listed: str, uuids: Mapping[int, str]) -> list[int]:
    """The first GPU of a list of numbers or beginnings of UUIDs, as CUDA reads it; none when CUDA would see none."""
    name = listed.split(",")[0].strip()
    if name.isdecimal():
        return [int(name)] if int(name) in uuids else []
    return [index for index, uuid in uuids.items() if name and uuid.startswith(name)][:1]
