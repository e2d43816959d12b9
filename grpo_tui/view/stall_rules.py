"""The rules of diagnosis for a run that makes no steps: since when, and which service or rank waits for which. Pure.

What services wait for is what they report (`ServiceStatus.waits_for`); one that reports nothing, as a stock trainer, is
left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from grpo_engine.wire.metrics import MetricsLine
from grpo_engine.wire.supervisor import ENDED_RUN_STATES, RunStatus, ServiceState, ServiceStatus, WaitsFor, Warning
from grpo_tui.view.format import duration_text, with_key
from grpo_tui.view.progress import step_spans
from grpo_tui.view.service_rules import ENVIRONMENT_KINDS, INFERENCE_KIND, TRAINER_KIND

LONG_S = 60.0
LONG_FACTOR = 5.0
"""Times the usual duration of a step, or of an evaluation while one is in progress."""
LONG_FIRST_S = 300.0
"""For what has not happened yet in this start of the trainer: the first step compiles, the first evaluation is new."""
CHANGING = frozenset({ServiceState.WAITING, ServiceState.STARTING, ServiceState.STOPPING})
WORDS = {
    WaitsFor.BATCH: "waits for groups",
    WaitsFor.EVALUATION: "waits for an evaluation",
    WaitsFor.REHEARSAL: "rehearses a step, for which kernels are compiled",
    WaitsFor.UPDATE: "waits for the inference server to take new weights",
    WaitsFor.INFERENCE: "waits for completions",
    WaitsFor.REWARDS: "waits for its reward function",
    WaitsFor.ROLLOUT_API: "waits for the rollout API",
    WaitsFor.TRAINER: "waits for the trainer: it has sampled as far ahead as it may",
    WaitsFor.STEP: "is asleep while the trainer steps",
}


def stalls(lines: Sequence[MetricsLine], status: RunStatus, now: float) -> Iterator[Warning]:
    """Ranks that make no progress; without any, a run that makes no steps."""
    found = list(_stalled_ranks(status, now))
    yield from found or no_step(lines, status, now)


def _stalled_ranks(status: RunStatus, now: float) -> Iterator[Warning]:
    for service in status.services:
        if (stall := service.rank_stall) is None:
            continue
        yield Warning(
            id=f"rank-stalled:{service.name}",
            severity="warning",
            text=f"{service.name}: no progress for {duration_text(now - stall.since)}: {stall.text}",
            hint=f"`grpo-tui logs {service.name}` has the stacks of all ranks; --rank-timeout-s ends the wait; "
            f"`grpo-tui restart {service.name}` goes on from the newest checkpoint",
        )


def no_step(lines: Sequence[MetricsLine], status: RunStatus, now: float) -> Iterator[Warning]:
    """No optimizer step for far longer than one usually takes, though every service is up."""
    trainer = _trainer(status)
    is_changing = any(service.state in CHANGING for service in status.services)
    if trainer is None or is_changing or status.is_ending or status.state in ENDED_RUN_STATES:
        return
    steps = [line for line in lines if line.step > 0]
    ready_at = trainer.ready_at or trainer.started_at or now
    last = steps[-1].time if steps else ready_at
    spans_s = step_spans(steps)
    usual_s, limit_s = median(spans_s) if spans_s else None, LONG_S
    if usual_s is None or last <= ready_at:
        limit_s = LONG_FIRST_S
    if usual_s is not None:
        limit_s = max(limit_s, LONG_FACTOR * usual_s)
    if trainer.waits_for is WaitsFor.EVALUATION:
        times_s = [line.metrics["eval/time"] for line in lines if "eval/time" in line.metrics]
        limit_s = max(limit_s, LONG_FACTOR * times_s[-1] if times_s else LONG_FIRST_S)
    idle_s = now - max(last, ready_at)
    if idle_s < limit_s:
        return
    usually = "" if usual_s is None else f" (usually one takes {duration_text(usual_s)})"
    waits = [_wait(service, now) for service in status.services if service.waits_for is not None]
    notes = [f"{service.name}: {service.note}" for service in status.services if service.note]
    yield Warning(
        id="no-step",
        severity="warning",
        text=f"no step for {duration_text(idle_s)}{usually}"
        + (f": {'; '.join([*waits, *notes])}" if waits or notes else ""),
        hint=_hint(status, trainer),
    )


def _trainer(status: RunStatus) -> ServiceStatus | None:
    trainers = [each for each in status.services if each.kind == TRAINER_KIND and each.state is ServiceState.READY]
    return trainers[0] if trainers else None


def _wait(service: ServiceStatus, now: float) -> str:
    assert service.waits_for is not None
    since = "" if service.waits_since is None else f" ({duration_text(now - service.waits_since)})"
    return f"{service.name} {WORDS[service.waits_for]}{since}"


def _hint(status: RunStatus, trainer: ServiceStatus) -> str:
    """What to look at: what cannot be written, else the service at the end of the chain of waits."""
    if status.write_faults or any(service.write_faults for service in status.services):
        return "first see to what cannot be written; services go on by themselves then"
    servers = [service.name for service in status.services if service.kind == INFERENCE_KIND]
    restart = f"{with_key(f'`grpo-tui restart {servers[0]}`', 'v')} restarts it" if servers else "its log says why"
    environments = [service for service in status.services if service.kind in ENVIRONMENT_KINDS]
    logs = " and ".join(f"`grpo-tui logs {service.name}`" for service in environments or [trainer])
    if trainer.waits_for is WaitsFor.UPDATE:
        return f"the inference server does not take the weights: {restart}"
    if trainer.waits_for is WaitsFor.EVALUATION:
        return "evaluate less: --eval-prompts, --eval-samples, --eval-every; --eval-timeout-s is its limit"
    if trainer.waits_for is not WaitsFor.BATCH:
        return f"`grpo-tui logs {trainer.name}` shows what it does"
    wanted = {service.waits_for for service in environments}
    if WaitsFor.INFERENCE in wanted:
        return f"the inference server gives no completions: {restart}; fewer --max-tokens make them shorter"
    if WaitsFor.REWARDS in wanted:
        return f"rewards take long, or hang: {logs}"
    if wanted == {WaitsFor.TRAINER}:
        return "groups are there and make no batch: a multiple of --group-size must fit into the trainer's batch"
    return f"{logs} says what hinders it"
