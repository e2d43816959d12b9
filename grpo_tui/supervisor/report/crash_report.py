"""The crash report: one text file per failed attempt, with the cause, the state of the run, and the last log lines.

`compose` builds the text from plain values, the cause first; `write_report` collects them and writes the file beside
the logs. Environment variables are left out, and secrets in command lines and logs are masked. A report that cannot be
written is logged by the supervisor and has no other effect.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from grpo_engine.errors import ConfigError
from grpo_engine.wire.access_token import read_token
from grpo_engine.wire.codec import write_atomically
from grpo_engine.wire.environment_variables import SECRET_ARGUMENT_PREFIX
from grpo_engine.wire.run_folder import (
    TOKEN_FILE,
    crash_report_file,
    crash_report_files,
    keeper_state_file,
    service_log,
)
from grpo_engine.wire.secrets import (
    MIN_SECRET_CHARS,
    longest_first,
    masked_argv,
    masked_text,
    secret_values,
    with_secrets,
)
from grpo_engine.wire.supervisor import GpuStatus, RunStatus, ServiceState, ServiceStatus
from grpo_engine.wire.terminal_text import printable
from grpo_tui.keeper_process import on_one_line
from grpo_tui.run_files.log_file import last_lines
from grpo_tui.run_files.metrics import latest_metrics
from grpo_tui.run_files.whole_file import read_whole
from grpo_tui.services.base import Launch
from grpo_tui.supervisor.keeper.client import KeeperState
from grpo_tui.supervisor.report.exits import exit_text, has_ended_alone, kill_text
from grpo_tui.supervisor.report.machine_facts import Facts, Space, machine_facts

EARLIER_FAILURE = b"\n\n=== an earlier failure of the same attempt ===\n"
MAX_EARLIER_BYTES = 1 << 20
MAX_REPORTS = 20
"""Per service: the first, and the newest."""
SEARCHED_LINES, OWN_LINES, OTHER_LINES = 400, 60, 25
"""Lines of the failed service's log that are searched for an error, and shown; lines shown of other logs."""
MAX_ERRORS = 3
MAX_HISTORY = 10
MAX_WHY_CHARS = 160
RULE = 68
"""Columns of the title of a section and its dashes: with what stands around them it fits into 80."""
MAX_LINE_CHARS = 400
SCARCE_BYTES = 1_000_000_000
UNWELL = frozenset({ServiceState.FAILED, ServiceState.UNHEALTHY, ServiceState.BACKOFF, ServiceState.STOPPING})

EXCEPTION = re.compile(r"\b[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)\b(?::|$)")
IN_SOURCE = re.compile(r"\b(?:except|raise)\b[^:]*(?:Error|Exception|Interrupt|Exit)\b")
"""A source line quoted in a traceback."""
ALARM = re.compile(
    r"\b(?:ERROR|FATAL|CRITICAL|[Ff]atal error|panic(?:ked)?|Segmentation fault|Killed|Aborted|core dumped"
    r"|No space left on device|Address already in use|[Oo]ut of memory|cannot start)\b"
)
CLOCK = re.compile(r"\b(\d\d):(\d\d):(\d\d)\b")
CLOCK_CHARS, LAST_SECONDS = 60, 5
"""Where a log line has its time, and how long before a process was ended by a signal it may have logged why."""
CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f]")
LOG_HINTS = (
    (
        re.compile(r"CUDA out of memory|OutOfMemoryError|Free memory on device"),
        "the GPU table below shows which process held it",
    ),
    (
        re.compile(r"Address already in use|EADDRINUSE"),
        "`grpo-tui doctor --profile …` names the process that holds the port",
    ),
    (
        re.compile(r"cudaErrorMps|MPS server|MPS client"),
        "its MPS server ended, or another service on the GPU had a fault, which ends all: see mps.log and their logs",
    ),
    (re.compile(r"Connection refused|ConnectError|ConnectionError"), "check the service that it connects to, below"),
)
SIGNAL_HINTS = {
    signal.SIGSEGV: 'native code crashed: PYTHONFAULTHANDLER = "1" in the service\'s env shows where',
    signal.SIGABRT: "native code aborted, e.g. a failed assertion or the NCCL watchdog: see the log",
    signal.SIGBUS: "a memory-mapped file could not be accessed, most often because /dev/shm is full",
    signal.SIGILL: "the program was built for another processor",
}
log = logging.getLogger(__name__)


