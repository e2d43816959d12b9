"""Random histories of services: invariants of the life cycle and of the order, checked by hypothesis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launches import IN_PLACE, READY_WITHIN_60_S, launch, launches

from grpo_engine.wire.supervisor import ProbeOutcome, RunState
from grpo_engine.wire.supervisor import ServiceState as S
from grpo_tui.services.base import Launch, NeedCondition, Probe, RestartPolicy
from grpo_tui.supervisor import order
from grpo_tui.supervisor.machine import (
    UNKILLABLE_AFTER_S,
    Admitted,
    Effect,
    Event,
    Exited,
    KillAsked,
    LimitExceeded,
    Prepared,
    ProbeAnswered,
    Progressed,
    RestartAsked,
    RestartedInPlace,
    ServerKilled,
    Service,
    Spawned,
    StartAsked,
    StopAsked,
    Tick,
    step,
)

READY_WITHIN_60_S_OR_PROGRESS = Probe(http="http://127.0.0.1:1/health", within_s=60, stalled_s=30)


@dataclass
class Processes:
    """Processes as the kernel would have them: they end on SIGTERM, or ignore all but SIGKILL."""

    launches: Mapping[str, Launch]
    ignores_sigterm: frozenset[str] = frozenset()
    services: dict[str, Service] = field(default_factory=dict)
    alive: set[str] = field(default_factory=set)
    dying: set[str] = field(default_factory=set)
    is_down: set[str] = field(default_factory=set)
    """Services that have stopped as last requested."""
    held: set[str] = field(default_factory=set)
    """Processes whose gate is closed."""
    num_cores: int = 2
    ending: order.Ending | None = None
    now_s: float = 0.0

    def __post_init__(self) -> None:
        self.services = {name: Service(name=name) for name in self.launches}

    def apply(self, name: str, event: Event) -> None:
        self.services[name], effects = step(self.services[name], event, self.now_s, self.launches[name])
        for effect in effects:
            match effect:
                case Effect.SPAWN | Effect.SPAWN_HELD:
                    assert name not in self.alive, f"two processes of {name}"
                    assert name not in self.is_down, f"{name} was started after a completed stop"
                    self.alive.add(name)
                    if effect is Effect.SPAWN_HELD:
                        self.held.add(name)
                case Effect.OPEN_GATE:
                    assert name in self.alive & self.held, f"{name} has no gate"
                    self.held.discard(name)
                case Effect.STOP if name not in self.ignores_sigterm:
                    self.dying.add(name)
                case Effect.KILL:
                    self.dying.add(name)
                case Effect.RESTART_IN_PLACE:
                    assert name in self.alive, f"{name} restarts in place without a process"
                    assert name not in self.is_down, f"{name} was restarted after a completed stop"
                case Effect.STOP:
                    pass
        assert (name in self.alive) == self.services[name].has_process
        is_held = name in self.held and self.services[name].state not in {S.STOPPING, S.FAILED}
        assert is_held == self.services[name].is_held == (self.services[name].has_process and waits(self, name))
        assert not (name in self.held and (self.services[name].is_running or self.services[name].was_ready))
        assert not self.services[name].is_restarting_in_place or self.services[name].state is S.STARTING
        if self.services[name].state is S.STOPPED and not self.services[name].is_restart_pending:
            self.is_down.add(name)

    def decide(self) -> None:
        if self.ending is None and (state := order.run_outcome(self.services, self.launches)):
            self.end(state)
        for name, event in order.decisions(
            self.services, self.launches, self.ending, self.now_s, num_cores=self.num_cores
        ):
            # One that is being stopped stays held: it is noted that it is to start again.
            if isinstance(event, Admitted) and name in self.held and self.services[name].state is S.WAITING:
                assert not order.unmet_needs(name, self.services, self.launches), f"{name} begins before its turn"
            if self.services[name].is_restart_pending and isinstance(event, Admitted):
                followers = [f for f in order.transitive_followers(name, self.launches) if f in self.alive - self.held]
                is_alone = all(self.services[f].state is S.FAILED for f in followers)  # they hang in the kernel
                assert self.ending or is_alone, f"{name} is restarted before its followers have ended"
            self.apply(name, event)

    def end(self, state: RunState) -> None:
        budget_s = order.ending_budget_s(self.services, self.launches)
        self.ending = order.Ending(state=state, since_s=self.now_s, budget_s=budget_s)

    def exit(self, name: str, code: int) -> None:
        if name in self.alive:
            self.alive.discard(name)
            self.dying.discard(name)
            self.held.discard(name)
            self.apply(name, Exited(code=code))

    def command(self, name: str, event: Event) -> None:
        if isinstance(event, StartAsked | RestartAsked):
            self.is_down.discard(name)
        self.apply(name, event)

    def tick(self, seconds: float) -> None:
        self.now_s += seconds
        for name in self.launches:
            self.apply(name, Tick())


def waits(run: Processes, name: str) -> bool:
    return run.services[name].state is S.WAITING


POLICIES = st.sampled_from(list(RestartPolicy))
CONDITIONS = st.sampled_from(list(NeedCondition))


@st.composite
def runs(draw: st.DrawFn) -> Processes:
    names = ["a", "b", "c", "d"][: draw(st.integers(1, 4))]
    made = []
    for index, name in enumerate(names):
        needs = {other: draw(CONDITIONS) for other in names[:index] if draw(st.booleans())}
        followers = tuple(other for other in names[index + 1 :] if draw(st.integers(0, 5)) == 0)
        made.append(
            launch(
                name,
                needs=needs,
                followers=followers,
                restart=draw(POLICIES),
                ready=draw(st.sampled_from([None, READY_WITHIN_60_S, READY_WITHIN_60_S_OR_PROGRESS])),
                live=draw(st.sampled_from([None, Probe(tcp="a:1", within_s=30)])),
                restart_unhealthy=draw(st.booleans()),
                max_restarts=draw(st.integers(0, 2)),
                restart_in_place=draw(st.sampled_from([None, IN_PLACE])),
                prepares=draw(st.booleans()),
            )
        )
    return Processes(launches(*made), ignores_sigterm=frozenset(name for name in names if draw(st.integers(0, 3)) == 0))


EVENTS = st.tuples(
    st.sampled_from(
        ["start", "stop", "restart", "kill", "prepared", "spawned", "renewed", "pass", "fail", "move", "overrun"]
        + ["server"]
        + ["exit 0", "exit 1", "die"]
        + 2 * ["time"]
    ),
    st.integers(0, 3),
    st.sampled_from([0.1, 1.0, 13.0, 40.0, 70.0]),
)


def apply_event(run: Processes, what: str, index: int, seconds: float) -> None:
    name = list(run.launches)[index % len(run.launches)]
    attempt, in_place = run.services[name].attempt, run.services[name].num_in_place_restarts
    match what:
        case "start" | "stop" | "restart" | "kill" if run.ending is None:
            requests: dict[str, Event] = {
                "start": StartAsked(),
                "stop": StopAsked(),
                "restart": RestartAsked(),
                "kill": KillAsked(),
            }
            run.command(name, requests[what])
        case "prepared" if name in run.alive:
            run.apply(name, Prepared(attempt))
        case "spawned" if name in run.alive - run.held:
            run.apply(name, Spawned())
        case "renewed" if name in run.alive:
            run.apply(name, RestartedInPlace(num_in_place_restarts=in_place))
        case "pass" | "fail" if name in run.alive:
            outcome = ProbeOutcome.PASSED if what == "pass" else ProbeOutcome.CLOSED
            answer = ProbeAnswered(attempt=attempt, num_in_place_restarts=in_place, outcome=outcome, words=what)
            was_restarting = run.services[name].is_restarting_in_place
            run.apply(name, answer)
            assert not (was_restarting and run.services[name].state is S.READY), "the previous start answered"
        case "move" if name in run.alive:
            run.apply(name, Progressed(attempt=attempt, num_in_place_restarts=in_place, phase="loading"))
        case "server" if name in run.alive:
            run.apply(name, ServerKilled(attempt=attempt, num_in_place_restarts=in_place, words="killed"))
        case "overrun" if name in run.alive:
            run.apply(name, LimitExceeded("too much"))
        case "exit 0" | "exit 1":
            run.exit(name, int(what[-1]))
        case "die" if name in run.dying:
            run.exit(name, -15)
        case "time" if seconds < UNKILLABLE_AFTER_S or not run.dying:
            run.tick(seconds)  # what was killed dies within seconds: no process hangs in the kernel in these runs
    run.decide()


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(run=runs(), history=st.lists(EVENTS, max_size=60))
def test_no_history_runs_two_processes_or_starts_after_a_stop_and_every_run_settles(
    run: Processes, history: list[tuple[str, int, float]]
) -> None:
    run.decide()
    for what, index, seconds in history:
        apply_event(run, what, index, seconds)
    if run.ending is None:
        run.end(RunState.STOPPED)
    started_s = run.now_s
    while run.alive and run.now_s < started_s + 60:
        run.decide()
        for name in sorted(run.dying):
            run.exit(name, -9)
        run.tick(0.5)
    run.decide()
    assert not run.alive
    assert run.now_s - started_s <= 10.0 + 1.0, "the run took more than its budget"
    settled = {S.STOPPED, S.FINISHED, S.FAILED}
    assert {service.state for service in run.services.values()} <= settled
