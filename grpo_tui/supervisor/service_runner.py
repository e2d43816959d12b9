"""Starts, probes and stops the processes of one service, as `core.py` decided, and posts what happens as events.

One runner per service carries its effects out one after another, so that a start and a stop never overlap. It keeps no
state besides the keeper of the current attempt, and decides nothing.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import ValidationError

from grpo_engine.errors import GrpoError
from grpo_engine.wire.fork_server import Restarts
from grpo_engine.wire.log_lines import PREPARED
from grpo_engine.wire.run_folder import SUPERVISOR_LOG, service_log
from grpo_engine.wire.supervisor import ProbeOutcome, Refusal
from grpo_tui.run_files.log_file import last_lines, written_so_far
from grpo_tui.services.base import Launch, Probe, RestartInPlace
from grpo_tui.supervisor.keeper.client import ExitReport, Keeper
from grpo_tui.supervisor.machine import (
    Effect,
    Event,
    Exited,
    Prepared,
    ProbeAnswered,
    Progressed,
    Refused,
    RestartedInPlace,
    ServerKilled,
    Service,
    Spawned,
    shortened,
)
from grpo_tui.supervisor.placement.machine import Machine
from grpo_tui.supervisor.probes import Answer, LogSearch, Prober
from grpo_tui.supervisor.progress import Progress
from grpo_tui.supervisor.report.console_metrics import ConsoleMetrics
from grpo_tui.supervisor.report.machine_facts import oom_kill_count
from grpo_tui.supervisor.usage.sampling import Sampler

START_LIMIT_S = 5.0
"""A keeper reports within 0.1 s; one that has not by then hangs on its disk."""
IN_PLACE_POLL_S = 0.05
SERVER_POLL_S = 0.5
PREPARED_POLL_S = 0.2
CAUSE_LINES = 200
"""Lines at the end of a log that are searched for why it failed: a traceback of several parts has a hundred."""
log = logging.getLogger(__name__)

T = TypeVar("T")
Post = Callable[[str, Event], None]
Severity = Literal["info", "warning", "error"]
Notice = Callable[[Severity, str, str | None], None]
"""Takes a severity, a text, and the service it is about."""


class ServiceRunner:
    """Carries out the effects on one service."""

    def __init__(
        self,
        launch: Launch,
        *,
        machine: Machine,
        run_folder: Path,
        tasks: asyncio.TaskGroup,
        post: Post,
        notice: Notice,
        sampler: Sampler,
        end_of_ranks: Callable[[int], str | None],
        prepare: Callable[[], None],
        mask: Callable[[str], str],
    ) -> None:
        self._launch = launch
        self._machine = machine
        self._run_folder = run_folder
        self._log = service_log(run_folder, launch.name)
        self._tasks = tasks
        self._post = post
        self._notice = notice
        self._sampler = sampler
        self._end_of_ranks = end_of_ranks
        """Returns why the ranks of an attempt ended, if it had any and reported it."""
        self._prepare = prepare
        """Called before each start, in place too: makes the temporary folder of the run again if it was removed; raises
        `GrpoError` where the service must not be started."""
        self._mask = mask
        """Masks secrets in what the service printed or answered, before it becomes part of the state."""
        self._effects: asyncio.Queue[tuple[Effect, Service]] = asyncio.Queue()
        self._is_ready = False
        self._num_in_place_restarts = 0
        """Of the current start."""
        self.may_take_ports = False
        """Permission, for one start, to end foreign processes of our own user that hold a declared port."""
        self._clearing: asyncio.Task[list[Refusal]] | None = None
        """Frees ports and GPU memory before a start."""
        self._refused: Refused | None = None
        """Why the attempt, which was started held, is ended instead of let begin."""
        self._attempt_task: asyncio.Task[None] | None = None
        self._exit_task: asyncio.Task[None] | None = None
        """Cleans up after an attempt that ended without a supervisor."""
        self.keeper: Keeper | None = None
        """Of the current attempt."""
        self._probing: asyncio.Task[None] | None = None
        self._watching_server: asyncio.Task[None] | None = None
        """Looks whether the fork server of the attempt says that its server was killed."""
        self._preparing: asyncio.Task[None] | None = None
        """Waits for the report of an attempt that was started held; its turn may come before."""
        self.started_at: float | None = None
        """Unix time of the last start."""
        self.begins_at: int | None = None
        """Offset in the log where the current start begins; None: where its attempt begins."""
        self._oom_kills_before: int | None = None
        """The kernel's count of out-of-memory kills when the attempt started; None where unknown."""
        self._failed_parts: set[str] = set()
        """Of what is read from the service, what has failed; each is reported once."""

    def carry_out(self, effect: Effect, service: Service) -> None:
        """Queue an effect on the service in its current state."""
        if effect not in {Effect.SPAWN, Effect.SPAWN_HELD, Effect.OPEN_GATE} and self._clearing is not None:
            self._clearing.cancel()
        self._effects.put_nowait((effect, service))

    async def run(self) -> None:
        """Carry effects out in order, until cancelled."""
        while True:
            effect, service = await self._effects.get()
            match effect:
                case Effect.SPAWN:
                    await self._spawn(service)
                case Effect.SPAWN_HELD:
                    await self._spawn_held(service)
                case Effect.OPEN_GATE if self.keeper is not None:
                    await self._open_gate(self.keeper)
                case Effect.RESTART_IN_PLACE if self.keeper is not None:
                    await self._restart_in_place(self.keeper, service)
                case Effect.STOP if self.keeper is not None:
                    self.keeper.stop()
                case Effect.KILL if self.keeper is not None:
                    self.keeper.kill()

    def adopt(self, keeper: Keeper, service: Service) -> None:
        """Supervise an attempt that an earlier supervisor started."""
        self._is_ready, self._num_in_place_restarts = service.was_ready, service.num_in_place_restarts
        started_at = self.started_at
        self._watch(keeper)
        if self.begins_at is not None:
            self.started_at = started_at

    def record_exit(self, attempt: int, report: ExitReport) -> None:
        """Clean up after an attempt that ended while no supervisor ran, and post its exit."""
        name = f"end of {self._launch.name}"
        self._exit_task = self._tasks.create_task(self._record_exit(attempt, report), name=name)

    async def exit_posted(self) -> None:
        """Return once the exit that was to be recorded, if any, is posted."""
        if self._exit_task is not None:
            await asyncio.wait({self._exit_task})

    def num_oom_kills(self) -> int | None:
        """Processes that the kernel's out-of-memory killer has killed during the attempt; None where unknown."""
        before, now = self._oom_kills_before, oom_kill_count()
        return None if before is None or now is None else now - before

    def abandon(self) -> None:
        """Stop waiting for an attempt that hangs in the kernel."""
        if self._attempt_task is not None:
            self._attempt_task.cancel()

    # --- one attempt -------------------------------------------------------------------------------------------------

    async def _spawn(self, service: Service) -> None:
        if (refused := await self._free_resources()) is not None:
            self._post_event(refused)
            return
        await self._start_keeper(service, is_held=False)

    async def _spawn_held(self, service: Service) -> None:
        """Start a process that waits for its gate; ports and GPU memory, which it does not touch, are checked then."""
        await self._start_keeper(service, is_held=True)

    async def _open_gate(self, keeper: Keeper) -> None:
        """Check ports and GPU memory and let the service begin, or end it if it cannot have what it needs."""
        self._refused = await self._free_resources()
        if self.keeper is not keeper:
            return  # it exited meanwhile
        if self._refused is not None:
            keeper.stop()  # posted when it has exited
            return
        keeper.open_gate()
        self._post_event(Spawned())
        self._start_probing(self._probe(keeper))

    async def _start_keeper(self, service: Service, *, is_held: bool) -> None:
        name = self._launch.name
        self._oom_kills_before = None if self._launch.is_placed else oom_kill_count()  # the count is of this machine
        try:
            self._prepare()
            keeper = await self._start(service.attempt, is_held=is_held)
        except GrpoError as error:
            log.error("%s: %s", name, error)
            self._post_event(Exited(code=None, error=str(error), jitter=random.random()))
            return
        self._is_ready, self._num_in_place_restarts, self.begins_at = False, service.num_in_place_restarts, None
        self._refused = None
        self._watch(keeper)

    async def _restart_in_place(self, keeper: Keeper, service: Service) -> None:
        """Send the signal for a restart in place, and search the log from here on for the line that confirms it."""
        how = self._launch.restart_in_place
        assert how is not None, "only a service that can restart in place gets this effect"
        self._stop_probing()
        written = asyncio.to_thread(written_so_far, self._log)
        self.begins_at = await self._guarded("reading its log", written, otherwise=self._offset(keeper))
        if self.keeper is not keeper:
            return  # it exited meanwhile
        self._is_ready, self._num_in_place_restarts, self.started_at = False, service.num_in_place_restarts, time.time()
        has_restarted = await asyncio.to_thread(self._restart_check, keeper, how)
        try:
            self._prepare()
        except GrpoError as error:
            log.error("%s: %s", self._launch.name, error)
            keeper.stop()  # the start that follows fails for the same reason, and says so
            return
        keeper.signal_service(signal.Signals[how.signal])
        self._start_probing(self._probe_after_restart_in_place(keeper, has_restarted))

    def _restart_check(self, keeper: Keeper, how: RestartInPlace) -> Callable[[], bool]:
        """A check for a restart in place that ends after now; reads the log or the file that reports it."""
        if how.log is not None:
            line = LogSearch(self._log, self._offset(keeper), how.log)
            return lambda: line.search().passed
        assert how.file is not None, "a restart in place is reported by a log line or a file"
        file = self._launch.cwd / how.file
        before = _content(file)
        return lambda: _content(file) != before

    async def _probe_after_restart_in_place(self, keeper: Keeper, has_restarted: Callable[[], bool]) -> None:
        while not await self._guarded("restart check", asyncio.to_thread(has_restarted), otherwise=False):  # noqa: ASYNC110 - a file
            await asyncio.sleep(IN_PLACE_POLL_S)
        self._post_event(RestartedInPlace(num_in_place_restarts=self._num_in_place_restarts))
        await self._probe(keeper)

    async def _start(self, attempt: int, *, is_held: bool) -> Keeper:
        """Start a keeper; cancelled, wait until its files exist, so that the next supervisor finds it."""
        starting = asyncio.create_task(self._machine.start(self._launch, attempt, is_held=is_held))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.wait({starting}, timeout=START_LIMIT_S)
            raise

    async def _free_resources(self) -> Refused | None:
        """End what is ours on its ports and GPUs; why it cannot start, if so. A stop cancels the check."""
        take_ports, self.may_take_ports = self.may_take_ports, False
        self._clearing = asyncio.create_task(
            self._machine.free_resources(self._launch, report=self._post_notice, take_ports=take_ports)
        )
        try:
            await asyncio.wait({self._clearing})
            if self._clearing.cancelled():
                return Refused("stopped before it was started")
            refusals = self._clearing.result()
            return Refused("; ".join(each.text for each in refusals), tuple(refusals)) if refusals else None
        except OSError as error:
            text = f"cannot check ports and GPU memory before the start: {error}; it is started nevertheless"
            self._notice("warning", f"{self._launch.name}: {text}", self._launch.name)
            return None
        finally:
            self._clearing.cancel()
            self._clearing = None

    def _watch(self, keeper: Keeper) -> None:
        self.keeper = keeper
        self.started_at = keeper.started_at
        if keeper.is_held:
            name = f"preparation of {self._launch.name}"
            self._preparing = self._tasks.create_task(self._watch_preparation(keeper), name=name)
        else:
            self._start_probing(self._probe(keeper))
        if (how := self._launch.restart_in_place) is not None and how.file is not None:
            watching = self._watch_server(keeper, self._launch.cwd / how.file)
            self._watching_server = self._tasks.create_task(watching, name=f"server of {self._launch.name}")
        title = f"attempt {keeper.attempt} of {self._launch.name}"
        self._attempt_task = self._tasks.create_task(self._attend(keeper), name=title)
        if keeper.main_pid is not None and not keeper.is_held:
            self._post_event(Spawned())

    async def _attend(self, keeper: Keeper) -> None:
        """Probe the attempt until it exits, clean up after it, and post its exit."""
        ended = asyncio.Event()
        reading = self._tasks.create_task(
            self._read_console(keeper.attempt, keeper.log_offset, ended), name=f"console of {self._launch.name}"
        )
        try:
            report = await keeper.exited()
        finally:
            self._stop_probing()
            self._stop_watching_preparation()
            if self._watching_server is not None:
                self._watching_server.cancel()
            ended.set()
        await reading
        if report.code == 0 and not self._is_ready:
            await self._probe_after_exit(keeper)
        self.keeper = None
        await self._clean_up(keeper.attempt, keeper.log_offset, report)

    async def _record_exit(self, attempt: int, report: ExitReport) -> None:
        if report.log_offset is not None:
            ended = asyncio.Event()
            ended.set()
            await self._read_console(attempt, report.log_offset, ended)
        await self._clean_up(attempt, report.log_offset or 0, report)

    async def _clean_up(self, attempt: int, log_offset: int, report: ExitReport) -> None:
        name = self._launch.name
        if report.ended:
            log.info("%s: ended processes that attempt %d left: %s", name, attempt, ", ".join(report.ended))
        for process in report.unkillable:
            self._notice("error", f"{name}: {process} is still alive after SIGKILL: it hangs in the kernel", name)
        if report.keeper_lost or self._launch.ports or self._sampler.gpus:
            await self._sweep()
        reading = asyncio.to_thread(last_lines, self._log, log_offset)
        lines = tuple(map(self._mask, await self._guarded("reading its log", reading, otherwise=())))
        if self._refused is not None:
            self._post_event(self._refused)
            return
        failed_by, cause, is_unfinished = None, None, False
        if report.code != 0:
            looking_back = asyncio.to_thread(logged_cause, self._log, log_offset, self._launch.cause)
            cause = await self._guarded("search of its log", looking_back, otherwise=None)
            searching = asyncio.to_thread(self._failed_by, log_offset)
            failed_by = await self._guarded("search of its log", searching, otherwise=None)
        elif self._launch.unfinished is not None:
            looking = asyncio.to_thread(self._logged, log_offset, self._launch.unfinished)
            is_unfinished = await self._guarded("search of its log", looking, otherwise=False)
        self._post_event(
            Exited(
                code=report.code,
                error=report.error,
                failed_by=failed_by,
                cause=self._end_of_ranks(attempt) or (cause and shortened(self._mask(cause))),
                is_unfinished=is_unfinished,
                oom_kills=self.num_oom_kills(),
                last_lines=lines,
                jitter=random.random(),
            )
        )

    def _failed_by(self, log_offset: int) -> str | None:
        """The service whose failure ended this attempt, as its log shows."""
        patterns = self._launch.failed_by.items()
        return next((name for name, line in patterns if self._logged(log_offset, line)), None)

    def _logged(self, log_offset: int, line: str) -> bool:
        return LogSearch(self._log, log_offset, line).search().passed

    async def _sweep(self) -> None:
        name = self._launch.name
        try:
            await self._machine.sweep(
                self._launch,
                report=self._post_notice,
                ledger=self._sampler.processes(name),
                gpu_memory=self._sampler.gpu_memory_reader(name),
            )
        except OSError as error:
            text = f"cannot search for processes that it left: {error}; the end of the run searches again"
            self._notice("error", f"{name}: {text}", name)

    async def _watch_preparation(self, keeper: Keeper) -> None:
        """Search the log for the line that says that it only waits for its gate."""
        line = LogSearch(self._log, keeper.log_offset, PREPARED.pattern)

        def is_logged() -> bool:
            return line.search().passed

        while not await self._guarded("search of its log", asyncio.to_thread(is_logged), otherwise=False):  # noqa: ASYNC110 - a file
            await asyncio.sleep(PREPARED_POLL_S)
        self._post_event(Prepared(keeper.attempt))

    async def _watch_server(self, keeper: Keeper, file: Path) -> None:
        """Post that the server was killed, again and again while its fork server waits to be asked for the next one."""
        while True:
            start = {"attempt": keeper.attempt, "num_in_place_restarts": self._num_in_place_restarts}
            looking = asyncio.to_thread(_killed_by, file, keeper.main_pid)
            killed_by = await self._guarded("fork server", looking, otherwise=None)
            if killed_by is not None:
                words = self._end_of_ranks(keeper.attempt) or f"its server was killed by {killed_by}"
                self._post_event(ServerKilled(**start, words=words))
            await asyncio.sleep(SERVER_POLL_S)

    def _stop_watching_preparation(self) -> None:
        if self._preparing is not None:
            self._preparing.cancel()

    # --- probes ------------------------------------------------------------------------------------------------------

    async def _probe(self, keeper: Keeper) -> None:
        """Send the readiness probe until it passes, and from then on the liveness probe."""
        if self._launch.ready is not None and not self._is_ready:
            prober = self._prober(self._launch.ready, keeper)
            progress = Progress(self._log, self._offset(keeper), self._launch.phases)
            while not (answer := await self._ask(prober)).passed:
                self._post_event(self._answered(keeper, answer))
                await self._check_progress(keeper, progress)
                await asyncio.sleep(self._launch.ready.interval_s)
            self._is_ready = True
            self._stop_watching_preparation()
            self._post_event(self._answered(keeper, answer))
        if self._launch.live is not None:
            prober = self._prober(self._launch.live, keeper)
            while True:
                await asyncio.sleep(self._launch.live.interval_s)
                self._post_event(self._answered(keeper, await self._ask(prober)))

    async def _ask(self, prober: Prober) -> Answer:
        failed = Answer(ProbeOutcome.UNASKABLE, f"the probe itself failed; {SUPERVISOR_LOG} has the rest")
        return await self._guarded("probe", prober.ask(), otherwise=failed)

    def _start_probing(self, probing: Coroutine[None, None, None]) -> None:
        self._probing = self._tasks.create_task(probing, name=f"probing {self._launch.name}")

    def _stop_probing(self) -> None:
        if self._probing is not None:
            self._probing.cancel()

    async def _check_progress(self, keeper: Keeper, progress: Progress) -> None:
        name = self._launch.name
        held_bytes = self._sampler.gpu_memory_bytes.get(name)
        pids = [process.pid for process in self._sampler.processes(name)]
        looking = asyncio.to_thread(progress.look, held_bytes, pids)
        movement = await self._guarded("progress check", looking, otherwise=None)
        if movement is not None:
            start = {"attempt": keeper.attempt, "num_in_place_restarts": self._num_in_place_restarts}
            self._post_event(Progressed(**start, phase=movement.phase and self._mask(movement.phase)))

    async def _read_console(self, attempt: int, log_offset: int, ended: asyncio.Event) -> None:
        """Record the metrics that the service prints, if it has a console table."""
        if self._launch.console:
            reader = ConsoleMetrics(
                self._launch,
                attempt=attempt,
                log_offset=log_offset,
                run_folder=self._run_folder,
                notice=lambda words: self._notice("warning", f"{self._launch.name}: {words}", self._launch.name),
            )
            await self._guarded("metrics from its output (no more of this attempt)", reader.run(ended), otherwise=None)

    async def _probe_after_exit(self, keeper: Keeper) -> None:
        """A command may finish between two probes: it was ready if its log or file shows it."""
        ready = self._launch.ready
        if ready is not None and (ready.log is not None or ready.file is not None):
            self._post_event(self._answered(keeper, await self._ask(self._prober(ready, keeper))))

    def _prober(self, probe: Probe, keeper: Keeper) -> Prober:
        launch = self._launch
        offset = self._offset(keeper)
        return Prober(probe, log=self._log, log_offset=offset, cwd=launch.cwd, env=launch.env, ports=launch.ports)

    def _offset(self, keeper: Keeper) -> int:
        """Offset in the log where the current start begins."""
        return keeper.log_offset if self.begins_at is None else self.begins_at

    def _answered(self, keeper: Keeper, answer: Answer) -> ProbeAnswered:
        start = {"attempt": keeper.attempt, "num_in_place_restarts": self._num_in_place_restarts}
        return ProbeAnswered(**start, outcome=answer.kind, words=self._mask(answer.words))

    async def _guarded(self, part: str, reading: Awaitable[T], *, otherwise: T) -> T:
        """Read what a service wrote or answers; a failure is logged and reported once, and supervision goes on."""
        try:
            return await reading
        except Exception as error:  # whatever a service can write to make it fail
            if part not in self._failed_parts:
                self._failed_parts.add(part)
                log.exception("%s: %s failed", self._launch.name, part)
                text = f"{self._launch.name}: {part} failed: {error!r}; {SUPERVISOR_LOG} has the rest"
                self._notice("error", text, self._launch.name)
            return otherwise

    # --- events and notices ------------------------------------------------------------------------------------------

    def _post_event(self, event: Event) -> None:
        self._post(self._launch.name, event)

    def _post_notice(self, line: str) -> None:
        self._notice("info", line, self._launch.name)


def _killed_by(file: Path, fork_server: int | None) -> str | None:
    """What killed the server of this fork server, if it waits to be asked for the next one."""
    try:
        now = Restarts.model_validate_json(file.read_bytes())
    except (OSError, ValidationError):  # it has restarted none yet, or the file is that of another program
        return None
    return now.killed_by if now.pid == fork_server else None


def _content(file: Path) -> bytes:
    """The content of a file; empty while it does not exist or cannot be read."""
    try:
        return file.read_bytes()
    except OSError:
        return b""


def logged_cause(log: Path, offset: int, pattern: str | None) -> str | None:
    """What the first group of the pattern has of the last line near the end of a log that it matches."""
    if pattern is None:
        return None
    found = (re.search(pattern, line) for line in reversed(last_lines(log, offset, CAUSE_LINES)))
    return next((match[1] for match in found if match), None)
