"""Before a start: frees ports and GPU memory of stale processes, and reports what other processes hold.

GPU memory is checked if a launch names the GPU or requests a share of its memory. Memory that no live process holds may
still be in the process of being freed by the driver: it is waited for, within a limit. Without a driver, or with one
that does not answer, a start is not refused for lack of memory.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from grpo_engine.wire.supervisor import Refusal
from grpo_tui.services.base import Launch
from grpo_tui.services.visible_gpus import gpus_of
from grpo_tui.supervisor import teardown
from grpo_tui.supervisor.keeper.owners import Owner, owner_of
from grpo_tui.supervisor.keeper.proc import ProcessId
from grpo_tui.supervisor.teardown import Report
from grpo_tui.supervisor.usage.gpus import GpuMemory, GpuReader

ANSWER_LIMIT_S = 10.0
"""For the driver's answer: without persistence mode it initialises every GPU for the first one."""
FREEING_LIMIT_S = 5.0
"""For memory that no live process holds: the driver frees that of a large model within a second."""
UNMAPPING_LIMIT_S = 120.0
"""For other services of the run to unmap weights: a trainer finishes its step first."""
STUCK = "it does not end after SIGKILL: it hangs in the kernel, often in a driver"
CONTEXT_BYTES = 600_000_000
"""Approximate size of a CUDA context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuHolder:
    """A process that holds memory of a GPU."""

    gpu: int
    pid: int
    memory_bytes: int | None
    """None when the driver does not report it."""
    owner: Owner

    @property
    def identity(self) -> ProcessId | None:
        """The process by pid and start time; None when it cannot be seen."""
        process = self.owner.process
        return None if process is None else ProcessId(process.pid, process.start_ticks)

    @property
    def run(self) -> str | None:
        """The run of this project that started it, if any."""
        return None if self.owner.mark is None else self.owner.mark.run

    @property
    def is_alive(self) -> bool:
        """Whether it is known to be alive; the driver may be freeing the memory of one that is not."""
        return self.owner.process is not None and not self.owner.process.is_dead

    def words(self, run: str | None = None) -> str:
        """How much memory, and which process; `run` is the one that asks."""
        return f"{_gb(self.memory_bytes)} held by {self._who(run)}"

    def _who(self, run: str | None) -> str:
        if self.owner.process is None:
            return f"pid {self.pid}, which cannot be seen from here (in another container, or ended just now)"
        if not self.is_alive:
            return f"pid {self.pid} ({self.owner.process.comm}), which has exited and hangs in the driver"
        return self.owner.who(run)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU that a launch uses, with every process that holds memory of it."""

    memory: GpuMemory
    holders: tuple[GpuHolder, ...]

    def has_room(self, share: float) -> bool:
        """Whether this share of it is free."""
        return self.memory.free_bytes >= share * self.memory.usable_bytes

    def may_get_room(self, share: float, hanging: Set[ProcessId | None], *, but_for_run: str | None = None) -> bool:
        """Whether this share would be free if only live processes and those that hang in the kernel kept their memory.

        Args:
            but_for_run: a run whose services are about to release theirs.
        """
        staying = [
            each
            for each in self.holders
            if each.identity in hanging or (each.is_alive and (but_for_run is None or each.run != but_for_run))
        ]
        held_bytes = sum(each.memory_bytes or 0 for each in staying)
        return self.memory.usable_bytes - held_bytes >= share * self.memory.usable_bytes

    @property
    def left_over_bytes(self) -> int:
        """Memory of stale processes, which any start ends."""
        return sum(each.memory_bytes or 0 for each in self.holders if each.owner.is_left_over(None, None))

    def in_words(self, run: str | None) -> list[str]:
        """Every process that holds memory of it, the largest first, then the memory of no listed process."""
        words = [each.words(run) for each in sorted(self.holders, key=lambda each: -(each.memory_bytes or 0))]
        shares = [each.memory_bytes for each in self.holders]
        unlisted_bytes = self.memory.used_bytes - sum(share or 0 for share in shares)
        if None not in shares and unlisted_bytes > CONTEXT_BYTES * (1 + len(shares)):
            words.append(f"{_gb(unlisted_bytes)} held by no process that the driver lists here (in another container?)")
        return words


async def free_resources(
    launch: Launch, *, run: str, report: Report, gpu_reader: GpuReader, take_ports: bool = False
) -> list[Refusal]:
    """End what earlier attempts and runs of ours left on this launch's ports and GPUs, and check what is free then.

    Returns one refusal for each port or GPU that the service cannot have. It may be cancelled at any time.

    Args:
        report: takes a line for people: which process was ended, what was waited for.
        take_ports: whether to end foreign processes of our own user that hold a declared port.
    """
    refusals = await _clear_ports(launch, run, report, take_ports)
    gpus = await look_at_gpus([launch], gpu_reader)
    if gpus:
        hanging = await _end_leftovers(gpus, launch, run, report, gpu_reader)
        refusals += await _shortfalls(launch, run, hanging, report, gpu_reader)
    return refusals


async def look_at_gpus(launches: Iterable[Launch], gpu_reader: GpuReader) -> list[Gpu]:
    """The GPUs that these launches use, with the processes on them; none without a driver that answers. Reads only."""
    launches = [launch for launch in launches if launch.gpus or launch.plans_gpu_memory]
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


