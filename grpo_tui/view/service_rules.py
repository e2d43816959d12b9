"""Rules of diagnosis over the status document: services that failed or do not answer, and GPU memory. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from grpo_engine.wire.supervisor import RunStatus, ServiceState, ServiceStatus, Warning
from grpo_tui.view.format import bytes_text, count_text

MANY_RESTARTS = 3
OTHERS_BYTES = 1 << 30
"""Less of a GPU in strangers' hands is a display or a monitor, not a neighbour."""
NEARLY_FULL = 0.97

OUT_OF_MEMORY_HINT = (
    "use less GPU memory: --gpu-memory-utilization 0.4 for vLLM; for the trainer --batch-size 2 with more "
    "--gradient-accumulation-steps, --seq-len 1024, --optimizer adafactor"
)
KNOWN_CAUSES = (
    (("out of memory", "outofmemory", "oom-kill"), OUT_OF_MEMORY_HINT),
    (
        ("address already in use", "eaddrinuse", "port is taken"),
        "somebody else has its port: end that, or set another --port",
    ),
    (("re-initialize cuda",), "set VLLM_WORKER_MULTIPROC_METHOD=spawn in the service's env"),
    (
        ("no module named", "modulenotfound", "command not found", "no such file"),
        "install what it names, or correct its argv in the profile; `grpo-tui doctor` checks for it",
    ),
)
"""Words in a service's explanation, and what helps."""


def failed_services(status: RunStatus) -> Iterator[Warning]:
    """A service that will not come back by itself."""
    for service in status.services:
        if service.state is not ServiceState.FAILED:
            continue
        yield Warning(
            id=f"failed:{service.name}",
            severity="error",
            text=f"{service.name} failed: {service.why or _ended_with(service.exit_code)}",
            hint=f"{_help_for(service)}; its log: {service.log}",
        )


def unhealthy_services(status: RunStatus) -> Iterator[Warning]:
    """A service that runs and does not answer, and one that falls over again and again."""
    for service in status.services:
        if service.state is ServiceState.UNHEALTHY:
            yield Warning(
                id=f"unhealthy:{service.name}",
                severity="error",
                text=f"{service.name} runs but does not answer: {service.why or service.health or 'no answer'}",
                hint=f"read its log ({service.log}); restarting it often helps: grpo-tui restart {service.name}",
            )
        elif service.state is ServiceState.BACKOFF or (
            service.restarts >= MANY_RESTARTS and service.state is ServiceState.STARTING
        ):
            times = count_text(service.restarts, "restart")
            yield Warning(
                id=f"restarting:{service.name}",
                severity="warning",
                text=f"{service.name} keeps ending ({times}): {service.why or _ended_with(service.exit_code)}",
                hint=_help_for(service),
            )


def gpu_memory_of_others(status: RunStatus) -> Iterator[Warning]:
    """Memory that no service of this run holds, and a GPU that is about to be full."""
    for gpu in status.gpus:
        if gpu.other_bytes is not None and gpu.other_bytes >= OTHERS_BYTES:
            yield Warning(
                id=f"gpu-others:{gpu.index}",
                severity="warning",
                text=f"GPU {gpu.index}: {bytes_text(gpu.other_bytes)} belong to processes outside this run",
                hint="nvidia-smi names them; use other GPUs (`gpus = […]` of the services) or less memory "
                "(--gpu-memory-utilization)",
            )
        used, total = gpu.memory_used_bytes, gpu.memory_total_bytes
        if used is not None and total and used / total >= NEARLY_FULL:
            yield Warning(
                id=f"gpu-full:{gpu.index}",
                severity="warning",
                text=f"GPU {gpu.index} is nearly full: {bytes_text(used)} of {bytes_text(total)}",
                hint=OUT_OF_MEMORY_HINT,
            )


SERVICE_RULES: tuple[Callable[[RunStatus], Iterator[Warning]], ...] = (
    failed_services,
    unhealthy_services,
    gpu_memory_of_others,
)


def _ended_with(exit_code: int | None) -> str:
    if exit_code is None:
        return "no exit code is known"
    return f"ended by signal {-exit_code}" if exit_code < 0 else f"ended with exit code {exit_code}"


def _help_for(service: ServiceStatus) -> str:
    why = (service.why or "").lower()
    for words, hint in KNOWN_CAUSES:
        if any(word in why for word in words):
            return hint
    if service.exit_code == -9:
        return "killed from outside, most often by the kernel for want of memory: `dmesg` says so"
    return "the last lines of its log say why"
