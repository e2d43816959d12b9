"""A run on several machines, made of namespaces, by the commands of docs/cluster.md."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from machines import ClusterWorkplace, ray_machines, why_not
from workplace import until

from grpo_engine.wire.supervisor import RunStatus
from grpo_tui.profile.cluster import has_ray

pytestmark = [
    pytest.mark.skipif(not has_ray(), reason="Ray is not installed"),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.extended("test_cluster_broker.py and test_cluster_relay.py have the parts of it on one machine"),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterWorkplace]:
    with ray_machines(tmp_path_factory.mktemp("shared"), "m1", "m2", "m3") as place:
        yield place


@contextmanager
def run(place: ClusterWorkplace, *settings: str) -> Iterator[Path]:
    """A run of `tiny-ray` on these machines, whose end leaves nothing of it, and the cluster as it was."""
    before = cluster(place)
    words = [word for setting in settings for word in ("--set", setting)]
    joined = ("--set", f"cluster.address={place.address}")
    up = ("up", "--profile", "tiny-ray", "--detach", "--wait", "ready")
    name = place.succeed(*up, *joined, *words, "--set", "services.trainer.eval_every=0", limit_s=600).strip()
    assert {each.name: each.machine for each in status(place, name).services if each.machine} == {
        "trainer": "m2",
        "vllm": "m3",
    }
    yield place.folder / "logs" / name
    place.succeed("down", name)
    assert not place.survivors()
    assert cluster(place) == before


def status(place: ClusterWorkplace, name: str) -> RunStatus:
    return RunStatus.model_validate_json(place.succeed("status", name, "--json"))


def steps(run_folder: Path) -> list[dict[str, float]]:
    """The metrics of each step."""
    try:
        lines = (run_folder / "metrics.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [json.loads(line)["metrics"] for line in lines]


def cluster(place: ClusterWorkplace) -> set[int]:
    """The processes of the cluster itself."""
    found = [
        place.processes(each, kind) for each in place.machines.all for kind in ("gcs_server", "raylet_socket_name")
    ]
    return {process.pid for some in found for process in some}


def test_a_run_trains_over_three_machines_and_leaves_the_cluster_as_it_was(place: ClusterWorkplace) -> None:
    with run(place, "services.trainer.training_steps=6") as folder:
        until(lambda: len(steps(folder)) == 6)


def test_weights_are_sent_from_machine_to_machine_and_again_to_a_server_that_was_killed(
    place: ClusterWorkplace,
) -> None:
    settings = ("bridge={mode='broadcast'}", "services.trainer.max_staleness=0", "services.trainer.training_steps=30")
    with run(place, *settings) as folder:
        until(lambda: len(steps(folder)) >= 3)
        (server,) = place.processes(place.machines.all[2], "-m grpo_engine server")
        os.kill(server.pid, signal.SIGKILL)
        until(lambda: len(steps(folder)) == 30)
        assert next(each for each in status(place, folder.name).services if each.name == "vllm").attempt == 2
        # Sampled by the weights that are trained on: the two compute the same, but for rounding.
        assert max(each["alignment/diff_abs_mean"] for each in steps(folder)) < 1e-4
        assert {each["sync/num_servers"] for each in steps(folder) if "sync/num_servers" in each} == {1.0}
        assert {each["rollout/staleness_max"] for each in steps(folder)} == {0.0}