async def _clear_ports(launch: Launch, run: str, report: Report, take: bool) -> list[Refusal]:
    """End what is ours on the declared ports; one refusal for each process that still holds one."""
    if not launch.ports:
        return []
    _, stuck, foreign = await teardown.clear_ports(run, launch.name, ports=launch.ports, report=report, take=take)
    return [
        *(
            Refusal(resource="port", port=each.port, holders=[each.owner.holder(run)], text=each.words(run))
            for each in foreign
        ),
        *(
            Refusal(
                resource="port", port=each.port, holders=[each.owner.holder(run)], text=f"{each.words(run)}; {STUCK}"
            )
            for each in stuck
        ),
    ]


# --- GPU memory ----------------------------------------------------------------------------------------------------


async def _end_leftovers(
    gpus: Sequence[Gpu], launch: Launch, run: str, report: Report, gpu_reader: GpuReader
) -> frozenset[ProcessId]:
    """End stale processes and wait until the driver has freed their memory; returns those that hang in the kernel."""
    holders = [each for gpu in gpus for each in gpu.holders]
    left = [each for each in holders if each.owner.is_left_over(run, launch.name)]
    processes = {each.identity: each.owner.process for each in left}
    if not left:
        return frozenset()
    started = time.monotonic()
    await teardown.end_all(lambda: [stat for who, stat in processes.items() if who and stat and who.is_alive()])
    held = await _still_listed(left, started, launch, gpu_reader)
    seconds = f"{time.monotonic() - started:.2f} s"
    for each in left:
        mark = each.owner.mark
        origin = "an earlier attempt" if mark and mark.run == run else f"run {mark and mark.run} of this project"
        words = f"GPU {each.gpu}: {_gb(each.memory_bytes)} held by pid {each.pid}, left by {origin}"
        if each.identity not in held:
            report(f"{words}: ended, freed after {seconds}")
        elif held[each.identity]:
            report(f"{words}: still alive after SIGKILL: it hangs in the kernel, often in a driver")
        else:
            report(f"{words}: ended, but the driver has not freed its memory after {seconds}")
    return frozenset(who for who, hangs in held.items() if who and hangs)


async def _still_listed(
    left: Sequence[GpuHolder], started: float, launch: Launch, gpu_reader: GpuReader
) -> dict[ProcessId | None, bool]:
    """Wait until the driver lists none of the ended processes; returns those still listed, and whether each hangs."""
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
) -> list[Refusal]:
    """One refusal for each GPU with too little free memory, after waiting for what is still being freed."""
    if not launch.plans_gpu_memory:
        return []
    started = time.monotonic()
    has_waited = False
    # A process that has mapped the weights of the last attempt unmaps them, a trainer at the end of its step.
    unmapping_run = run if launch.after_restart is not None else None
    while True:
        gpus = await look_at_gpus([launch], gpu_reader)
        shares = [(gpu, share) for gpu in gpus if (share := launch.gpu_share_of(gpu.memory.usable_bytes)) is not None]
        short = [(gpu, share) for gpu, share in shares if not gpu.has_room(share)]
        is_being_freed = all(gpu.may_get_room(share, hanging) for gpu, share in short)
        is_being_unmapped = all(gpu.may_get_room(share, hanging, but_for_run=unmapping_run) for gpu, share in short)
        limit_s = FREEING_LIMIT_S if is_being_freed or unmapping_run is None else UNMAPPING_LIMIT_S
        if not short or time.monotonic() - started > limit_s or not (is_being_freed or is_being_unmapped):
            break
        if not has_waited and not is_being_freed:
            report(f"{launch.name}: waits for other services of this run to release GPU memory of its last attempt")
        has_waited = True
        await asyncio.sleep(teardown.GPU_ROUND_S)
    if has_waited and not short:
        report(f"{launch.name}: waited {time.monotonic() - started:.2f} s until GPU memory was free")
    return [_refusal(launch, run, share, gpu) for gpu, share in short]


def _refusal(launch: Launch, run: str, share: float, gpu: Gpu) -> Refusal:
    """How much memory of the GPU is free, which processes hold the rest, and what to do."""
    memory = gpu.memory
    need = f"{_gb(share * memory.usable_bytes)} ({share:.0%} of {_gb(memory.usable_bytes)})"
    key = "gpu_memory_utilization" if launch.kind == "inference" else "gpu_memory_share"
    if launch.gpu_memory_bytes is not None:
        key = "gpu_memory_gb"
    fitting = math.floor(100 * (memory.free_bytes - CONTEXT_BYTES) / memory.usable_bytes) / 100
    remedies = [f"end pid {each.pid}" for each in gpu.holders if _is_foreign(each)]
    if fitting > 0:
        most = f"{fitting * memory.usable_bytes / 1e9:.1f}" if key == "gpu_memory_gb" else f"{fitting:.2f}"
        remedies.append(f"request less: `--set {launch.settings}.{key}={most}`")
    remedies.append(f"use another GPU: `--set {launch.settings}.gpus=[…]`")
    parts = [f"GPU {memory.index} has {_gb(memory.free_bytes)} free, and {launch.name} needs {need}"]
    return Refusal(
        resource="gpu",
        gpu=memory.index,
        holders=[each.owner.holder(run, pid=each.pid) for each in gpu.holders],
        text="; ".join([*parts, *gpu.in_words(run), f"to do: {', or '.join(remedies)}"]),
    )


def _is_foreign(holder: GpuHolder) -> bool:
    """Whether a person can end it by its pid: it is alive, of our user, and no run of ours started it."""
    return holder.is_alive and not holder.owner.is_other_users and holder.owner.is_foreign


def _gb(held_bytes: float | None) -> str:
    return "an unknown amount" if held_bytes is None else f"{held_bytes / 1e9:.1f} GB"
