"""Restarts of the inference server that a bridge requests from the supervisor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from threading import Thread

import pytest
from stage import free_ports
from workplace import IDLE, UP, Workplace, service, until

from grpo_engine.bridges.transport.server_control import SupervisedServer
from grpo_engine.errors import BridgeError, PeerUnavailable
from grpo_engine.wire.supervisor import RunState

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ONCE_ONLY = """
import os, signal, sys
if os.path.exists(sys.argv[1]): sys.exit("no memory left on the GPU")
open(sys.argv[1], "w").close()
print("up", flush=True)
signal.pause()
"""
"""Fails at every start but the first."""

SETTINGS = {
    "bridge": {"mode": "lora_restart", "every_steps": 2, "restart": True},
    "services.env": {"group_size": 4, "max_batches_offpolicy": 3},
    "services.trainer": {"training_steps": 5, "batch_size": 16, "checkpoint_interval": 0, "eval_every": 0},
}
"""Of the profile tiny-cpu."""


def with_settings(tables: Mapping[str, Mapping[str, object]]) -> list[str]:
    """The flags that run the profile tiny-cpu with these settings."""
    pairs = [f"{table}.{key}={json.dumps(value)}" for table, keys in tables.items() for key, value in keys.items()]
    return ["--profile", "tiny-cpu", *(word for pair in pairs for word in ("--set", pair))]


def server_of(place: Workplace, name: str, **settings: object) -> SupervisedServer:
    return SupervisedServer(place.run_folder(), name, **{"patience_s": 20, **settings})  # type: ignore[arg-type]


@pytest.mark.extended("test_bridges_restart.py has the restarts of a bridge, test_export.py what an export writes")
def test_a_run_trains_through_restarts_that_its_bridge_requests_and_is_exported(place: Workplace) -> None:
    api, vllm = place.ports = free_ports(2)
    ports = {"services.api": {"port": api}, "services.vllm": {"port": vllm}}
    place.succeed("up", *with_settings(SETTINGS | ports), "--wait", "finished", limit_s=300)
    status, folder = place.status(), place.run_folder()
    assert status.state is RunState.FINISHED
    attempts = {each.name: each.attempt for each in status.services}
    assert attempts == {"api": 1, "vllm": 3, "env": 1, "trainer": 1}  # before version 2 and before version 4
    assert place.log("trainer").count("vllm is ready again after") == 2
    assert all(f"Loaded version {version} from" in place.log("vllm") for version in (2, 4))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert not (folder / "handover").exists()
    # and it is exported, by another process, which takes four seconds
    exported = place.succeed("export", folder.name, "model", "--merge-lora").strip()
    assert exported == str(place.folder / "model")
    assert {"model.safetensors", "config.json", "README.md"} <= {
        path.name for path in (place.folder / "model").iterdir()
    }
    assert "lora_restart" in (place.folder / "model" / "README.md").read_text()


def test_a_restart_returns_when_the_new_process_is_ready(place: Workplace) -> None:
    place.up(place.server(loads_s=0.5))
    before = place.pid()
    server_of(place, "a").restart()
    status = place.service()
    assert status.pid not in (None, before)
    assert (status.state, status.attempt) == ("ready", 2)


def test_a_server_that_fails_at_its_restart_is_an_error_with_its_reason_and_its_log(place: Workplace) -> None:
    place.up(service("a", ONCE_ONLY, place.folder / "started", ready=UP), service("b", IDLE))
    error = r"a did not become ready after its restart: a is failed: exit code 1; last lines:\s+no memory left on"
    with pytest.raises(BridgeError, match=error):
        server_of(place, "a").restart()


def test_an_unknown_service_and_a_missing_supervisor_are_errors(place: Workplace) -> None:
    place.up(service("a", IDLE, ready=UP))
    with pytest.raises(BridgeError, match=r"'vllm' is not a service of p-.*: a"):
        server_of(place, "vllm").restart()
    place.succeed("down")
    with pytest.raises(PeerUnavailable, match=r"the supervisor of p-.* does not answer"):
        server_of(place, "a", patience_s=0.2).restart()


def test_a_restart_completes_although_its_supervisor_is_killed(place: Workplace) -> None:
    place.up(place.server(loads_s=2), service("b", IDLE))
    restarting = Thread(target=server_of(place, "a", patience_s=60).restart)
    restarting.start()
    until(lambda: place.service().attempt == 2)
    place.kill_supervisor()
    place.succeed("start", "b")  # starts a supervisor that takes over
    restarting.join()
    assert (place.service().state, place.service().attempt) == ("ready", 2)


def test_a_wait_for_a_restart_ends_when_training_stops(place: Workplace) -> None:
    place.up(place.server(), service("b", IDLE))
    with pytest.raises(PeerUnavailable, match="not waiting for a, since training is stopping"):
        server_of(place, "a", is_stopping=lambda: True).restart()


@pytest.mark.parametrize(
    ("setting", "error"),
    [
        (
            {"restart_with": ["vllm"]},
            "--set services.trainer.restart_with=[\"vllm\"]: 'vllm', which this trainer restarts (bridge.restart)",
        ),
        (
            {"inference_service": "sampler"},
            "--set services.trainer.inference_service=\"sampler\": 'sampler' is not a service here",
        ),
    ],
    ids=["restart_with", "unknown service"],
)
def test_a_profile_that_cannot_restart_its_server_is_refused(
    place: Workplace, setting: Mapping[str, object], error: str
) -> None:
    plan = place.grpo("plan", *with_settings(SETTINGS | {"services.trainer": setting}))
    assert plan.returncode == 2
    assert error in plan.stderr
