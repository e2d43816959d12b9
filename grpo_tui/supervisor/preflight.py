"""Before a start: ports and GPU memory. What is ours and left over is ended; whoever else is in the way is named.

Room on a GPU is looked for where a launch names the GPU or demands a share of its memory. Memory that no living process
accounts for may be on its way back from the driver: it is waited for, within a limit. Where nobody can be asked (no
driver, or one that does not answer) nothing is held against a start.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from grpo_tui.services.base import Launch
from grpo_tui.services.visible_gpus import gpus_of
from grpo_tui.supervisor import teardown
from grpo_tui.supervisor.gpus import GpuMemory, GpuReader
from grpo_tui.supervisor.owners import Owner, owner_of
from grpo_tui.supervisor.proc import ProcessId
from grpo_tui.supervisor.teardown import Report

ANSWER_LIMIT_S = 10.0
"""For the driver's answer: without its persistence mode it wakes every card for the first one."""
FADING_LIMIT_S = 5.0
"""For memory that nobody living accounts for: the driver takes a large model's back within a second."""
LETTING_GO_LIMIT_S = 120.0
"""For other services of the run to let go of weights that they have mapped: a trainer ends its step first."""
CONTEXT_BYTES = 600_000_000
"""About what a program takes on a GPU before it has allocated anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuHolder:
    """A process that holds memory of a GPU."""

    gpu: int
    pid: int
    memory_bytes: int | None
    """None when the driver does not tell."""
    owner: Owner

    @property
    def identity(self) -> ProcessId | None:
        """The process by pid and start time; None when it cannot be seen."""
        process = self.owner.process
        return None if process is None else ProcessId(process.pid, process.start_ticks)

    @property
    def run(self) -> str | None:
        """The run of ours that it was started for."""
        return None if self.owner.mark is None else self.owner.mark.run

    @property
    def lives(self) -> bool:
        """Whether it is seen to live; the memory of one that does not may be on its way back."""
        return self.owner.process is not None and not self.owner.process.is_dead

    def words(self, run: str | None = None) -> str:
        """For a person: how much, and who; `run` is the one that asks."""
        return f"{_gb(self.memory_bytes)} held by {self._who(run)}"

    def _who(self, run: str | None) -> str:
        if self.owner.process is None:
            return f"pid {self.pid}, which cannot be seen from here (in another container, or ended just now)"
        if not self.lives:
            return f"pid {self.pid} ({self.owner.process.comm}), which is dead and hangs in the driver"
        return self.owner.who(run)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU that a launch takes, with everybody who holds memory of it."""

    memory: GpuMemory
    holders: tuple[GpuHolder, ...]

    def has_room(self, share: float) -> bool:
        """Whether so much of it is free."""
        return self.memory.free_bytes >= share * self.memory.usable_bytes

    def may_get_room(self, share: float, hanging: Set[ProcessId | None], *, but_for_run: str | None = None) -> bool:
        """Whether so much would be free if only those held on who live, or hang in the kernel.

        Args:
            but_for_run: a run whose services are about to let go.
        """
        staying = [
            each
            for each in self.holders
            if each.identity in hanging or (each.lives and (but_for_run is None or each.run != but_for_run))
        ]
        held_bytes = sum(each.memory_bytes or 0 for each in staying)
        return self.memory.usable_bytes - held_bytes >= share * self.memory.usable_bytes

    @property
    def left_over_bytes(self) -> int:
        """What runs of ours left on it, and any start ends."""
        return sum(each.memory_bytes or 0 for each in self.holders if each.owner.is_left_over(None, None))

    def in_words(self, run: str | None) -> list[str]:
        """Everybody who holds memory of it, the largest first, then what nobody listed holds."""
        words = [each.words(run) for each in sorted(self.holders, key=lambda each: -(each.memory_bytes or 0))]
        shares = [each.memory_bytes for each in self.holders]
        unlisted_bytes = self.memory.used_bytes - sum(share or 0 for share in shares)
        if None not in shares and unlisted_bytes > CONTEXT_BYTES * (1 + len(shares)):
            words.append(f"{_gb(unlisted_bytes)} held by nobody whom the driver lists here (in another container?)")
        return words


