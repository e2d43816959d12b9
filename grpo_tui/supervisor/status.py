"""The status document of a run (`status --json`, `state.json`, the screen), made from what the supervisor knows."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

from grpo_engine.wire.run_folder import service_log
from grpo_engine.wire.supervisor import (
    ENDED_RUN_STATES,
    PlacedUsage,
    RanksReport,
    RankStatus,
    RunState,
    RunStatus,
    ServiceReport,
    ServiceState,
    ServiceStatus,
    SupervisorInfo,
    WriteFault,
)
from grpo_tui.profile.plan_file import Plan
from grpo_tui.run_files.timeline import with_usage
from grpo_tui.services.base import Launch
from grpo_tui.supervisor.explanations import why
from grpo_tui.supervisor.machine import Service
from grpo_tui.supervisor.order import Ending
from grpo_tui.supervisor.report.machines import Machines
from grpo_tui.supervisor.report.self_reports import SelfReports
from grpo_tui.supervisor.service_runner import ServiceRunner
from grpo_tui.supervisor.state_file import Ledger, StartTimes, StateDocument, boot_id, to_ledger
from grpo_tui.supervisor.usage.sampling import Sampler


@dataclass(slots=True, kw_only=True)
class RunRecord:
    """What changes in the course of a run; `core.py` alone writes it."""

    services: dict[str, Service]
    state: RunState
    started_at: float
    ended_at: float | None = None
    times: dict[str, StartTimes]
    ending: Ending | None = None
    has_been_up: bool = False
    """Whether every service has been ready at the same time."""
    supervisor: SupervisorInfo | None = field(
        default_factory=lambda: SupervisorInfo(pid=os.getpid(), started_at=time.time())
    )

    def note_start(self, before: Service, after: Service) -> None:
        """Record when the latest start of a service came so far."""
        times, now = self.times[after.name], time.time()
        if after.num_starts != before.num_starts:
            times.prepared_at = times.begun_at = None
        if after.state is ServiceState.STARTING and before.state is not ServiceState.STARTING:
            times.ready_at = None
        if after.is_prepared and not before.is_prepared:
            times.prepared_at = now
        if after.is_running and not before.is_running:
            times.begun_at = now
        if after.was_ready and not before.was_ready:
            times.ready_at = now

    @property
    def is_ending(self) -> bool:
        """Whether the run is being taken down, and is not over yet."""
        return self.ending is not None and self.state not in ENDED_RUN_STATES


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusReport:
    """Makes the documents; reads all of its parts and changes none."""

    plan: Plan
    run_folder: Path
    temporary_folder: Path | None
    launches: Mapping[str, Launch]
    runners: Mapping[str, ServiceRunner]
    sampler: Sampler
    self_reports: SelfReports[ServiceReport]
    rank_reports: SelfReports[RanksReport]
    machines: Machines
    record: RunRecord

    def run(self, *, write_faults: list[WriteFault], last_usage_of: str | None = None) -> RunStatus:
        """The status of the run, without metrics, which the reader adds from their file.

        Args:
            write_faults: what the supervisor cannot write.
            last_usage_of: a service that has ended, whose last sample is included nevertheless.
        """
        return RunStatus(
            run=self.run_folder.name,
            profile=self.plan.profile_name,
            tags=list(self.plan.tags),
            state=self.record.state,
            supervisor=self.record.supervisor,
            services=[self.service(name, with_last_usage=name == last_usage_of) for name in self.launches],
            gpus=self.sampler.gpus,
            gpu_note=self.sampler.gpu_note,
            low_disks=self.sampler.low_disks,
            write_faults=write_faults,
            machines=self.machines.latest,
            is_ending=self.record.is_ending,
            started_at=self.record.started_at,
            ended_at=self.record.ended_at,
        )

    def service(self, name: str, *, with_last_usage: bool = False) -> ServiceStatus:
        """The status of one service."""
        service, launch, runner = self.record.services[name], self.launches[name], self.runners[name]
        pid = runner.keeper.main_pid if runner.keeper is not None else None
        has_usage = service.has_process or with_last_usage
        usage = self.sampler.usage.get(name) if has_usage else None
        attempt = service.attempt if service.has_process else -1
        machines = self.machines.of(name) if has_usage else ()
        placed = self.machines.usage().get(name, PlacedUsage())
        times = self.record.times[name]
        said, ranks = self.self_reports.of(name, attempt), self.rank_reports.of(name, attempt)
        return ServiceStatus(
            name=name,
            kind=launch.kind,
            state=service.state,
            health=service.answer,
            probe=service.outcome,
            phase=service.phase,
            pid=pid,
            pgid=pid,
            started_at=runner.started_at,
            prepared_at=times.prepared_at,
            begun_at=times.begun_at,
            ready_at=times.ready_at,
            attempt=service.attempt,
            restarts=max(0, service.num_starts - 1),
            failures=sum(time.monotonic() - at < launch.restart_window_s for at in service.restarted_at_s),
            exit_code=service.exit_code,
            oom_kills=service.oom_kills,
            ports=list(launch.ports),
            gpus=list(launch.gpus),
            cpu_percent=placed.cpu_percent if machines else usage.cpu_percent if usage else None,
            rss_bytes=placed.rss_bytes if machines else usage.rss_bytes if usage else None,
            gpu_memory_bytes=(
                placed.gpu_memory_bytes if machines else self.sampler.gpu_memory_bytes.get(name) if has_usage else None
            ),
            log=str(service_log(self.run_folder, name)),
            why=why(name, self.record.services, self.launches, time.monotonic()),
            is_refused=service.is_refused,
            refusals=list(service.refusals),
            waits_for=said.waits_for,
            waits_since=said.waits_since,
            note=said.note,
            write_faults=said.write_faults,
            ranks=self._ranks(name, ranks.ranks),
            rank_stall=ranks.stall,
            machine=machines[0] if machines else None,
            machines=list(machines),
            versions=said.versions,
        )

    def _ranks(self, name: str, reported: list[RankStatus]) -> list[RankStatus]:
        """The reported ranks with their GPUs and figures; they are in the order of the service's GPUs.

        Those of a cluster are reported with their GPUs.
        """
        if self.launches[name].is_placed:
            return with_usage(reported, self.machines.usage().get(name, PlacedUsage()).ranks)
        ranks = [
            rank.model_copy(update={"gpu": gpu})
            for rank, gpu in zip_longest(reported, self.launches[name].rank_gpus)
            if rank is not None
        ]
        return with_usage(ranks, self.sampler.rank_usage.get(name, ()))

    def state_document(self, *, write_faults: list[WriteFault]) -> StateDocument:
        """The status and the ledger, for `state.json`."""
        ledger = Ledger(
            ending=self.record.ending.state if self.record.ending is not None and self.record.is_ending else None,
            has_been_up=self.record.has_been_up,
            boot_id=boot_id(),
            temporary_folder=self.temporary_folder,
            services={
                name: to_ledger(
                    service,
                    started_at=self.runners[name].started_at,
                    begins_at=self.runners[name].begins_at,
                    times=self.record.times[name],
                    processes=self.sampler.processes(name),
                )
                for name, service in self.record.services.items()
            },
        )
        return StateDocument(**dict(self.run(write_faults=write_faults)), ledger=ledger)


def shown(service: Service) -> tuple[object, ...]:
    """The part of a service that clients see; without its usage, and without the seconds in its explanation."""
    probe, progress = (service.answer, service.outcome), (service.phase, service.is_running, service.is_prepared)
    return (service.state, probe, service.reason, service.num_starts, progress, service.exit_code)
