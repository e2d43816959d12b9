"""MPS in a plan: a service more, where services of a run share a GPU.

Its daemon is private to the run: it listens in the run's temporary folder, and only the services that share a GPU get
the variable that names it. They start once it is ready, or cannot be had: a service that finds no daemon there runs
without MPS. Every one of them is restarted after it, since none can call CUDA once its server is gone.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from grpo_engine.python_command import module_command
from grpo_tui import mps_process
from grpo_tui.profile.model import Profile
from grpo_tui.services.base import (
    DEVICE_ORDER,
    MPS_PRIORITY,
    MPS_THREADS,
    VISIBLE_DEVICES,
    Launch,
    NeedCondition,
    Place,
    Probe,
    RestartPolicy,
)
from grpo_tui.services.trainer import Trainer

NAME = "mps"
READY_WITHIN_S = 60.0
STOP_GRACE_S = 15.0
"""Above what `mps_process` takes to end the daemon in the worst case."""
MAX_RESTARTS = 3
FAULT = (
    r"(?i)cudaErrorMps|CUDA_ERROR_MPS|MPS server and the MPS client|MPS server is not ready"
    r"|MPS client has been terminated|MPS client failed to connect"
    r"|CUDA error: (?:an illegal (?:memory access|instruction)|misaligned address"
    r"|unspecified launch failure|device-side assert|invalid program counter)"
)
"""CUDA's messages after its server ended, and those of a fault on the GPU, which ends every client of the server: the
driver does not say whose it was."""
PART_OF_GPU = (
    "gpu_share of {}: an 8B trainer with 0.7 or 0.8 of an H200's multiprocessors computed NaN (driver 580, torch 2.11, "
    "CUDA 13.0): compare the first steps with a run without it"
)
FOLDERS = {mps_process.PIPES: "mps", mps_process.LOGS: "mps-log"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """What of this machine decides whether a run may have a daemon of its own."""

    program: str | None
    """`nvidia-cuda-mps-control`; None where it is not in PATH."""
    daemon_of_all: str | None = None
    """Who runs a daemon that every CUDA program uses, if anybody does."""
    environment: Mapping[str, str]
    uuids: Callable[[], Mapping[int, str]] = dict
    """Returns the UUIDs of the GPUs by number; of none where no driver answers."""

    @classmethod
    def of_this(cls) -> MachineFacts:
        """Of this machine."""
        program = shutil.which(mps_process.CONTROL)
        return cls(
            program=program,
            daemon_of_all=mps_process.daemon_of_all(),
            environment=os.environ,
            uuids=lambda: mps_process.of_driver(mps_process.uuids) or {},
        )


def sharing(launches: Iterable[Launch], profile: Profile) -> dict[str, tuple[int, ...]]:
    """The services that share a GPU with another one, each with its GPUs; those on a CPU are left out.

    None where they take turns: then one of them computes at a time.
    """
    if any(isinstance(each, Trainer) and each.bridge.takes_turns for each in profile.services.values()):
        return {}
    on_gpus = [each for each in launches if each.gpus and not _is_on_cpu(each, profile)]
    pairs = [pair for pair in combinations(on_gpus, 2) if not set(pair[0].gpus).isdisjoint(pair[1].gpus)]
    names = {launch.name for pair in pairs for launch in pair}
    return {launch.name: launch.gpus for launch in on_gpus if launch.name in names}


def with_mps(
    launches: Sequence[Launch], profile: Profile, place: Place, machine: MachineFacts
) -> tuple[list[Launch], tuple[str, ...]]:
    """The launches of a plan with the daemon among them where services share a GPU; and why not, if so."""
    on_gpus = sharing(launches, profile) if profile.gpu.mps else {}
    words = _visible_to_all(on_gpus, machine)
    reason = lacking([each for each in launches if each.name in on_gpus], launches, words, machine)
    if on_gpus and reason is None:
        joined = [_joined(each, words) if each.name in on_gpus else each for each in launches]
        limited = [
            each.name for each in launches if each.name in on_gpus and float(each.env.get(MPS_THREADS, 100)) < 100
        ]
        doubts = (PART_OF_GPU.format(" and ".join(limited)),) if limited else ()
        return [_launch(on_gpus, words, place), *joined], doubts
    notes = []
    if reason is not None:
        notes.append(f"{' and '.join(on_gpus)} share a GPU without MPS, so they are time-sliced: {reason}")
    if limited := [each.name for each in launches if not {MPS_THREADS, MPS_PRIORITY}.isdisjoint(each.env)]:
        notes.append(f"gpu_share and gpu_priority of {' and '.join(limited)} have no effect without MPS")
    return list(launches), tuple(notes)


def lacking(
    clients: Sequence[Launch], launches: Iterable[Launch], words: Mapping[int, str], machine: MachineFacts
) -> str | None:
    """Why services that share a GPU cannot have a daemon of their own; None where they can, or none shares one.

    Args:
        words: for each of their GPUs, its word in CUDA_VISIBLE_DEVICES.
    """
    if not clients:
        return None
    if NAME in {each.name for each in launches}:
        return f"services.{NAME} has the name of its service: rename it"
    for client in clients:
        if (folder := {**machine.environment, **client.env}.get(mps_process.PIPES)) is not None:
            return f"{mps_process.PIPES} is set to {folder}, so {client.name} uses the daemon there, if one runs"
    if machine.daemon_of_all is not None:
        return f"the daemon of {machine.daemon_of_all} serves all programs of this machine: end it for one of the run"
    if machine.program is None:
        return f"{mps_process.CONTROL} is not in PATH (it comes with the driver: nvidia-compute-utils)"
    if unknown := [gpu for client in clients for gpu in client.gpus if gpu not in words]:
        return f"the driver does not say the UUID of GPU {unknown[0]}"
    return None


def _visible_to_all(on_gpus: Mapping[str, tuple[int, ...]], machine: MachineFacts) -> dict[int, str]:
    """Every GPU of the services that share one, with its word in CUDA_VISIBLE_DEVICES.

    To its clients, the driver numbers the GPUs that the daemon sees, from 0 on: unless those are the first of the
    machine, only UUIDs mean the same to both.
    """
    gpus = sorted({gpu for each in on_gpus.values() for gpu in each})
    if gpus == list(range(len(gpus))):
        return {gpu: str(gpu) for gpu in gpus}
    known = machine.uuids()
    return {gpu: known[gpu] for gpu in gpus if gpu in known}


def _joined(client: Launch, words: Mapping[int, str]) -> Launch:
    """A service that finds the daemon, sees its GPUs as the daemon does, and is restarted with it."""
    return replace(
        client,
        needs={NAME: NeedCondition.SETTLED, **client.needs},
        env={**client.env, VISIBLE_DEVICES: ",".join(words[gpu] for gpu in client.gpus)},
        env_in_temporary=FOLDERS,
        failed_by={NAME: FAULT},
    )


def _launch(on_gpus: Mapping[str, tuple[int, ...]], words: Mapping[int, str], place: Place) -> Launch:
    """The daemon, which sees the GPUs of all services that use it."""
    return Launch(
        name=NAME,
        kind=NAME,
        argv=module_command("grpo_tui.mps_process", *map(str, words), python=place.python),
        env={VISIBLE_DEVICES: ",".join(words.values()), DEVICE_ORDER: "PCI_BUS_ID"},
        env_in_temporary=FOLDERS,
        cwd=place.profile_folder,
        needs={},
        ready=Probe(log=f"^{re.escape(mps_process.READY)}", within_s=READY_WITHIN_S),
        live=None,
        restart=RestartPolicy.ON_FAILURE,
        restart_unhealthy=False,
        max_restarts=MAX_RESTARTS,
        restart_window_s=600.0,
        backoff_s=0.5,
        stop_grace_s=STOP_GRACE_S,
        stop_signal=signal.SIGTERM,
        ports=(),
        gpus=(),
        ends_run=False,
        followers=tuple(on_gpus),
        is_optional=True,
    )


def _is_on_cpu(launch: Launch, profile: Profile) -> bool:
    return getattr(profile.services.get(launch.name), "device", None) == "cpu"
