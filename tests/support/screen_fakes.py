"""A run for the screen without a supervisor: status documents, metric lines, and a connection for tests to send on.

Good enough because the screen knows the supervisor only as `RunConnection`, and these are the wire's own types.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from rich.cells import cell_len

from grpo_engine.errors import PeerUnavailable
from grpo_engine.wire.metrics import MetricsLine
from grpo_engine.wire.supervisor import (
    Bye,
    Event,
    GpuStatus,
    Refusal,
    Reply,
    ResourceHolder,
    RunState,
    RunStatus,
    ServiceChanged,
    ServiceState,
    ServiceStatus,
    Snapshot,
    SupervisorInfo,
)
from grpo_tui.ui.widgets.lines import Lines
from grpo_tui.view.state import Do, MetricsRead, ViewState, reduce

NOW = 1_764_000_725.0
"""When the pictures are taken; the run began 12 min 5 s before."""
STARTED = NOW - 725
GIB = 1 << 30
REFUSED = {"state": ServiceState.FAILED, "is_refused": True, "pid": None}


class FakeConnection:
    """Yields the events that a test sends; keeps the commands that the screen sends."""

    def __init__(self) -> None:
        self.commands: list[tuple[Do, str | None]] = []
        self.took_ports: list[bool] = []
        """Of each command, whether foreign processes on its ports were to be ended."""
        self.refusal: str | None = None
        self.is_reachable = True
        self.stored: RunStatus | None = None
        self._events: asyncio.Queue[Snapshot | Event | Bye | None] = asyncio.Queue()
        self._number = 0

    def send(self, *events: Snapshot | Event | Bye) -> None:
        """Send events to the screen."""
        for event in events:
            self._events.put_nowait(event)

    def disconnect(self) -> None:
        """End the connection."""
        self._events.put_nowait(None)

    async def events(self) -> AsyncIterator[Snapshot | Event | Bye]:
        if not self.is_reachable:
            raise PeerUnavailable("no supervisor listens")
        while (event := await self._events.get()) is not None:
            yield event

    def stored_status(self) -> RunStatus:
        if self.stored is None:
            raise PeerUnavailable("state.json: missing")
        return self.stored

    async def replace_supervisor(self) -> bool:
        return False

    async def command(self, do: Do, service: str | None = None, *, take_ports: bool = False) -> Reply:
        if not self.is_reachable:
            raise PeerUnavailable("no supervisor listens")
        self.commands.append((do, service))
        self.took_ports.append(take_ports)
        return Reply(id=1, ok=self.refusal is None, error=self.refusal)


def service(name: str, **changes: Any) -> ServiceStatus:
    """A service that is ready, with what a healthy one has."""
    kinds = {"api": "rollout_api", "vllm": "inference", "env": "environment", "trainer": "trainer"}
    values: dict[str, Any] = {
        "name": name,
        "kind": kinds.get(name, "command"),
        "state": ServiceState.READY,
        "pid": 4000 + len(name),
        "started_at": STARTED,
        "ready_at": STARTED + 5,
        "attempt": 1,
        "cpu_percent": 3.2,
        "rss_bytes": 180 << 20,
        "log": f"{name}.log",
    }
    return ServiceStatus(**{**values, **changes})


def port_taken(name: str, user: str, **changes: Any) -> ServiceStatus:
    """A service that was not started: pid 4242 of this user holds port 9001."""
    text = f"port 9001 is held by pid 4242 (user {user}): python app.py"
    holder = ResourceHolder(pid=4242, user=user, command="python app.py")
    refusal = Refusal(resource="port", port=9001, holders=[holder], text=text)
    return service(name, **{**REFUSED, "why": text, "refusals": [refusal], **changes})


def gpu_short(name: str, user: str) -> ServiceStatus:
    """A service that was not started: pid 7 of this user holds memory of GPU 0."""
    text = f"GPU 0 has 20.0 GB free, and {name} needs 36.0 GB; 60.0 GB held by pid 7 (user {user}): x; to do: end pid 7"
    refusal = Refusal(resource="gpu", gpu=0, holders=[ResourceHolder(pid=7, user=user, command="x")], text=text)
    return service(name, **{**REFUSED, "why": text, "refusals": [refusal]})


def four_services(*, on_gpu: bool = True) -> list[ServiceStatus]:
    """The usual stack."""
    gpu = {"vllm": int(36.1 * GIB), "trainer": int(22.4 * GIB)} if on_gpu else {}
    return [
        service("api", ports=[8002], health="200 /info"),
        service("vllm", ports=[9001], health="200 /health", cpu_percent=87.6, rss_bytes=int(9.2 * GIB),
                gpu_memory_bytes=gpu.get("vllm"), restarts=1),
        service("env", cpu_percent=41.0, rss_bytes=int(1.4 * GIB)),
        service("trainer", cpu_percent=101.3, rss_bytes=int(5.9 * GIB), gpu_memory_bytes=gpu.get("trainer")),
    ]  # fmt: skip


def gpu(index: int = 0, *, other: int = 0) -> GpuStatus:
    """An 80 GB GPU that vLLM and the trainer share."""
    return GpuStatus(
        index=index,
        uuid=f"GPU-{index}",
        name="NVIDIA H100 80GB HBM3",
        memory_used_bytes=int(59.2 * GIB) + other,
        memory_total_bytes=80 * GIB,
        utilization_percent=97.0,
        by_service={"vllm": int(36.1 * GIB), "trainer": int(22.4 * GIB)},
        other_bytes=other,
    )


def run_status(run: str = "hermes8b-shared-1121-041503", **changes: Any) -> RunStatus:
    """A run of the usual stack on one GPU."""
    values: dict[str, Any] = {
        "run": run,
        "profile": "hermes8b-shared",
        "state": RunState.RUNNING,
        "supervisor": SupervisorInfo(pid=3999, started_at=STARTED),
        "services": four_services(),
        "gpus": [gpu()],
        "started_at": STARTED,
    }
    return RunStatus(**{**values, **changes})


def without_gpus() -> RunStatus:
    """The same on a machine that has no driver."""
    return run_status(services=four_services(on_gpu=False), gpus=[], gpu_note="no NVIDIA driver")


def changed(number: int, time: float, new: ServiceStatus) -> ServiceChanged:
    """An event about one service."""
    return ServiceChanged(number=number, time=time, service=new)


def state_after(
    *events: Snapshot | Event, status: RunStatus | None = None, steps: Sequence[MetricsLine] = ()
) -> ViewState:
    """The state of a screen that received a snapshot, these events and these steps."""
    state = ViewState(run_folder=Path("run"), now=NOW)
    for change in (Snapshot(number=1, status=status or run_status()), *events, MetricsRead(lines=tuple(steps))):
        state = reduce(state, change)
    return state


def drawn(part: Lines, state: ViewState, width: int = 78, height: int = 20) -> list[str]:
    """The lines of a part for a state, without a screen; none is wider than asked."""
    lines = [line.plain for line in part.lines(state, width, height)]
    assert all(cell_len(line) <= width for line in lines), lines
    return lines


def metrics_line(step: int, **changes: float | None) -> MetricsLine:
    """A healthy step; `alignment__diff_mean=0.3` sets, and None leaves out."""
    wave = math.sin(step * 0.7)
    metrics: dict[str, float] = {
        "reward/mean": 0.92 - 0.6 * math.exp(-step / 40) + 0.02 * wave,
        "reward/std": 0.31 + 0.02 * wave,
        "reward/frac_zero_std": 0.25,
        "grpo/mean_ratio": 1.0 + 0.02 * wave,
        "grpo/clipped_fraction": 0.08 + 0.03 * wave,
        "grpo/entropy": 0.6 * math.exp(-step / 150) + 0.2,
        "grpo/kl": 0.002,
        "grpo/ess": 0.97,
        "alignment/diff_mean": 0.002 * wave,
        "alignment/diff_abs_mean": 0.012 + 0.002 * wave,
        "alignment/diff_max": 0.31,
        "train/loss": -0.021 + 0.01 * wave,
        "train/grad_norm": 0.41 + 0.1 * wave,
        "train/lr": 1e-5,
        "train/step_time": 2.31,
        "train/sync_time": 0.004,
        "train/tokens_per_second": 11873 + 200 * wave,
        "rollout/length_mean": 212.0,
        "rollout/truncated_fraction": 0.02,
        "rollout/staleness_mean": 0.5,
        "logprobs/training_mean": -0.61,
        "logprobs/inference_mean": -0.61,
    }
    for key, value in changes.items():
        name = key.replace("__", "/")
        if value is None:
            metrics.pop(name, None)
        else:
            metrics[name] = value
    return MetricsLine(time=STARTED + 2.4 * step, step=step, policy_version=step, metrics=metrics)


def write_metrics(run_folder: Path, num_steps: int, **last: float | None) -> None:
    """Put `metrics.jsonl` into the run folder; `last` changes the last five steps."""
    lines = [metrics_line(step, **(last if step > num_steps - 5 else {})) for step in range(1, num_steps + 1)]
    text = "".join(json.dumps(line.model_dump()) + "\n" for line in lines)
    (run_folder / "metrics.jsonl").write_text(text)


def write_log(run_folder: Path, name: str, num_lines: int = 40) -> None:
    """Put a log with colours and a progress bar into the run folder."""
    lines = [f"— attempt 1 · 04:15:03 · python -m grpo_engine {name} --port 9001\n"]
    for step in range(1, num_lines):
        lines.append(
            f"\x1b[32mINFO\x1b[0m {name}: step {step} loss -0.02{step % 10} reward 0.87 "
            f"grad_norm 0.41 tokens/s 11873 sync 0.004s ratio 1.00{step % 7}\n"
        )
    lines.append("fetching rollouts:  10%|█         |\rfetching rollouts:  90%|█████████ | 14/16")
    (run_folder / f"{name}.log").write_text("".join(lines))
