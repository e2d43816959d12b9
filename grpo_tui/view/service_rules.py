"""Rules of diagnosis over the status document: services that failed or do not answer, and GPU memory. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

from grpo_engine.wire.run_folder import crash_report_file
from grpo_engine.wire.supervisor import (
    ENDED_RUN_STATES,
    GpuStatus,
    ProbeOutcome,
    RunStatus,
    ServiceState,
    ServiceStatus,
    WaitsFor,
    Warning,
)
from grpo_tui.exit_codes import ExitCode
from grpo_tui.supervisor.report.exits import exit_text, kill_text
from grpo_tui.view.format import bytes_text, count_text, with_key

MANY_FAILURES = 2
"""From here on it is a crash loop."""
INFERENCE_KIND = "inference"
ENVIRONMENT_KINDS = frozenset({"environment", "atropos_environment"})
TRAINER_KIND = "trainer"
COMMAND_KIND = "command"
OUT_OF_WORK = frozenset({ServiceState.FINISHED, ServiceState.STOPPED, ServiceState.FAILED})
OTHERS_BYTES = 1 << 30
"""Less memory of foreign processes is a display or a monitoring tool."""
NEARLY_FULL = 0.97
TOLD_WAITS = {
    WaitsFor.STEP: "asleep while the trainer steps",
    WaitsFor.REHEARSAL: "rehearsing a step, kernels are compiled the first time",
}
"""What is said of a service that is ready."""

OUT_OF_MEMORY_HINT = (
    "use less GPU memory: --gpu-memory-utilization 0.4 for vLLM; for the trainer --batch-size 2 with more "
    "--gradient-accumulation-steps, --seq-len 1024, --optimizer adafactor"
)
KNOWN_CAUSES = (
    (("out of memory", "outofmemory", "oom-kill"), OUT_OF_MEMORY_HINT),
    (
        ("address already in use", "eaddrinuse", "port is taken"),
        "another process has its port: end it, or set another --port",
    ),
    (
        ("mps server", "mps client", "cudaerrormps"),
        "see mps.log; where it happens again, `mps = false` in [gpu] of the profile runs the services without MPS",
    ),
    (("desired_name",), "give the environment a name: `name` of its service, or wandb_name in its file"),
    (("re-initialize cuda",), "set VLLM_WORKER_MULTIPROC_METHOD=spawn in the service's env"),
    (
        ("no module named", "modulenotfound", "command not found", "no such file"),
        "install what it names, or correct its argv in the profile; `grpo-tui doctor` checks for it",
    ),
    (
        ("task.functions:",),
        "correct the function and start the service again, or set task.error_reward, the reward of completions for "
        "which it fails",
    ),
)
"""Words in a service's explanation, and what helps."""


def failed_services(status: RunStatus) -> Iterator[Warning]:
    """A service that is not restarted automatically."""
    for service in status.services:
        if service.state is not ServiceState.FAILED:
            continue
        yield Warning(
            id=f"failed:{service.name}",
            severity="error",
            text=f"{service.name} failed: {reason(service) or _ended_with(service.exit_code)}",
            hint=_help_for_refused(service, status)
            if service.is_refused
            else f"{_help_for(service, status)}; {_crash_report(service)}",
        )


def unhealthy_services(status: RunStatus) -> Iterator[Warning]:
    """A service that runs but does not answer, or whose engine is stalled behind a web server that answers."""
    for service in status.services:
        is_stalled = service.probe is ProbeOutcome.ENGINE_STALLED
        if service.state is not ServiceState.UNHEALTHY and not (service.state is ServiceState.READY and is_stalled):
            continue
        what = "runs but does not answer"
        if is_stalled:
            what = "answers, but its engine is stalled"
        elif service.probe is ProbeOutcome.SILENT:
            what = "hangs: it accepts connections and never answers"
        way = f"`grpo-tui restart {service.name}`"
        if service.kind == INFERENCE_KIND:
            way = with_key(way, "v")
        yield Warning(
            id=f"unhealthy:{service.name}",
            severity="error",
            text=f"{service.name} {what}: {reason(service) or service.health or 'no answer'}",
            hint=f"{way} restarts it; see its log: {service.log}",
        )