def compose(
    status: RunStatus,
    launch: Launch,
    *,
    attempt: int,
    why: str,
    history: Sequence[KeeperState],
    logs: Mapping[str, Sequence[str]],
    metrics: Mapping[str, float],
    facts: Facts,
    oom_kills: int | None,
) -> str:
    """The report; a pure function of its arguments.

    Args:
        launch: of the service that failed.
        why: why the attempt counts as failed, as in the status document.
        history: attempts of this service by their state files, the oldest first.
        logs: last lines by service, at best `SEARCHED_LINES` of the failed one and `OTHER_LINES` of the others.
        metrics: latest values, with `step`.
        oom_kills: processes that the kernel's out-of-memory killer killed during the attempt; None when unknown.
    """
    own = [_clean(line) for line in logs.get(launch.name, ())]
    others = [service for service in status.services if service.name != launch.name]
    parts = [
        "\n".join(_head(status, launch, attempt, why, history, own, facts, oom_kills)),
        _section(f"Log of {launch.name}, last lines", own[-OWN_LINES:], "no output in this attempt"),
        _section("All services", _service_table(status.services, facts.at)),
        _section(f"Command of {launch.name}", _command(launch)),
        _section(f"Attempts of {launch.name}", _attempts(history), "none recorded"),
        _section("GPUs, last sample", _gpu_table(status.gpus), status.gpu_note or "none found"),
        _section("Latest metrics", _metrics(metrics), "none yet"),
        _section("Machine", _machine(facts)),
        *(
            _section(f"Log of {service.name}, last lines", list(map(_clean, logs.get(service.name, ())))[-OTHER_LINES:])
            for service in others
        ),
    ]
    return "\n\n".join(parts) + "\n"


# --- the head: cause, hints, attempt -------------------------------------------------------------------------------


def _head(
    status: RunStatus,
    launch: Launch,
    attempt: int,
    why: str,
    history: Sequence[KeeperState],
    lines: Sequence[str],
    facts: Facts,
    oom_kills: int | None,
) -> Iterator[str]:
    service = next((each for each in status.services if each.name == launch.name), None)
    record = next((each for each in history if each.attempt == attempt), None)
    first_why = _first_line(why)
    yield f"{launch.name} failed: {first_why}"
    yield ""
    code = service.exit_code if service is not None else None
    is_by_signal = has_ended_alone(code, first_why) and _signal_of(code) is not None
    if is_by_signal:
        lines = of_last_seconds(lines, (record.ended_at if record else None) or facts.at)
    for line in error_lines(lines):
        if not is_by_signal or EXCEPTION.search(line) or ALARM.search(line):
            yield f"  log says  {line}"
    for hint in hints(code, first_why, lines, facts, oom_kills):
        yield f"  hint      {hint}"
    for words in _unwell(status.services, launch, record.started_at if record else None):
        yield f"  also      {words}"
    yield f"  when      {_when(facts.at, record, status.started_at)}"
    yield f"  attempt   {attempt} of {launch.name} (kind {launch.kind}) in run {status.run}, profile {status.profile}"
    if record is not None and (record.ended or record.unkillable):
        ended = [entry.words() for entry in record.ended] + [
            f"{entry.words()} without effect" for entry in record.unkillable
        ]
        yield f"  leftover  its keeper had to terminate {', '.join(ended)}"
    if service is not None:
        now = f": {_shortened(_first_line(service.why))}" if service.why and service.why != why else ""
        yield f"  now       {service.state}{now}; the run is {status.state}"
        yield f"  full log  {service.log}"


