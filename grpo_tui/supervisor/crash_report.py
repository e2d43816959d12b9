"""One file for whoever comes in the morning: what failed and why, how everything stood, and what it printed last.

`compose` makes the text of plain values, the cause first; `write_report` gathers them and writes the file beside the
logs. Environment variables are not in it, and secrets that a command line or a log repeats are masked. A report that
cannot be written is told in the supervisor's log, and stops nothing.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from grpo_engine.wire.codec import write_atomically
from grpo_engine.wire.supervisor import GpuStatus, RunStatus, ServiceState, ServiceStatus
from grpo_tui.paths import KEEPERS
from grpo_tui.services.base import Launch
from grpo_tui.supervisor.capped_log import last_lines
from grpo_tui.supervisor.keeper import on_one_line
from grpo_tui.supervisor.latest_metrics import latest_metrics
from grpo_tui.supervisor.machine import exit_words
from grpo_tui.supervisor.machine_facts import Facts, Space, machine_facts
from grpo_tui.supervisor.processes import KeeperState

MAX_REPORTS = 20
"""Of one service: the first, which tells how it began, and the newest."""
SEARCHED_LINES, OWN_LINES, OTHER_LINES = 400, 60, 25
"""Of the failed service's log: searched for an error, and shown; shown of the others' logs."""
MAX_ERRORS = 3
MAX_HISTORY = 10
MAX_WHY_CHARS = 160
MAX_LINE_CHARS = 400
SCARCE_BYTES = 1_000_000_000
SECRET_NAME = re.compile(r"(?i)(?:key|token|secret|password|passwd|credentials?)$")
MASK = "***"
MIN_SECRET_CHARS = 8
"""Shorter values are words like `true` and `1`, which would be masked wherever they stand."""
UNWELL = frozenset({ServiceState.FAILED, ServiceState.UNHEALTHY, ServiceState.BACKOFF, ServiceState.STOPPING})

EXCEPTION = re.compile(r"\b[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)\b(?::|$)")
IN_SOURCE = re.compile(r"\b(?:except|raise)\b[^:]*(?:Error|Exception|Interrupt|Exit)\b")
"""A line of code that a traceback quotes."""
ALARM = re.compile(
    r"\b(?:ERROR|FATAL|CRITICAL|[Ff]atal error|panic(?:ked)?|Segmentation fault|Killed|Aborted|core dumped"
    r"|No space left on device|Address already in use|[Oo]ut of memory|cannot start)\b"
)
CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f]")
LOG_HINTS = (
    (re.compile(r"CUDA out of memory|OutOfMemoryError|Free memory on device"), "the GPU table below shows who held it"),
    (re.compile(r"Address already in use|EADDRINUSE"), "`grpo-tui doctor --profile …` names who holds the port"),
    (re.compile(r"Connection refused|ConnectError|ConnectionError"), "look at the service that it talks to, below"),
)
SIGNAL_HINTS = {
    "SIGSEGV": 'native code crashed: PYTHONFAULTHANDLER = "1" in the service\'s env shows where',
    "SIGABRT": "native code gave up, e.g. a failed assertion or NCCL's watchdog: its log says which",
    "SIGBUS": "a mapped file could not be read, most often because /dev/shm is full",
    "SIGILL": "a program built for another processor",
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
        why: why the attempt counts as failed, in words, as the supervisor says it.
        history: attempts of this service as their keepers told them, the oldest first.
        logs: last lines by service, at best `SEARCHED_LINES` of the failed one and `OTHER_LINES` of the others.
        metrics: latest values, with `step`.
        oom_kills: processes that the kernel ended for want of memory during the attempt; None when nobody counted.
    """
    own = [_clean(line) for line in logs.get(launch.name, ())]
    others = [service for service in status.services if service.name != launch.name]
    parts = [
        "\n".join(_head(status, launch, attempt, why, history, own, facts, oom_kills)),
        _section(f"Log of {launch.name}, last lines", own[-OWN_LINES:], "it printed nothing in this attempt"),
        _section("All services", _service_table(status.services, facts.at)),
        _section(f"Command of {launch.name}", _command(launch)),
        _section(f"Attempts of {launch.name}", _attempts(history), "none is on record"),
        _section("GPUs, as last seen", _gpu_table(status.gpus), status.gpu_note or "none was seen"),
        _section("Latest metrics", _metrics(metrics), "none yet"),
        _section("Machine", _machine(facts)),
        *(
            _section(f"Log of {service.name}, last lines", list(map(_clean, logs.get(service.name, ())))[-OTHER_LINES:])
            for service in others
        ),
    ]
    return "\n\n".join(parts) + "\n"


