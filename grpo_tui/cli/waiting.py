"""What `grpo-tui up` does once it has a run: print its progress, and wait as requested.

`Watch` is the pure part: it receives events and decides when the waiting is over, and the exit code.
"""

from __future__ import annotations

import asyncio
import json
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
from grpo_tui.cli.printing import write_line
from grpo_tui.cli.training import Training, TrainingFollower
from grpo_tui.client.api import Daemon, OpenedRun, ensure_daemon, look_at, stored_status, until_gone
from grpo_tui.client.interrupts import INTERRUPTS, HeldInterrupts
from grpo_tui.exit_codes import ExitCode

Goal = Literal["ready", "finished"]


@dataclass(slots=True)
class Watch:
    """The state of a run as far as received, and whether the waiting is over."""

    goal: Goal | None
    stops_on_failure: bool
    state: RunState = RunState.STARTING
    is_ending: bool = False
    failed: dict[str, ServiceStatus] = field(default_factory=dict)
    """Services that have failed permanently, in that order."""

    def receive(self, message: Snapshot | Event | Bye) -> ExitCode | None:
        """Process a message; returns the exit code when the waiting is over."""
        match message:
            case Snapshot(status=status):
                self.state, self.is_ending = status.state, status.is_ending
                for service in status.services:
                    self._receive_service(service)
            case ServiceChanged(service=service):
                self._receive_service(service)
            case RunChanged(state=state) | Bye(state=state):
                self.state = state
            case _:
                pass
        return self.outcome()

    def outcome(self) -> ExitCode | None:
        """The exit code when the waiting is over."""
        if self.state is RunState.FINISHED:
            return ExitCode.OK
        if self.state is RunState.FAILED or (self.failed and self.stops_on_failure):
            return self.failure_code()
        if self.state is RunState.STOPPED:
            return ExitCode.OK if self.goal is None and not self.failed else self.stopped_code()
        is_up = self.state is RunState.RUNNING and not self.is_ending
        return ExitCode.OK if self.goal == "ready" and is_up else None

    def how_to_go_on(self, run: str) -> str:
        """What to do about services without which the run goes on; nothing else says that waiting may have no end."""
        first = next(iter(self.failed))
        return (
            f"the run goes on without {', '.join(self.failed)}: `grpo-tui start {run} {first}` starts it again, "
            f"`grpo-tui down {run}` ends the run"
        )

    def failure_code(self) -> ExitCode:
        """The exit code for a failed service."""
        return ExitCode.REFUSED if any(each.is_refused for each in self.failed.values()) else ExitCode.FAILED

    def stopped_code(self) -> ExitCode:
        """The exit code when another client ended the run before the awaited state."""
        return self.failure_code() if self.failed else ExitCode.NOT_IN_TIME

    def _receive_service(self, service: ServiceStatus) -> None:
        if service.state is ServiceState.FAILED:
            self.failed[service.name] = service
        else:
            self.failed.pop(service.name, None)


@dataclass(slots=True)
class ProgressPrinter:
    """Progress for people on stderr, or for programs on stdout."""

    began: float
    as_json: bool
    _printed: dict[str, tuple[str, int]] = field(default_factory=dict)
    _explained: set[str | None] = field(default_factory=set)
    """Services whose failure a notice has explained."""

    def opened(self, opened: OpenedRun) -> None:
        """Print that the run was started, resumed or joined."""
        name = opened.folder.name
        verb = "resumed" if opened.is_resumed else "started" if opened.is_new else "joined"
        self._say(f"run {name} {verb}", event=verb, run=name, folder=str(opened.folder), note=opened.note)
        if opened.note is not None and not self.as_json:
            write_line(opened.note, to_stderr=True)

    def queued(self, text: str) -> None:
        """Print what the start waits for."""
        self._say(text, event="queued", text=text)

    def event(self, message: Snapshot | Event | Bye) -> None:
        """Print an event."""
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
        """Print a note about the waiting itself."""
        self._say(text, event="note", text=text)

    def training(self, text: str) -> None:
        """Print how training goes; programs read `metrics.jsonl` and `status --json`."""
        if not self.as_json:
            self._say(text.replace("\n", "\n" + " " * 8))  # below the text, which the time comes before

    def ended(self, watch: Watch, code: ExitCode) -> None:
        """Print the result: for people, once more why each service failed, which is far up by now."""
        if self.as_json:
            self._say("", event="end", state=watch.state, exit_code=int(code), failed=list(watch.failed))
            return
        for service in watch.failed.values():
            reason = (service.why or "no reason known").partition("\n")[0].removesuffix("; last lines:")
            self._say(f"{service.name} failed: {reason}")

    def _service(self, service: ServiceStatus) -> None:
        now = (str(service.state), service.attempt)
        if self._printed.get(service.name) == now:
            return
        self._printed[service.name] = now
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
            write_line(json.dumps({"time": time.time(), "elapsed_s": round(elapsed_s, 3), **fields}), flush=True)
        else:
            write_line(f"{elapsed_s:6.1f} s  {text}", to_stderr=True)