def error_lines(lines: Sequence[str]) -> list[str]:
    """The log lines most likely to be the cause: exceptions, else lines with an alarm word, else the last line.

    Of many exceptions the first and the last ones: Python prints a chain from its root on.
    """
    exceptions = [line for line in lines if EXCEPTION.search(line) and not IN_SOURCE.search(line)]
    found = list(dict.fromkeys(line.strip() for line in exceptions))
    if not found:
        found = [line.strip() for line in lines if ALARM.search(line)][-1:] or [line.strip() for line in lines[-1:]]
    if len(found) > MAX_ERRORS:
        found = [found[0], *found[1 - MAX_ERRORS :]]
    return [_shortened(line, 2 * MAX_WHY_CHARS) for line in found]


def of_last_seconds(lines: Sequence[str], ended_at: float) -> list[str]:
    """The lines that a process logged in its last seconds, by their times: a signal follows from no earlier one.

    A line without a time has that of the line before it; of a log without any, all count.
    """
    end, found, is_last = time.localtime(ended_at), [], True
    for line in lines:
        if clock := CLOCK.search(line[:CLOCK_CHARS]):
            hours, minutes, seconds = map(int, clock.groups())
            age_s = ((end.tm_hour - hours) * 60 + end.tm_min - minutes) * 60 + end.tm_sec - seconds
            is_last = (age_s + 1) % 86_400 <= LAST_SECONDS + 1  # its times may be rounded up
        if is_last:
            found.append(line)
    return found


