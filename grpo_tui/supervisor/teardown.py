"""The teardown after a service or a run: ends stale processes, and reports what others still hold.

In this order: processes with the run's marker (and those in the ledger), declared ports, GPU memory, shared memory,
the run's temporary folder.
A keeper that exited normally has left nothing to do, so this is the second check and takes milliseconds. Ends only
processes with our marker or in our ledger, by pid and start time; a foreign process only with `take_ports`, another
user's process never.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from grpo_engine.errors import GrpoError
from grpo_tui.supervisor import temporary
from grpo_tui.supervisor.keeper import orphans, proc
from grpo_tui.supervisor.keeper.ports import Holder, port_holders
from grpo_tui.supervisor.keeper.proc import ProcessId, Stat
from grpo_tui.supervisor.registered import registered_folders

Report = Callable[[str], None]
"""Takes a line for people: what was ended, which process is in the way, how long a stage took."""
GpuMemory = Callable[[], Awaitable[int | None]]
"""GPU memory in bytes that the service still holds; None when unknown."""

KILL_ROUND_S = 0.02
CLOSING_LIMIT_S = 1.0
"""For the kernel to close the sockets of a process that was killed."""
UNKILLABLE_AFTER_S = 5.0
"""A process that outlives SIGKILL for so long hangs in the kernel: it is reported and not waited for."""
GPU_LIMIT_S = 15.0
"""The driver frees a large model's memory within a second; after this another process must have mapped it."""
GPU_ROUND_S = 0.1
SHARED_MEMORY = "/dev/shm"
SEMAPHORE = "sem."
"""What the C library puts before the names of semaphores."""
CUDA_SHARED = re.compile(r"cuda\.shm\.[^.]+\.([0-9a-f]+)\.")
NAMED_SHARED = re.compile(r"(?:torch|psm)_(\d+)_")


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepReport:
    """The result of a sweep."""

    ended: tuple[str, ...]
    """Stale processes that were ended."""
    unkillable: tuple[str, ...]
    """Processes that are still alive after SIGKILL."""
    foreign: tuple[Holder, ...]
    """Foreign processes that hold a declared port."""
    removed: tuple[str, ...]
    """Shared-memory files and temporary folders that were removed."""
    gpu_memory_bytes: int | None
    """GPU memory still held when the wait ended; None when unknown."""
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
    run_folder: Path | None = None,
) -> SweepReport:
    """End stale processes of a service, or of the whole run if `service` is None, and report what could not be ended.

    Args:
        ledger: processes known to be the service's, for those that have neither parent nor marker any more.
        take_ports: whether to end foreign processes of our own user that hold a declared port.
        temporary_folder: of the run, if known.
        run_folder: if known; a run of the same id in another folder is then left alone.
    """
    started = time.monotonic()
    ledger = frozenset(ledger)
    whose = service or f"run {run}"
    ended, stuck = await end_all(lambda: _left(run, service, ledger, run_folder))
    if ended:
        report(f"{whose}: ended its remaining processes in {_since(started)}: {', '.join(ended)}")
    freed, hanging, foreign = await clear_ports(run, service, ports=ports, report=report, take=take_ports)
    held = [process_text(each.owner.process) for each in hanging if each.owner.process is not None]
    for words in (*stuck, *held):
        report(f"{whose}: {words} still alive after SIGKILL: it hangs in the kernel, often in a driver")
    gpu_memory_bytes = None if gpu_memory is None else await _gpu_is_free(gpu_memory, whose, report)
    removed = await asyncio.to_thread(remove_shared_memory, run, ledger, is_over=service is None)
    if removed:
        report(f"{whose}: removed from shared memory: {', '.join(removed)}")
    if service is None:
        removed += await _remove_temporary(run, temporary_folder, report)
    return SweepReport(
        ended=(*ended, *freed),
        unkillable=(*stuck, *held),
        foreign=tuple(foreign),
        removed=tuple(removed),
        gpu_memory_bytes=gpu_memory_bytes,
        seconds=time.monotonic() - started,
    )


async def clear_ports(
    run: str, service: str | None, *, ports: Iterable[int], report: Report, take: bool = False
) -> tuple[list[str], list[Holder], list[Holder]]:
    """End processes of ours that hold these ports; also part of the check before a start.

    Returns who was ended (in words), who outlives SIGKILL, and the foreign processes, which are named and left alone.
    """
    wanted = frozenset(ports)

    def may_end(holder: Holder) -> bool:
        owner = holder.owner
        return owner.may_be_ended and (owner.belongs_to(run, service) or (take and owner.is_foreign))

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
    ended, _ = await end_all(ours)
    left = await _settled_holders(wanted)
    return ended, [each for each in left if may_end(each)], [each for each in left if not may_end(each)]


async def _settled_holders(ports: frozenset[int]) -> list[Holder]:
    """The processes on these ports, after a socket of ours that no process has open any more was closed."""
    deadline = time.monotonic() + CLOSING_LIMIT_S
    while True:
        holders = await asyncio.to_thread(port_holders, ports)
        is_closing = any(each.owner.process is None and each.owner.uid == os.getuid() for each in holders)
        if not is_closing or time.monotonic() > deadline:
            return holders
        await asyncio.sleep(KILL_ROUND_S)


