"""A server that sleeps while its trainer computes a step: requests wait, and no exit leaves it with garbage."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from bridging import PROMPT, Serving, assert_agreement, bridge_context, bridge_to, make_bridge, serving
from forked import run_forked, start_forked
from serving import shift

from grpo_engine.bridges import Bridge
from grpo_engine.bridges.memory.shared_names import staging_name
from grpo_engine.bridges.memory.staging import Filler, Piece, Staging, pieces_by_content
from grpo_engine.bridges.memory.turn_lock import TurnLock
from grpo_engine.bridges.memory.weight_lock import SHARED_MEMORY
from grpo_engine.bridges.placement.own import OwnModel
from grpo_engine.bridges.transport.server_client import ServerClient
from grpo_engine.bridges.transport.turns import TurnsBridge
from grpo_engine.bridges.transport.weight_group import Checksum
from grpo_engine.errors import BridgeError, PeerError, PeerUnavailable
from grpo_engine.server.config import ServerConfig
from grpo_engine.server.torch.weights import open_weights
from grpo_engine.wire.inference import SleepAnswer, TensorShape
from grpo_engine.wire.log_lines import WAITING_FOR_STEP

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def settings() -> dict[str, object]:
    return {"mode": "turns"}


def state_of(server: Serving) -> str:
    with server.now.client as client:
        return str(client.get("/bridge/info").json()["sleep_state"])


def staging_of(pid: int) -> list[Path]:
    """Staging memory of a process."""
    return list(SHARED_MEMORY.glob(f"grpo-*-staging*-{pid}-*"))


# --- a step ----------------------------------------------------------------------------------------------------------


def test_requests_wait_while_the_server_sleeps_and_its_health_stays_green(server: Serving, bridge: Bridge) -> None:
    model = bridge.attach().model.eval()
    bridge.publish(1, shift(model, 1))
    bridge.prepare_step()
    assert state_of(server) == "asleep"
    with ThreadPoolExecutor() as pool, server.now.client as client:
        waiting = pool.submit(server.now.generate, prompt={"prompt_token_ids": PROMPT}, max_tokens=4, logprobs=0)
        health = client.get("/health")
        assert (health.status_code, health.json()["engine"]) == (200, "asleep")
        assert health.json()["detail"] == f"asleep while process {os.getpid()} computes a step; requests wait"
        refused = client.post("/bridge/resume")  # no other client may have it sample from weights that are not there
        assert refused.status_code == 409
        assert not waiting.done()
        update = bridge.publish(2, shift(model, 2))
        assert set(waiting.result()["policy_versions"][0]) == {2}
        assert client.get("/health").content == b""
    assert update is not None
    assert update.num_bytes == sum(parameter.nbytes for parameter in model.parameters())
    assert {"sync/sleep_time", "time/training"} <= update.metrics().keys()
    assert_agreement(server.now, model, 2)


def test_a_step_without_an_update_is_followed_by_samples_of_the_same_version(server: Serving, bridge: Bridge) -> None:
    model = bridge.attach().model.eval()
    bridge.publish(1, shift(model, 1))
    bridge.prepare_step()  # whose loss was not finite
    bridge.poll_server()
    assert_agreement(server.now, model, 1)


def test_the_server_sleeps_while_steps_are_repeated_from_the_journal(server: Serving, bridge: Bridge) -> None:
    attached = bridge.attach()
    model = attached.model.eval()
    attached.repeat(range(4))
    for version in (1, 2):
        assert bridge.publish(version, shift(model, version)) is None
        assert state_of(server) == "asleep"
        bridge.prepare_step()
    assert bridge.publish(3, shift(model, 3)) is not None
    assert_agreement(server.now, model, 3)


def test_weights_that_are_larger_than_the_staging_memory_arrive_in_parts(server: Serving, tmp_path: Path) -> None:
    context = bridge_context(server.model, server.url, tmp_path)
    bridge = TurnsBridge(context, OwnModel(context), handover=None, staging_bytes=4000, check_every=1)
    with closing(bridge):
        model = bridge.attach().model.eval()
        bridge.publish(1, shift(model, 1))
        assert_agreement(server.now, model, 1)
    assert not staging_of(os.getpid())


def test_the_weights_of_a_server_that_sleeps_are_freed(model_folder: Path) -> None:
    config = ServerConfig(model_name=str(model_folder), engine="torch", dtype="float32", device="cpu")
    weights = open_weights(config, instance="i", environment={}, before_export=lambda: None)
    shapes = {name: parameter.shape for name, parameter in weights.model.named_parameters()}
    weights.free()
    assert [parameter.untyped_storage().nbytes() for parameter in weights.model.parameters()] == [0] * len(shapes)
    weights.allocate()
    assert {name: parameter.shape for name, parameter in weights.parameters.items()} == shapes
    weights.close()


def test_a_server_that_serves_other_bits_ends_the_training(
    server: Serving, bridge: Bridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = bridge.attach().model
    with monkeypatch.context() as patch:
        patch.setattr(Checksum, "value", lambda self: 7)
        with pytest.raises(PeerError, match=r"than were handed over as version 1"):
            bridge.publish(1, shift(model, 1))


# --- exits -----------------------------------------------------------------------------------------------------------


def sleep_and_die(model: Path, url: str, folder: Path, *, is_handing_over: bool = False) -> None:
    """A trainer that is killed while it computes a step, or while it hands its weights over."""
    context = bridge_context(model, url, folder)
    bridge = TurnsBridge(context, OwnModel(context), handover=None, staging_bytes=4000, check_every=1)
    trained = bridge.attach().model
    bridge.publish(1, shift(trained, 5))
    bridge.prepare_step()
    if is_handing_over:
        Filler.end = lambda self: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
        bridge.publish(2, shift(trained, 6))
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(("is_handing_over", "state"), [(False, "asleep"), (True, "weights")])
def test_a_server_whose_trainer_was_killed_holds_requests_until_the_next_one_wakes_it(
    is_handing_over: bool, state: str, server: Serving, tmp_path: Path
) -> None:
    killed = partial(sleep_and_die, server.model, server.url, tmp_path, is_handing_over=is_handing_over)
    trainer = start_forked(killed)
    trainer.join()
    assert trainer.exitcode == -signal.SIGKILL
    assert state_of(server) == state
    assert trainer.pid is not None
    left = staging_of(trainer.pid)  # others are of tests beside this one
    assert bool(left) is is_handing_over
    with ThreadPoolExecutor() as pool, server.now.client as client:
        waiting = pool.submit(server.now.generate, prompt={"prompt_token_ids": PROMPT}, max_tokens=4, logprobs=0)
        assert client.get("/health").status_code == 200
        with closing(bridge_to(server, "turns", tmp_path)) as bridge:
            model = bridge.attach().model.eval()
            assert not waiting.done()
            bridge.publish(3, shift(model, 3))
            assert set(waiting.result()["policy_versions"][0]) == {3}
            assert_agreement(server.now, model, 3)
    assert not any(path.exists() for path in left)


def attach_beside(model: Path, url: str, folder: Path, other_pid: int) -> None:
    """A trainer of a server that sleeps for another one."""
    bridge = make_bridge({"mode": "turns"}, model, url, folder)
    with closing(bridge), pytest.raises(BridgeError, match=f"asleep for process {other_pid}, which trains: end it"):
        bridge.attach()


def test_a_second_trainer_is_refused_while_the_first_one_runs(server: Serving, bridge: Bridge, tmp_path: Path) -> None:
    bridge.attach()
    assert run_forked(attach_beside, server.model, server.url, tmp_path / "other", os.getpid()) == 0


@pytest.fixture
def own_server(model_folder: Path, tmp_path: Path) -> Iterator[Serving]:
    """A server that finds its trainer, and may be killed."""
    with serving(model_folder, tmp_path, "--enable-sleep-mode", "--handover", str(tmp_path / "handover")) as server:
        yield server


def test_a_server_that_is_killed_during_a_step_loads_when_the_step_is_computed(
    own_server: Serving, tmp_path: Path
) -> None:
    bridge = bridge_to(own_server, {"mode": "turns", "handover": tmp_path / "handover"}, tmp_path)
    with closing(bridge), ThreadPoolExecutor() as pool:
        model = bridge.attach().model.eval()
        bridge.publish(1, shift(model, 1))
        bridge.prepare_step()
        own_server.end(signal.SIGKILL)
        logs = set(tmp_path.glob("server-*.log"))
        starting = pool.submit(own_server.start)
        while not (new := set(tmp_path.glob("server-*.log")) - logs) or WAITING_FOR_STEP.text not in (
            new.pop().read_text(errors="replace")
        ):
            assert not starting.done()
        assert bridge.publish(2, shift(model, 2)) is None  # it is not up yet
        starting.result()
        while state_of(own_server) != "awake":
            bridge.poll_server()  # as a trainer does that waits for a batch
        assert_agreement(own_server.now, model, 2)


def test_a_server_that_is_killed_while_it_takes_weights_gets_all_of_them_after_its_restart(
    own_server: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = bridge_context(own_server.model, own_server.url, tmp_path)
    bridge = TurnsBridge(context, OwnModel(context), handover=tmp_path / "handover", staging_bytes=4000, check_every=1)
    take = ServerClient.take

    def kill_before_the_third(self: ServerClient, number: int) -> SleepAnswer:
        if number == 2:
            own_server.end(signal.SIGKILL)
        return take(self, number)

    with closing(bridge):
        model = bridge.attach().model.eval()
        bridge.publish(1, shift(model, 1))
        bridge.prepare_step()
        with monkeypatch.context() as patch:
            patch.setattr(ServerClient, "take", kill_before_the_third)
            assert bridge.publish(2, shift(model, 2)) is None
        own_server.start()
        bridge.prepare_step()  # a batch had been complete before
        bridge.publish(3, shift(model, 3))
        assert_agreement(own_server.now, model, 3)


def test_a_step_waits_for_a_server_that_loads(own_server: Serving, tmp_path: Path) -> None:
    context = bridge_context(own_server.model, own_server.url, tmp_path, is_stopping=lambda: has_begun)
    has_begun = False
    bridge = TurnsBridge(context, OwnModel(context), handover=tmp_path / "handover", staging_bytes=4000, check_every=1)
    loading = TurnLock(tmp_path / "handover")
    with closing(bridge):
        model = bridge.attach().model
        bridge.publish(1, shift(model, 1))
        assert loading.take(is_stopping=lambda: True, when_held=lambda: None)
        has_begun = True
        with pytest.raises(PeerUnavailable, match="not waiting for the inference server to load"):
            bridge.prepare_step()
        has_begun = False
        loading.give_back()
        bridge.prepare_step()
        assert not loading.take(is_stopping=lambda: True, when_held=lambda: None)


def test_a_server_without_sleep_mode_is_refused(model_folder: Path, tmp_path: Path) -> None:
    with serving(model_folder, tmp_path) as plain, closing(bridge_to(plain, "turns", tmp_path)) as bridge:
        with pytest.raises(BridgeError, match="cannot sleep: start it with --enable-sleep-mode"):
            bridge.attach()
        with plain.now.client as client:
            assert client.post("/bridge/sleep", json={"owner_pid": os.getpid()}).status_code == 501


def test_contents_that_come_out_of_order_are_refused(server: Serving, bridge: Bridge) -> None:
    bridge.attach()
    with server.now.client as client:
        early = client.post("/bridge/take", json={"number": 0}).json()
        assert early["problem"] == "take: the server is asleep, not weights"
        early = client.post("/bridge/woken", json={"policy_version": 1}).json()
        assert (early["problem"], early["state"]) == ("woken: the server is asleep, not weights", "asleep")


# --- staging memory --------------------------------------------------------------------------------------------------


def test_contents_of_the_staging_memory_are_full_and_in_order() -> None:
    layers = [
        [TensorShape(name="a", shape=(2, 3)), TensorShape(name="empty", shape=(0, 5))],
        [TensorShape(name="b", shape=(7,))],
    ]
    assert pieces_by_content(layers, 4) == [
        [Piece("a", 0, 4, 0)],
        [Piece("a", 4, 2, 0), Piece("b", 0, 2, 2)],
        [Piece("b", 2, 4, 0)],
        [Piece("b", 6, 1, 0)],
    ]
    assert pieces_by_content(layers, 100) == [[Piece("a", 0, 6, 0), Piece("b", 0, 7, 6)]]


def test_staging_memory_has_another_name_each_time() -> None:
    """Else a server would read what it still maps under that name, which is the memory of the update before."""
    import torch

    staging = Staging([{"a": (4,)}], dtype=torch.float32, device=torch.device("cpu"), num_bytes=100)
    first = staging.open()
    staging.close()
    second = staging.open()
    staging.close()
    assert first.memory != second.memory
    assert staging.capacity == 4  # no more than there is
    assert staging_name("run") != staging_name("run")
    assert not staging_of(os.getpid())
