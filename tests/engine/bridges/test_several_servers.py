"""A trainer of several inference servers: all serve what it publishes, and one that is killed holds up nobody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from bridging import MODES, Serving, assert_agreement, bridge_context, make_bridge
from peft import PeftModel
from rank_training import TRAINED, Training, train_on_ranks
from serving import save_tiny_model, shift
from transformers import AutoModelForCausalLM

from grpo_engine.bridges import OVER_RANKS, TO_MANY_SERVERS, Bridge
from grpo_engine.bridges.placement.own import OwnModel
from grpo_engine.bridges.transport.broadcast import BroadcastBridge
from grpo_engine.bridges.transport.weight_group import Checksum
from grpo_engine.errors import BridgeError, PeerError

pytestmark = pytest.mark.slow

EXTENDED = pytest.mark.extended("the same test with broadcast")
TO_MANY = [
    pytest.param(settings, id=str(settings["mode"]), marks=() if settings["mode"] == "broadcast" else EXTENDED)
    for settings in MODES
    if settings["mode"] in TO_MANY_SERVERS
]


@pytest.fixture(scope="module")
def started(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Serving]]:
    folders = [tmp_path_factory.mktemp(name) for name in ("first", "second")]
    pair = [Serving(model_folder, folder, "--enable-lora", "--receives-weights") for folder in folders]
    try:
        for each in pair:
            each.start()
        yield pair
    finally:
        for each in pair:
            each.close()


@pytest.fixture
def pair(started: list[Serving]) -> list[Serving]:
    """Two servers of version 0."""
    for each in started:
        each.reset()
    return started


def bridge_of(pair: list[Serving], settings: dict[str, object], folder: Path) -> Bridge:
    urls = tuple(each.url for each in pair)
    return make_bridge(settings, pair[0].model, urls[0], folder, server_urls=urls)


@pytest.mark.parametrize("settings", TO_MANY)
def test_a_killed_server_holds_up_nobody_and_is_brought_up_to_date(
    settings: dict[str, object], pair: list[Serving], tmp_path: Path
) -> None:
    living, killed = pair
    with closing(bridge_of(pair, settings, tmp_path)) as bridge:
        model = bridge.attach().model.eval()
        bridge.publish(1, shift(model, 1))
        for each in pair:
            assert_agreement(each.now, model, 1)
        killed.end(signal.SIGKILL)
        bridge.publish(2, shift(model, 2))
        bridge.prepare_step()
        assert_agreement(living.now, model, 2)
        killed.start()
        with killed.now.client as client:
            while client.get("/bridge/info").json()["policy_version"] != 2:
                bridge.poll_server()  # as a trainer does that waits for a batch
        assert_agreement(killed.now, model, 2)
        bridge.publish(3, shift(model, 3))
        for each in pair:
            assert_agreement(each.now, model, 3)


@pytest.mark.parametrize("settings", [each for each in TO_MANY if each.id in OVER_RANKS])
def test_what_two_ranks_train_is_served_by_both_servers(
    settings: dict[str, object], pair: list[Serving], tmp_path: Path
) -> None:
    urls = [each.url for each in pair]
    trainer = {"bridge": settings, "server_urls": urls, "lr": 0.05, "lora_dropout": 0.0}
    train_on_ranks(
        Training(model=pair[0].model, folder=tmp_path / "two", num_ranks=2, settings=trainer, is_served=True)
    )
    saved = tmp_path / "two" / TRAINED
    if (saved / "adapter_config.json").exists():
        untrained = AutoModelForCausalLM.from_pretrained(pair[0].model, dtype=torch.float32)
        model = PeftModel.from_pretrained(untrained, saved).eval()
    else:
        model = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32).eval()
    for each in pair:
        assert_agreement(each.now, model, 3)


def broadcast(
    servers: list[Serving],
    folder: Path,
    placement: type[OwnModel] = OwnModel,
    model: Path | None = None,
    timeout_s: float = 20,
) -> BroadcastBridge:
    urls = tuple(each.url for each in servers)
    context = bridge_context(model or servers[0].model, urls[0], folder, server_urls=urls)
    return BroadcastBridge(context, placement(context), handover=None, timeout_s=timeout_s, check_every=1)


def test_a_server_that_is_killed_in_the_middle_of_a_transfer_leaves_no_half_written_one(
    pair: list[Serving], tmp_path: Path
) -> None:
    living, killed = pair

    class Killing(OwnModel):
        has_killed = False

        def stream(self, receive: Callable[[dict[str, torch.Tensor]], None]) -> None:
            def kill_after_the_first(layer: dict[str, torch.Tensor]) -> None:
                receive(layer)
                if not self.has_killed:
                    self.has_killed = True
                    killed.end(signal.SIGKILL)

            super().stream(kill_after_the_first)

    with closing(broadcast(pair, tmp_path, Killing)) as bridge:
        model = bridge.attach().model.eval()
        bridge.publish(1, shift(model, 1))
        assert_agreement(living.now, model, 1)
        bridge.publish(2, shift(model, 2))
        assert_agreement(living.now, model, 2)


def test_a_server_that_restarts_while_a_batch_is_awaited_is_sent_the_weights(
    pair: list[Serving], tmp_path: Path
) -> None:
    restarted = pair[0]
    with closing(broadcast([restarted], tmp_path)) as bridge:
        model = bridge.attach().model.eval()
        bridge.publish(1, shift(model, 1))
        restarted.end(signal.SIGKILL)
        restarted.start()
        with restarted.now.client as client:
            while client.get("/bridge/info").json()["policy_version"] != 1:
                bridge.poll_server()  # nothing was sent to it since, so nobody has missed it
        assert_agreement(restarted.now, model, 1)


@pytest.mark.extended("test_a_server_that_is_killed_in_the_middle_of_a_transfer_leaves_no_half_written_one")
def test_a_server_that_is_stopped_holds_up_the_others_for_the_time_limit_only(
    pair: list[Serving], tmp_path: Path
) -> None:
    living, stopped = pair
    with closing(broadcast(pair, tmp_path, timeout_s=6)) as bridge:
        model = bridge.attach().model.eval()
        bridge.publish(1, shift(model, 1))
        stopped.now.process.send_signal(signal.SIGSTOP)
        try:
            assert bridge.publish(2, shift(model, 2)).num_servers == 1
            assert_agreement(living.now, model, 2)
        finally:
            stopped.now.process.send_signal(signal.SIGCONT)
        with stopped.now.client as client:
            while client.get("/bridge/info").json()["policy_version"] != 2:
                bridge.poll_server()
        assert_agreement(stopped.now, model, 2)


def test_a_server_that_received_other_bits_is_named(
    pair: list[Serving], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(broadcast(pair, tmp_path)) as bridge:
        model = bridge.attach().model
        monkeypatch.setattr(Checksum, "value", lambda self: 7)
        with pytest.raises(
            PeerError, match=rf"{pair[0].url}, process 0: serves other weights than were sent as version"
        ):
            bridge.publish(1, shift(model, 1))


def test_a_checksum_tells_bits_order_and_rows() -> None:
    def of(*tensors: torch.Tensor) -> int:
        checksum = Checksum()
        checksum.add(tensors)
        return checksum.value()

    a, b = torch.arange(6.0).reshape(2, 3), torch.ones(4, dtype=torch.bfloat16)
    flipped = a.clone()
    flipped.view(torch.int32)[1, 2] ^= 1
    assert of(a, b) == of(a.clone(), b.clone())
    assert len({of(a, b), of(b, a), of(flipped, b), of(a.flip(0), b), of(a), of()}) == 6


def test_servers_of_another_model_or_without_the_setting_are_refused(
    pair: list[Serving], model_folder: Path, tmp_path: Path
) -> None:
    other = save_tiny_model(tmp_path / "other", seed=3)
    with (
        closing(broadcast(pair, tmp_path, model=other)) as bridge,
        pytest.raises(BridgeError, match=r"but .*other is trained: give both the same model"),
    ):
        bridge.attach()
    plain = Serving(model_folder, tmp_path)
    plain.start()
    try:
        with (
            closing(broadcast([plain], tmp_path)) as bridge,
            pytest.raises(BridgeError, match="does not receive weights: start it with --receives-weights"),
        ):
            bridge.attach()
    finally:
        plain.close()


def test_a_store_that_others_may_write_is_refused(pair: list[Serving], tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    (tmp_path / "store").touch()
    meeting = {"epoch": 1, "store": str(tmp_path / "store"), "size": 2, "timeout_s": 1}
    model = AutoModelForCausalLM.from_pretrained(pair[0].model)
    layers = [[{"name": name, "shape": list(value.shape)} for name, value in model.named_parameters()]]
    body = {"meeting": meeting, "first_rank": 1, "sender_pid": os.getpid(), "dtype": "float32", "layers": layers}
    with pair[0].now.client as client:
        answer = client.post("/bridge/join", json=body).json()
    assert "not a file of this user in a folder that only this user may write" in answer["problem"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_an_idle_connection_of_another_user_holds_up_no_update(
    pair: list[Serving], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program = (
        "import encodings.idna, os, socket, sys; os.setuid(65534)\n"
        f"held = [socket.create_connection(('127.0.0.1', port)) for port in {[each.port for each in pair]}]\n"
        "print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with closing(broadcast(pair, tmp_path)) as bridge:
            model = bridge.attach().model.eval()
            assert bridge.publish(1, shift(model, 1)).num_servers == 2
        assert "did not reach" not in caplog.text
        assert other.poll() is None
        other.communicate()
