"""Runs the commands that a profile hangs on what becomes of its services and of the run.

Each run of a hook has a keeper of its own, as an attempt of a service has: it is no child of the daemon, outlives it,
and leaves nothing behind, however far its children went. What it prints is appended to `hooks.log`. One hook runs once
at a time, in the order of the events; different hooks run side by side. A hook that fails is told, and changes nothing.
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
from grpo_engine.wire.supervisor import RunStatus, ServiceState, ServiceStatus
from grpo_tui.paths import KEEPERS
from grpo_tui.services.base import Place
from grpo_tui.services.command import Command
from grpo_tui.services.hook import Hook, HookEvent
from grpo_tui.supervisor.attempts import Notice
from grpo_tui.supervisor.keeper import ends_with_newline, on_one_line, write_line
from grpo_tui.supervisor.machine import exit_words
from grpo_tui.supervisor.processes import ExitReport, Keeper, adopt_keeper, forget_attempt, start_keeper
from grpo_tui.supervisor.state_file import last_attempt

HOOKS = "hooks"
"""What the keepers of hooks and their log are named after; no service has this name."""
MAX_WAITING = 16
"""Runs of one hook that wait for their turn; a service that fails over and over must not fill the memory."""
END_LIMIT_S = 8.0
"""A keeper gives up on what hangs in the kernel after 5 s; one that is not done by then hangs itself."""
MAX_WHY_CHARS = 4000
MAX_COMMAND_CHARS = 60


class Hooks:
    """The hooks of a run: started by what happens, awaited or ended at its end."""

    def __init__(self, hooks: Sequence[Hook], *, run: str, run_folder: Path, cwd: Path, notice: Notice) -> None:
        """Start nothing yet.

        Args:
            cwd: the folder of the profile, in which hooks run.
            notice: told of every hook that fails, with the service whose event it was.
        """
        self._lines = [_Line(hook) for hook in hooks]
        self._run = run
        self._run_folder = run_folder
        self._place = Place(profile_folder=cwd, run_folder=run_folder, python="")
        self._notice = notice
        self._number = last_attempt(run_folder, HOOKS)
        self._tasks: set[asyncio.Task[None]] = set()
        self._keepers: set[Keeper] = set()
        self._is_over = False

    def take_over(self) -> None:
        """See to hooks that an earlier daemon started: they get the longest time limit there is, then they end."""
        limit_s = max((line.hook.timeout_s for line in self._lines), default=0.0)
        for number in range(1, self._number + 1):
            found = adopt_keeper(self._run_folder, HOOKS, number)
            if isinstance(found, Keeper):
                title = f"hook run {number}, begun by an earlier supervisor,"
                self._go(self._see_through(found, title, limit_s, None))
            elif found is not None:
                forget_attempt(self._run_folder / KEEPERS, HOOKS, number)

    def fire(self, event: HookEvent, *, service: ServiceStatus | None, status: RunStatus) -> None:
        """Start the hooks that wait for this, each when its turn comes; returns at once.

        Args:
            service: whose event it is; None for one of the run as a whole.
            status: of the run, when it happened.
        """
        occasion = Occasion(event=event, service=service, status=status)
        for line in self._lines:
            if not occasion.concerns(line.hook):
                continue
            if line.num_waiting >= MAX_WAITING:
                hint = f"{MAX_WAITING} runs of it wait already; lower its timeout_s or make it faster"
                self._notice("warning", f"{occasion.title(line.hook)} is left out: {hint}", occasion.name)
                continue
            line.num_waiting += 1
            self._go(self._take_turn(line, occasion))

    async def finish(self, limit_s: float) -> None:
        """Wait until all hooks have ended, for so long at most; then end those that run and drop those that wait."""
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

    async def _take_turn(self, line: _Line, occasion: Occasion) -> None:
        title = occasion.title(line.hook)
        async with line.turn:
            line.num_waiting -= 1
            if self._is_over:
                self._notice("warning", f"{title} was not run: the run was over before its turn came", occasion.name)
                return
            keeper = await self._start(line.hook, occasion, title)
            if keeper is not None:
                await self._see_through(keeper, title, line.hook.timeout_s, occasion.name)

    async def _start(self, hook: Hook, occasion: Occasion, title: str) -> Keeper | None:
        """Start it below a keeper, or tell why that is not possible."""
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
        """Say in the log whose event it is; the keeper's own line below it has time and command."""
        path = self._run_folder / f"{HOOKS}.log"
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            gap = "" if ends_with_newline(str(path)) else "\n"
            write_line(descriptor, f"{gap}=== hook run {number}: {occasion.words}")
        finally:
            os.close(descriptor)

    async def _see_through(self, keeper: Keeper, title: str, limit_s: float, service: str | None) -> None:
        """Wait for its end, or bring that about when its time is up or the run is over; tell what went wrong."""
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
        forget_attempt(self._run_folder / KEEPERS, HOOKS, keeper.attempt)
        fault = self._fault(report, limit_s if is_late else None)
        if fault is not None:
            self._notice("warning", f"{title} {fault}; its output is in {self._run_folder}/{HOOKS}.log", service)

    def _fault(self, report: ExitReport, passed_limit_s: float | None) -> str | None:
        """What a person should know of how it ended, and what to do about it."""
        if report.unkillable:
            return f"does not end after SIGKILL: {', '.join(report.unkillable)} hangs in the kernel"
        if passed_limit_s is not None:
            others = f", with {', '.join(report.ended)}" if len(report.ended) > 1 else ""
            return f"was ended after {passed_limit_s:g} s{others}: make it faster, or raise its timeout_s"
        if self._is_over and report.code == -signal.SIGKILL:
            return "was ended because the run is over: make it faster"
        if report.keeper_lost:
            return f"is lost: {report.error}"
        if report.error is not None:
            return f"failed: {report.error}: correct its argv in the profile"
        if report.code != 0:
            return f"failed with {exit_words(report.code)}"
        if report.ended:
            return f"left {', '.join(report.ended)} running, which was ended: a hook has to wait for what it starts"
        return None

    # --- housekeeping ----------------------------------------------------------------------------------------------

    def _go(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work, name="hook")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Line:
    """Where the runs of one hook queue up."""

    def __init__(self, hook: Hook) -> None:
        self.hook = hook
        self.turn = asyncio.Lock()
        """Let go of in the order in which it was asked for."""
        self.num_waiting = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Occasion:
    """What has happened, and how things stood then."""

    event: HookEvent
    service: ServiceStatus | None
    """None when it happened to the run as a whole."""
    status: RunStatus

    @property
    def name(self) -> str | None:
        """The service whose event it is."""
        return None if self.service is None else self.service.name

    @property
    def words(self) -> str:
        """`failed · trainer (attempt 2)`, `finished · the run`."""
        whose = "the run" if self.service is None else f"{self.service.name} (attempt {self.service.attempt})"
        return f"{self.event} · {whose}"

    def title(self, hook: Hook) -> str:
        """The hook on this occasion, to begin a sentence with."""
        command = on_one_line([*hook.argv])
        shown = command if len(command) <= MAX_COMMAND_CHARS else f"{command[: MAX_COMMAND_CHARS - 1]}…"
        return f"hook {shown} on {self.event} of {self.name or 'the run'}"

    def concerns(self, hook: Hook) -> bool:
        """Whether a hook waits for this."""
        return self.event in hook.on and (not hook.services or self.name in hook.services)

    def environment(self) -> dict[str, str]:
        """What a hook is told, besides the run and its folder, which the keeper's environment names."""
        if self.service is None:
            failed = [each for each in self.status.services if each.state is ServiceState.FAILED]
            state, why = str(self.status.state), "\n".join(f"{each.name}: {each.why}" for each in failed)
            code, attempt = None, None
        else:
            state, why = str(self.service.state), self.service.why or ""
            code, attempt = self.service.exit_code, self.service.attempt
        return {
            "GRPO_TUI_HOOK_EVENT": str(self.event),
            "GRPO_TUI_HOOK_SERVICE": self.name or "",
            "GRPO_TUI_HOOK_STATE": state,
            "GRPO_TUI_HOOK_WHY": why.replace("\0", "")[:MAX_WHY_CHARS],  # lines of a log may hold anything
            "GRPO_TUI_HOOK_EXIT_CODE": "" if code is None else str(code),
            "GRPO_TUI_HOOK_ATTEMPT": "" if attempt is None else str(attempt),
        }
