"""Policy versions of the groups on the way, as the rollout API reports them to the supervisor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grpo_engine.rollouts.config import ApiConfig
from grpo_engine.rollouts.coordinator import Coordinator
from grpo_engine.rollouts.state.api_state import ApiState
from grpo_engine.rollouts.state.records import Stored
from grpo_engine.rollouts.storage.store import Store
from grpo_engine.serving.reporting import Reporter
from grpo_engine.wire.rollouts import RegisterEnvironmentRequest, RegisterRequest
from grpo_engine.wire.supervisor import MAX_VERSIONS, VersionsInFlight

NOW = 1000.0


def api(**changes: Any) -> ApiState:
    """A trainer that waits for batches of four sequences, and an environment of groups of two, with id 0."""
    empty = Stored(run=None, environments=[], leases=[], groups=[], latest_body=None)
    state = ApiState(empty, lease_s=60.0, liveness_s=30.0, share_wait_s=5.0, now=NOW)
    run = {"wandb_group": "", "wandb_project": "", "batch_size": 4, "max_token_len": 64, "checkpoint_dir": "c"}
    run |= {"save_checkpoint_interval": 0, "starting_step": 0, "num_steps": 9, **changes}
    state.register(RegisterRequest.model_validate(run), uuid=1)
    take_batch(state, version=7)
    environment = {"max_token_length": 64, "desired_name": "sort6", "weight": 1.0, "group_size": 2}
    state.register_environment(RegisterEnvironmentRequest.model_validate({**environment, "takes_slots": True}), NOW)
    return state


def take_batch(state: ApiState, *, version: int, ack: str = "") -> None:
    state.next_batch(client="us", ack=ack, lease_id="lease", now=NOW, policy_version=version)


def put(state: ApiState, *versions: int | None) -> None:
    for version in versions:
        state.place(0, 2, 100, NOW, policy_version=version)


def test_queued_groups_are_counted_by_version_beside_the_one_that_is_served() -> None:
    state = api()
    put(state, 7, 5, 7, None)
    assert state.versions_in_flight(NOW) == VersionsInFlight(newest=7, queued={5: 1, 7: 2}, num_unversioned=1)
    take_batch(state, version=8)  # the two oldest
    assert state.versions_in_flight(NOW) == VersionsInFlight(newest=8, queued={7: 1}, num_unversioned=1)


def test_groups_that_live_environments_sample_are_counted() -> None:
    state = api()
    state.report_sampling(0, 6)
    put(state, 7)
    flight = state.versions_in_flight(NOW)
    assert flight is not None
    assert flight.num_sampled == 5
    later = state.versions_in_flight(NOW + 31)  # it has timed out
    assert later is not None
    assert later.num_sampled == 0


def test_many_versions_are_counted_together_from_some_on() -> None:
    state = api()
    put(state, *range(MAX_VERSIONS + 10))
    flight = state.versions_in_flight(NOW)
    assert flight is not None
    assert (min(flight.queued), len(flight.queued), flight.num_older) == (10, MAX_VERSIONS, 10)


def test_nothing_is_told_before_a_trainer_has_registered() -> None:
    empty = Stored(run=None, environments=[], leases=[], groups=[], latest_body=None)
    assert ApiState(empty, lease_s=1.0, liveness_s=1.0, share_wait_s=1.0, now=NOW).versions_in_flight(NOW) is None


async def test_the_report_of_the_rollout_api_has_them(tmp_path: Path) -> None:
    reporter, store = Reporter(service="api", attempt=1), Store(tmp_path / "rollouts.sqlite")
    coordinator = Coordinator(ApiConfig(store=tmp_path / "rollouts.sqlite"), store, store.load(), reporter)
    coordinator.state = api()
    put(coordinator.state, 7)
    report = reporter.report()
    await coordinator.close_store()
    assert report.versions == VersionsInFlight(newest=7, queued={7: 1})
