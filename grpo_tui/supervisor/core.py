"""A run from its first start to its last clean-up. Read `Supervisor.run` first, then top to bottom.

One queue of events and one writer of state: process exits, probe answers and requests of clients come in as events,
`machine.step` and `order.decisions` decide, and each `ServiceRunner` carries the effects out. Reads no profile and does
not depend on the kind of a service.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from grpo_engine.wire.run_folder import SUPERVISOR_LOG, service_log
from grpo_engine.wire.secrets import masked_text
from grpo_engine.wire.supervisor import (
    MachinesReport,
    Notice,
    RanksReport,
    RunChanged,
    RunState,
    RunStatus,
    ServiceChanged,
    ServiceReport,
    how_it_ended,
    how_to_go_on,
)
from grpo_engine.wire.supervisor import ServiceState as S
from grpo_tui.profile.plan_file import Plan
from grpo_tui.services.base import Launch
from grpo_tui.services.hook import HookEvent
from grpo_tui.supervisor import order, takeover, teardown
from grpo_tui.supervisor.capped_log import LogCapper
from grpo_tui.supervisor.explanations import why
from grpo_tui.supervisor.hooks import HOOKS, Hooks
from grpo_tui.supervisor.keeper.client import ExitReport, Keeper
from grpo_tui.supervisor.keeper.proc import ProcessId
from grpo_tui.supervisor.machine import (
    RUNNING,
    Event,
    Exited,
    LimitExceeded,
    RestartAsked,
    RestartRequired,
    ServerKilled,
    Service,
    Tick,
    step,
)
from grpo_tui.supervisor.placement.machine import LocalMachine, Machine
from grpo_tui.supervisor.placement.remote import RemoteMachine
from grpo_tui.supervisor.report.broadcast import Broadcast
from grpo_tui.supervisor.report.crash_report import secrets, write_report
from grpo_tui.supervisor.report.machines import Machines
from grpo_tui.supervisor.report.self_reports import SelfReports
from grpo_tui.supervisor.report.timeline import Timeline
from grpo_tui.supervisor.service_runner import ServiceRunner
from grpo_tui.supervisor.state_file import StartTimes, StateDocument, StateWriter
from grpo_tui.supervisor.status import RunRecord, StatusReport, shown
from grpo_tui.supervisor.temporary import TemporaryFolder
from grpo_tui.supervisor.usage.disks import SHARED_MEMORY
from grpo_tui.supervisor.usage.sampling import Sampler

OWN_LOG_LIMIT_BYTES = 64_000_000
BACKGROUND_RETRY_S = 30.0
"""Before a failed background task runs again: often enough for metrics and logs, rare enough for the log."""
LOST_GRACE_S = 5.0
"""For a service whose process cannot go on after the failure of another one: it may hang, and has nothing to save."""
log = logging.getLogger(__name__)


class Supervisor:
    """Holds the state of a run, and is the only one to change it."""

    def __init__(self, plan: Plan, *, run_folder: Path, predecessor: StateDocument | None) -> None:
        """Start nothing yet.

        Args:
            predecessor: what an earlier supervisor of this run wrote last; None for a new run.
        """
        self.run_name = run_folder.name
        self._plan = plan
        self._run_folder = run_folder
        self._is_new_run = predecessor is None
        self._ledger = takeover.valid_ledger(predecessor)
        self._temporary = TemporaryFolder.open(self.run_name, self._ledger.temporary_folder if self._ledger else None)
        self._launches = {launch.name: self._temporary.with_variables(launch) for launch in plan.launches}
        self._run = RunRecord(
            services={name: Service(name=name, since_s=time.monotonic()) for name in self._launches},
            times={name: StartTimes() for name in self._launches},
            state=RunState.STARTING if predecessor is None else predecessor.state,
            started_at=time.time() if predecessor is None else predecessor.started_at or time.time(),
        )
        self._runners: dict[str, ServiceRunner] = {}
        # Unbounded: only our own probes and commands of clients fill it, and each event takes microseconds.
        self._events: asyncio.Queue[tuple[str, Event]] = asyncio.Queue()
        self._changed = asyncio.Event()
        self._num_cores = len(os.sched_getaffinity(0))
        self._hooks_limit_s = math.inf
        self._takes_ports_at_end = False
        self._timeline = Timeline(run_folder, self.status)
        self.broadcast = Broadcast(self._timeline.keep)
        self._writer = StateWriter(run_folder, self._state_document)
        self._sampler = Sampler(
            self.broadcast,
            self.keeper_pids,
            sampled=self._send_waiting_services,
            ledger_changed=self._writer.mark,
            limits={each.name: each.memory_limit_bytes for each in plan.launches if each.memory_limit_bytes},
            over_limit=self._exceed_memory_limit,
            attempts=lambda: {name: each.attempt for name, each in self._run.services.items()},
            logs={name: service_log(run_folder, name) for name in self._launches},
            folders=_written_folders(run_folder, self._temporary.path, self._launches.values()),
            write_faults=lambda: self._writer.faults,
            ranks=lambda: {
                name: self._rank_reports.of(name, each.attempt) for name, each in self._run.services.items()
            },
            placed={each.name for each in plan.launches if each.is_placed},
        )
        self._self_reports = SelfReports(ServiceReport)
        self._rank_reports = SelfReports(RanksReport)
        self._machines = Machines()
        self._sampler.machines = self._machines
        self._report = StatusReport(
            plan=plan,
            run_folder=run_folder,
            temporary_folder=self._temporary.path,
            launches=self._launches,
            runners=self._runners,
            sampler=self._sampler,
            self_reports=self._self_reports,
            rank_reports=self._rank_reports,
            machines=self._machines,
            record=self._run,
        )
        self._hooks = Hooks(
            plan.hooks, run=self.run_name, run_folder=run_folder, cwd=plan.profile_folder, notice=self.notice
        )
        self._log_capper = LogCapper(_log_limits(plan, run_folder))
        self._tasks: asyncio.TaskGroup

    # --- the run ---------------------------------------------------------------------------------------------------

    async def run(self) -> RunState:
        """Start the services, supervise them, stop them; returns the state in which the run ended.

        Cancelled, it leaves every service running: the next supervisor of this run takes them over.
        """
        try:
            await self._supervise()
        except asyncio.CancelledError:
            await self._writer.write()
            await self._timeline.write()
            raise
        await self._clean_up()
        return self._run.state

    async def _supervise(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            background = self._start_runners(tasks)
            self._take_over()
            self._timeline.begin()
            for note in self._plan.notes if self._is_new_run else ():
                self.notice("warning", note, None)
            await self._writer.write()
            for part in (self._writer, self._timeline, self._sampler, self._log_capper):
                background.append(tasks.create_task(self._run_in_background(part)))
            while not self._is_over():
                self._decide()
                self._publish_run_state()
                if not self._is_over():
                    await self._next_event()
            for task in background:
                task.cancel()
            for runner in self._runners.values():
                runner.abandon()

    def _start_runners(self, tasks: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        known = secrets(self._launches.values(), os.environ, self._run_folder)
        here: Machine = LocalMachine(
            run=self.run_name, run_folder=self._run_folder, gpu_reader=self._sampler.gpu_reader
        )
        elsewhere: Machine = RemoteMachine(run=self.run_name, run_folder=self._run_folder)
        for name, launch in self._launches.items():
            self._runners[name] = ServiceRunner(
                launch,
                machine=elsewhere if launch.is_placed else here,
                run_folder=self._run_folder,
                tasks=tasks,
                post=self.post,
                notice=self.notice,
                sampler=self._sampler,
                end_of_ranks=partial(self._end_of_ranks, name),
                prepare=lambda: self._temporary.restore(lambda text: self.notice("warning", text, None)),
                mask=lambda text: masked_text(text, known),
            )
            self._runners[name].may_take_ports = self._plan.take_ports and self._is_new_run
        return [tasks.create_task(runner.run(), name=f"runner of {name}") for name, runner in self._runners.items()]

    def _take_over(self) -> None:
        """Adopt what an earlier supervisor left: running services and pending restarts go on."""
        ledger, now_s = self._ledger, time.monotonic()
        if ledger is not None:
            self._run.has_been_up = ledger.has_been_up
        for name, launch in self._launches.items():
            runner = self._runners[name]
            if ledger is not None and (entry := ledger.services.get(name)) is not None:
                self._run.times[name] = StartTimes(entry.prepared_at, entry.begun_at, entry.ready_at)
                runner.started_at, runner.begins_at = entry.started_at, entry.begins_at
                self._sampler.remember(name, (ProcessId(*each) for each in entry.processes))
            found = takeover.find(launch, ledger, self._run_folder, now_s)
            self._run.services[name] = found.service
            match found.process:
                case Keeper() as keeper:
                    runner.adopt(keeper, found.service)
                case ExitReport() as report:
                    runner.record_exit(found.service.attempt, report)
            for effect in found.effects:
                runner.carry_out(effect, found.service)
        self._hooks.take_over()
        if ledger is not None and ledger.ending is not None:
            self.end(ledger.ending)

    async def _run_in_background(self, part: StateWriter | Timeline | Sampler | LogCapper) -> None:
        """Run it, and again after a failure: what it lacks (disk space, a descriptor) may become available."""
        while True:
            try:
                await part.run()
            except Exception as error:  # whatever it is: services and their supervision go on
                log.exception("%s failed; it runs again in %g s", type(part).__name__, BACKGROUND_RETRY_S)
                text = f"a part of the supervisor failed and runs again in {BACKGROUND_RETRY_S:g} s"
                self.notice("error", f"{text} ({type(part).__name__}: {error!r}); {SUPERVISOR_LOG} has the rest", None)
            await asyncio.sleep(BACKGROUND_RETRY_S)

    def _decide(self) -> None:
        """Apply every decision that follows from the current state of the services."""
        before: dict[str, Service] = {}
        while before != self._run.services:  # one decision may allow another, e.g. a stop and then a start
            before = dict(self._run.services)
            if self._run.ending is None and (state := order.run_outcome(self._run.services, self._launches)):
                self.end(state)
            now_s = time.monotonic()
            for name, event in order.decisions(
                self._run.services, self._launches, self._run.ending, now_s, num_cores=self._num_cores
            ):
                self._apply(name, event)

    async def _next_event(self) -> None:
        """Wait for an event or the next deadline, and apply it."""
        try:
            async with asyncio.timeout_at(self._next_deadline_s()):
                name, event = await self._events.get()
        except TimeoutError:
            for name in self._launches:
                self._apply(name, Tick())
            return
        self._apply(name, event)
        while not self._events.empty():
            self._apply(*self._events.get_nowait())

    def _next_deadline_s(self) -> float | None:
        times = [service.deadline_s for service in self._run.services.values() if service.deadline_s is not None]
        if (ending := self._run.ending) is not None:
            now_s = time.monotonic()
            stops = [*order.stop_times_s(ending, self._run.services, self._launches).values(), ending.kill_at_s]
            times += [stop for stop in stops if stop > now_s]
        return min(times, default=None)

    def _is_over(self) -> bool:
        """Whether the run is ending and no process is left, except those that hang in the kernel."""
        has_process = any(each.has_process and each.state is not S.FAILED for each in self._run.services.values())
        return self._run.ending is not None and not has_process

    async def _clean_up(self) -> None:
        """Run the last hooks, end what processes of the run are left, and write the final state."""
        assert self._run.ending is not None
        await self._run_last_hooks(self._run.ending.state)
        ports = [port for launch in self._launches.values() for port in launch.ports]
        await teardown.sweep(
            self.run_name,
            None,
            ports=ports if self._takes_ports_at_end else (),  # each service's own were checked after its exit
            report=lambda line: self.notice("info", line, None),
            ledger=self._sampler.seen,
            take_ports=self._takes_ports_at_end,
            temporary_folder=self._temporary.path,
            run_folder=self._run_folder,
        )
        free = ", ".join(map(str, ports)) or "none"
        log.info("run %s is over: %s; free ports: %s", self.run_name, self._run.ending.state, free)
        if self._run.ending.state is not RunState.FINISHED:
            self.notice("info", how_to_go_on(self._run_folder), None)
        self._run.ended_at = time.time()
        self._run.supervisor = None
        self._set_state(self._run.ending.state)
        await self._timeline.write()
        await self._writer.write()
        self._wake_waiters()

    async def _run_last_hooks(self, state: RunState) -> None:
        event = HookEvent.FAILED if state is RunState.FAILED else HookEvent.FINISHED
        self._hooks.fire(event, service=None, status=self.status().model_copy(update={"state": state}))
        longest_s = max((hook.timeout_s for hook in self._plan.hooks), default=0.0)
        await self._hooks.finish(min(longest_s, self._hooks_limit_s))

    # --- requests --------------------------------------------------------------------------------------------------

    def post(self, name: str, event: Event) -> None:
        """Queue an event for a service."""
        self._events.put_nowait((name, event))

    def end(self, state: RunState, *, budget_s: float | None = None, take_ports: bool = False) -> None:
        """End the run in this state; a second call can only shorten the time that services get."""
        self._takes_ports_at_end = self._takes_ports_at_end or take_ports
        longest_s = order.ending_budget_s(self._run.services, self._launches)
        if budget_s is not None:
            self._hooks_limit_s = min(self._hooks_limit_s, budget_s)
        budget_s = longest_s if budget_s is None else min(budget_s, longest_s)
        now_s, ending = time.monotonic(), self._run.ending
        if ending is None:
            log.info("ending the run as %s; all services together have %.1f s to stop", state, budget_s)
            self._run.ending = order.Ending(state=state, since_s=now_s, budget_s=budget_s)
        elif now_s + budget_s < ending.kill_at_s:
            shorter_s = now_s + budget_s - ending.since_s
            self._run.ending = order.Ending(state=ending.state, since_s=ending.since_s, budget_s=shorter_s)
        self.post(next(iter(self._launches)), Tick())

    def take_ports(self, name: str) -> None:
        """At its next start, end foreign processes of our own user that hold a port of this service."""
        self._runners[name].may_take_ports = True

    def take_report(self, report: ServiceReport | RanksReport | MachinesReport) -> None:
        """Show what a service reports of itself, or the broker of its machines."""
        if isinstance(report, MachinesReport):
            self._take_machines(report)
            return
        if report.service not in self._launches:
            return
        is_new = self._rank_reports.take(report) if isinstance(report, RanksReport) else self._self_reports.take(report)
        if is_new:
            self._send_service(report.service)

    def _take_machines(self, report: MachinesReport) -> None:
        before = {name: self._machines.of(name) for name in self._launches}
        for severity, text in self._machines.take(report):
            self.notice(severity, text, None)
            self._writer.mark()
            self.broadcast.figures_wanted.set()
        for name, machines in before.items():
            if self._machines.of(name) != machines:
                self._send_service(name)

    def _end_of_ranks(self, name: str, attempt: int) -> str | None:
        """Why the ranks of a service ended, if it has any and said so."""
        return self._rank_reports.of(name, attempt).end

    def write_state(self) -> None:
        """Write the state again, though nothing changed."""
        self._writer.mark()

    async def wait_until(self, holds: Callable[[Supervisor], bool]) -> None:
        """Return once `holds` does; evaluated after every change."""
        while not holds(self):
            await self._changed.wait()

    async def until_applied(self) -> None:
        """Return once the events posted so far are applied, with the decisions that follow from them."""
        await self.wait_until(lambda s: s._events.empty())

    async def until_taken_over(self, name: str) -> None:
        """Return once it is known how an attempt ended that ended without a supervisor: until then it looks up."""
        await self._runners[name].exit_posted()
        await self.until_applied()

    # --- questions -------------------------------------------------------------------------------------------------

    @property
    def is_ending(self) -> bool:
        """Whether the run is being ended."""
        return self._run.ending is not None

    @property
    def state(self) -> RunState:
        """The state of the run."""
        return self._run.state

    def how_it_ended(self) -> str:
        """For people, about a run that is over: its state, and how to go on with it."""
        return how_it_ended(self._run_folder, self.state)

    @property
    def service_names(self) -> list[str]:
        """Every service, in start order."""
        return list(self._launches)

    def service(self, name: str) -> Service:
        """The state of one service."""
        return self._run.services[name]

    def needs_of(self, name: str) -> list[str]:
        """Every service that this one needs, directly or through others."""
        needs: list[str] = []
        for needed in self._launches[name].needs:
            needs += [needed, *self.needs_of(needed)]
        return needs

    def keepers(self) -> list[Keeper]:
        """The keepers of all running services."""
        return [runner.keeper for runner in self._runners.values() if runner.keeper is not None]

    def keeper_pids(self) -> dict[str, int]:
        """The keeper of each running service: the parent of all its processes."""
        return {name: each.keeper.identity.pid for name, each in self._runners.items() if each.keeper is not None}

    def status(self, *, last_usage_of: str | None = None) -> RunStatus:
        """The status document of the run."""
        return self._report.run(write_faults=self._writer.faults, last_usage_of=last_usage_of)

    def _state_document(self) -> StateDocument:
        return self._report.state_document(write_faults=self._writer.faults)

    # --- state changes ---------------------------------------------------------------------------------------------

    def _apply(self, name: str, event: Event) -> None:
        """The only place where the state of a service changes."""
        before = self._run.services[name]
        if isinstance(event, Exited) and event.failed_by and order.is_at_rest(self._run.services[event.failed_by]):
            event = replace(event, failed_by=None)  # it did without that service: what its log says has another cause
        after, effects = step(before, event, time.monotonic(), self._launches[name])
        self._run.services[name] = after
        self._run.note_start(before, after)
        for effect in effects:
            self._runners[name].carry_out(effect, after)
        if isinstance(event, Exited) and event.failed_by is not None and after.state is S.BACKOFF:
            self._restart_culprit(event.failed_by, name)
        if after.is_restart_pending is not before.is_restart_pending:
            self._writer.mark()
            if after.is_restart_pending:
                self._announce_restart(name)
            if isinstance(event, ServerKilled):
                self.notice("warning", f"{name}: {after.reason}", name)
                self._tasks.create_task(self._write_crash_report(name, after), name=f"crash report of {name}")
        if after.state is not before.state:
            self._report_change(before, after)
        if shown(after) != shown(before):
            self._send_service(name)
            for other, service in self._run.services.items():
                if service.state is S.WAITING and name in self._launches[other].needs:
                    self._send_service(other)

    def _restart_culprit(self, name: str, ended: str) -> None:
        """Restart a service whose failure ended another one, unless its own exit was seen too: then it restarts."""
        if self._run.services[name].state in RUNNING and not self._run.services[name].is_restart_pending:
            self.notice("warning", f"{ended} ended by a failure of {name}, as its log shows: both are restarted", ended)
            self.post(name, RestartAsked())

    def _announce_restart(self, name: str) -> None:
        followers = order.transitive_followers(name, self._launches)
        services = (self._run.services[each] for each in followers)
        running = [each.name for each in services if each.has_process and not each.is_held]
        if running:
            self.notice("info", f"restarting {name}, and with it {', '.join(running)}", name)
        else:
            others = self._launches[name].after_restart or "no other service restarts"
            self.notice("info", f"restarting {name}; {others}", name)

    def _report_change(self, before: Service, after: Service) -> None:
        """Log a change of state, run hooks, write crash reports, and restart followers of a failed service."""
        name = after.name
        self.broadcast.figures_wanted.set()
        if after.state is S.READY and not before.was_ready:
            self._fire_hook(HookEvent.READY, name)
            if after.num_starts > 1:
                self._fire_hook(HookEvent.RESTARTED, name)
        text = f"{name}: {before.state} → {after.state}" + (f" ({after.reason})" if after.reason else "")
        log.log(logging.WARNING if after.state in {S.FAILED, S.UNHEALTHY, S.BACKOFF} else logging.INFO, "%s", text)
        if after.state is S.FAILED:
            reason = why(name, self._run.services, self._launches, time.monotonic())
            self.notice("error", f"{name} failed: {reason}", name)
        if after.state is S.FINISHED and self._launches[name].is_optional and not after.was_ready:
            self.notice("warning", after.reason or f"{name} cannot be had", name)
        elif after.state is S.FINISHED:
            self._fire_hook(HookEvent.FINISHED, name)
        if after.state in {S.FAILED, S.BACKOFF}:
            self._tasks.create_task(self._write_crash_report(name, after), name=f"crash report of {name}")
        if before.state is S.STOPPING and not after.has_process:
            seconds = time.monotonic() - before.since_s
            exit_ = "no process" if after.exit_code is None else f"exit code {after.exit_code}"
            self.notice("info", f"{name} ended in {seconds:.2f} s ({exit_})", name)
        is_lost = self._launches[name].is_optional and after.state in {S.FAILED, S.STOPPED} and not self.is_ending
        if after.state is S.BACKOFF or is_lost:
            for follower in order.transitive_followers(name, self._launches):
                if self._run.services[follower].state in RUNNING:
                    grace_s = LOST_GRACE_S if name in self._launches[follower].failed_by else math.inf
                    self.post(follower, RestartRequired(f"restarted because {name} restarts", grace_s))

    def _fire_hook(self, event: HookEvent, name: str) -> None:
        self._hooks.fire(event, service=self._report.service(name), status=self.status())

    async def _write_crash_report(self, name: str, failed: Service) -> None:
        """Write the crash report, and only then run the hooks, which may send it somewhere."""
        status = self.status(last_usage_of=name)
        path = await asyncio.to_thread(
            write_report,
            self._run_folder,
            status,
            self._launches,
            name,
            attempt=failed.attempt,
            why=failed.reason or "failed",
            oom_kills=self._runners[name].num_oom_kills(),
        )
        if path is not None:
            self.notice("info", f"{name}: the crash report is {path}", name)
        service = next(each for each in status.services if each.name == name)
        self._hooks.fire(HookEvent.FAILED, service=service, status=status)

    def _exceed_memory_limit(self, name: str, held_bytes: int) -> None:
        limit_bytes = self._launches[name].memory_limit_bytes or 0
        text = f"holds {held_bytes / 1e9:.2f} GB, over its memory_limit_gb of {limit_bytes / 1e9:g}"
        self.post(name, LimitExceeded(text))

    # --- what clients receive --------------------------------------------------------------------------------------

    def notice(self, severity: Literal["info", "warning", "error"], text: str, service: str | None) -> None:
        """Send a line to all clients, and log it."""
        levels = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
        log.log(levels[severity], "%s", text)
        at = time.time()
        self.broadcast.send(lambda n: Notice(number=n, time=at, severity=severity, service=service, text=text))

    def _send_service(self, name: str) -> None:
        status, at = self._report.service(name), time.time()
        self.broadcast.send(lambda n: ServiceChanged(number=n, time=at, service=status))
        self._writer.mark()

    def _send_waiting_services(self) -> None:
        """Send the services whose explanation counts seconds, and those that no longer report what they did."""
        for name in {*self._self_reports.forget_old(), *self._rank_reports.forget_old()}:
            self._send_service(name)
        for name, service in self._run.services.items():
            if service.state in {S.WAITING, S.STARTING, S.STOPPING}:
                self._send_service(name)

    def _publish_run_state(self) -> None:
        """Derive the state of the run, send it, and wake the tasks that wait for a change."""
        if self._run.ending is None:
            state = order.run_state(self._run.services, self._launches, has_been_up=self._run.has_been_up)
            is_first_time_up = state is RunState.RUNNING and not self._run.has_been_up
            self._run.has_been_up = self._run.has_been_up or is_first_time_up
            self._set_state(state)
            if is_first_time_up:
                self._hooks.fire(HookEvent.READY, service=None, status=self.status())
        self._wake_waiters()

    def _set_state(self, state: RunState) -> None:
        if state is self._run.state:
            return
        self._run.state, at = state, time.time()
        log.info("run %s: %s", self.run_name, state)
        self.broadcast.send(lambda n: RunChanged(number=n, time=at, state=state))
        self._writer.mark()

    def _wake_waiters(self) -> None:
        waiting, self._changed = self._changed, asyncio.Event()
        waiting.set()


def _written_folders(run_folder: Path, temporary: Path | None, launches: Iterable[Launch]) -> list[Path]:
    """The folders that the run writes to, as far as its plan says."""
    of_services = [folder for launch in launches for folder in launch.written_folders]
    return [run_folder, *([] if temporary is None else [temporary]), SHARED_MEMORY, *of_services]


def _log_limits(plan: Plan, run_folder: Path) -> dict[Path, int]:
    """Every log of a run, with its limit in bytes."""
    services = {service_log(run_folder, launch.name): launch.log_limit_bytes for launch in plan.launches}
    return {
        **services,
        run_folder / SUPERVISOR_LOG: OWN_LOG_LIMIT_BYTES,
        service_log(run_folder, HOOKS): OWN_LOG_LIMIT_BYTES,
    }