def hints(exit_code: int | None, why: str, lines: Sequence[str], facts: Facts, oom_kills: int | None) -> Iterator[str]:
    """Further evidence of a cause, and what to do.

    Args:
        exit_code: negative for a signal, as in `subprocess`.
        why: why the attempt counts as failed.
    """
    if (killed := kill_text(exit_code, why, oom_kills)) is not None:
        yield killed
    if has_ended_alone(exit_code, why):
        yield from (words for number, words in SIGNAL_HINTS.items() if _signal_of(exit_code) == number)
    yield from (words for pattern, words in LOG_HINTS if any(pattern.search(line) for line in lines))
    for space, where in ((facts.disk, "the disk of the run folder"), (facts.shared_memory, "/dev/shm")):
        if space is not None and space.free_bytes < min(SCARCE_BYTES, space.total_bytes // 20):
            yield f"{where} is full: {_space(space)}"


def _signal_of(exit_code: int | None) -> int | None:
    """The signal that ended a process, or one below the shell that it is."""
    if exit_code is None or 0 <= exit_code <= 128:
        return None
    return -exit_code if exit_code < 0 else exit_code - 128


def _unwell(services: Iterable[ServiceStatus], launch: Launch, started_at: float | None) -> Iterator[str]:
    """Other services that are not well or were restarted during the attempt; those that it needs first."""
    others = sorted(
        (each for each in services if each.name != launch.name), key=lambda each: each.name not in launch.needs
    )
    for other in others:
        needed = ", which it needs," if other.name in launch.needs else ""
        if other.state in UNWELL:
            yield _shortened(f"{other.name}{needed} is {other.state}: {_first_line(other.why or 'reason unknown')}")
        elif other.restarts and started_at and other.started_at and other.started_at > started_at:
            yield f"{other.name}{needed} was restarted during this attempt, at {_clock(other.started_at)}"


def _when(at: float, record: KeeperState | None, run_started_at: float | None) -> str:
    ended_at = (record.ended_at if record else None) or at
    words = f"{_clock(ended_at)} {time.strftime('%Z', time.localtime(ended_at))}"
    if record is not None:
        words += f", {_duration(ended_at - record.started_at)} after its start"
    return words + (f", {_duration(ended_at - run_started_at)} into the run" if run_started_at else "")


# --- the sections --------------------------------------------------------------------------------------------------


def _section(title: str, lines: Sequence[str], empty: str = "(nothing)") -> str:
    return "\n".join([f"--- {title} {'-' * max(3, RULE - len(title))}", *(lines or [f"({empty.strip('()')})"])])


def _service_table(services: Iterable[ServiceStatus], at: float) -> list[str]:
    head = ("service", "state", "attempt", "pid", "up", "memory", "GPU memory", "exit", "why")
    rows = [
        (
            each.name,
            str(each.state),
            str(each.attempt),
            _or_dash(each.pid),
            _duration(at - each.started_at) if each.started_at and each.pid else "-",
            _size(each.rss_bytes),
            _size(each.gpu_memory_bytes),
            _or_dash(each.exit_code),
            _shortened(_first_line(each.why or "")),
        )
        for each in services
    ]
    return _aligned([head, *rows])


def _command(launch: Launch) -> list[str]:
    return [f"cd {shlex.quote(str(launch.cwd))}", on_one_line(masked_argv(launch.argv))]


def _attempts(history: Sequence[KeeperState]) -> list[str]:
    rows = [
        (
            f"attempt {each.attempt}",
            _clock(each.started_at),
            f"ran {_duration(each.ended_at - each.started_at)}" if each.ended_at else "runs",
            each.error or (exit_text(each.exit_code) if each.ended_at else ""),
            f"terminated by its keeper: {', '.join(entry.words() for entry in each.ended)}" if each.ended else "",
        )
        for each in history
    ]
    return _aligned(rows)


def _gpu_table(gpus: Iterable[GpuStatus]) -> list[str]:
    rows = []
    for gpu in gpus:
        shares = [f"{name} {_size(held)}" for name, held in gpu.by_service.items()]
        shares += [f"others {_size(gpu.other_bytes)}"] if gpu.other_bytes else []
        busy = "-" if gpu.utilization_percent is None else f"{gpu.utilization_percent:.0f} % busy"
        used = f"{_size(gpu.memory_used_bytes)} of {_size(gpu.memory_total_bytes)}"
        rows.append((str(gpu.index), gpu.name, used, busy, ", ".join(shares) or "use by process unknown"))
    return _aligned(rows)


def _metrics(metrics: Mapping[str, float]) -> list[str]:
    names = sorted(metrics, key=lambda name: (name != "step", name))
    return _aligned([(name, f"{metrics[name]:.6g}") for name in names])


def _machine(facts: Facts) -> list[str]:
    versions = ", ".join(f"{name} {number}" for name, number in facts.versions.items()) or "none installed"
    load = "-" if facts.load is None else f"{facts.load:.1f}"
    return _aligned(
        [
            ("host", f"{facts.host}, {facts.kernel}, {_or_dash(facts.num_cores)} cores, load {load}"),
            ("memory", _space(facts.memory)),
            ("disk", _space(facts.disk)),
            ("/dev/shm", _space(facts.shared_memory)),
            ("driver", f"NVIDIA {facts.nvidia_driver}" if facts.nvidia_driver else "no NVIDIA driver loaded"),
            ("python", facts.python),
            ("packages", versions),
        ]
    )


# --- formats -------------------------------------------------------------------------------------------------------


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return [line.rstrip() for line in lines]


def _clean(line: str) -> str:
    """Without colour codes and other control characters."""
    return CONTROL.sub("", line)


def _first_line(text: str) -> str:
    return text.partition("\n")[0].removesuffix("; last lines:")


def _shortened(text: str, num_chars: int = MAX_WHY_CHARS) -> str:
    return text if len(text) <= num_chars else f"{text[: num_chars - 1]}…"


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)


def _size(num_bytes: int | None) -> str:
    if num_bytes is None:
        return "-"
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


