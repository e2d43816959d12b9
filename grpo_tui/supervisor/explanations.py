"""Explains the state of a service to people (`ServiceStatus.why`). Pure."""

from __future__ import annotations

from grpo_engine.wire.supervisor import ServiceState as S
from grpo_tui.services.base import Launch, NeedCondition
from grpo_tui.supervisor.machine import AfterStop, Service, shortened
from grpo_tui.supervisor.order import Launches, Services, is_permanently_blocked, unmet_needs

CONDITION_WORDS = {
    NeedCondition.STARTED: "to start",
    NeedCondition.READY: "to be ready",
    NeedCondition.FINISHED: "to finish",
    NeedCondition.SETTLED: "to be ready or to end",
}


def why(name: str, services: Services, launches: Launches, now_s: float) -> str | None:
    """Why the service is in its state; None when it is ready."""
    service = services[name]
    match service.state:
        case S.READY:
            return None
        case S.WAITING:
            verb = "cannot start without" if is_permanently_blocked(name, services, launches) else "waits for"
            waiting = (
                "; ".join(
                    f"{verb} {needed} {CONDITION_WORDS[condition]}: {_state_of(services[needed], now_s)}"
                    for needed, condition in unmet_needs(name, services, launches)
                )
                or "about to start"
            )
            return _preparation(service) + waiting
        case S.STARTING:
            return _starting(service, now_s) + _ready_limit(launches[name])
        case S.STOPPING:
            what = "restarting" if service.after_stop is AfterStop.RESTART else "stopping"
            return f"{what} for {_seconds(now_s - service.since_s)}: {service.reason}"
        case S.BACKOFF if service.last_lines:
            return f"{service.reason}; last line: {shortened(service.last_lines[-1])}"
        case S.FAILED if any(line not in (service.reason or "") for line in service.last_lines):
            return f"{service.reason}; last lines:\n" + "\n".join(f"  {line}" for line in service.last_lines)
        case _:
            return service.reason


def _preparation(service: Service) -> str:
    """What a service that was started before its turn does."""
    if not service.is_held:
        return ""
    return "prepared, " if service.is_prepared else "preparing, "


def _state_of(service: Service, now_s: float) -> str:
    """The state of another service, in one clause."""
    match service.state:
        case S.STARTING:
            return _starting(service, now_s)
        case S.WAITING:
            return "it is waiting too"
        case S.READY:
            return f"ready for {_seconds(now_s - service.since_s)}"
        case S.FINISHED:
            return "it ended before it was ready"
        case _:
            return f"{service.state}, {service.reason}" if service.reason else str(service.state)


def _starting(service: Service, now_s: float) -> str:
    details = "".join(f", {words}" for words in (service.phase, service.answer) if words)
    return f"starting for {_seconds(now_s - service.since_s)}{details}"


def _ready_limit(launch: Launch) -> str:
    if launch.ready is None:
        return ""
    more = "" if launch.ready.stalled_s is None else ", longer while it makes progress"
    return f" (limit {_seconds(launch.ready.within_s)}{more})"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
