"""Runs the hooks of a profile: commands on events of its services and of the run.

Each run of a hook has its own keeper, as an attempt of a service has: it is no child of the supervisor, outlives it,
and all of its processes are ended. Its output is appended to `hooks.log`. One hook runs once at a time, in the order
of the events; different hooks run in parallel. A failed hook is reported, and has no further effect.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_engine.errors import GrpoError
from grpo_engine.wire.environment_variables import HOOK_PREFIX
from grpo_engine.wire.run_folder import last_attempt, service_log
from grpo_engine.wire.secrets import masked_argv
from grpo_engine.wire.supervisor import RunStatus, ServiceState, ServiceStatus
from grpo_tui.keeper_process import ends_with_newline, on_one_line, write_line
from grpo_tui.services.base import Place
from grpo_tui.services.command import Command
from grpo_tui.services.hook import Hook, HookEvent
from grpo_tui.supervisor.keeper.client import ExitReport, Keeper, adopt_keeper, forget_attempt, start_keeper
from grpo_tui.supervisor.report.exits import exit_text
from grpo_tui.supervisor.service_runner import Notice

HOOKS = "hooks"
"""The name of the hooks' log and keepers; no service has it."""
MAX_WAITING = 16
"""Runs of one hook that wait for their turn: a service that fails repeatedly must not fill the memory."""
END_LIMIT_S = 8.0
"""A keeper gives up on processes that hang in the kernel after 5 s; one that has not exited by then hangs too."""
MAX_WHY_CHARS = 4000
MAX_COMMAND_CHARS = 60