# --- the head: what a tired person reads ---------------------------------------------------------------------------


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
    for line in error_lines(lines):
        yield f"  log says  {line}"
    for hint in hints(first_why, lines, facts, oom_kills):
        yield f"  hint      {hint}"
    for words in _unwell(status.services, launch, record.started_at if record else None):
        yield f"  also      {words}"
    yield f"  when      {_when(facts.at, record, status.started_at)}"
    yield f"  attempt   {attempt} of {launch.name} (kind {launch.kind}) in run {status.run}, profile {status.profile}"
    if record is not None and (record.ended or record.unkillable):
        ended = [entry.words() for entry in record.ended] + [f"{entry.words()}, in vain" for entry in record.unkillable]
        yield f"  leftover  its keeper had to end {', '.join(ended)}"
    if service is not None:
        now = f": {_shortened(_first_line(service.why))}" if service.why and service.why != why else ""
        yield f"  now       {service.state}{now}; the run is {status.state}"
        yield f"  full log  {service.log}"


def error_lines(lines: Sequence[str]) -> list[str]:
    """The lines of a log that look most like the cause: exceptions, else alarms, else the last thing it said.

    Of many exceptions the first and the last ones: Python tells a chain from its root on.
    """
    exceptions = [line for line in lines if EXCEPTION.search(line) and not IN_SOURCE.search(line)]
    found = list(dict.fromkeys(line.strip() for line in exceptions))
    if not found:
        found = [line.strip() for line in lines if ALARM.search(line)][-1:] or [line.strip() for line in lines[-1:]]
    if len(found) > MAX_ERRORS:
        found = [found[0], *found[1 - MAX_ERRORS :]]
    return [_shortened(line, 2 * MAX_WHY_CHARS) for line in found]


