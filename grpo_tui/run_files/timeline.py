"""What a line of the timeline, `events.jsonl`, changes in the status document.

Lines are those of `grpo_engine.wire.supervisor`: a `Snapshot` with its time where a supervisor begins or takes a run
over (and where lines were lost), then `ServiceChanged`, `RunChanged` and `Notice`, and every few seconds a
`UsageSampled`. Event numbers start again with each supervisor, and one that is killed leaves at most half a last line.
"""

from __future__ import annotations

from collections.abc import Iterable

from grpo_engine.wire.supervisor import (
    ENDED_RUN_STATES,
    Event,
    Notice,
    RankStatus,
    RankUsage,
    RunChanged,
    RunStatus,
    ServiceChanged,
    ServiceStatus,
    Snapshot,
    UsageSampled,
)

USAGE_START = b'{"type":"usage"'
"""Begins the line of a `UsageSampled`: most lines are such, and are skipped without being parsed."""


def after_event(status: RunStatus, event: Snapshot | Event) -> RunStatus:
    """The status document after an event; a notice changes nothing in it."""
    match event:
        case Snapshot():
            return event.status
        case ServiceChanged():
            services = [event.service if each.name == event.service.name else each for each in status.services]
            return status.model_copy(update={"services": services})
        case RunChanged():
            ended_at = event.time if event.state in ENDED_RUN_STATES else None
            return status.model_copy(update={"state": event.state, "ended_at": ended_at})
        case UsageSampled():
            services = [_with_usage(each, event) for each in status.services]
            return status.model_copy(
                update={
                    "services": services,
                    "gpus": event.gpus,
                    "gpu_note": event.gpu_note,
                    "low_disks": event.low_disks,
                    "write_faults": event.write_faults,
                    **({} if event.machines is None else {"machines": event.machines}),
                },
            )
        case Notice():
            return status


def _with_usage(service: ServiceStatus, usage: UsageSampled) -> ServiceStatus:
    if service.pid is None:  # it may have exited after the sample was taken
        return service.model_copy(update={"cpu_percent": None, "rss_bytes": None, "gpu_memory_bytes": None})
    return service.model_copy(
        update={
            "cpu_percent": usage.cpu_percent.get(service.name),
            "rss_bytes": usage.rss_bytes.get(service.name),
            "gpu_memory_bytes": usage.gpu_memory_bytes.get(service.name),
            "ranks": with_usage(service.ranks, usage.ranks.get(service.name, ())),
        }
    )


def with_usage(ranks: Iterable[RankStatus], usage: Iterable[RankUsage]) -> list[RankStatus]:
    """Ranks with the figures of a sample."""
    figures = {each.rank: dict(each) for each in usage}
    return [rank.model_copy(update=figures.get(rank.rank, {})) for rank in ranks]