async def clear_the_way(
    launch: Launch, *, run: str, report: Report, gpu_reader: GpuReader, take_ports: bool = False
) -> str | None:
    """End what earlier attempts and runs of ours left on this launch's ports and GPUs, and see that there is room.

    Returns None when nothing is in the way, else who is, and what to do, in words. It may be cancelled at any time.

    Args:
        report: takes a line for a person: who was ended, what was waited for.
        take_ports: the explicit word to end strangers of our own user that hold a declared port.
    """
    faults = await _clear_ports(launch, run, report, take_ports)
    gpus = await look_at_gpus([launch], gpu_reader)
    if gpus:
        hanging = await _end_leftovers(gpus, launch, run, report, gpu_reader)
        faults += await _shortfalls(launch, run, hanging, report, gpu_reader)
    return "; ".join(faults) or None


async def look_at_gpus(launches: Iterable[Launch], gpu_reader: GpuReader) -> list[Gpu]:
    """The GPUs that these launches take, with who holds their memory; none when nobody can be asked. Reads only."""
    launches = [launch for launch in launches if launch.gpus or launch.gpu_memory_share is not None]
    if not launches:
        return []
    memories = await gpu_reader.memory(ANSWER_LIMIT_S)
    uuids = {memory.index: memory.uuid for memory in memories}
    taken = {index for launch in launches for index in gpus_of(launch, uuids)}
    return await asyncio.to_thread(_with_holders, [memory for memory in memories if memory.index in taken])


def _with_holders(memories: Iterable[GpuMemory]) -> list[Gpu]:
    return [
        Gpu(
            memory=memory,
            holders=tuple(
                GpuHolder(gpu=memory.index, pid=pid, memory_bytes=held_bytes, owner=owner_of(pid))
                for pid, held_bytes in memory.bytes_by_pid.items()
            ),
        )
        for memory in memories
    ]


# --- ports ---------------------------------------------------------------------------------------------------------


async def _clear_ports(launch: Launch, run: str, report: Report, take: bool) -> list[str]:
    """Clear the declared ports of what is ours; who else holds them, in words."""
    if not launch.ports:
        return []
    _, stuck, strangers = await teardown.clear_ports(run, launch.name, ports=launch.ports, report=report, take=take)
    return [
        *(holder.words(run) for holder in strangers),
        *(f"{words} holds a port, and does not end" for words in stuck),
    ]


# --- GPU memory ----------------------------------------------------------------------------------------------------


async def _end_leftovers(
    gpus: Sequence[Gpu], launch: Launch, run: str, report: Report, gpu_reader: GpuReader
) -> frozenset[ProcessId]:
    """End whoever is ours and left over, and wait until the driver has their memory back; who hangs in the kernel."""
    holders = [each for gpu in gpus for each in gpu.holders]
    left = [each for each in holders if each.owner.is_left_over(run, launch.name)]
    processes = {each.identity: each.owner.process for each in left}
    if not left:
        return frozenset()
    started = time.monotonic()
    await teardown.end_all(lambda: [stat for who, stat in processes.items() if who and stat and who.is_alive()])
    held = await _not_given_back(left, started, launch, gpu_reader)
    seconds = f"{time.monotonic() - started:.2f} s"
    for each in left:
        mark = each.owner.mark
        origin = "an earlier attempt" if mark and mark.run == run else f"run {mark and mark.run} of this project"
        words = f"GPU {each.gpu}: {_gb(each.memory_bytes)} held by pid {each.pid}, left by {origin}"
        if each.identity not in held:
            report(f"{words}: ended, free again after {seconds}")
        elif held[each.identity]:
            report(f"{words}: does not end, SIGKILL or not: it hangs in the kernel, often in a driver")
        else:
            report(f"{words}: ended, but not given back by the driver within {seconds}")
    return frozenset(who for who, hangs in held.items() if who and hangs)


