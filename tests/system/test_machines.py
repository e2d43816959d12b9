"""A run on several machines, made of namespaces, by the commands of docs/cluster.md."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from machines import ClusterWorkplace, ray_machines, why_not
from workplace import until

from grpo_tui.profile.cluster import has_ray

pytestmark = [
    pytest.mark.skipif(not has_ray(), reason="Ray is not installed"),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.extended("test_cluster_broker.py and test_cluster_relay.py have the parts of it on one machine"),
    pytest.mark.timeout(900),
]
STEPS = 6


@pytest.fixture
def place(tmp_path: Path) -> Iterator[ClusterWorkplace]:
    with ray_machines(tmp_path, "m1", "m2", "m3") as place:
        yield place


def steps(place: ClusterWorkplace) -> list[dict[str, float]]:
    """The metrics of each step."""
    lines = [json.loads(line) for line in (place.run_folder() / "metrics.jsonl").read_text().splitlines()]
    return [each["metrics"] for each in lines]


def cluster(place: ClusterWorkplace) -> set[int]:
    """The processes of the cluster itself."""
    found = [
        place.processes(each, kind) for each in place.machines.all for kind in ("gcs_server", "raylet_socket_name")
    ]
    return {process.pid for some in found for process in some}


def test_a_run_trains_over_three_machines_and_leaves_the_cluster_as_it_was(place: ClusterWorkplace) -> None:
    before = cluster(place)
    short = ("--set", f"services.trainer.training_steps={STEPS}", "--set", "services.trainer.eval_every=0")
    joined = ("--set", f"cluster.address={place.address}")
    place.succeed("up", "--profile", "tiny-ray", *joined, *short, "--detach", "--wait", "ready", limit_s=600)
    assert {each.name: each.machine for each in place.status().services if each.machine} == {
        "trainer": "m2",
        "vllm": "m3",
    }
    until(lambda: len(steps(place)) == STEPS)
    place.succeed("down")
    assert not place.survivors()
    assert cluster(place) == before
