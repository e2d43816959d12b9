"""GPUs of live runs: which of them a start would share, and whether the memory that all of them plan fits.

A live run has the GPUs that the launches of its plan name, until its last process has ended. Without a driver they are
compared by number alone. Reads only.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_engine.installed import has_gpu_driver
from grpo_tui.client.local import StartRefused
from grpo_tui.profile.loaded import LoadedProfile
from grpo_tui.profile.plan import Plan, make_plan
from grpo_tui.services.base import Launch
from grpo_tui.services.visible_gpus import gpus_of

if TYPE_CHECKING:
    from grpo_tui.client.second_run import LiveRun
    from grpo_tui.supervisor.preflight import Gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """A GPU of a start that live runs use."""

    words: str
    """Which run and service, and what is left."""
    excess: str | None = None
    """Which memory is planned in all, where that is more than the GPU has."""


def gpus_by_launch(plan: Plan, uuids: Mapping[int, str]) -> dict[str, list[int]]:
    """The GPUs of each launch by its name, by their number in nvidia-smi.

    Args:
        uuids: of all GPUs of this machine, by number; none without a driver.
    """
    found = {each.name: gpus_of(each, uuids) if uuids else list(each.gpus) for each in plan.launches}
    return {name: gpus for name, gpus in found.items() if gpus}


def crowded_gpus(loaded: LoadedProfile, live: Sequence[LiveRun], logs: Path) -> list[Crowd]:
    """The GPUs of a profile that other live runs use."""
    plan = make_plan(loaded, run_folder=logs / loaded.name, python=sys.executable)
    if not live or not any(launch.gpus or launch.plans_gpu_memory for launch in plan.launches):
        return []
    gpus, uuids = _seen(plan)
    seen: dict[int, Gpu | int] = {gpu.memory.index: gpu for gpu in gpus}
    taken = sorted({index for indices in gpus_by_launch(plan, uuids).values() for index in indices})
    crowds = (crowd_on(seen.get(index, index), live, uuids, plan) for index in taken)
    return [crowd for crowd in crowds if crowd is not None]


def _seen(plan: Plan) -> tuple[list[Gpu], dict[int, str]]:
    if not has_gpu_driver():
        return [], {}
    from grpo_tui.supervisor.preflight import ANSWER_LIMIT_S, look_at_gpus
    from grpo_tui.supervisor.usage.gpus import GpuReader

    async def look() -> tuple[list[Gpu], dict[int, str]]:  # in one event loop: a late answer belongs to it
        reader = GpuReader()
        gpus = await look_at_gpus(plan.launches, reader)
        return gpus, {memory.index: memory.uuid for memory in await reader.memory(ANSWER_LIMIT_S)}

    return asyncio.run(look())


def crowd_on(
    gpu: Gpu | int, live: Sequence[LiveRun], uuids: Mapping[int, str], own: Plan | None = None
) -> Crowd | None:
    """Which live runs use a GPU; None when none does.

    Args:
        gpu: its number alone, where there is no driver.
        uuids: of all GPUs of this machine, by number.
        own: the plan of a start that is to use it too.
    """
    memory = None if isinstance(gpu, int) else gpu.memory
    index = gpu if isinstance(gpu, int) else gpu.memory.index
    held = _held_bytes(gpu)
    theirs = {
        (each.run.id, launch.name): _Use(launch=launch) for each in live for launch in _users(index, each.plan, uuids)
    }
    theirs = {key: replace(theirs.get(key, _Use()), held_bytes=held[key]) for key in {**theirs, **held}}
    if not theirs:
        return None
    words = f"GPU {index} is used by " + _runs({key: use.now for key, use in theirs.items()})
    if memory is not None:
        left = f"{memory.free_bytes / 1e9:.1f} of {memory.usable_bytes / 1e9:.1f} GB"
        words += f"; {left} ({memory.free_bytes / memory.usable_bytes:.0%}) are free"
    mine = {launch.name: _Use(launch=launch) for launch in (_users(index, own, uuids) if own is not None else ())}
    card_bytes = None if memory is None else memory.usable_bytes
    total = sum(use.most(card_bytes) for use in (*theirs.values(), *mine.values()))
    if total <= (card_bytes or 1):
        return Crowd(words=words)
    asked = ", ".join(f"{name} {use.planned}" for name, use in mine.items() if use.planned) or "no plan of its memory"
    sums = f"{total:.0%}" if card_bytes is None else f"{total / 1e9:.1f} of {card_bytes / 1e9:.1f} GB"
    others = _runs({key: use.now if use.is_above_plan(card_bytes) else use.planned for key, use in theirs.items()})
    return Crowd(words=words, excess=f"GPU {index}: {others} and this start ({asked}) come to {sums}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Use:
    """What a service takes of a GPU."""

    launch: Launch | None = None
    held_bytes: int = 0

    @property
    def planned(self) -> str:
        """What its plan says: `45%`, `36.0 GB`, or nothing."""
        if self.launch is None or self.launch.gpu_memory_bytes is not None:
            return "" if self.launch is None else _gb(self.launch.gpu_memory_bytes or 0)
        return "" if self.launch.gpu_memory_share is None else f"{self.launch.gpu_memory_share:.0%}"

    @property
    def now(self) -> str:
        """What it holds, or else requests."""
        return _gb(self.held_bytes) if self.held_bytes else f"{self.planned} requested" if self.planned else ""

    def is_above_plan(self, card_bytes: int | None) -> bool:
        """Whether it holds more than it has planned."""
        return self.held_bytes >= self.most(card_bytes) > 0

    def most(self, card_bytes: int | None) -> float:
        """The greater of both in bytes; of a GPU of unknown size, the share that is planned."""
        share = None if self.launch is None else self.launch.gpu_share_of(card_bytes)
        return max((share or 0.0) * (card_bytes or 1), self.held_bytes)


def _users(index: int, plan: Plan, uuids: Mapping[int, str]) -> list[Launch]:
    gpus = gpus_by_launch(plan, uuids)
    return [launch for launch in plan.launches if index in gpus.get(launch.name, ())]


def _held_bytes(gpu: Gpu | int) -> Counter[tuple[str, str]]:
    """What processes of live runs hold, by run and service; 0 of one whose memory the driver does not report."""
    held: Counter[tuple[str, str]] = Counter()
    for holder in () if isinstance(gpu, int) else gpu.holders:
        mark = holder.owner.mark
        if mark is not None and (holder.owner.is_supervised or holder.owner.is_kept):
            held[mark.run, str(mark.service)] += holder.memory_bytes or 0
    return held


def _runs(services: Mapping[tuple[str, str], str]) -> str:
    """`run a (vllm 36.0 GB, trainer) and run b (vllm 45% requested)`."""
    by_run: dict[str, list[str]] = {}
    for (run, service), amount in services.items():
        by_run.setdefault(run, []).append(f"{service} {amount}".rstrip())
    return " and ".join(f"run {run} ({', '.join(each)})" for run, each in by_run.items())


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB"


def require_gpus(crowds: Sequence[Crowd], *, shares: bool, is_resumed: bool = False) -> None:
    """Refuse to start on GPUs of live runs: any of them, or where GPUs are shared, those with too little memory.

    Raises:
        StartRefused: names the GPUs, the runs, and what can be done.
    """
    if crowds and not shares:
        raise refusal_of_gpus([crowd.words for crowd in crowds], is_resumed=is_resumed)
    if excesses := [crowd.excess for crowd in crowds if crowd.excess is not None]:
        hint = "plan less memory (gpu_memory_utilization, gpu_memory_share, gpu_memory_gb), name another GPU (gpus)"
        raise StartRefused(
            "\n".join([*excesses, f"{hint}, or end the other run with `grpo-tui down RUN`"]), reasons=excesses
        )


def refusal_of_gpus(crowds: Sequence[str], *, is_resumed: bool = False) -> StartRefused:
    """That other runs use the GPUs, and what can be done."""
    hint = (
        "--share-gpus starts this run beside it, in what is left"
        if is_resumed
        else "--new starts this run beside it, in what is left; --queue waits for them"
    )
    text = "\n".join([*crowds, f"{hint}; `grpo-tui down RUN` ends the other"])
    return StartRefused(text, choices=() if is_resumed else ("new",), reasons=crowds)