async def _not_given_back(
    left: Sequence[GpuHolder], started: float, launch: Launch, gpu_reader: GpuReader
) -> dict[ProcessId | None, bool]:
    """Wait until the driver lists none of those that were ended; who is still listed, and whether it hangs."""
    known = {each.pid: each.identity for each in left}
    while True:
        gpus = await look_at_gpus([launch], gpu_reader)
        listed = [each for gpu in gpus for each in gpu.holders if each.identity in {None, known.get(each.pid)}]
        held = {known[each.pid]: each.identity is not None for each in listed if each.pid in known}
        limit_s = teardown.UNKILLABLE_AFTER_S if any(held.values()) else teardown.GPU_LIMIT_S
        if not held or time.monotonic() - started > limit_s:
            return held
        await asyncio.sleep(teardown.GPU_ROUND_S)


async def _shortfalls(
    launch: Launch, run: str, hanging: frozenset[ProcessId], report: Report, gpu_reader: GpuReader
) -> list[str]:
    """Which GPUs have too little free, in words, once nothing more can be expected to come back."""
    share = launch.gpu_memory_share
    if share is None:
        return []
    started = time.monotonic()
    has_waited = False
    # Who has mapped the weights of the last attempt lets go of them, if need be at the end of a step.
    letting_go = run if launch.after_restart is not None else None
    while True:
        short = [gpu for gpu in await look_at_gpus([launch], gpu_reader) if not gpu.has_room(share)]
        is_fading = all(gpu.may_get_room(share, hanging) for gpu in short)
        is_let_go = all(gpu.may_get_room(share, hanging, but_for_run=letting_go) for gpu in short)
        limit_s = FADING_LIMIT_S if is_fading or letting_go is None else LETTING_GO_LIMIT_S
        if not short or time.monotonic() - started > limit_s or not (is_fading or is_let_go):
            break
        if not has_waited and not is_fading:
            report(f"{launch.name}: waits for the others of this run to let go of GPU memory of its last attempt")
        has_waited = True
        await asyncio.sleep(teardown.GPU_ROUND_S)
    if has_waited and not short:
        report(f"{launch.name}: waited {time.monotonic() - started:.2f} s until GPU memory was given back")
    return [_refusal(launch, run, share, gpu) for gpu in short]


def _refusal(launch: Launch, run: str, share: float, gpu: Gpu) -> str:
    """That a GPU has too little free: how much, who holds the rest, what to do."""
    memory = gpu.memory
    need = f"{_gb(share * memory.usable_bytes)} ({share:.0%} of {_gb(memory.usable_bytes)})"
    key = "gpu_memory_utilization" if launch.kind == "inference" else "gpu_memory_share"
    fitting = math.floor(100 * (memory.free_bytes - CONTEXT_BYTES) / memory.usable_bytes) / 100
    remedies = [f"end pid {each.pid}" for each in gpu.holders if _is_strangers(each)]
    if fitting > 0:
        remedies.append(f"demand less: `--set services.{launch.name}.{key}={fitting:.2f}`")
    remedies.append(f"take another GPU: `--set services.{launch.name}.gpus=[…]`")
    parts = [f"GPU {memory.index} has {_gb(memory.free_bytes)} free, and {launch.name} needs {need}"]
    return "; ".join([*parts, *gpu.in_words(run), f"to do: {', or '.join(remedies)}"])


def _is_strangers(holder: GpuHolder) -> bool:
    """Whether a person can end it by its pid: it lives, it is of our user, and no run of ours."""
    return holder.lives and not holder.owner.is_other_users and holder.owner.is_strangers


def _gb(held_bytes: float | None) -> str:
    return "an unknown amount" if held_bytes is None else f"{held_bytes / 1e9:.1f} GB"
