"""A run, from its first start to nothing left. Read `Supervisor.run` for the story.

One queue of events, one writer of state: whatever happens (a process ended, a probe answered, a person asked) comes as
an event, `machine.step` and `order` decide, and `attempts` does it. Reads no profile and knows no kind of service.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from grpo_engine.wire.supervisor import (
    ENDED_RUN_STATES,
    Notice,
    RunChanged,
    RunState,
    RunStatus,
    ServiceChanged,
    ServiceStatus,
    SupervisorInfo,
    Warning,
)
from grpo_engine.wire.supervisor import ServiceState as S
from grpo_tui.paths import SUPERVISOR_LOG
from grpo_tui.profile.plan_file import Plan
from grpo_tui.services.base import Launch
from grpo_tui.services.hook import HookEvent
from grpo_tui.supervisor import order, teardown, temporary
from grpo_tui.supervisor.attempts import Attempts
from grpo_tui.supervisor.broadcast import Broadcast
from grpo_tui.supervisor.capped_log import LogCapper
from grpo_tui.supervisor.crash_report import write_report
from grpo_tui.supervisor.hooks import HOOKS, Hooks
from grpo_tui.supervisor.machine import (
    RUNNING,
    Effect,
    Event,
    KillAsked,
    Overran,
    RestartAsked,
    Service,
    StopAsked,
    Tick,
    adopted,
    step,
)
from grpo_tui.supervisor.machine_facts import oom_kill_count
from grpo_tui.supervisor.proc import ProcessId
from grpo_tui.supervisor.processes import ExitReport, Keeper, adopt_keeper
from grpo_tui.supervisor.sampling import Sampler
from grpo_tui.supervisor.state_file import (
    Ledger,
    StateDocument,
    StateWriter,
    boot_id,
    from_ledger,
    last_attempt,
    last_begun_attempt,
    to_ledger,
)
from grpo_tui.supervisor.timeline import Timeline
from grpo_tui.supervisor.words import why

OWN_LOG_LIMIT_BYTES = 64_000_000
HELPER_REST_S = 30.0
"""After a helper has failed: soon enough for figures and logs, and seldom enough for the log that says so."""
_INTERRUPTED = RestartAsked("its start was interrupted", makes_way=True)
log = logging.getLogger(__name__)


class Supervisor:
    """Holds a run: every service's place in its life, and the hands that move it."""

    def __init__(self, plan: Plan, *, run_folder: Path, predecessor: StateDocument | None) -> None:
        self.run_name = run_folder.name
        self._timeline = Timeline(run_folder, self.status)
        self.broadcast = Broadcast(self._timeline.keep)
        self._plan = plan
        self._run_folder = run_folder
        self._predecessor = predecessor
        self._temporary_folder = self._take_temporary_folder()
        self._launches = {launch.name: self._at_home(launch) for launch in plan.launches}
        self._services = {name: Service(name=name, since_s=time.monotonic()) for name in self._launches}
        self._hands: dict[str, Attempts] = {}
        self._ready_at: dict[str, float | None] = {}
        # Unbounded: it is filled by our own probes and by commands of people, and each event takes microseconds.
        self._events: asyncio.Queue[tuple[str, Event]] = asyncio.Queue()
        self._ending: order.Ending | None = None
        self._restarting: set[str] = set()
        """Services to be restarted, of which some follower may still have to end first."""
        self._hooks_limit_s = math.inf
        self._takes_ports_at_end = False
        self._has_been_up = False
        self._state = RunState.STARTING if predecessor is None else predecessor.state
        self._started_at = time.time() if predecessor is None else predecessor.started_at or time.time()
        self._ended_at: float | None = None
        self._me: SupervisorInfo | None = SupervisorInfo(pid=os.getpid(), started_at=time.time())
        self._changed = asyncio.Event()
        self._writer = StateWriter(run_folder, self.document)
        self._sampler = Sampler(
            self.broadcast,
            self.keeper_pids,
            told=self._retell,
            ledger_changed=self._writer.mark,
            limits={each.name: each.memory_limit_bytes for each in plan.launches if each.memory_limit_bytes},
            over_limit=self._over_limit,
            attempts=lambda: {name: each.attempt for name, each in self._services.items()},
            logs={name: run_folder / f"{name}.log" for name in self._launches},
        )
        self._hooks = Hooks(
            plan.hooks, run=self.run_name, run_folder=run_folder, cwd=plan.profile_folder, notice=self.notice
        )
        self._log_capper = LogCapper(_log_limits(plan, run_folder))
        self._tasks: asyncio.TaskGroup

    # --- the story of a run ----------------------------------------------------------------------------------------

    async def run(self) -> RunState:
        """Bring the services up, keep them up, take them down; how the run ended.

        Cancelled, it leaves every service running: the next daemon of this run goes on with them.
        """
        try:
            await self._supervise()
        except asyncio.CancelledError:
            await self._writer.write()
            await self._timeline.write()
            raise
        await self._leave_nothing()
        return self._state

    async def _supervise(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            helpers = self._take_hands(tasks)
            self._take_over()
            self._timeline.begin()
            await self._writer.write()
            own = (self._writer, self._timeline, self._sampler, self._log_capper)
            helpers += [tasks.create_task(self._see_to(each)) for each in own]
            while not self._is_over():
                self._decide()
                self._publish()
                if not self._is_over():
                    await self._next_event()
            for helper in helpers:
                helper.cancel()
            for hands in self._hands.values():
                hands.let_go()

    async def _see_to(self, helper: StateWriter | Timeline | Sampler | LogCapper) -> None:
        """Run a helper, and run it again when it fails: what it is missing (a file, a descriptor) may come back."""
        while True:
            try:
                await helper.run()
            except Exception as error:  # whatever it is: services go on, and so does their supervision
                log.exception("%s failed, and goes on in %g s", type(helper).__name__, HELPER_REST_S)
                text = f"a part of the supervisor failed and is tried again ({type(helper).__name__}: {error!r})"
                self.notice("error", f"{text}; {SUPERVISOR_LOG} has the rest", None)
            await asyncio.sleep(HELPER_REST_S)

    def _take_hands(self, tasks: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        for name, launch in self._launches.items():
            self._hands[name] = Attempts(
                launch,
                run=self.run_name,
                run_folder=self._run_folder,
                tasks=tasks,
                post=self.post,
                notice=self.notice,
                sampler=self._sampler,
                prepare=self._see_to_temporary_folder,
            )
            self._hands[name].may_take_ports = self._plan.take_ports and self._predecessor is None
        return [tasks.create_task(hands.work(), name=f"hands of {name}") for name, hands in self._hands.items()]

    def _take_temporary_folder(self) -> Path | None:
        """The one that an earlier daemon made, or a new one; None, told, where none can be made."""
        ledger = None if self._predecessor is None else self._predecessor.ledger
        if ledger is not None and ledger.temporary_folder is not None:
            return ledger.temporary_folder
        try:
            return temporary.make_folder(self.run_name)
        except OSError as error:
            log.warning("no temporary folder for the run can be made (%s): what services leave is not removed", error)
            return None

    def _at_home(self, launch: Launch) -> Launch:
        """A launch in the temporary folder of the run; what its profile says stands."""
        if self._temporary_folder is None:
            return launch
        return replace(launch, env={**temporary.variables(self._temporary_folder), **launch.env})

    def _see_to_temporary_folder(self) -> None:
        if self._temporary_folder is None:
            return
        try:
            temporary.make_anew(self._temporary_folder)
        except OSError as error:
            words = f"{self._temporary_folder}, TMPDIR of the services, was removed and cannot be made anew: {error}"
            self.notice("warning", words, None)

    def _take_over(self) -> None:
        """Find what an earlier daemon left: living services go on, ended ones are told, none starts twice."""
        now_s = time.monotonic()
        ledger = None if self._predecessor is None else self._predecessor.ledger
        if ledger is not None and ledger.boot_id != boot_id():
            log.warning("the machine was restarted since: nothing that ran then runs now, and no timer holds")
            ledger = ledger.model_copy(update={"services": {}})
        if ledger is not None:
            self._has_been_up = ledger.has_been_up
            self._restarting = set(ledger.restarting)
        for name in self._launches:
            entry = ledger.services.get(name) if ledger is not None else None
            service = self._services[name] if entry is None else from_ledger(name, entry)
            if entry is not None:
                self._ready_at[name], self._hands[name].started_at = entry.ready_at, entry.started_at
                self._hands[name].begins_at = entry.begins_at
                self._sampler.remember(name, (ProcessId(*each) for each in entry.processes))
            attempt = max(service.attempt, last_attempt(self._run_folder, name))
            found = adopt_keeper(self._run_folder, name, attempt) if attempt else None
            self._services[name] = self._adopt(service, attempt, found, now_s)
            if self._services[name].has_process:
                log.info("%s: taken over in attempt %d: %s", name, attempt, self._services[name].state)
        self._hooks.take_over()
        if ledger is not None and ledger.ending is not None:
            self.end(ledger.ending)

    def _adopt(self, service: Service, attempt: int, found: Keeper | ExitReport | None, now_s: float) -> Service:
        name, hands = service.name, self._hands[service.name]
        if isinstance(found, Keeper):
            taken = adopted(self._as_of(service, attempt), now_s, self._launches[name])
            hands.adopt(found, taken)
            if taken.state is S.STOPPING:
                hands.do(Effect.STOP, taken)
            elif taken.is_renewing:
                hands.do(Effect.RENEW, taken)
            return taken
        if not service.has_process and service.attempt == attempt:
            return service
        lost = ExitReport(code=None, ended_at=time.time(), error="its keeper left no trace", keeper_lost=True)
        hands.bury(attempt, found or lost)
        # Its end is told once what is left of it was cleared away; until then it is not up for anybody.
        taken = replace(adopted(self._as_of(service, attempt), now_s, self._launches[name]), is_running=False)
        if taken.state is S.STARTING and attempt > last_begun_attempt(self._run_folder, name):
            # Its supervisor left while it looked for ports and GPU memory: nothing was started that could have failed.
            taken, _ = step(taken, _INTERRUPTED, now_s, self._launches[name])
        return taken

    def _as_of(self, service: Service, attempt: int) -> Service:
        """The service in the attempt that was found, which may be newer than what its last daemon came to write."""
        if service.attempt == attempt:
            return service
        return Service(name=service.name, attempt=attempt, num_renewals=service.num_renewals)

    def _decide(self) -> None:
        """Everything that follows from where the services stand now."""
        before: dict[str, Service] = {}
        while before != self._services:  # a restart, e.g., makes a service wait, and then it may start
            before = dict(self._services)
            self._decide_once(time.monotonic())

    def _decide_once(self, now_s: float) -> None:
        if self._ending is None and (state := order.verdict(self._services, self._launches)):
            self.end(state)
        for name, event in order.decisions(self._services, self._launches, self._ending, now_s, self._restarting):
            if name in self._restarting and isinstance(event, RestartAsked):
                self._restarting.remove(name)
            self._apply(name, event)

    async def _next_event(self) -> None:
        """Wait for an event or the next deadline, and apply what came."""
        wake_at_s = self._wake_at_s()
        try:
            async with asyncio.timeout_at(wake_at_s):
                name, event = await self._events.get()
        except TimeoutError:
            for name in self._launches:
                self._apply(name, Tick())
            return
        self._apply(name, event)
        while not self._events.empty():
            self._apply(*self._events.get_nowait())

    def _wake_at_s(self) -> float | None:
        times = [service.deadline_s for service in self._services.values() if service.deadline_s is not None]
        if self._ending is not None:
            now_s = time.monotonic()
            turns = [*order.stop_times_s(self._ending, self._services, self._launches).values(), self._ending.kill_at_s]
            times += [turn for turn in turns if turn > now_s]
        return min(times, default=None)

    def _is_over(self) -> bool:
        """Whether nothing is left that could end; what is stuck in the kernel has been told, and is not awaited."""
        is_open = any(service.has_process and service.state is not S.FAILED for service in self._services.values())
        return self._ending is not None and not is_open

    async def _leave_nothing(self) -> None:
        """The second net below all services, then the last words."""
        assert self._ending is not None
        await self._run_last_hooks(self._ending.state)
        ports = [port for launch in self._launches.values() for port in launch.ports]
        await teardown.sweep(
            self.run_name,
            None,
            ports=ports if self._takes_ports_at_end else (),  # each service's own were looked at as it ended
            report=lambda line: self.notice("info", line, None),
            ledger=self._sampler.seen,
            take_ports=self._takes_ports_at_end,
            temporary_folder=self._temporary_folder,
        )
        log.info("run %s is over: %s; ports %s are free", self.run_name, self._ending.state, ports or "(none)")
        self._ended_at = time.time()
        self._me = None
        self._set_state(self._ending.state)
        await self._timeline.write()
        await self._writer.write()
        self._pulse()

    async def _run_last_hooks(self, state: RunState) -> None:
        event = HookEvent.FAILED if state is RunState.FAILED else HookEvent.FINISHED
        self._hooks.fire(event, service=None, status=self.status().model_copy(update={"state": state}))
        longest_s = max((hook.timeout_s for hook in self._plan.hooks), default=0.0)
        await self._hooks.finish(min(longest_s, self._hooks_limit_s))

    # --- what others may ask ---------------------------------------------------------------------------------------

    @property
    def is_ending(self) -> bool:
        """Whether the run is being ended."""
        return self._ending is not None

    @property
    def state(self) -> RunState:
        """Where the run stands."""
        return self._state

    @property
    def service_names(self) -> list[str]:
        """Every service, in start order."""
        return list(self._launches)

    def service(self, name: str) -> Service:
        """Where a service stands."""
        return self._services[name]

    def needs_of(self, name: str) -> list[str]:
        """Every service that this one needs, directly or through others."""
        needs: list[str] = []
        for needed in self._launches[name].needs:
            needs += [needed, *self.needs_of(needed)]
        return needs

    def post(self, name: str, event: Event) -> None:
        """Queue an event for a service; it is applied in turn."""
        self._events.put_nowait((name, event))

    def restart(self, name: str) -> None:
        """Restart a service and those that must follow, and say who does."""
        followers = [f for f in order.restart_group(name, self._launches) if self._services[f].has_process]
        self.notice("info", f"{name} is restarted; {self._what_follows(name, followers)}", name)
        self._restarting.add(name)
        self._writer.mark()
        self.post(name, Tick())

    def _what_follows(self, name: str, followers: list[str]) -> str:
        if followers:
            return f"after it {', '.join(followers)}"
        return self._launches[name].after_restart or "nobody has to follow"

    def take_ports(self, name: str) -> None:
        """At its next start, end strangers of our own user that hold a port of this service."""
        self._hands[name].may_take_ports = True

    def end(self, state: RunState, *, budget_s: float | None = None, take_ports: bool = False) -> None:
        """End the run; a second call may only shorten the time that services get."""
        self._takes_ports_at_end = self._takes_ports_at_end or take_ports
        longest_s = order.ending_budget_s(self._services, self._launches)
        if budget_s is not None:
            self._hooks_limit_s = min(self._hooks_limit_s, budget_s)  # who is in a hurry does not wait for hooks either
        budget_s = longest_s if budget_s is None else min(budget_s, longest_s)
        now_s = time.monotonic()
        if self._ending is None:
            log.info("ending the run as %s; services get %.1f s together", state, budget_s)
            self._ending = order.Ending(state=state, since_s=now_s, budget_s=budget_s)
        elif now_s + budget_s < self._ending.kill_at_s:
            since_s = self._ending.since_s
            self._ending = order.Ending(state=self._ending.state, since_s=since_s, budget_s=now_s + budget_s - since_s)
        self._events.put_nowait((next(iter(self._launches)), Tick()))

    async def wait_until(self, holds: Callable[[Supervisor], bool]) -> None:
        """Return once `holds` does; asked after every change."""
        while not holds(self):
            await self._changed.wait()

    async def until_taken(self) -> None:
        """Return once what was posted so far is applied, with what follows from it at once."""
        await self.wait_until(lambda s: s._events.empty())

    def keepers(self) -> list[Keeper]:
        """The keepers of all running services."""
        return [hands.keeper for hands in self._hands.values() if hands.keeper is not None]

    def write_state(self) -> None:
        """Have the state written again, though nothing changed."""
        self._writer.mark()

    def keeper_pids(self) -> dict[str, int]:
        """The keeper of each running service: whatever the service is, is below it."""
        return {name: hands.keeper.identity.pid for name, hands in self._hands.items() if hands.keeper is not None}

    # --- telling ---------------------------------------------------------------------------------------------------

    def notice(self, severity: Literal["info", "warning", "error"], text: str, service: str | None) -> None:
        """Tell everybody who watches, and the log."""
        levels = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
        log.log(levels[severity], "%s", text)
        at = time.time()
        self.broadcast.send(lambda n: Notice(number=n, time=at, severity=severity, service=service, text=text))

    def _apply(self, name: str, event: Event) -> None:
        if isinstance(event, StopAsked | KillAsked):
            self._restarting.discard(name)
        before, launch = self._services[name], self._launches[name]
        after, effects = step(before, event, time.monotonic(), launch)
        self._services[name] = after
        for effect in effects:
            self._hands[name].do(effect, after)
        if after.state is not before.state:
            self._note_change(before, after)
        if _shown(after) != _shown(before):
            self._tell_service(name)
            for other, service in self._services.items():
                if service.state is S.WAITING and name in self._launches[other].needs:
                    self._tell_service(other)

    def _note_change(self, before: Service, after: Service) -> None:
        name = after.name
        self.broadcast.figures_wanted.set()
        if after.state is S.READY and not before.was_ready:
            self._ready_at[name] = time.time()
            self._fire(HookEvent.READY, name)
            if after.num_starts > 1:
                self._fire(HookEvent.RESTARTED, name)
        elif after.state is S.STARTING:
            self._ready_at[name] = None
        words = f"{name}: {before.state} → {after.state}" + (f" ({after.reason})" if after.reason else "")
        log.log(logging.WARNING if after.state in {S.FAILED, S.UNHEALTHY, S.BACKOFF} else logging.INFO, "%s", words)
        if after.state is S.FAILED:
            self.notice("error", f"{name} failed: {why(name, self._services, self._launches, time.monotonic())}", name)
        if after.state is S.FINISHED:
            self._fire(HookEvent.FINISHED, name)
        if after.state in {S.FAILED, S.BACKOFF}:
            self._tasks.create_task(self._record_failure(name, after), name=f"crash report of {name}")
        if before.state is S.STOPPING and not after.has_process:
            seconds = time.monotonic() - before.since_s
            self.notice("info", f"{name} ended in {seconds:.2f} s ({_how(after)})", name)
        if after.state is S.BACKOFF:
            for follower in order.restart_group(name, self._launches):
                if self._services[follower].state in RUNNING:
                    self.post(follower, RestartAsked(f"restarted because {name} is", makes_way=True))

    def _fire(self, event: HookEvent, name: str) -> None:
        self._hooks.fire(event, service=self.service_status(name), status=self.status())

    async def _record_failure(self, name: str, failed: Service) -> None:
        """Write down how everything stood, and only then tell the hooks, which may send it to somebody."""
        status, before = self.status(last_usage_of=name), self._hands[name].oom_kills_before
        now = oom_kill_count()
        path = await asyncio.to_thread(
            write_report,
            self._run_folder,
            status,
            self._launches,
            name,
            attempt=failed.attempt,
            why=failed.reason or "failed",
            oom_kills=None if before is None or now is None else now - before,
        )
        if path is not None:
            self.notice("info", f"{name}: how everything stood is in {path}", name)
        service = next(each for each in status.services if each.name == name)
        self._hooks.fire(HookEvent.FAILED, service=service, status=status)

    def _over_limit(self, name: str, held_bytes: int) -> None:
        limit_bytes = self._launches[name].memory_limit_bytes or 0
        self.post(name, Overran(f"holds {held_bytes / 1e9:.2f} GB, over its memory_limit_gb of {limit_bytes / 1e9:g}"))

    def _tell_service(self, name: str) -> None:
        status, at = self.service_status(name), time.time()
        self.broadcast.send(lambda n: ServiceChanged(number=n, time=at, service=status))
        self._writer.mark()

    def _retell(self) -> None:
        """Tell the services again whose explanation counts seconds."""
        for name, service in self._services.items():
            if service.state in {S.WAITING, S.STARTING, S.STOPPING}:
                self._tell_service(name)

    def _publish(self) -> None:
        """Tell what became of the run, and wake whoever waits for a change."""
        if self._ending is None:
            state = order.run_state(self._services, self._launches, has_been_up=self._has_been_up)
            is_first_time_up = state is RunState.RUNNING and not self._has_been_up
            self._has_been_up = self._has_been_up or is_first_time_up
            self._set_state(state)
            if is_first_time_up:
                self._hooks.fire(HookEvent.READY, service=None, status=self.status())
        self._pulse()

    def _set_state(self, state: RunState) -> None:
        if state is self._state:
            return
        self._state, at = state, time.time()
        log.info("run %s: %s", self.run_name, state)
        self.broadcast.send(lambda n: RunChanged(number=n, time=at, state=state))
        self._writer.mark()

    def _pulse(self) -> None:
        waiting, self._changed = self._changed, asyncio.Event()
        waiting.set()

    # --- the status document ---------------------------------------------------------------------------------------

    def status(self, *, last_usage_of: str | None = None) -> RunStatus:
        """Where the run stands now. Metrics are added by whoever reads: they are a file, not ours.

        Args:
            last_usage_of: a service that has ended, of which the last sample is to be told nevertheless.
        """
        warnings = []
        if self._writer.fault is not None:
            hint = "free some space; services go on, and the state is written again at the next change"
            warnings.append(Warning(id="state-file", severity="error", text=self._writer.fault, hint=hint))
        return RunStatus(
            run=self.run_name,
            profile=self._plan.profile_name,
            state=self._state,
            supervisor=self._me,
            services=[self.service_status(name, with_last_usage=name == last_usage_of) for name in self._launches],
            gpus=self._sampler.gpus,
            gpu_note=self._sampler.gpu_note,
            warnings=warnings,
            is_ending=self.is_ending and self._state not in ENDED_RUN_STATES,
            started_at=self._started_at,
            ended_at=self._ended_at,
        )

    def service_status(self, name: str, *, with_last_usage: bool = False) -> ServiceStatus:
        """One service, for the status document."""
        service, launch, hands = self._services[name], self._launches[name], self._hands[name]
        pid = hands.keeper.main_pid if hands.keeper is not None else None
        has_usage = service.has_process or with_last_usage
        usage = self._sampler.usage.get(name) if has_usage else None
        return ServiceStatus(
            name=name,
            kind=launch.kind,
            state=service.state,
            health=service.answer,
            probe=service.outcome,
            phase=service.phase,
            pid=pid,
            pgid=pid,
            started_at=hands.started_at,
            ready_at=self._ready_at.get(name),
            attempt=service.attempt,
            restarts=max(0, service.num_starts - 1),
            exit_code=service.exit_code,
            ports=list(launch.ports),
            gpus=list(launch.gpus),
            cpu_percent=usage.cpu_percent if usage else None,
            rss_bytes=usage.rss_bytes if usage else None,
            gpu_memory_bytes=self._sampler.gpu_memory_bytes.get(name) if has_usage else None,
            log=str(self._run_folder / f"{name}.log"),
            why=why(name, self._services, self._launches, time.monotonic()),
            is_refused=service.is_refused,
        )

    def document(self) -> StateDocument:
        """The status and the ledger, for `state.json`."""
        ledger = Ledger(
            ending=self._ending.state if self._ending is not None and self._state not in ENDED_RUN_STATES else None,
            has_been_up=self._has_been_up,
            boot_id=boot_id(),
            restarting=tuple(self._restarting),
            temporary_folder=self._temporary_folder,
            services={
                name: to_ledger(
                    service,
                    started_at=self._hands[name].started_at,
                    begins_at=self._hands[name].begins_at,
                    ready_at=self._ready_at.get(name),
                    processes=self._sampler.processes(name),
                )
                for name, service in self._services.items()
            },
        )
        return StateDocument(**dict(self.status()), ledger=ledger)


def _shown(service: Service) -> tuple[object, ...]:
    """The part of a service that people see."""
    answer, how_far = (service.answer, service.outcome), (service.phase, service.is_running)
    return (service.state, answer, service.reason, service.num_starts, how_far, service.exit_code)


def _log_limits(plan: Plan, run_folder: Path) -> dict[Path, int]:
    """Every log of a run, with its limit in bytes."""
    services = {run_folder / f"{launch.name}.log": launch.log_limit_bytes for launch in plan.launches}
    return {
        **services,
        run_folder / SUPERVISOR_LOG: OWN_LOG_LIMIT_BYTES,
        run_folder / f"{HOOKS}.log": OWN_LOG_LIMIT_BYTES,
    }


def _how(service: Service) -> str:
    return "no process" if service.exit_code is None else f"exit code {service.exit_code}"
