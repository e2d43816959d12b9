"""`grpo-tui ps | status`: the list of runs, and the status of one."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from itertools import compress
from typing import Annotated

import typer

from grpo_engine.diagnosis.evidence import RunSettings
from grpo_engine.errors import PeerError
from grpo_engine.wire.metrics import Band, MetricsLine, is_evaluated_score
from grpo_engine.wire.supervisor import RunState, RunStatus, how_to_go_on
from grpo_tui.cli.arguments import JsonOption, RunArgument, note_unsupervised, run_to_read
from grpo_tui.cli.printing import indented, one_line, table, warning_text, write_line
from grpo_tui.client.api import Run, run_status
from grpo_tui.client.local import NO_RUN_HERE, age_words, duration_words, runs_and_left_out, stored_status
from grpo_tui.paths import name_of_run
from grpo_tui.view.machines import gpu_words, machine_rows, memory_words, ready_words, state_words
from grpo_tui.view.progress import read_progress
from grpo_tui.view.service_rules import TOLD_WAITS
from grpo_tui.view.versions import version_words, versions_of

HELD = ("PORTS", "GPUS", "TAGS")
"""Columns that are shown where any run has something in them."""
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


def ps_command(
    as_json: JsonOption = False,
    tag: Annotated[str | None, typer.Option("--tag", help="Only runs with this tag.")] = None,
) -> None:
    """List the runs of this folder, the newest first. On stderr also the starts of this host that wait."""
    from grpo_tui.client.start_queue import waiting_starts, who
    from grpo_tui.view.diagnosis import diagnose

    found, left_out = runs_and_left_out()
    rows = [(run, _stored(run)) for run in found]
    if tag is not None:
        rows = [(run, status) for run, status in rows if status is not None and tag in status.tags]
    for run, _ in rows:
        note_unsupervised(run)
    if as_json:
        write_line(json.dumps([_summary(run, status) for run, status in rows], indent=1))
        return
    lines: list[tuple[str, ...]] = [("RUN", "STATE", "STEP", "LEFT", "SERVICES", "UP", "SUPERVISOR", *HELD)]
    for run, status in rows:
        if status is None:
            lines.append((run.id, "unknown", "-", "-", "-", "-", "alive" if run.has_daemon else "none", "", "", ""))
            continue
        up = sum(service.pid is not None for service in status.services)
        supervisor = f"pid {status.supervisor.pid}" if run.has_daemon and status.supervisor else "none"
        age = age_words(status.started_at, status.ended_at)
        progress = read_progress(run.folder, is_live=run.is_live)
        left = "-" if progress.time_left_s is None else duration_words(progress.time_left_s)
        lines.append(
            (run.id, status.state, progress.of_steps or "-", left, f"{up}/{len(status.services)}", age, supervisor,
             *(",".join(map(str, each)) for each in _held(status)))
        )  # fmt: skip
    has_column = [
        index < len(lines[0]) - len(HELD) or any(line[index] for line in lines[1:]) for index in range(len(lines[0]))
    ]
    write_line(table([tuple(compress(line, has_column)) for line in lines]))
    if not found and not left_out:
        write_line(NO_RUN_HERE, to_stderr=True)
    for start in waiting_starts():
        wanted = [*(f"port {port}" for port in start.ports), *(f"GPU {gpu}" for gpu in start.gpus)]
        waited = f"{age_words(start.since, None)} in the queue"
        write_line(one_line(f"{who(start)}: {waited}, for {', '.join(wanted) or 'files'}"), to_stderr=True)
    for run, status in rows:
        for warning in diagnose((), status) if run.is_live else ():
            write_line(f"{run.id}: {warning.severity}: {indented(warning.text)}", to_stderr=True)
    for each in left_out:
        write_line(each, to_stderr=True)


def status_command(run: RunArgument = None, as_json: JsonOption = False) -> None:
    """Show the status of a run and what is wrong. Its services, GPUs and latest metrics."""
    from grpo_tui.view.metrics.names import bands_of
    from grpo_tui.view.run_settings import read_settings

    found = run_to_read(run)
    settings = read_settings(found.folder)
    status = _with_diagnosis(found, run_status(found), settings)
    progress = read_progress(found.folder, is_live=found.is_live)
    if as_json:
        write_line(json.dumps({**status.model_dump(mode="json"), **asdict(progress)}, indent=1))
        return
    state = f"{status.state}, being taken down" if status.is_ending else status.state
    step = progress.of_steps and f"step {progress.of_steps}"
    up = f"{'up' if status.ended_at is None else 'ran'} {age_words(status.started_at, status.ended_at)}"
    write_line("  ".join(filter(None, (one_line(status.run), state, step, progress.left, up))) + "\n")
    lines = [("SERVICE", "STATE", "HEALTH", "PID", "RESTARTS", "CPU", "MEMORY", "GPU MEMORY", "PORTS", "MACHINE")]
    for service in status.services:
        cpu = "-" if service.cpu_percent is None else f"{service.cpu_percent:.0f} %"
        ports = " ".join(str(port) for port in service.ports) or "-"
        lines.append(
            (service.name, service.state, service.health or "-", str(service.pid or "-"), str(service.restarts), cpu,
             _bytes(service.rss_bytes), _bytes(service.gpu_memory_bytes), ports,
             ", ".join(service.machines) or service.machine or "-")
        )  # fmt: skip
        for rank in service.ranks:
            cpu = "-" if rank.cpu_percent is None else f"{rank.cpu_percent:.0f} %"
            lines.append(
                (f"  rank {rank.rank}", "", "" if rank.gpu is None else f"GPU {rank.gpu}", str(rank.pid), "", cpu,
                 _bytes(rank.rss_bytes), _bytes(rank.gpu_memory_bytes), "",
                 rank.machine or "")
            )  # fmt: skip
    write_line(table(lines if status.machines else [line[:-1] for line in lines]))
    explained: list[str] = []
    for service in status.services:
        if service.waits_for in TOLD_WAITS:
            explained.append(f"{one_line(service.name)}: {TOLD_WAITS[service.waits_for]}")
        if service.why is not None:
            explained.append(f"{one_line(service.name)}: {indented(service.why)}")
    for name, versions in versions_of(status).items():
        told = "; ".join(" ".join(each) for each in version_words(versions))
        explained.append(f"{one_line(name)}: policy versions: {told}")
    if explained:
        write_line("\n" + "\n".join(explained))
    _print_rest(status, bands_of(settings))
    if not found.is_live and status.state is not RunState.FINISHED:
        write_line("\n" + how_to_go_on(found.folder))


def _print_rest(status: RunStatus, bands: Mapping[str, Band]) -> None:
    _print_machines(status)
    for gpu in status.gpus:
        holders = (f"{name} {_bytes(held)}" for name, held in gpu.by_service.items())
        shares = one_line(", ".join(holders) or "none of ours")
        used, total = _bytes(gpu.memory_used_bytes), _bytes(gpu.memory_total_bytes)
        write_line(f"\nGPU {gpu.index} {one_line(gpu.name)}: {used} of {total} ({shares})")
    if status.gpu_note is not None:
        write_line(f"\nGPUs: {indented(status.gpu_note)}")
    if status.metrics:
        write_line(f"\n{table(_metric_lines(status.metrics, bands))}")
    for warning in status.warnings:
        write_line(f"\n{warning_text(warning)}")


def _print_machines(status: RunStatus) -> None:
    """A row for each machine of a cluster, then their GPUs."""
    rows = machine_rows(status)
    if not rows:
        return
    now = time.time()
    lines = [("MACHINE", "ADDRESS", "STATE", "SERVICES", "CPU", "MEMORY", "GPUS", "DEVICES")]
    for row in rows:
        machine = row.machine
        cpu = "-" if machine is None or machine.cpu_percent is None else f"{machine.cpu_percent:.0f} %"
        devices = "-" if machine is None else str(machine.num_devices)
        memory = "-" if machine is None or machine.memory_used_bytes is None else memory_words(machine)
        told = (state_words(row, now), ready_words(row), cpu, memory, gpu_words(row) or "-", devices)
        lines.append((one_line(row.name), "-" if machine is None else one_line(machine.address), *told))
    write_line(f"\n{table(lines)}")
    for row in rows:
        for gpu in row.gpus if row.machine is not None else ():
            used, total = _bytes(gpu.memory_used_bytes), _bytes(gpu.memory_total_bytes)
            held = ", ".join(f"{name} {_bytes(each)}" for name, each in gpu.by_service.items()) or "none of ours"
            write_line(
                f"{one_line(row.name)} GPU {gpu.index} {one_line(gpu.name)}: {used} of {total} ({one_line(held)})"
            )


def _metric_lines(metrics: Mapping[str, float], bands: Mapping[str, Band]) -> list[tuple[str, ...]]:
    """The latest values of the main metrics, with their healthy bands; `grpo-tui metrics` has all."""
    from grpo_tui.view.metrics.names import printed

    lines: list[tuple[str, ...]] = [("METRIC", "NOW", "HEALTHY")]
    for name in ("step", *FIRST_METRICS, *filter(is_evaluated_score, metrics)):
        value = metrics.get(name)
        if value is not None:
            band = bands.get(name)
            verdict = "" if band is None else f"{'yes' if band.holds(value) else 'NO'}, {_band(band)}"
            lines.append((name, printed(name, value), verdict))
    return lines


def _band(band: Band) -> str:
    if band.low is None or band.high is None:
        return f"at most {band.high}" if band.low is None else f"at least {band.low}"
    return f"{band.low} to {band.high}"


def _with_diagnosis(run: Run, status: RunStatus, settings: RunSettings) -> RunStatus:
    """Add a warning for each finding in the latest metrics and services."""
    from grpo_tui.run_files.metrics import spread_lines
    from grpo_tui.view.diagnosis import diagnose

    history: list[MetricsLine] = []
    with suppress(OSError):
        history = spread_lines(run.folder, num_places=64, bytes_a_place=8 * 1024, tail_bytes=1 << 20)
    known = {warning.id for warning in status.warnings}
    found = [warning for warning in diagnose(history, status, settings, now=time.time()) if warning.id not in known]
    return status.model_copy(update={"warnings": [*status.warnings, *found]})


def _stored(run: Run) -> RunStatus | None:
    try:
        return stored_status(run) if not run.has_daemon else run_status(run)
    except PeerError:
        return None


def _held(status: RunStatus) -> tuple[list[int], list[int], list[str]]:
    """The ports and GPUs that the services of a run declare, and its tags."""
    services = status.services
    gpus = {gpu for each in services for gpu in each.gpus}
    return [port for each in services for port in each.ports], sorted(gpus), status.tags


def _summary(run: Run, status: RunStatus | None) -> dict[str, object]:
    from grpo_tui.view.diagnosis import diagnose

    return {
        "run": run.id,
        "profile": status.profile if status else None,
        "state": status.state if status else None,
        "is_live": run.is_live,
        "supervisor": status.supervisor.model_dump() if status and status.supervisor else None,
        "started_at": status.started_at if status else None,
        "ended_at": status.ended_at if status else None,
        **asdict(read_progress(run.folder, is_live=run.is_live)),
        "warnings": [warning.model_dump() for warning in diagnose((), status)] if run.is_live else [],
        "folder": str(run.folder),
        "name": name_of_run(run.id),
        **(dict(zip(("ports", "gpus", "tags"), _held(status), strict=True)) if status else {}),
    }


def _bytes(count: int | None) -> str:
    if count is None:
        return "-"
    return f"{count / 1e6:.0f} MB" if count < 1e9 else f"{count / 1e9:.1f} GB"
