"""Why a service is not running, in words. Pure."""

from __future__ import annotations

from grpo_engine.wire.supervisor import ServiceState as S
from grpo_tui.services.base import Launch, NeedCondition
from grpo_tui.supervisor.machine import AfterStop, Service, last_words
from grpo_tui.supervisor.order import Launches, Services, is_hopeless, unmet_needs

CONDITION_WORDS = {
    NeedCondition.STARTED: "to start",
    NeedCondition.READY: "to be ready",
    NeedCondition.FINISHED: "to finish",
}


def why(name: str, services: Services, launches: Launches, now_s: float) -> str | None:
    """Why `name` is where it is; None when it is ready and there is nothing to explain."""
    service = services[name]
    match service.state:
        case S.READY:
            return None
        case S.WAITING:
            verb = "cannot start without" if is_hopeless(name, services, launches) else "waits for"
            return (
                "; ".join(
                    f"{verb} {needed} {CONDITION_WORDS[condition]}: {_standing(services[needed], now_s)}"
                    for needed, condition in unmet_needs(name, services, launches)
                )
                or "about to start"
            )
        case S.STARTING:
            return _starting(service, now_s) + _ready_limit(launches[name])
        case S.STOPPING:
            what = "restarting" if service.after_stop is AfterStop.RESTART else "stopping"
            return f"{what} for {_seconds(now_s - service.since_s)}: {service.reason}"
        case S.BACKOFF if service.last_lines:
            return f"{service.reason}; last line: {last_words(service.last_lines[-1])}"
        case S.FAILED if any(line not in (service.reason or "") for line in service.last_lines):
            return f"{service.reason}; last lines:\n" + "\n".join(f"  {line}" for line in service.last_lines)
        case _:
            return service.reason


def _standing(service: Service, now_s: float) -> str:
    """Where another service stands, short enough for a clause."""
    match service.state:
        case S.STARTING:
            return _starting(service, now_s)
        case S.WAITING:
            return "it waits itself"
        case S.READY:
            return f"ready for {_seconds(now_s - service.since_s)}"
        case S.FINISHED:
            return "it ended without having been ready"
        case _:
            return f"{service.state}, {service.reason}" if service.reason else str(service.state)


def _starting(service: Service, now_s: float) -> str:
    details = "".join(f", {words}" for words in (service.phase, service.answer) if words)
    return f"starting for {_seconds(now_s - service.since_s)}{details}"


def _ready_limit(launch: Launch) -> str:
    if launch.ready is None:
        return ""
    more = "" if launch.ready.stalled_s is None else ", more while it moves"
    return f" (limit {_seconds(launch.ready.within_s)}{more})"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
