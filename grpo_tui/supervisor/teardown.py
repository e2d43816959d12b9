"""After a service has ended: nothing of it is left, and whoever else is in the way is named.

In this order: processes with the run's marker (and those in the ledger), declared ports, GPU memory, shared memory,
the run's temporary folder.
A keeper that lived to the end has left nothing to do here, so this is the second net and costs some milliseconds.
Ends only what carries our marker or stands in our ledger, by pid and start time; a stranger is ended on explicit word
alone, another user's process never.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from grpo_tui.supervisor import orphans, proc, temporary
from grpo_tui.supervisor.ports import Holder, port_holders
from grpo_tui.supervisor.proc import ProcessId, Stat

Report = Callable[[str], None]
"""Takes a line for a person: what was ended, what is in the way, how long a stage took."""
GpuMemory = Callable[[], Awaitable[int | None]]
"""GPU memory in bytes that the service still holds; None when nobody knows."""

KILL_ROUND_S = 0.02
CLOSING_LIMIT_S = 1.0
"""For the kernel to close the sockets of a process that was killed."""
UNKILLABLE_AFTER_S = 5.0
"""What outlives SIGKILL for so long hangs in the kernel: it is named and not waited for."""
GPU_LIMIT_S = 15.0
"""The driver frees a large model's memory within a second; past this somebody else maps it."""
GPU_ROUND_S = 0.1
SHARED_MEMORY = "/dev/shm"
CUDA_SHARED = re.compile(r"cuda\.shm\.[^.]+\.([0-9a-f]+)\.")
TORCH_SHARED = re.compile(r"torch_(\d+)_")


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepReport:
    """What a sweep found."""

    ended: tuple[str, ...]
    """Processes that were left and have been ended, in words."""
    unkillable: tuple[str, ...]
    """Processes that SIGKILL did not end in time, in words."""
    strangers: tuple[Holder, ...]
    """Who still holds a declared port."""
    removed: tuple[str, ...]
    """Shared-memory files and temporary folders that were removed."""
    gpu_memory_bytes: int | None
    """GPU memory still held when the wait ended; 0 when all is free, None when nobody knows."""
    seconds: float


async def sweep(
    run: str,
    service: str | None,
    *,
    ports: Iterable[int],
    report: Report,
    ledger: Iterable[ProcessId] = (),
    gpu_memory: GpuMemory | None = None,
    take_ports: bool = False,
    temporary_folder: Path | None = None,
) -> SweepReport:
    """End what is left of a service, or of the whole run if `service` is None, and say what could not be ended.

    Args:
        ledger: processes known to be the service's, for those that have neither parent nor marker any more.
        take_ports: the explicit word to end strangers of our own user that hold a declared port.
        temporary_folder: the run's, where it is known.
    """
    started = time.monotonic()
    ledger = frozenset(ledger)
    whose = service or f"run {run}"
    ended, stuck = await end_all(lambda: _left(run, service, ledger))
    if ended:
        report(f"{whose}: ended what was left of it in {_since(started)}: {', '.join(ended)}")
    freed, held, strangers = await clear_ports(run, service, ports=ports, report=report, take=take_ports)
    for words in (*stuck, *held):
        report(f"{whose}: {words} does not end, SIGKILL or not: it hangs in the kernel, often in a driver")
    gpu_memory_bytes = None if gpu_memory is None else await _gpu_is_free(gpu_memory, whose, report)
    removed = await asyncio.to_thread(_remove_shared_memory, run if service is None else None, ledger)
    if removed:
        report(f"{whose}: removed from shared memory: {', '.join(removed)}")
    if service is None:
        removed += await _remove_temporary(run, temporary_folder, report)
    return SweepReport(
        ended=(*ended, *freed),
        unkillable=(*stuck, *held),
        strangers=tuple(strangers),
        removed=tuple(removed),
        gpu_memory_bytes=gpu_memory_bytes,
        seconds=time.monotonic() - started,
    )


async def clear_ports(
    run: str, service: str | None, *, ports: Iterable[int], report: Report, take: bool = False
) -> tuple[list[str], list[str], list[Holder]]:
    """End holders of these ports that are ours or left by a run of ours; also the pre-flight before a start.

    Returns who was ended, who could not be ended (both in words), and the strangers, who are named and left alone.
    """
    wanted = frozenset(ports)

    def may_end(holder: Holder) -> bool:
        owner = holder.owner
        return owner.may_be_ended and (owner.belongs_to(run, service) or (take and owner.is_strangers))

    def ours() -> list[Stat]:
        holders = port_holders(wanted)
        return [each.owner.process for each in holders if each.owner.process is not None and may_end(each)]

    holders = await _settled_holders(wanted)
    for holder in holders:
        is_refused = take and holder.owner.is_other_users
        refusal = "another user's process is never ended" if is_refused else "it is left alone"
        report(f"{holder.words(run)}; {'it is ended' if may_end(holder) else refusal}")
    if not any(map(may_end, holders)):
        return [], [], holders
    ended, stuck = await end_all(ours)
    return ended, stuck, [holder for holder in await _settled_holders(wanted) if not may_end(holder)]


