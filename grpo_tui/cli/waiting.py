"""What `grpo-tui up` does once it has a run: say how it goes, and wait for as long as is asked.

`Watch` is the pure part: it hears events and says when the waiting is over, and with which exit code.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from grpo_engine.errors import PeerUnavailable
from grpo_engine.wire.supervisor import (
    ENDED_RUN_STATES,
    Bye,
    Event,
    Notice,
    RunChanged,
    RunState,
    ServiceChanged,
    ServiceState,
    ServiceStatus,
    Snapshot,
    UsageSampled,
)
from grpo_tui.client.api import Daemon, OpenedRun, ensure_daemon, look_at, stored_status, until_gone
from grpo_tui.exit_codes import ExitCode

Goal = Literal["ready", "finished"]


@dataclass(slots=True)
class Watch:
    """What was heard of a run, and whether that is the end of the waiting."""

    goal: Goal | None
    stops_on_failure: bool
    state: RunState = RunState.STARTING
    is_ending: bool = False
    failed: dict[str, ServiceStatus] = field(default_factory=dict)
    """Services that have failed for good, in the order in which they did."""

    def hear(self, message: Snapshot | Event | Bye) -> ExitCode | None:
        """Take in a message; the exit code when the waiting is over."""
        match message:
            case Snapshot(status=status):
                self.state, self.is_ending = status.state, status.is_ending
                for service in status.services:
                    self._hear_service(service)
            case ServiceChanged(service=service):
                self._hear_service(service)
            case RunChanged(state=state) | Bye(state=state):
                self.state = state
            case _:
                pass
        return self.verdict()

    def verdict(self) -> ExitCode | None:
        """The exit code when the waiting is over."""
        if self.state is RunState.FINISHED:
            return ExitCode.OK
        if self.state is RunState.FAILED or (self.failed and self.stops_on_failure):
            return self.failure_code()
        if self.state is RunState.STOPPED:
            return ExitCode.OK if self.goal is None and not self.failed else self.stopped_code()
        is_up = self.state is RunState.RUNNING and not self.is_ending
        return ExitCode.OK if self.goal == "ready" and is_up else None

    def failure_code(self) -> ExitCode:
        """What a failed service means to a script."""
        return ExitCode.REFUSED if any(each.is_refused for each in self.failed.values()) else ExitCode.FAILED

    def stopped_code(self) -> ExitCode:
        """Somebody else ended the run before it was where we waited for it to be."""
        return self.failure_code() if self.failed else ExitCode.NOT_IN_TIME

    def _hear_service(self, service: ServiceStatus) -> None:
        if service.state is ServiceState.FAILED:
            self.failed[service.name] = service
        else:
            self.failed.pop(service.name, None)


@dataclass(slots=True)
class Speaker:
    """Progress for people on stderr, or for programs on stdout."""

    began: float
    as_json: bool
    _told: dict[str, tuple[str, int]] = field(default_factory=dict)
    _explained: set[str | None] = field(default_factory=set)
    """Services of whose failure a notice has told the reason."""

    def opened(self, opened: OpenedRun) -> None:
        """A run is there."""
        name = opened.folder.name
        verb = "started" if opened.is_new else "joined"
        self._say(f"run {name} {verb}", event=verb, run=name, folder=str(opened.folder), note=opened.note)
        if opened.note is not None and not self.as_json:
            print(opened.note, file=sys.stderr)

    def heard(self, message: Snapshot | Event | Bye) -> None:
        """Something happened."""
        match message:
            case Snapshot(status=status):
                for service in status.services:
                    self._service(service)
            case ServiceChanged(service=service):
                self._service(service)
            case RunChanged(state=state):
                self._say(f"run {state}", event="run", state=state)
            case Notice(text=text, severity=severity, service=name):
                if severity == "error":
                    self._explained.add(name)
                self._say(text, event="notice", severity=severity, service=name, text=text)
            case UsageSampled() | Bye():
                pass

    def note(self, text: str) -> None:
        """Something about the waiting itself."""
        self._say(text, event="note", text=text)

    def ended(self, watch: Watch, code: ExitCode) -> None:
        """The waiting is over."""
        if self.as_json:
            self._say("", event="end", state=watch.state, exit_code=int(code), failed=list(watch.failed))

    def _service(self, service: ServiceStatus) -> None:
        now = (str(service.state), service.attempt)
        if self._told.get(service.name) == now:
            return
        self._told[service.name] = now
        is_explained = service.state is ServiceState.FAILED and service.name in self._explained
        self._explained.discard(service.name)
        why = "" if service.why is None or is_explained else f"  {service.why}"
        text = f"{service.name}  {service.state}{why}"
        self._say(
            text,
            event="service",
            service=service.name,
            state=service.state,
            attempt=service.attempt,
            pid=service.pid,
            exit_code=service.exit_code,
            why=service.why,
        )

    def _say(self, text: str, /, **fields: object) -> None:
        elapsed_s = time.monotonic() - self.began
        if self.as_json:
            print(json.dumps({"time": time.time(), "elapsed_s": round(elapsed_s, 3), **fields}), flush=True)
        else:
            print(f"{elapsed_s:6.1f} s  {text}", file=sys.stderr)


async def stay(folder: Path, watch: Watch, say: Speaker, deadline: float | None, *, owns: bool) -> ExitCode:
    """Watch until there is nothing more to wait for; then leave the run or take it down, as is right."""
    watching = asyncio.create_task(_watch(folder, watch, say))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, watching.cancel)
    try:
        async with asyncio.timeout_at(deadline):
            code = await watching
    except TimeoutError:
        code = ExitCode.NOT_IN_TIME
        say.note(f"not {watch.goal or 'over'} in time")
    except asyncio.CancelledError:
        code = ExitCode.INTERRUPTED
        say.note("interrupted")
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    if watch.state in ENDED_RUN_STATES or (code != ExitCode.OK and not owns and await _is_ending(folder)):
        await until_gone(folder)
    elif code != ExitCode.OK and owns:
        say.note("taking the run down")
        await _take_down(folder, watch, say)
    elif code != ExitCode.OK:
        say.note(f"the run goes on: `grpo-tui status {folder.name}` shows it, `grpo-tui down {folder.name}` ends it")
    return code


async def _is_ending(folder: Path) -> bool:
    """Whether the run ends by itself by now."""
    try:
        reply = await Daemon(folder).command("status")
    except PeerUnavailable:
        return True  # it has just ended, or its daemon was lost: its files tell
    return reply.status is not None and (reply.status.is_ending or reply.status.state in ENDED_RUN_STATES)


async def _watch(folder: Path, watch: Watch, say: Speaker) -> ExitCode:
    """Hear events until the waiting is over; a daemon that dies meanwhile is replaced, and heard again."""
    daemon = Daemon(folder)
    while True:
        try:
            async for message in daemon.events():
                say.heard(message)
                code = watch.hear(message)
                if code is not None:
                    return code
        except PeerUnavailable:
            pass  # gone, or not there yet: its files and its successor tell
        if not await asyncio.to_thread(ensure_daemon, folder):
            return _from_files(folder, watch, say)
        say.note("the supervisor was lost; another has taken the run over")


def _from_files(folder: Path, watch: Watch, say: Speaker) -> ExitCode:
    """How a run ended that was over before we could listen."""
    status = stored_status(look_at(folder))
    snapshot = Snapshot(number=0, status=status)
    say.heard(snapshot)
    code = watch.hear(snapshot)
    for service in watch.failed.values():
        say.note(f"{service.name} failed: {service.why}")
    return ExitCode.FAILED if code is None else code


async def _take_down(folder: Path, watch: Watch, say: Speaker) -> None:
    daemon = Daemon(folder)

    hears = asyncio.Event()

    async def listen() -> None:
        async for message in daemon.events():
            hears.set()
            say.heard(message)
            watch.hear(message)

    listening = asyncio.create_task(listen())
    listening.add_done_callback(lambda _: hears.set())
    await hears.wait()
    try:
        await daemon.command("down", wait=True)
        await listening
    except PeerUnavailable:
        say.note("the supervisor hung up; the run's files say how it ended")
        await asyncio.gather(listening, return_exceptions=True)
    await until_gone(folder)