def hints(why: str, lines: Sequence[str], facts: Facts, oom_kills: int | None) -> Iterator[str]:
    """What else speaks for a cause, and what to do."""
    if oom_kills:
        times = "a process" if oom_kills == 1 else f"{oom_kills} processes"
        yield f"during this attempt the kernel's out-of-memory killer ended {times} on this machine: use less memory"
    elif re.search(r"ended by SIGKILL|exit code 137", why):
        if oom_kills is None:
            yield "nobody here sent SIGKILL: most often the kernel's out-of-memory killer (`dmesg | grep -i oom`)"
        else:
            yield "nobody here sent SIGKILL, nor did the kernel's out-of-memory killer: a person or another program did"
    yield from (words for name, words in SIGNAL_HINTS.items() if name in why)
    yield from (words for pattern, words in LOG_HINTS if any(pattern.search(line) for line in lines))
    for space, where in ((facts.disk, "the disk of the run folder"), (facts.shared_memory, "/dev/shm")):
        if space is not None and space.free_bytes < min(SCARCE_BYTES, space.total_bytes // 20):
            yield f"{where} is full: {_space(space)}"


def _unwell(services: Iterable[ServiceStatus], launch: Launch, started_at: float | None) -> Iterator[str]:
    """Others in trouble, or begun anew during the attempt; those that it needs first."""
    others = sorted(
        (each for each in services if each.name != launch.name), key=lambda each: each.name not in launch.needs
    )
    for other in others:
        needed = ", which it needs," if other.name in launch.needs else ""
        if other.state in UNWELL:
            yield _shortened(f"{other.name}{needed} is {other.state}: {_first_line(other.why or 'no reason known')}")
        elif other.restarts and started_at and other.started_at and other.started_at > started_at:
            yield f"{other.name}{needed} was restarted meanwhile, at {_clock(other.started_at)}"


def _when(at: float, record: KeeperState | None, run_started_at: float | None) -> str:
    ended_at = (record.ended_at if record else None) or at
    words = f"{_clock(ended_at)} {time.strftime('%Z', time.localtime(ended_at))}"
    if record is not None:
        words += f", {_duration(ended_at - record.started_at)} after its start"
    return words + (f", {_duration(ended_at - run_started_at)} into the run" if run_started_at else "")


# --- the sections --------------------------------------------------------------------------------------------------


def _section(title: str, lines: Sequence[str], empty: str = "(nothing)") -> str:
    return "\n".join([f"--- {title} {'-' * max(3, 100 - len(title))}", *(lines or [f"({empty.strip('()')})"])])


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
    return [f"cd {shlex.quote(str(launch.cwd))}", on_one_line(without_secrets(launch.argv))]


def without_secrets(argv: Sequence[str]) -> list[str]:
    """A command line with the values of `--api-key …`, `--token=…` and `SOME_SECRET=…` masked."""
    shown: list[str] = []
    is_value = False
    for word in argv:
        name, equals, value = word.partition("=")
        is_secret = SECRET_NAME.search(name) is not None
        shown.append(MASK if is_value else f"{name}={MASK}" if is_secret and equals and value else word)
        is_value = is_secret and name.startswith("-") and not equals and not is_value
    return shown


def _attempts(history: Sequence[KeeperState]) -> list[str]:
    rows = [
        (
            f"attempt {each.attempt}",
            _clock(each.started_at),
            f"ran {_duration(each.ended_at - each.started_at)}" if each.ended_at else "runs",
            each.error or (exit_words(each.exit_code) if each.ended_at else ""),
            f"ended by its keeper: {', '.join(entry.words() for entry in each.ended)}" if each.ended else "",
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
        rows.append((str(gpu.index), gpu.name, used, busy, ", ".join(shares) or "shares are not known"))
    return _aligned(rows)


def _metrics(metrics: Mapping[str, float]) -> list[str]:
    names = sorted(metrics, key=lambda name: (name != "step", name))
    return _aligned([(name, f"{metrics[name]:.6g}") for name in names])


def _machine(facts: Facts) -> list[str]:
    versions = ", ".join(f"{name} {number}" for name, number in facts.versions.items()) or "none is installed"
    load = "-" if facts.load is None else f"{facts.load:.1f}"
    return _aligned(
        [
            ("host", f"{facts.host}, {facts.kernel}, {_or_dash(facts.num_cores)} cores, load {load}"),
            ("memory", _space(facts.memory)),
            ("disk", _space(facts.disk)),
            ("/dev/shm", _space(facts.shared_memory)),
            ("driver", f"NVIDIA {facts.nvidia_driver}" if facts.nvidia_driver else "no NVIDIA driver is loaded"),
            ("python", facts.python),
            ("packages", versions),
        ]
    )


# --- words ---------------------------------------------------------------------------------------------------------


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines with their columns below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return [line.rstrip() for line in lines]


def _clean(line: str) -> str:
    """Without colours and other control characters."""
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
    return "not known" if space is None else f"{_size(space.free_bytes)} free of {_size(space.total_bytes)}"


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{max(0.0, seconds):.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


# --- gathering and writing -----------------------------------------------------------------------------------------


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
    """Write `crash-<service>-<attempt>.txt` beside the logs; where it is, or None when that was not possible.

    Blocks for some milliseconds: run it in a thread.

    Args:
        why: why the attempt counts as failed, in words.
        oom_kills: how much `oom_kill_count` grew during the attempt.
    """
    path = run_folder / f"crash-{service}-{attempt}.txt"
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
                name: last_lines(run_folder / f"{name}.log", began, SEARCHED_LINES)
                if name == service
                else last_lines(run_folder / f"{name}.log", 0, OTHER_LINES)
                for name in launches
            },
            metrics=latest_metrics(run_folder),
            facts=machine_facts(run_folder),
            oom_kills=oom_kills,
        )
        for secret in secrets(launches.values(), os.environ):
            text = text.replace(secret, MASK)
        write_atomically(path, text.encode(errors="replace"))
        _drop_surplus(run_folder, service)
    except OSError as error:
        log.error("%s: the report on its failure cannot be written: %s; free some space", path, error.strerror or error)
        return None
    except Exception:  # the report is a service to people: a defect in it must not end the supervisor
        log.exception("%s: the report on its failure cannot be made: please report this defect", path)
        return None
    return path


def secrets(launches: Iterable[Launch], environment: Mapping[str, str]) -> list[str]:
    """Values of variables and arguments that must not be shown, the longest first: logs repeat both."""
    found = {value for name, value in environment.items() if SECRET_NAME.search(name)}
    for launch in launches:
        found |= {value for name, value in launch.env.items() if SECRET_NAME.search(name)}
        found |= {launch.env[name] for name in launch.env_from_files if name in launch.env}
        shown = zip(launch.argv, without_secrets(launch.argv), strict=True)
        found |= {word if masked == MASK else word.partition("=")[2] for word, masked in shown if word != masked}
    return sorted((value for value in found if len(value) >= MIN_SECRET_CHARS), key=len, reverse=True)


def _history(run_folder: Path, service: str, attempt: int) -> list[KeeperState]:
    """What the keepers wrote of the first attempt and the latest ones; a damaged file is passed over."""
    numbers = [1, *range(max(2, attempt - MAX_HISTORY + 2), attempt + 1)] if attempt > 1 else [1]
    found = []
    for number in numbers:
        with suppress(OSError, ValidationError):
            content = (run_folder / KEEPERS / f"{service}.{number}.json").read_bytes()
            found.append(KeeperState.model_validate_json(content))
    return found


def _drop_surplus(run_folder: Path, service: str) -> None:
    """Keep the first report of a service and the newest."""
    name = re.compile(rf"crash-{re.escape(service)}-(\d+)\.txt")
    numbers = sorted(int(found[1]) for path in run_folder.iterdir() if (found := name.fullmatch(path.name)))
    for number in numbers[1 : max(1, len(numbers) - MAX_REPORTS + 1)]:
        (run_folder / f"crash-{service}-{number}.txt").unlink(missing_ok=True)