async def stay(
    folder: Path,
    watch: Watch,
    say: ProgressPrinter,
    deadline: float | None,
    *,
    owns: bool,
    interrupts: HeldInterrupts,
) -> ExitCode:
    """Watch until the waiting is over, which it is at once after an interrupt; then leave the run or take it down."""
    follower = TrainingFollower(folder, say.training)
    training = follower.training
    watching = asyncio.create_task(_watch(folder, watch, say, training))
    following = asyncio.create_task(follower.follow())
    loop = asyncio.get_running_loop()
    for number in INTERRUPTS:
        loop.add_signal_handler(number, watching.cancel)
    if interrupts.have_come:
        watching.cancel()
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
        for number in INTERRUPTS:
            loop.remove_signal_handler(number)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    if watch.state in ENDED_RUN_STATES or (code != ExitCode.OK and not owns and await _is_ending(folder)):
        await until_gone(folder)
    elif code != ExitCode.OK and owns:
        say.note("taking the run down")
        await _take_down(folder, watch, say, training)
    elif code != ExitCode.OK:
        say.note(f"the run goes on: `grpo-tui status {folder.name}` shows it, `grpo-tui down {folder.name}` ends it")
    if watch.state in ENDED_RUN_STATES:
        await follower.finish()
    return code


async def _is_ending(folder: Path) -> bool:
    """Whether the run is already ending."""
    try:
        reply = await Daemon(folder).command("status")
    except PeerUnavailable:
        return True  # it has just ended, or its supervisor exited: its files show which
    return reply.status is not None and (reply.status.is_ending or reply.status.state in ENDED_RUN_STATES)


async def _watch(folder: Path, watch: Watch, say: ProgressPrinter, training: Training) -> ExitCode:
    """Receive events until the waiting is over; a supervisor that exits meanwhile is replaced."""
    daemon = Daemon(folder)
    while True:
        try:
            async for message in daemon.events():
                say.event(message)
                training.receive(message)
                code = watch.receive(message)
                if code is not None:
                    return code
                if isinstance(message, RunChanged) and message.state is RunState.DEGRADED and watch.failed:
                    say.note(watch.how_to_go_on(folder.name))
        except PeerUnavailable:
            pass  # it has exited or not started yet
        if not await asyncio.to_thread(ensure_daemon, folder, was_live=True):
            return _from_files(folder, watch, say, training)
        say.note("the supervisor exited; a new one has taken the run over")


def _from_files(folder: Path, watch: Watch, say: ProgressPrinter, training: Training) -> ExitCode:
    """The exit code of a run that was over before we could connect."""
    status = stored_status(look_at(folder))
    snapshot = Snapshot(number=0, status=status)
    say.event(snapshot)
    training.receive(snapshot)
    code = watch.receive(snapshot)
    for service in watch.failed.values():
        say.note(f"{service.name} failed: {service.why}")
    return ExitCode.FAILED if code is None else code


async def _take_down(folder: Path, watch: Watch, say: ProgressPrinter, training: Training) -> None:
    daemon = Daemon(folder)

    is_listening = asyncio.Event()

    async def listen() -> None:
        async for message in daemon.events():
            is_listening.set()
            say.event(message)
            training.receive(message)
            watch.receive(message)

    listening = asyncio.create_task(listen())
    listening.add_done_callback(lambda _: is_listening.set())
    await is_listening.wait()
    try:
        await daemon.command("down", wait=True)
        await listening
    except PeerUnavailable:
        say.note("the supervisor closed the connection; the run's files show how it ended")
        await asyncio.gather(listening, return_exceptions=True)
    await until_gone(folder)
