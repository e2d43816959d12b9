"""The hands of the supervisor: does to one service's processes what `core.py` decided, and tells what came of it.

One of these a service, working off its effects one after another, so that a start and a stop never overlap. It keeps no
state of its own besides the keeper of the attempt at hand, and decides nothing: every answer is an event for the core.
"""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Literal

from grpo_engine.errors import GrpoError
from grpo_tui.services.base import Launch, Probe
from grpo_tui.supervisor import preflight, teardown
from grpo_tui.supervisor.capped_log import last_lines, written_so_far
from grpo_tui.supervisor.console_metrics import ConsoleMetrics
from grpo_tui.supervisor.machine import Answered, Effect, Event, Exited, Moved, Refused, Renewed, Service, Spawned
from grpo_tui.supervisor.machine_facts import oom_kill_count
from grpo_tui.supervisor.probes import Answer, LogSearch, Prober
from grpo_tui.supervisor.processes import ExitReport, Keeper, start_keeper
from grpo_tui.supervisor.progress import Progress
from grpo_tui.supervisor.sampling import Sampler

START_LIMIT_S = 5.0
"""A keeper reports within a tenth of a second; one that does not by then hangs on its disk."""
RENEWAL_POLL_S = 0.05
log = logging.getLogger(__name__)

Post = Callable[[str, Event], None]
Severity = Literal["info", "warning", "error"]
Notice = Callable[[Severity, str, str | None], None]
"""Takes a severity, a text, and the service it is about."""


