"""A bridge that has the inference server restarted, under a supervisor: asked for, waited for, and never doubled."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
from stage import free_ports
from workplace import POLITE, SERVER, Workplace, open_workplace, service, until

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
"""Comes up at its first start alone."""
UP = "{ log = '^(up|listening)$', interval_s = 0.02 }"

STACK = """
[model]
name = "local/tiny"
dtype = "float32"
device = "cpu"
max_model_len = 64

[bridge]
mode = "{mode}"
every_steps = 2
restart = true

[services.api]
kind = "rollout_api"
port = {api}

[services.sampler]
kind = "inference"
engine = "torch"
port = {sampler}
logprobs_mode = "processed"
threads = 1
needs = {{ api = "ready" }}

[services.env]
kind = "environment"
task = "sort6"
group_size = 4
max_tokens = 8
needs = {{ api = "ready", sampler = "ready" }}

[services.trainer]
kind = "trainer"
training_steps = 5
batch_size = 16
gradient_accumulation_steps = 1
lr = 1e-3
optimizer = "adamw"
checkpoint_interval = 0
threads = 1
needs = {{ api = "ready", sampler = "ready", env = "ready" }}
"""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Workplace]:
    with open_workplace(tmp_path) as workplace:
        yield workplace


def server_of(place: Workplace, name: str, **settings: object) -> SupervisedServer:
    return SupervisedServer(place.run_folder(), name, **{"patience_s": 20, **settings})  # type: ignore[arg-type]


def test_a_run_trains_through_restarts_that_its_bridge_asks_for(place: Workplace) -> None:
    api, sampler = place.ports = free_ports(2)
    place.profile(STACK.format(mode="lora_restart", api=api, sampler=sampler))
    done = place.grpo("up", "--profile", "p", "--wait", "finished", limit_s=300)
    assert done.returncode == 0, done.stderr
    status, folder = place.status(), place.run_folder()
    assert status.state is RunState.FINISHED
    attempts = {each.name: each.attempt for each in status.services}
    assert attempts == {"api": 1, "sampler": 3, "env": 1, "trainer": 1}  # before version 2 and before version 4
    told = (folder / "trainer.log").read_text(errors="replace")
    assert told.count("sampler is ready again after") == 2
    served = (folder / "sampler.log").read_text(errors="replace")
    assert "Loaded version 2 from" in served
    assert "Loaded version 4 from" in served
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert not (folder / "handover").exists()


def test_a_restart_comes_back_with_a_new_process_that_is_ready(place: Workplace) -> None:
    (port,) = place.ports = free_ports(1)
    ready = f"{{ http = 'http://127.0.0.1:{port}/health', interval_s = 0.05, within_s = 20 }}"
    place.profile(service("a", SERVER, port, 0.5, ports=[port], ready=ready))
    place.up()
    before = place.pid("a")
    server_of(place, "a").restart()
    (status,) = place.status().services
    assert status.pid not in (None, before)
    assert (status.state, status.attempt) == ("ready", 2)
    assert place.grpo("down").returncode == 0


def test_a_server_that_does_not_come_up_again_is_an_error_with_its_reason_and_its_log(place: Workplace) -> None:
    place.profile(service("a", ONCE_ONLY, place.folder / "started", ready=UP), service("b", POLITE))
    place.up()
    with pytest.raises(
        BridgeError,
        match=r"a did not become ready after its restart: a is failed: exit code 1; last lines:\s+no memory left on",
    ):
        server_of(place, "a").restart()
    place.grpo("down")


def test_an_unknown_service_and_a_supervisor_that_is_gone_are_named(place: Workplace) -> None:
    place.profile(service("a", POLITE, ready=UP))
    place.up()
    with pytest.raises(BridgeError, match=r"'vllm' is not a service of p-.*: a"):
        server_of(place, "vllm").restart()
    assert place.grpo("down").returncode == 0
    with pytest.raises(PeerUnavailable, match=r"the supervisor of p-.* does not answer"):
        server_of(place, "a", patience_s=0.2).restart()


def test_a_restart_outlives_the_supervisor_that_was_asked_for_it(place: Workplace) -> None:
    (port,) = place.ports = free_ports(1)
    ready = f"{{ http = 'http://127.0.0.1:{port}/health', interval_s = 0.05, within_s = 60 }}"
    place.profile(service("a", SERVER, port, 3, ports=[port], ready=ready), service("b", POLITE))
    place.up()
    asked = Thread(target=server_of(place, "a", patience_s=60).restart)
    asked.start()
    until(lambda: place.status().services[0].attempt == 2)
    place.lose_daemon()
    assert place.grpo("start", "b").returncode == 0  # brings a daemon that takes over
    asked.join()
    status = next(each for each in place.status().services if each.name == "a")
    assert (status.state, status.attempt) == ("ready", 2)
    assert place.grpo("down").returncode == 0


def test_a_wait_for_a_restart_ends_when_training_is_to_stop(place: Workplace) -> None:
    (port,) = place.ports = free_ports(1)
    ready = f"{{ http = 'http://127.0.0.1:{port}/health', interval_s = 0.05, within_s = 600 }}"
    place.profile(service("a", SERVER, port, 0, ports=[port], ready=ready), service("b", POLITE))
    place.up()
    with pytest.raises(PeerUnavailable, match="not waiting for a, since training is stopping"):
        server_of(place, "a", is_stopping=lambda: True).restart()
    assert place.grpo("down").returncode == 0


def test_a_profile_that_cannot_restart_its_server_is_refused(place: Workplace) -> None:
    text = STACK.format(mode="none", api=8000, sampler=9001)
    place.profile(text.replace("[services.trainer]", '[services.trainer]\nrestart_with = ["sampler"]'))
    plan = place.grpo("plan", "--profile", "p")
    assert plan.returncode == 2
    assert "services.trainer.restart_with: 'sampler', which this trainer restarts (bridge.restart)" in plan.stderr
    place.profile(text.replace("[services.trainer]", '[services.trainer]\ninference_service = "vllm"'))
    assert (
        "services.trainer.inference_service: 'vllm' is not a service here"
        in place.grpo("plan", "--profile", "p").stderr
    )