def _space(space: Space | None) -> str:
    return "unknown" if space is None else f"{_size(space.free_bytes)} free of {_size(space.total_bytes)}"


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{max(0.0, seconds):.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


# --- collecting and writing ----------------------------------------------------------------------------------------


def write_report(
    run_folder: Path,
    status: RunStatus,
    launches: Mapping[str, Launch],
    service: str,
    *,
    attempt: int,
    why: str,
    oom_kills: int | None = None,
) -> Path | None:
    """Write `crash-<service>-<attempt>.txt` beside the logs; return its path, or None when that was not possible.

    An attempt that was restarted in place after a kill may have one already, which then follows the new one.

    Blocks for some milliseconds: run it in a thread.

    Args:
        why: why the attempt counts as failed.
        oom_kills: how much `oom_kill_count` grew during the attempt.
    """
    path = crash_report_file(run_folder, service, attempt)
    try:
        history = _history(run_folder, service, attempt)
        began = next((each.log_offset for each in history if each.attempt == attempt), 0)
        text = compose(
            status,
            launches[service],
            attempt=attempt,
            why=why,
            history=history,
            logs={
                name: last_lines(service_log(run_folder, name), began, SEARCHED_LINES)
                if name == service
                else last_lines(service_log(run_folder, name), 0, OTHER_LINES)
                for name in launches
            },
            metrics=latest_metrics(run_folder),
            facts=machine_facts(run_folder),
            oom_kills=oom_kills,
        )
        text = printable(masked_text(text, secrets(launches.values(), os.environ, run_folder)), keep="\n\t")
        write_atomically(path, text.encode() + _earlier(path), mode=0o600)
        _drop_surplus(run_folder, service)
    except OSError as error:
        log.error("%s: cannot write the crash report: %s; free some space", path, error.strerror or error)
        return None
    except Exception:  # a bug in the report must not end the supervisor
        log.exception("%s: cannot compose the crash report: please report this bug", path)
        return None
    return path


def secrets(launches: Iterable[Launch], environment: Mapping[str, str], run_folder: Path) -> list[str]:
    """The token of a run and secret values in variables, their files and command lines, the longest first: logs may
    repeat any of them."""
    found = secret_values(environment)
    with suppress(ConfigError):  # it has none
        token = read_token(run_folder / TOKEN_FILE, where="token")
        found |= {token} if len(token) >= MIN_SECRET_CHARS else set()
    for launch in launches:
        variables = {name: value for name, value in launch.env.items() if not name.startswith(SECRET_ARGUMENT_PREFIX)}
        found |= secret_values(variables, with_secrets(launch.argv, launch.env))
        values = {launch.env[name] for name in launch.env_from_files if name in launch.env}
        found |= {value for value in values if len(value) >= MIN_SECRET_CHARS}
    return longest_first(found)


def _history(run_folder: Path, service: str, attempt: int) -> list[KeeperState]:
    """State files of the first attempt and the latest ones; damaged files are skipped."""
    numbers = [1, *range(max(2, attempt - MAX_HISTORY + 2), attempt + 1)] if attempt > 1 else [1]
    found = []
    for number in numbers:
        with suppress(OSError, ValidationError):
            content = read_whole(keeper_state_file(run_folder, service, number))
            found.append(KeeperState.model_validate_json(content))
    return found


def _earlier(path: Path) -> bytes:
    """What the file has from an earlier failure of the same attempt, of a long history the newest part."""
    with suppress(OSError):
        return EARLIER_FAILURE + read_whole(path)[:MAX_EARLIER_BYTES]
    return b""


def _drop_surplus(run_folder: Path, service: str) -> None:
    """Keep the first report of a service and the newest."""
    paths = list(crash_report_files(run_folder, service).values())
    for path in paths[1 : max(1, len(paths) - MAX_REPORTS + 1)]:
        path.unlink(missing_ok=True)
