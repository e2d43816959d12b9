"""The status document of a run on three machines of a cluster, with GPUs, and what becomes of it when one is lost."""

from __future__ import annotations

from typing import Any

from screen_fakes import GIB, NOW, STARTED, gpu, run_status, service

from grpo_engine.wire.supervisor import GpuStatus, MachineStatus, PlacedUsage, RunStatus, ServiceState, ServiceStatus

LOST_AT = NOW - 12


def gpu_of(machine: int, index: int, holder: str | None = None) -> GpuStatus:
    """A GPU that one service holds."""
    held = {holder: 41 * GIB} if holder else {}
    changes = {"uuid": f"GPU-{machine}-{index}", "by_service": held, "memory_used_bytes": sum(held.values()) + GIB,
               "utilization_percent": 93.0 if holder else 0.0, "other_bytes": GIB}  # fmt: skip
    return gpu(index).model_copy(update=changes)


def machine(number: int, *services: str, **changes: Any) -> MachineStatus:
    """A machine of two GPUs that answers; the first of its services holds both."""
    holder = services[0] if services else None
    values: dict[str, Any] = {
        "name": f"machine-{number}",
        "address": f"10.0.0.{number}",
        "state": "ready",
        "since": STARTED,
        "answered_at": NOW - 1,
        "num_devices": 2 * len(services),
        "num_free": 0 if services else 2,
        "services": {name: PlacedUsage(cpu_percent=80.0, rss_bytes=9 * GIB) for name in services},
        "gpus": [gpu_of(number, 0, holder), gpu_of(number, 1, holder)],
        "cpu_percent": 12.5,
        "num_cpus": 64,
        "memory_used_bytes": 44 * GIB,
        "memory_total_bytes": 512 * GIB,
    }
    return MachineStatus(**{**values, **changes})


def placed(name: str, number: int, **changes: Any) -> ServiceStatus:
    """A service on a machine."""
    values = {"machine": f"machine-{number}", "cpu_percent": 80.0, "rss_bytes": 9 * GIB, "gpu_memory_bytes": 82 * GIB}
    return service(name, **{**values, **changes})


def on_machines(**changes: Any) -> RunStatus:
    """A trainer and two inference servers on a machine each; the rest is beside the supervisor."""
    services = [
        service("ray", kind="cluster"),
        service("machines", kind="cluster"),
        service("api", ports=[8000], health="200 /info"),
        placed("vllm", 2, kind="inference", ports=[9001], health="200 /health"),
        placed("vllm-2", 3, kind="inference", ports=[9002], health="200 /health"),
        service("env"),
        placed("trainer", 1),
    ]
    machines = [machine(1, "trainer"), machine(2, "vllm"), machine(3, "vllm-2")]
    values: dict[str, Any] = {"services": services, "machines": machines, "gpus": [], "gpu_note": "no NVIDIA driver"}
    return run_status(**{**values, **changes})


def lost(number: int = 2, name: str = "vllm", **changes: Any) -> RunStatus:
    """The same after the loss of a machine, whose service waits for another one."""
    status = on_machines()
    gone = {"state": ServiceState.BACKOFF, "machine": None, "pid": None, "why": "exited with code 75"}
    services = [each.model_copy(update=gone) if each.name == name else each for each in status.services]
    values: dict[str, Any] = {
        "state": "lost", "since": LOST_AT, "lost_at": LOST_AT, "lost_services": [name], "gpus": [], "num_free": None,
        "cpu_percent": None, "memory_used_bytes": None,
        "next": f"{name} waits up to 60 s for a machine with 2 free devices; the machine is started again", **changes,
    }  # fmt: skip
    machines = [
        machine(number, name, **values) if each.name == f"machine-{number}" else each for each in status.machines
    ]
    return on_machines(services=services, machines=machines)
