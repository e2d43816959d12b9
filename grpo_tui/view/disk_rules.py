"""Rules of diagnosis over the status document: file systems with little space, and what cannot be written. Pure.

A full disk is one warning, however many files of the run are on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from grpo_engine.wire.supervisor import DiskSpace, RunStatus, Warning, WriteFault
from grpo_tui.view.format import bytes_text

MAX_FAULTS = 1000
"""Of a run that are looked at, several times a second; a state from elsewhere may have tens of thousands."""
SUPERVISOR = "supervisor"
SHARED_MEMORY = "/dev/shm"
MAKE_ROOM = (
    "make room there: earlier runs and checkpoints (`du -sh {folder}`), fewer --keep-checkpoints; services go on by "
    "themselves as soon as there is space"
)
MAKE_SHARED_MEMORY = (
    "remove what killed programs left in /dev/shm (`ls -l /dev/shm`), or make it larger (shm-size of a container); it "
    "holds shared weights and adapters"
)


def disks(status: RunStatus) -> Iterator[Warning]:
    """One warning for each file system that is full or nearly so, and for each file that is not writable otherwise."""
    faults = [(SUPERVISOR, fault) for fault in status.write_faults]
    faults += [(service.name, fault) for service in status.services for fault in service.write_faults]
    faults = faults[:MAX_FAULTS]
    spaces = {space.device: space for space in status.low_disks}
    for _, fault in faults:
        if fault.disk is not None and fault.disk.is_full:
            spaces.setdefault(fault.disk.device, fault.disk)
    of_device: dict[int, list[tuple[str, WriteFault]]] = {}
    for writer, fault in faults:
        if fault.disk is not None:
            of_device.setdefault(fault.disk.device, []).append((writer, fault))
    for space in spaces.values():
        yield _disk_warning(space, of_device.get(space.device, []))
    for writer, fault in faults:
        if fault.disk is None or fault.disk.device not in spaces:
            yield _fault_warning(writer, fault)


def _disk_warning(space: DiskSpace, faults: list[tuple[str, WriteFault]]) -> Warning:
    free = f"{bytes_text(space.free_bytes)} of {bytes_text(space.total_bytes)} are free"
    is_memory = space.folder == SHARED_MEMORY
    what = f"shared memory ({space.folder})" if is_memory else f"the disk of {space.folder}"
    text = f"little space is left: {what} is nearly full, {free}"
    if space.is_full or faults:
        text = f"{what} is full, {free}"
    names: dict[tuple[str, str], list[str]] = {}
    for writer, fault in faults:
        names.setdefault((writer, fault.effect), []).append(Path(fault.path).name)
    told = [f"{writer} cannot write {', '.join(files)} ({effect})" for (writer, effect), files in names.items()]
    return Warning(
        id=f"disk:{space.folder}",
        severity="error" if space.is_full or faults else "warning",
        text=": ".join([text, "; ".join(told)] if told else [text]),
        hint=MAKE_SHARED_MEMORY if is_memory else MAKE_ROOM.format(folder=space.folder),
    )


def _fault_warning(writer: str, fault: WriteFault) -> Warning:
    free = "" if fault.disk is None else f"; {bytes_text(fault.disk.free_bytes)} are free there"
    return Warning(
        id=f"unwritten:{writer}:{fault.path}",
        severity="error",
        text=f"{writer} cannot write {fault.path}: {fault.error} ({fault.effect}){free}",
        hint=f"check that {Path(fault.path).parent} exists, that this user may write there, and how large files may be "
        "(`ulimit -f`); or make room",
    )
