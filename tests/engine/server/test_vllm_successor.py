"""A real vLLM in the place of a killed one: where its weights come from, in a run whose trainer has newer ones."""

from __future__ import annotations

import os
import signal
from contextlib import closing
from pathlib import Path

import pytest
from bridging import write_and_wait
from forked import start_forked
from serving import free_port, save_tiny_model, shift
from vllm_serving import (
    HAS_GPU,
    LONG_PROMPT,
    Stack,
    assert_agreement,
    load,
    named_sockets,
    processes_below,
    segments_now,
    serving_vllm,
    wait_gone,
)
from workplace import until

from grpo_engine.bridges.memory.bridge_files import read_bridge_file
from grpo_engine.bridges.memory.shared_tensors import SEGMENT_PREFIX, segments_of, unlink_segments
from grpo_engine.bridges.memory.weight_lock import WeightLock

pytest.importorskip("vllm", reason="vLLM is not installed here")
pytestmark = [
    pytest.mark.extended("test_bridges_failures.py has a server on torch that adopts the weights of a killed one"),
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

RUN = f"successor{os.getpid()}"
FLAGS = ("--logprobs-mode", "processed")
NOTHING_READ = "The model's files are not read"


def lose_weights(killed: Stack) -> None:
    """As on a GPU, whose memory is freed with the server."""
    file = read_bridge_file(killed.bridge_file)
    unlink_segments(segments_of(file.tensors))
    killed.bridge_file.write_text(file.model_copy(update={"tensors": {}}).model_dump_json())


@pytest.mark.parametrize("are_weights_left", [True, False])
def test_a_server_adopts_the_weights_of_a_killed_one_and_removes_its_files(
    tmp_path: Path, *, are_weights_left: bool
) -> None:
    model_folder = save_tiny_model(tmp_path / "model", seed=5)
    run = f"{RUN}adopted"
    settings = {"environment": {"GRPO_TUI_RUN": run}, "port": free_port()}
    try:
        with serving_vllm(model_folder, tmp_path, *FLAGS, **settings) as killed:
            bridge = killed.bridge({"mode": "shared_vllm"})
            model = bridge.attach().model.eval()
            bridge.publish(50, shift(model, 50))
            below = processes_below(killed.server.process.pid)
            sockets = set().union(*(named_sockets(identity.pid) for identity in below))
            assert sockets
            before = read_bridge_file(killed.bridge_file)
            killed.server.stop(signal.SIGKILL)
            wait_gone(below, within_s=60)
        if not are_weights_left:
            lose_weights(killed)
        with closing(bridge), serving_vllm(model_folder, tmp_path, *FLAGS, **settings) as again:
            assert NOTHING_READ in again.server.log.read_text()
            if HAS_GPU or not are_weights_left:  # requests wait until the trainer publishes
                with again.server.client as client:
                    assert client.get("/bridge/is_paused").json() == {"paused": True}
                bridge.prepare_step()
            assert_agreement(again, model, version=50, prompt=LONG_PROMPT)
            assert not {before.fence_segment, *segments_of(before.tensors)} & segments_now()
            assert not [path for path in sockets if path.parent.exists()]
    finally:
        unlink_segments(name for name in segments_now() if name.startswith(f"{SEGMENT_PREFIX}{run}-"))


def test_a_server_that_read_no_file_reads_them_once_its_trainer_has_exited_without_a_publish(tmp_path: Path) -> None:
    model_folder = save_tiny_model(tmp_path / "model", seed=5)
    run = f"{RUN}abandoned"
    settings = {"environment": {"GRPO_TUI_RUN": run}, "port": free_port()}
    trainer = None
    try:
        with serving_vllm(model_folder, tmp_path, *FLAGS, **settings) as killed:
            trainer = start_forked(write_and_wait, read_bridge_file(killed.bridge_file).fence_segment, 50, True)
            lock = WeightLock.attach(read_bridge_file(killed.bridge_file).fence_segment)
            until(lambda: lock.read().sequence == 2)
            lock.close()
            below = processes_below(killed.server.process.pid)
            killed.server.stop(signal.SIGKILL)
            wait_gone(below, within_s=60)
        lose_weights(killed)
        with serving_vllm(model_folder, tmp_path, *FLAGS, **settings) as again, again.server.client as client:
            assert NOTHING_READ in again.server.log.read_text()
            assert client.get("/bridge/is_paused").json() == {"paused": True}
            trainer.kill()
            until(lambda: client.get("/bridge/is_paused").json() == {"paused": False})
            assert_agreement(again, load(model_folder), version=0, prompt=LONG_PROMPT)
            assert client.get("/health").status_code == 200
    finally:
        if trainer is not None:
            trainer.kill()
        unlink_segments(name for name in segments_now() if name.startswith(f"{SEGMENT_PREFIX}{run}-"))