class Hooks:
    """The hooks of a run: started on events, awaited or ended when the run is over."""

    def __init__(self, hooks: Sequence[Hook], *, run: str, run_folder: Path, cwd: Path, notice: Notice) -> None:
        """Start nothing yet.

        Args:
            cwd: the folder of the profile, in which hooks run.
            notice: called for every hook that fails, with the service of the event.
        """
        self._queues = [_HookQueue(hook) for hook in hooks]
        self._run = run
        self._run_folder = run_folder
        self._place = Place(profile_folder=cwd, run_folder=run_folder, python="")
        self._notice = notice
        self._number = last_attempt(run_folder, HOOKS)
        self._tasks: set[asyncio.Task[None]] = set()
        self._keepers: set[Keeper] = set()
        self._is_over = False

    def take_over(self) -> None:
        """Adopt hooks that an earlier supervisor started; they get the longest time limit of all hooks."""
        limit_s = max((line.hook.timeout_s for line in self._queues), default=0.0)
        for number in range(1, self._number + 1):
            found = adopt_keeper(self._run_folder, HOOKS, number)
            if isinstance(found, Keeper):
                title = f"hook run {number}, started by an earlier supervisor,"
                self._start_task(self._wait_for(found, title, limit_s, None))
            elif found is not None:
                forget_attempt(self._run_folder, HOOKS, number)

    def fire(self, event: HookEvent, *, service: ServiceStatus | None, status: RunStatus) -> None:
        """Queue the hooks of this event; returns at once.

        Args:
            service: the service of the event; None for one of the run as a whole.
            status: of the run, when it happened.
        """
        occasion = Occasion(event=event, service=service, status=status)
        for line in self._queues:
            if not occasion.concerns(line.hook):
                continue
            if line.num_waiting >= MAX_WAITING:
                hint = f"{MAX_WAITING} runs of it are waiting; lower its timeout_s or make it faster"
                self._notice("warning", f"{occasion.title(line.hook)} is skipped: {hint}", occasion.name)
                continue
            line.num_waiting += 1
            self._start_task(self._take_turn(line, occasion))

    async def finish(self, limit_s: float) -> None:
        """Wait for all hooks, at most this long; then kill those that run and drop those that wait."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=limit_s)
        self._is_over = True
        for keeper in self._keepers:
            keeper.kill()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=END_LIMIT_S)
        for task in self._tasks:
            task.cancel()

    # --- one run of a hook -----------------------------------------------------------------------------------------

    async def _take_turn(self, line: _HookQueue, occasion: Occasion) -> None:
        title = occasion.title(line.hook)
        async with line.turn:
            line.num_waiting -= 1
            if self._is_over:
                self._notice("warning", f"{title} was not run: the run was over before its turn came", occasion.name)
                return
            keeper = await self._start(line.hook, occasion, title)
            if keeper is not None:
                await self._wait_for(keeper, title, line.hook.timeout_s, occasion.name)

    async def _start(self, hook: Hook, occasion: Occasion, title: str) -> Keeper | None:
        """Start it under a keeper; report why if that is impossible."""
        self._number += 1
        command = Command(kind="command", argv=hook.argv, env=occasion.environment())
        try:
            self._write_title(self._number, occasion)
            return await start_keeper(
                command.launch(HOOKS, self._place), run=self._run, attempt=self._number, run_folder=self._run_folder
            )
        except (GrpoError, OSError) as error:
            self._notice("warning", f"{title} could not be started: {error}", occasion.name)
            return None

    def _write_title(self, number: int, occasion: Occasion) -> None:
        """Write the event to the log; the keeper's own line below it has time and command."""
        path = service_log(self._run_folder, HOOKS)
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            gap = "" if ends_with_newline(str(path)) else "\n"
            write_line(descriptor, f"{gap}=== hook run {number}: {occasion.words}")
        finally:
            os.close(descriptor)

    async def _wait_for(self, keeper: Keeper, title: str, limit_s: float, service: str | None) -> None:
        """Wait for its exit, kill it at its time limit or at the end of the run, and report a failure."""
        self._keepers.add(keeper)
        if self._is_over:
            keeper.kill()
        is_late = False
        try:
            async with asyncio.timeout(max(0.0, keeper.started_at + limit_s - time.time())):
                report = await keeper.exited()
        except TimeoutError:
            is_late = True
            keeper.kill()
            report = await keeper.exited()
        finally:
            self._keepers.discard(keeper)
        forget_attempt(self._run_folder, HOOKS, keeper.attempt)
        fault = self._fault(report, limit_s if is_late else None)
        if fault is not None:
            self._notice(
                "warning", f"{title} {fault}; its output is in {service_log(self._run_folder, HOOKS)}", service
            )

    def _fault(self, report: ExitReport, passed_limit_s: float | None) -> str | None:
        """What went wrong and what to do about it; None if it succeeded."""
        if report.unkillable:
            return f"is still alive after SIGKILL: {', '.join(report.unkillable)} hangs in the kernel"
        if passed_limit_s is not None:
            others = f", with {', '.join(report.ended)}" if len(report.ended) > 1 else ""
            return f"was killed after {passed_limit_s:g} s{others}: make it faster, or raise its timeout_s"
        if self._is_over and report.code == -signal.SIGKILL:
            return "was killed because the run is over: make it faster"
        if report.keeper_lost:
            return f"is lost: {report.error}"
        if report.error is not None:
            return f"failed: {report.error}: correct its argv in the profile"
        if report.code != 0:
            return f"failed with {exit_text(report.code)}"
        if report.ended:
            return f"left {', '.join(report.ended)} running, which was killed: a hook must wait for its processes"
        return None

    # --- tasks -----------------------------------------------------------------------------------------------------

    def _start_task(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work, name="hook")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _HookQueue:
    """The waiting runs of one hook."""

    def __init__(self, hook: Hook) -> None:
        self.hook = hook
        self.turn = asyncio.Lock()
        """Fair: taken in the order of the requests."""
        self.num_waiting = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Occasion:
    """An event, with the status of the run at that time."""

    event: HookEvent
    service: ServiceStatus | None
    """None for an event of the run as a whole."""
    status: RunStatus

    @property
    def name(self) -> str | None:
        """The service of the event."""
        return None if self.service is None else self.service.name

    @property
    def words(self) -> str:
        """`failed · trainer (attempt 2)`, `finished · the run`."""
        whose = "the run" if self.service is None else f"{self.service.name} (attempt {self.service.attempt})"
        return f"{self.event} · {whose}"

    def title(self, hook: Hook) -> str:
        """The hook and the event, as the subject of a message."""
        command = on_one_line(masked_argv(hook.argv))
        shown = command if len(command) <= MAX_COMMAND_CHARS else f"{command[: MAX_COMMAND_CHARS - 1]}…"
        return f"hook {shown} on {self.event} of {self.name or 'the run'}"

    def concerns(self, hook: Hook) -> bool:
        """Whether the hook is for this event."""
        return self.event in hook.on and (not hook.services or self.name in hook.services)

    def environment(self) -> dict[str, str]:
        """Environment variables for the hook, besides the run and its folder, which the keeper sets."""
        if self.service is None:
            failed = [each for each in self.status.services if each.state is ServiceState.FAILED]
            state, why = str(self.status.state), "\n".join(f"{each.name}: {each.why}" for each in failed)
            code, attempt = None, None
        else:
            state, why = str(self.service.state), self.service.why or ""
            code, attempt = self.service.exit_code, self.service.attempt
        return {
            f"{HOOK_PREFIX}EVENT": str(self.event),
            f"{HOOK_PREFIX}SERVICE": self.name or "",
            f"{HOOK_PREFIX}STATE": state,
            f"{HOOK_PREFIX}WHY": why.replace("\0", "")[:MAX_WHY_CHARS],  # lines of a log may hold anything
            f"{HOOK_PREFIX}EXIT_CODE": "" if code is None else str(code),
            f"{HOOK_PREFIX}ATTEMPT": "" if attempt is None else str(attempt),
        }
