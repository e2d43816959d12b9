"""`grpo-tui ps | status`: the list of runs, and the status of one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import typer

from grpo_engine.errors import PeerError
from grpo_engine.wire.metrics import HEALTHY_BANDS, Band, is_evaluated_score
from grpo_engine.wire.supervisor import RunStatus
from grpo_tui.cli.arguments import JsonOption, RunArgument, run_to_read
from grpo_tui.cli.printing import write_line
from grpo_tui.client.api import Run, run_status, runs
from grpo_tui.client.local import age_words, left_out_runs, stored_status

FIRST_METRICS = (
    "reward/mean",
    "grpo/mean_ratio",
    "grpo/clipped_fraction",
    "alignment/diff_mean",
    "alignment/diff_abs_mean",
    "grpo/entropy",
    "train/loss",
    "train/grad_norm",
    "train/tokens_per_second",
    "rollout/staleness_mean",
)


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command("ps")(ps_command)
    app.command("status")(status_command)


def ps_command(as_json: JsonOption = False) -> None:
    """List the runs of this folder, the newest first."""
    rows = [(run, _stored(run)) for run in runs()]
    if as_json:
        write_line(json.dumps([_summary(run, status) for run, status in rows], indent=1))
        return
    lines = [("RUN", "STATE", "SERVICES", "AGE", "SUPERVISOR")]
    for run, status in rows:
        if status is None:
            lines.append((run.id, "unknown", "-", "-", "alive" if run.has_daemon else "none"))
            continue
        up = sum(service.pid is not None for service in status.services)
        supervisor = f"pid {status.supervisor.pid}" if run.has_daemon and status.supervisor else "none"
        age = age_words(status.started_at, status.ended_at)
        lines.append((run.id, status.state, f"{up}/{len(status.services)}", age, supervisor))
    write_line(_table(lines))
    for path in left_out_runs():
        write_line(f"{path.parent}: left out, since {path.name} is not a regular file", to_stderr=True)


def status_command(run: RunArgument = None, as_json: JsonOption = False) -> None:
    """Show the status of a run and what is wrong. Its services, GPUs and latest metrics."""
    found = run_to_read(run)
    status = _with_diagnosis(found, run_status(found))
    if as_json:
        write_line(status.model_dump_json(indent=1))
        return
    state = f"{status.state}, being taken down" if status.is_ending else status.state
    write_line(f"{status.run}  {state}  {age_words(status.started_at, status.ended_at)}\n")
    lines = [("SERVICE", "STATE", "HEALTH", "PID", "RESTARTS", "CPU", "MEMORY", "GPU MEMORY", "PORTS")]
    for service in status.services:
        cpu = "-" if service.cpu_percent is None else f"{service.cpu_percent:.0f} %"
        ports = " ".join(str(port) for port in service.ports) or "-"
        lines.append(
            (service.name, service.state, service.health or "-", str(service.pid or "-"), str(service.restarts), cpu,
             _bytes(service.rss_bytes), _bytes(service.gpu_memory_bytes), ports)
        )  # fmt: skip
    write_line(_table(lines))
    explained: list[str] = []
    for service in status.services:
        if service.why is not None:
            explained.append(f"{service.name}: {service.why}")
    if explained:
        write_line("\n" + "\n".join(explained))
    _print_rest(status)


def _print_rest(status: RunStatus) -> None:
    for gpu in status.gpus:
        shares = ", ".join(f"{name} {_bytes(held)}" for name, held in gpu.by_service.items()) or "none of ours"
        used, total = _bytes(gpu.memory_used_bytes), _bytes(gpu.memory_total_bytes)
        write_line(f"\nGPU {gpu.index} {gpu.name}: {used} of {total} ({shares})")
    if status.gpu_note is not None:
        write_line(f"\nGPUs: {status.gpu_note}")
    if status.metrics:
        write_line(f"\n{_table(_metric_lines(status.metrics))}")
    for warning in status.warnings:
        write_line(f"\n{warning.severity}: {warning.text}" + (f"\n  → {warning.hint}" if warning.hint else ""))


def _metric_lines(metrics: Mapping[str, float]) -> list[tuple[str, ...]]:
    """The latest values of the main metrics, with their healthy bands; `grpo-tui metrics` has all."""
    from grpo_tui.view.metrics.names import printed

    lines: list[tuple[str, ...]] = [("METRIC", "NOW", "HEALTHY")]
    for name in ("step", *FIRST_METRICS, *filter(is_evaluated_score, metrics)):
        value = metrics.get(name)
        if value is not None:
            band = HEALTHY_BANDS.get(name)
            verdict = "" if band is None else f"{'yes' if band.holds(value) else 'NO'}, {_band(band)}"
            lines.append((name, printed(name, value), verdict))
    return lines


def _band(band: Band) -> str:
    if band.low is None or band.high is None:
        return f"at most {band.high}" if band.low is None else f"at least {band.low}"
    return f"{band.low} to {band.high}"


def _with_diagnosis(run: Run, status: RunStatus) -> RunStatus:
    """Add a warning for each finding in the latest metrics and services."""
    from grpo_engine.wire.run_folder import METRICS_FILE
    from grpo_tui.run_files.metrics import MetricsTail
    from grpo_tui.view.diagnosis import diagnose

    history = MetricsTail(run.folder / METRICS_FILE).read().lines
    known = {warning.id for warning in status.warnings}
    found = [warning for warning in diagnose(history, status) if warning.id not in known]
    return status.model_copy(update={"warnings": [*status.warnings, *found]})


def _stored(run: Run) -> RunStatus | None:
    try:
        return stored_status(run) if not run.has_daemon else run_status(run)
    except PeerError:
        return None


def _summary(run: Run, status: RunStatus | None) -> dict[str, object]:
    return {
        "run": run.id,
        "profile": status.profile if status else None,
        "state": status.state if status else None,
        "is_live": run.is_live,
        "supervisor": status.supervisor.model_dump() if status and status.supervisor else None,
        "started_at": status.started_at if status else None,
        "ended_at": status.ended_at if status else None,
        "folder": str(run.folder),
    }


def _bytes(count: int | None) -> str:
    if count is None:
        return "-"
    return f"{count / 1e6:.0f} MB" if count < 1e9 else f"{count / 1e9:.1f} GB"


def _table(lines: Sequence[tuple[str, ...]]) -> str:
    """Left-aligned columns, without the import time of a library."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