async def _settled_holders(ports: frozenset[int]) -> list[Holder]:
    """Who holds these ports; a socket of ours that nobody has open any more is on its way out, and waited for."""
    deadline = time.monotonic() + CLOSING_LIMIT_S
    while True:
        holders = await asyncio.to_thread(port_holders, ports)
        is_closing = any(each.owner.process is None and each.owner.uid == os.getuid() for each in holders)
        if not is_closing or time.monotonic() > deadline:
            return holders
        await asyncio.sleep(KILL_ROUND_S)


def _left(run: str, service: str | None, ledger: frozenset[ProcessId]) -> list[Stat]:
    """What is left of a service: marked processes, those in the ledger, all below either, and orphans of any keeper."""
    found = {process.pid: process for process in (*proc.processes_of_run(run, service), *orphans.adopted())}
    if any(entry.is_alive() for entry in ledger):
        everybody = proc.living()
        for process in everybody:
            if ProcessId(process.pid, process.start_ticks) in ledger:
                found.update((each.pid, each) for each in (process, *proc.below(process.pid, everybody)))
    spared = proc.ourselves()
    return [process for process in found.values() if process.pid not in spared]


async def end_all(find: Callable[[], Sequence[Stat]]) -> tuple[list[str], list[str]]:
    """SIGKILL to everybody found, until nobody is found; who was ended and who would not end, in words."""
    killed: dict[ProcessId, str] = {}
    deadline = time.monotonic() + UNKILLABLE_AFTER_S
    while left := await asyncio.to_thread(find):
        for process in left:
            killed[ProcessId(process.pid, process.start_ticks)] = f"pid {process.pid} ({process.comm})"
            proc.send_signal(process, signal.SIGKILL)
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(KILL_ROUND_S)
    stuck = {ProcessId(process.pid, process.start_ticks) for process in left}
    return [words for key, words in killed.items() if key not in stuck], [killed[key] for key in stuck]


async def _gpu_is_free(gpu_memory: GpuMemory, whose: str, report: Report) -> int | None:
    """Wait until the driver has taken back the memory; what is still held, in bytes, when the limit is over."""
    started = time.monotonic()
    held = first = await gpu_memory()
    while held and time.monotonic() - started < GPU_LIMIT_S:
        await asyncio.sleep(GPU_ROUND_S)
        held = await gpu_memory()
    if held:
        report(f"{whose}: {held / 1e9:.1f} GB of GPU memory still held after {_since(started)}: who else maps it?")
    elif first:
        report(f"{whose}: {first / 1e9:.1f} GB of GPU memory free again after {_since(started)}")
    return held


async def _remove_temporary(run: str, folder: Path | None, report: Report) -> list[str]:
    removed, left = await asyncio.to_thread(temporary.remove_folders, run, folder)
    if removed:
        report(f"run {run}: removed what its services had left in {', '.join(removed)}")
    for words in left:
        report(f"run {run}: its temporary folder cannot be removed: {words}; remove it by hand")
    return removed


def _remove_shared_memory(run: str | None, ledger: frozenset[ProcessId]) -> list[str]:
    """Remove what dead processes left in shared memory, and at the end of a run `grpo-<run>-*`; only our own user's.

    The CUDA driver (`cuda.shm.<device>.<pid in hex>.<n>`) and torch (`torch_<pid>_*`) leave the files by which memory
    was shared between processes, unless every process that mapped it ended in the right order.
    """
    dead = {entry.pid for entry in ledger if proc.identify(entry.pid) is None}  # nor a later process with its pid
    removed = []
    for entry in _shared_memory():
        is_of_run = run is not None and entry.name.startswith(f"grpo-{run}-")
        if not is_of_run and _left_by(entry.name) not in dead:
            continue
        with suppress(OSError):  # its maker removed it just now, or it may not be removed
            if entry.stat(follow_symlinks=False).st_uid != os.getuid():
                continue
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)
            removed.append(entry.path)
    return removed


def _left_by(name: str) -> int | None:
    """The process that made a file of shared memory, where its name says so."""
    if found := CUDA_SHARED.match(name):
        return int(found[1], 16)
    return int(found[1]) if (found := TORCH_SHARED.match(name)) else None


def _shared_memory() -> list[os.DirEntry[str]]:
    try:
        with os.scandir(SHARED_MEMORY) as entries:
            return list(entries)
    except OSError:
        return []


def _since(started: float) -> str:
    return f"{time.monotonic() - started:.2f} s"