class Attempts:
    """Starts, probes, stops and clears away the attempts of one service."""

    def __init__(
        self,
        launch: Launch,
        *,
        run: str,
        run_folder: Path,
        tasks: asyncio.TaskGroup,
        post: Post,
        notice: Notice,
        sampler: Sampler,
        prepare: Callable[[], None],
    ) -> None:
        self._launch = launch
        self._run = run
        self._run_folder = run_folder
        self._log = run_folder / f"{launch.name}.log"
        self._tasks = tasks
        self._post = post
        self._notice = notice
        self._sampler = sampler
        self._prepare = prepare
        """Sees to what a service finds on the disk when it starts."""
        self._effects: asyncio.Queue[tuple[Effect, Service]] = asyncio.Queue()
        self._is_ready = False
        self._num_renewals = 0
        """Of the start at hand."""
        self.may_take_ports = False
        """The word, good for one start, to end strangers of our own user that hold a declared port."""
        self._clearing: asyncio.Task[str | None] | None = None
        """Looks after ports and GPUs before a start."""
        self._life: asyncio.Task[None] | None = None
        self.keeper: Keeper | None = None
        """Of the attempt at hand."""
        self._probing: asyncio.Task[None] | None = None
        self.started_at: float | None = None
        """Unix time of the last start."""
        self.begins_at: int | None = None
        """Where in the log the start at hand begins, where that is not where its attempt does."""
        self.oom_kills_before: int | None = None
        """How often the kernel had ended processes for want of memory when it started; None where that is not known."""

    def do(self, effect: Effect, service: Service) -> None:
        """Have an effect carried out on the service as it stands now, after those before it."""
        if effect is not Effect.SPAWN and self._clearing is not None:
            self._clearing.cancel()
        self._effects.put_nowait((effect, service))

    async def work(self) -> None:
        """Carry effects out, until cancelled."""
        while True:
            effect, service = await self._effects.get()
            match effect:
                case Effect.SPAWN:
                    await self._spawn(service)
                case Effect.RENEW if self.keeper is not None:
                    await self._renew(self.keeper, service)
                case Effect.STOP if self.keeper is not None:
                    self.keeper.stop()
                case Effect.KILL if self.keeper is not None:
                    self.keeper.kill()

    def adopt(self, keeper: Keeper, service: Service) -> None:
        """Go on with an attempt that an earlier daemon started, and where its last start began."""
        self._is_ready, self._num_renewals = service.was_ready, service.num_renewals
        started_at = self.started_at
        self._follow(keeper)
        if self.begins_at is not None:
            self.started_at = started_at

    def bury(self, attempt: int, report: ExitReport) -> None:
        """Tell the core of an attempt that ended while no daemon was there."""
        self._tasks.create_task(self._bury(attempt, report), name=f"end of {self._launch.name}")

    def let_go(self) -> None:
        """Wait no longer for an attempt that is stuck in the kernel."""
        if self._life is not None:
            self._life.cancel()

    # --- one attempt -----------------------------------------------------------------------------------------------

    async def _spawn(self, service: Service) -> None:
        name = self._launch.name
        in_the_way = await self._clear_the_way()
        if in_the_way:
            self._tell(Refused(in_the_way))
            return
        self.oom_kills_before = oom_kill_count()
        self._prepare()
        try:
            keeper = await self._start(service.attempt)
        except GrpoError as error:
            log.error("%s: %s", name, error)
            self._tell(Exited(code=None, error=str(error), jitter=random.random()))
            return
        self._is_ready, self._num_renewals, self.begins_at = False, service.num_renewals, None
        self._follow(keeper)

    async def _renew(self, keeper: Keeper, service: Service) -> None:
        """Tell the service to begin anew, and listen for the line that says so from here on."""
        how = self._launch.restart_in_place
        assert how is not None, "only what can restart in place is told to"
        self._stop_probing()
        self.begins_at = await asyncio.to_thread(written_so_far, self._log)
        if self.keeper is not keeper:
            return  # it has ended meanwhile
        self._is_ready, self._num_renewals, self.started_at = False, service.num_renewals, time.time()
        keeper.tell_service(signal.Signals[how.signal])
        self._start_probing(self._probe_renewed(keeper, how.log))

    async def _probe_renewed(self, keeper: Keeper, pattern: str) -> None:
        line = LogSearch(self._log, self._offset(keeper), pattern)
        while not (await asyncio.to_thread(line.search)).passed:  # noqa: ASYNC110 - nothing tells us when a log grows
            await asyncio.sleep(RENEWAL_POLL_S)
        self._tell(Renewed(num_renewals=self._num_renewals))
        await self._probe(keeper)

    async def _start(self, attempt: int) -> Keeper:
        """Start a keeper; a daemon that leaves meanwhile waits until there is one that its successor can find."""
        starting = asyncio.create_task(
            start_keeper(self._launch, run=self._run, attempt=attempt, run_folder=self._run_folder)
        )
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.wait({starting}, timeout=START_LIMIT_S)
            raise

    async def _clear_the_way(self) -> str | None:
        """End what is ours on its ports and GPUs; who else is in the way, in words. A stop ends the looking."""
        take_ports, self.may_take_ports = self.may_take_ports, False
        self._clearing = asyncio.create_task(
            preflight.clear_the_way(
                self._launch,
                run=self._run,
                report=self._report,
                gpu_reader=self._sampler.gpu_reader,
                take_ports=take_ports,
            )
        )
        try:
            await asyncio.wait({self._clearing})
            return "stopped before it was started" if self._clearing.cancelled() else self._clearing.result()
        except OSError as error:
            words = f"cannot look for ports and GPU memory before its start: {error}; started all the same"
            self._notice("warning", f"{self._launch.name}: {words}", self._launch.name)
            return None
        finally:
            self._clearing.cancel()
            self._clearing = None

    def _follow(self, keeper: Keeper) -> None:
        self.keeper = keeper
        self.started_at = keeper.started_at
        words = f"attempt {keeper.attempt} of {self._launch.name}"
        self._start_probing(self._probe(keeper))
        self._life = self._tasks.create_task(self._live(keeper), name=words)
        if keeper.main_pid is not None:
            self._tell(Spawned())

    async def _live(self, keeper: Keeper) -> None:
        """Probe the attempt while it lives; clear away what is left of it; tell the core."""
        ended = asyncio.Event()
        reading = self._tasks.create_task(
            self._read_console(keeper.attempt, keeper.log_offset, ended), name=f"console of {self._launch.name}"
        )
        try:
            report = await keeper.exited()
        finally:
            self._stop_probing()
            ended.set()
        await reading
        if report.code == 0 and not self._is_ready:
            await self._ask_once_more(keeper)
        self.keeper = None
        await self._tell_end(keeper.attempt, keeper.log_offset, report)

    async def _bury(self, attempt: int, report: ExitReport) -> None:
        if report.log_offset is not None:
            ended = asyncio.Event()
            ended.set()
            await self._read_console(attempt, report.log_offset, ended)
        await self._tell_end(attempt, report.log_offset or 0, report)

    async def _tell_end(self, attempt: int, log_offset: int, report: ExitReport) -> None:
        name = self._launch.name
        if report.ended:
            log.info("%s: ended what attempt %d left behind: %s", name, attempt, ", ".join(report.ended))
        for words in report.unkillable:
            self._notice("error", f"{words} does not end after SIGKILL: it hangs in the kernel", name)
        if report.keeper_lost or self._launch.ports or self._sampler.gpus:
            await self._sweep()
        lines = await asyncio.to_thread(last_lines, self._log, log_offset)
        self._tell(Exited(code=report.code, error=report.error, last_lines=lines, jitter=random.random()))

    async def _sweep(self) -> None:
        name = self._launch.name
        try:
            await teardown.sweep(
                self._run,
                name,
                ports=self._launch.ports,
                report=self._report,
                ledger=self._sampler.processes(name),
                gpu_memory=self._sampler.gpu_memory_reader(name),
            )
        except OSError as error:
            words = f"cannot look for what it left: {error}; the end of the run looks again"
            self._notice("error", f"{name}: {words}", name)

    # --- probes ----------------------------------------------------------------------------------------------------

    async def _probe(self, keeper: Keeper) -> None:
        """Ask whether it is ready until it is, and from then on whether it lives."""
        if self._launch.ready is not None and not self._is_ready:
            prober = self._prober(self._launch.ready, keeper)
            progress = Progress(self._log, self._offset(keeper), self._launch.phases)
            while not (answer := await prober.ask()).passed:
                self._tell(self._answered(keeper, answer))
                await self._look_for_progress(keeper, progress)
                await asyncio.sleep(self._launch.ready.interval_s)
            self._is_ready = True
            self._tell(self._answered(keeper, answer))
        if self._launch.live is not None:
            prober = self._prober(self._launch.live, keeper)
            while True:
                await asyncio.sleep(self._launch.live.interval_s)
                self._tell(self._answered(keeper, await prober.ask()))

    def _start_probing(self, probing: Coroutine[None, None, None]) -> None:
        self._probing = self._tasks.create_task(probing, name=f"probing {self._launch.name}")

    def _stop_probing(self) -> None:
        if self._probing is not None:
            self._probing.cancel()

    async def _look_for_progress(self, keeper: Keeper, progress: Progress) -> None:
        name = self._launch.name
        held_bytes = self._sampler.gpu_memory_bytes.get(name)
        pids = [process.pid for process in self._sampler.processes(name)]
        movement = await asyncio.to_thread(progress.look, held_bytes, pids)
        if movement is not None:
            self._tell(Moved(attempt=keeper.attempt, num_renewals=self._num_renewals, phase=movement.phase))

    async def _read_console(self, attempt: int, log_offset: int, ended: asyncio.Event) -> None:
        """Keep the metrics that it prints, where it has any."""
        if self._launch.console:
            reader = ConsoleMetrics(
                self._launch,
                attempt=attempt,
                log_offset=log_offset,
                run_folder=self._run_folder,
                notice=lambda words: self._notice("warning", f"{self._launch.name}: {words}", self._launch.name),
            )
            await reader.run(ended)

    async def _ask_once_more(self, keeper: Keeper) -> None:
        """A command that does its work between two questions and ends has been ready if what it left says so."""
        ready = self._launch.ready
        if ready is not None and (ready.log is not None or ready.file is not None):
            self._tell(self._answered(keeper, await self._prober(ready, keeper).ask()))

    def _prober(self, probe: Probe, keeper: Keeper) -> Prober:
        launch = self._launch
        return Prober(probe, log=self._log, log_offset=self._offset(keeper), cwd=launch.cwd, env=launch.env)

    def _offset(self, keeper: Keeper) -> int:
        """Where in the log the start at hand begins."""
        return keeper.log_offset if self.begins_at is None else self.begins_at

    def _answered(self, keeper: Keeper, answer: Answer) -> Answered:
        start = {"attempt": keeper.attempt, "num_renewals": self._num_renewals}
        return Answered(**start, outcome=answer.kind, words=answer.words)

    # --- telling ---------------------------------------------------------------------------------------------------

    def _tell(self, event: Event) -> None:
        self._post(self._launch.name, event)

    def _report(self, line: str) -> None:
        self._notice("info", line, self._launch.name)
