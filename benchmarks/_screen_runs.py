"""Runs for `screen.py`: a live run of plain commands, and a run of an hour made from a recorded one.

The hour is a recorded run's lines over and over, with times, steps and numbers that go on. A small server says its
events on the run's socket as a daemon would, while the files grow beside it.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_engine.wire.codec import to_line
from grpo_engine.wire.run_folder import ADDRESS_FILE
from grpo_engine.wire.supervisor import Address, Hello

GRPO_TUI = (sys.executable, "-P", "-m", "grpo_tui")
RECORDED = Path(__file__).parents[1] / "tests" / "recorded" / "tiny-cpu.tar.gz"
HOUR_S = 3600.0
QUIET = "import time; print('up', flush=True); time.sleep(1e6)"
FLOOD = """
import os, time
line = b"INFO step %07d loss -0.021 reward 0.87 grad_norm 0.41 tokens/s 11873\\n"
number, due = 0, time.monotonic()
while True:
    os.write(1, b"".join(line % (number + each) for each in range(10_000)))
    number, due = number + 10_000, due + 0.05
    time.sleep(max(0.0, due - time.monotonic()))
"""
"""200,000 lines per second, or as many as the machine can."""


@dataclass(kw_only=True)
class LiveRun:
    """A run with its supervisor, in a separate folder."""

    folder: Path
    services: Mapping[str, str]
    """Programs by name."""
    environment: dict[str, str] = field(default_factory=dict)

    def command(self, *words: str) -> str:
        """Run one of our commands; its output."""
        done = subprocess.run(
            [*GRPO_TUI, *words], cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"grpo-tui {' '.join(words)}: exit code {done.returncode}\n{done.stderr}")
        return done.stdout


@contextmanager
def live_run(folder: Path, services: Mapping[str, str]) -> Iterator[LiveRun]:
    """Start services and wait until all are ready; always end them afterwards."""
    folder.mkdir()
    run = LiveRun(folder=folder, services=services, environment=environment(folder))
    tables = [
        f'[services.{name}]\nkind = "command"\nargv = {json.dumps([sys.executable, "-I", "-S", "-c", program])}\n'
        for name, program in services.items()
    ]
    (folder / "p.toml").write_text("\n".join(tables))
    try:
        run.command("up", "--profile", "p.toml", "--detach", "--wait", "ready")
        yield run
    finally:
        run.command("down", "--all")


def environment(folder: Path) -> dict[str, str]:
    """Sockets in the benchmark's folder, and cached compiled files."""
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONDONTWRITEBYTECODE", "NO_COLOR")}
    return {**kept, "XDG_RUNTIME_DIR": str(folder)}


# --- an hour of a recorded run ---------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class LongRun:
    """The folder of a run, and the lines of an hour that are still to be sent."""

    folder: Path
    events: list[bytes]
    metrics: list[bytes]
    rollouts: list[bytes]
    logs: dict[str, list[bytes]]
    last_step: int = 0

    def files(self) -> dict[str, list[bytes]]:
        """Lines for each file of the run, by name."""
        return {"metrics.jsonl": self.metrics, "rollouts.jsonl": self.rollouts, **self.logs}


def long_run(root: Path) -> LongRun:
    """Unpack the recorded run below `root/logs`, with empty files; its lines, repeated to an hour."""
    with tarfile.open(RECORDED) as tar:
        tar.extractall(root / "logs", filter="data")
    (folder,) = (root / "logs").iterdir()
    told = [json.loads(line) for line in (folder / "events.jsonl").read_bytes().splitlines()]
    opening, events = told[0], [each for each in told[1:] if each["type"] != "bye"]
    times = [each["time"] for each in events]
    lasts_s = times[-1] - times[0] + 1.0
    metrics, rollouts = (_objects(folder / name) for name in ("metrics.jsonl", "rollouts.jsonl"))
    num_steps = max(line["step"] for line in metrics) + 1
    run = LongRun(folder=folder, events=[_line(opening)], metrics=[], rollouts=[], logs={})
    number = opening["number"]
    for turn in range(round(HOUR_S / lasts_s)):
        for event in events:
            number += 1
            run.events.append(_line({**event, "number": number, "time": event["time"] + turn * lasts_s}))
        run.metrics += [_line(_moved(line, turn, lasts_s, num_steps)) for line in metrics]
        run.rollouts += [_line(_moved(line, turn, lasts_s, num_steps)) for line in rollouts]
        run.last_step = turn * num_steps + max(line["step"] for line in metrics)
    for log in sorted(folder.glob("*.log")):
        lines = [line + b"\n" for line in log.read_bytes().splitlines()]
        run.logs[log.name] = lines * round(HOUR_S / lasts_s)
    for name in ("events.jsonl", *run.files()):
        (folder / name).write_bytes(b"")
    return run


def _objects(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def _moved(line: dict[str, Any], turn: int, lasts_s: float, num_steps: int) -> dict[str, Any]:
    """The same line so many turns later."""
    return {**line, "time": line["time"] + turn * lasts_s, "step": line["step"] + turn * num_steps}


@contextmanager
def told_by_a_daemon(run: LongRun, socket: Path) -> Iterator[threading.Event]:
    """Send the run to every client of a socket, as fast as it is read; the event is set when all was sent."""
    is_told = threading.Event()
    loop = asyncio.new_event_loop()
    (run.folder / ADDRESS_FILE).write_bytes(to_line(Address(pid=os.getpid(), socket=str(socket))))

    async def serve() -> None:
        await asyncio.start_unix_server(lambda reader, writer: _tell(run, reader, writer, is_told), socket)

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(serve(), loop).result()
    try:
        yield is_told
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


async def _tell(
    run: LongRun, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_told: threading.Event
) -> None:
    writer.write(to_line(Hello(run=run.folder.name, pid=os.getpid())))
    await reader.readline()
    await reader.readline()
    num_parts = 600
    for part in range(num_parts):
        for name, lines in (("events.jsonl", run.events), *run.files().items()):
            share = lines[part * len(lines) // num_parts : (part + 1) * len(lines) // num_parts]
            with (run.folder / name).open("ab") as file:
                file.write(b"".join(share))
            if name == "events.jsonl":
                writer.writelines(share)
        await writer.drain()
        await asyncio.sleep(0.05)  # an hour in half a minute
    is_told.set()
    await reader.read()  # until the screen is closed