def crash_loops(status: RunStatus) -> Iterator[Warning]:
    """A service that exits repeatedly."""
    for service in status.services:
        is_looping = service.failures >= MANY_FAILURES
        if service.state is ServiceState.BACKOFF:
            why = reason(service) or _ended_with(service.exit_code)
            text = f"{service.name} exited and is restarted: {why}"
            if is_looping:
                text = f"{service.name} keeps exiting ({count_text(service.failures, 'failure')}): {why}"
        elif service.state is ServiceState.STARTING and is_looping:
            text = f"{service.name} is starting again after {count_text(service.failures, 'failure')}"
        else:
            continue
        yield Warning(
            id=f"restarting:{service.name}",
            severity="warning",
            text=text,
            hint=f"{_help_for(service, status)}; {_crash_report(service)}",
        )


def no_environment(status: RunStatus) -> Iterator[Warning]:
    """A trainer that runs while no environment is left to produce groups."""
    environments = [service for service in status.services if service.kind in ENVIRONMENT_KINDS]
    is_training = any(
        service.kind == TRAINER_KIND and service.state is ServiceState.READY for service in status.services
    )
    is_over = status.is_ending or status.state in ENDED_RUN_STATES
    if is_over or not is_training or not environments:
        return
    if any(service.state not in OUT_OF_WORK for service in environments):
        return
    ends = [f"{service.name} {service.state} ({reason(service) or 'reason unknown'})" for service in environments]
    yield Warning(
        id="no-environment",
        severity="warning",
        text=f"no environment is running: {', '.join(ends)}. The trainer gets no batches beyond those that are queued",
        hint=" or ".join(f"`grpo-tui start {service.name}`" for service in environments) + " starts it again; "
        f"its log ({environments[0].log}) says why it exited",
    )


def gpu_memory_of_others(status: RunStatus) -> Iterator[Warning]:
    """Memory that no service of this run holds, and a GPU that is about to be full."""
    for gpu in status.gpus:
        if gpu.other_bytes is not None and gpu.other_bytes >= OTHERS_BYTES:
            yield Warning(
                id=f"gpu-others:{gpu.index}",
                severity="warning",
                text=f"GPU {gpu.index}: {bytes_text(gpu.other_bytes)} belong to processes outside this run"
                + _users(gpu),
                hint="the screen (key 2) and nvidia-smi name them; use other GPUs (gpus = […] of the services) or "
                "less memory (--gpu-memory-utilization)",
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
    crash_loops,
    no_environment,
    gpu_memory_of_others,
)


def reason(service: ServiceStatus) -> str | None:
    """Why it is where it is, in one line; the last lines of its log, which the supervisor adds, are left to its log."""
    return service.why.partition("\n")[0].removesuffix("; last lines:") if service.why else None


def _crash_report(service: ServiceStatus) -> str:
    """Where the report on its latest failure is: that of this attempt, or of the one before where it starts again."""
    has_failed = service.state in (ServiceState.FAILED, ServiceState.BACKOFF)
    report = crash_report_file(Path(service.log).parent, service.name, service.attempt - (not has_failed))
    return f"{with_key('its crash report', 'c')} is {report}"


def _users(gpu: GpuStatus) -> str:
    shares = [f"{user} {bytes_text(held_bytes)}" for user, held_bytes in gpu.other_by_user.items() if held_bytes]
    return f" ({', '.join(shares)})" if shares else ""


def _help_for_refused(service: ServiceStatus, status: RunStatus) -> str:
    """What helps a service whose start was refused."""
    is_over = status.state in ENDED_RUN_STATES
    if all(refusal.foreign_holder() is None for refusal in service.refusals):
        again = f"`grpo-tui --profile {shlex.quote(status.profile)}`" if is_over else "s on the screen"
        return f"once that is resolved, {again} starts the service"
    ends_it = "s or r on the screen asks whether to end that process and start"
    if is_over:
        ends_it = (
            f"`grpo-tui up --profile {shlex.quote(status.profile)} --take-ports` ends that process and starts again"
        )
    return f"{ends_it}; or give the service another port"


def _ended_with(exit_code: int | None) -> str:
    if exit_code is None:
        return "exit code unknown"
    return f"killed by signal {-exit_code}" if exit_code < 0 else f"exited with code {exit_code}"


def _help_for(service: ServiceStatus, status: RunStatus) -> str:
    why = (service.why or "").lower()
    for words, hint in KNOWN_CAUSES:
        if any(word in why for word in words):
            return hint
    if (
        killed := kill_text(service.exit_code, service.why or exit_text(service.exit_code), service.oom_kills)
    ) is not None:
        return killed
    if service.exit_code == ExitCode.USAGE and service.kind != COMMAND_KIND:
        command = f"grpo-tui doctor --profile {shlex.quote(status.profile)}"
        return f"wrong setting or unsuitable machine: `{command}` checks both"
    return "the last lines of its log say why"