def _left(run: str, service: str | None, ledger: frozenset[ProcessId], run_folder: Path | None) -> list[Stat]:
    """Stale processes of a service: marked ones, those in the ledger, their descendants, and orphans of any keeper."""
    marked = proc.processes_of_run(run, service, run_folder=run_folder)
    found = {process.pid: process for process in (*marked, *orphans.adopted())}
    if any(entry.is_alive() for entry in ledger):
        processes = proc.living()
        for process in processes:
            if ProcessId(process.pid, process.start_ticks) in ledger:
                found.update((each.pid, each) for each in (process, *proc.below(process.pid, processes)))
    own = proc.ourselves()
    return [process for process in found.values() if process.pid not in own]


async def end_all(find: Callable[[], Sequence[Stat]]) -> tuple[list[str], list[str]]:
    """Send SIGKILL until no process is found; returns the processes that ended, and those that did not."""
    killed: dict[ProcessId, str] = {}
    deadline = time.monotonic() + UNKILLABLE_AFTER_S
    while left := await asyncio.to_thread(find):
        for process in left:
            killed[ProcessId(process.pid, process.start_ticks)] = process_text(process)
            proc.send_signal(process, signal.SIGKILL)
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(KILL_ROUND_S)
    stuck = {ProcessId(process.pid, process.start_ticks) for process in left}
    return [words for key, words in killed.items() if key not in stuck], [killed[key] for key in stuck]


def process_text(process: Stat) -> str:
    """A process as reports name it."""
    return f"pid {process.pid} ({process.comm})"


async def _gpu_is_free(gpu_memory: GpuMemory, whose: str, report: Report) -> int | None:
    """Wait until the driver has freed the memory; returns the bytes still held at the limit."""
    started = time.monotonic()
    held = first = await gpu_memory()
    while held and time.monotonic() - started < GPU_LIMIT_S:
        await asyncio.sleep(GPU_ROUND_S)
        held = await gpu_memory()
    if held:
        report(
            f"{whose}: {held / 1e9:.1f} GB of GPU memory still held after {_since(started)}: another process may map it"
        )
    elif first:
        report(f"{whose}: {first / 1e9:.1f} GB of GPU memory free again after {_since(started)}")
    return held


async def _remove_temporary(run: str, folder: Path | None, report: Report) -> list[str]:
    removed, left = await asyncio.to_thread(temporary.remove_folders, run, folder)
    if removed:
        report(f"run {run}: removed files that its services left in {', '.join(removed)}")
    for words in left:
        report(f"run {run}: its temporary folder cannot be removed: {words}; remove it by hand")
    return removed


def remove_shared_memory(run: str, ledger: frozenset[ProcessId], *, is_over: bool = True) -> list[str]:
    """Remove files of dead processes in shared memory, and at the end of a run `grpo-<run>-*`; only our own user's.

    Of a run `a`, what a live run `a-b` has made, `grpo-a-b-*`, is left alone.

    The CUDA driver (`cuda.shm.<device>.<pid in hex>.<n>`), torch (`torch_<pid>_*`) and our servers with vLLM
    (`grpo-<run>-psm_<pid>_*`, `sem.grpo-<run>-*`) leave the files by which memory was shared between processes, unless
    every process that mapped it ended in the right order. Only names say whose a file is: what processes of the run map
    may be a model that a user has put there.
    """
    dead = {entry.pid for entry in ledger if proc.identify(entry.pid) is None}  # nor a later process with its pid
    stem, others = f"grpo-{run}-", _stems_of_longer_names(run)

    def is_left(name: str) -> bool:
        named = name.removeprefix(SEMAPHORE)
        is_of_run = named.startswith(stem) and not named.startswith(others)
        return (is_over and is_of_run) or _left_by(name.removeprefix(stem)) in dead

    removed = []
    for path, is_folder in list(_of_ours(is_left)):
        with suppress(OSError):  # it was removed meanwhile, or may not be removed
            if is_folder:
                shutil.rmtree(path)
            else:
                os.unlink(path)
            removed.append(path)
    return removed


def _stems_of_longer_names(run: str) -> tuple[str, ...]:
    """How the shared memory of live runs is called whose names begin as that of this run does."""
    names = {mark.run for process in proc.living() if (mark := proc.marker(process.pid)) is not None}
    with suppress(GrpoError):  # the folder of registrations cannot be used
        names |= {folder.name for folder in registered_folders()}
    return tuple(f"grpo-{name}-" for name in names if name.startswith(f"{run}-"))


def _left_by(name: str) -> int | None:
    """The process that made a file of shared memory, if its name (without that of the run) contains the pid."""
    if found := CUDA_SHARED.match(name):
        return int(found[1], 16)
    return int(found[1]) if (found := NAMED_SHARED.match(name)) else None


def _of_ours(is_left: Callable[[str], bool]) -> Iterator[tuple[str, bool]]:
    """Our own files of such names in shared memory, and whether each is a folder.

    One is looked at at a time: any user may make a million names there.
    """
    with suppress(OSError), os.scandir(SHARED_MEMORY) as entries:
        for entry in entries:
            if is_left(entry.name):
                with suppress(OSError):  # it was removed meanwhile
                    if entry.stat(follow_symlinks=False).st_uid == os.getuid():
                        yield entry.path, entry.is_dir(follow_symlinks=False)


def _since(started: float) -> str:
    return f"{time.monotonic() - started:.2f} s"
