"""A server that exits during training: its memory is unmapped, no weights are lost, and the numbers stay equal."""

from __future__ import annotations

import gc
import logging
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import torch
from bridging import (
    PROMPT,
    RUN_STEPS,
    Serving,
    assert_agreement,
    bridge_to,
    config_for,
    mapped_segments,
    served_logprobs,
    train_beside,
)
from curves import curve
from forked import run_forked
from safetensors.torch import load_file
from serving import model_logprobs, shift
from training import ListedSource, made_up_groups, weights_of

from grpo_engine.bridges import ON_SHARED_MEMORY
from grpo_engine.bridges.memory.bridge_files import read_bridge_file
from grpo_engine.bridges.memory.weight_lock import WeightLock
from grpo_engine.errors import PeerUnavailable
from grpo_engine.train import loop
from grpo_engine.train.checkpointing import checkpoints
from grpo_engine.wire.rollouts import ScoredGroup

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def dtype() -> str:
    return "bfloat16"


@pytest.fixture
def server(started: Serving) -> Iterator[Serving]:
    started.reset()
    yield started
    gc.collect()
    assert mapped_segments() == set()


@pytest.fixture(scope="module", params=sorted(ON_SHARED_MEMORY))
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def undisturbed(started: Serving, mode: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose server stays."""
    folder = tmp_path_factory.mktemp("undisturbed")
    started.reset()
    train_beside(started, folder, config_for(started, mode), EventfulSource({}))
    return folder


class EventfulSource(ListedSource):
    """Calls a function while the batch with a certain number is awaited."""

    def __init__(self, events: dict[int, Callable[[Callable[[], None]], None]]) -> None:
        super().__init__([made_up_groups(seed) for seed in range(RUN_STEPS)])
        self._events = events
        self._num_asked = 0

    def next_batch(
        self,
        timeout_s: float,
        *,
        policy_version: int | None = None,
        stop: Callable[[], bool] = lambda: False,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> list[ScoredGroup] | None:
        self._events.get(self._num_asked, lambda meanwhile: None)(meanwhile)
        self._num_asked += 1
        return super().next_batch(timeout_s, stop=stop, meanwhile=meanwhile)


def assert_same_training(one: Path, other: Path, model_name: str) -> None:
    assert curve(one) == curve(other)
    assert len(curve(one)) == RUN_STEPS
    folders = [folder / "checkpoints" / f"step_{RUN_STEPS}" for folder in (one, other)]
    states = [checkpoints.load(folder, model_name=model_name) for folder in folders]
    saved = [load_file(next(folder.glob("*model.safetensors"))) for folder in folders]
    for ours, theirs in (saved, [state.masters for state in states], [state.optimizer for state in states]):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize(
    "dtype",
    ["bfloat16", pytest.param("float32", marks=pytest.mark.extended("the same in bfloat16, as vLLM serves"))],
    scope="module",
)
def test_a_restart_while_a_batch_is_awaited_changes_no_number(
    server: Serving, mode: str, undisturbed: Path, tmp_path: Path
) -> None:
    def restart(meanwhile: Callable[[], None]) -> None:
        assert mapped_segments()
        server.end(signal.SIGKILL)
        meanwhile()
        assert mapped_segments() == set()
        meanwhile()
        server.start()
        meanwhile()
        assert mapped_segments()
        with server.now.client as client:
            assert client.get("/bridge/info").json()["policy_version"] == 3

    train_beside(server, tmp_path / "run", config_for(server, mode), EventfulSource({3: restart}))
    assert_same_training(tmp_path / "run", undisturbed, str(server.model))


def test_a_new_server_samples_nothing_before_the_trainer_has_written_its_weights(
    server: Serving, tmp_path: Path
) -> None:
    """In the time between, a batch was sampled from the checkpoint, 41 versions old, and trained on."""
    with closing(bridge_to(server, "shared_vllm", tmp_path)) as bridge:
        model = bridge.attach().model.eval()
        bridge.publish(41, shift(model, 41))
        server.end(signal.SIGKILL)
        server.start()
        with ThreadPoolExecutor() as pool:
            asked = pool.submit(served_logprobs, server.now, 2)
            with server.now.client as client:
                assert client.get("/bridge/is_paused").json() == {"paused": True}
            bridge.poll_server()
            answer, *_ = asked.result()
    assert set(answer["policy_versions"][0]) == {41}


def write_version(segment: str, version: int) -> None:
    with WeightLock.attach(segment).writing(version):
        pass


def test_a_new_server_does_not_wait_for_a_trainer_that_has_exited(server: Serving) -> None:
    file = read_bridge_file(server.bridge_file)
    assert run_forked(write_version, file.fence_segment, 41) == 0
    with server.now.client as client:
        assert client.get("/bridge/info").json()["policy_version"] == 41
    server.end(signal.SIGKILL)
    server.start()
    answer, *_ = served_logprobs(server.now, 2)
    assert set(answer["policy_versions"][0]) == {0}


def test_a_server_that_ends_in_mid_step_costs_nothing(
    server: Serving, mode: str, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step_with = loop.gradient_step

    def step_while_it_ends(trainee, batch, *, step, policy_version):
        score = trainee.logprobs

        def end_and_score(rows):
            if step == 2:
                server.end()
            assert mapped_segments()
            return score(rows)

        monkeypatch.setattr(trainee, "logprobs", end_and_score)
        result = step_with(trainee, batch, step=step, policy_version=policy_version)
        monkeypatch.setattr(trainee, "logprobs", score)
        return result

    def come_back(meanwhile: Callable[[], None]) -> None:
        assert mapped_segments() == set()
        server.start()
        meanwhile()
        with server.now.client as client:
            assert client.get("/bridge/info").json()["policy_version"] == 3

    monkeypatch.setattr(loop, "gradient_step", step_while_it_ends)
    train_beside(server, tmp_path / "run", config_for(server, mode), EventfulSource({3: come_back}))
    assert_same_training(tmp_path / "run", undisturbed, str(server.model))


def test_frozen_weights_are_kept_in_host_memory_and_written_to_the_next_server(server: Serving, tmp_path: Path) -> None:
    with closing(bridge_to(server, "shared_vllm", tmp_path)) as bridge:
        model = bridge.attach().model.eval()
        trained, frozen = (layer.mlp.up_proj.weight for layer in model.model.layers)
        for parameter in model.parameters():
            parameter.requires_grad_(parameter is trained)
        with torch.no_grad():
            frozen.data.mul_(2)  # as a server has it that was not started from the same file
        value = 0.25

        def write() -> None:
            trained.data.fill_(value)

        bridge.publish(1, write)
        others = {name: p.detach().clone() for name, p in model.named_parameters() if p is not trained}
        for version in (1, 2):
            server.end()
            bridge.poll_server()
            assert mapped_segments() == set()
            if version == 2:
                value = 0.5
                bridge.publish(2, write)  # no server runs
            server.start()
            bridge.prepare_step()
            now = dict(model.named_parameters())
            assert all(torch.equal(now[name], others[name]) for name in others)
            assert torch.equal(trained.detach(), torch.full_like(trained, value))
            assert_agreement(server.now, model, version, tolerance=0.5)


def test_weights_without_a_server_are_saved_completely(server: Serving, tmp_path: Path) -> None:
    def end(meanwhile: Callable[[], None]) -> None:
        server.end(signal.SIGKILL)
        meanwhile()

    asked = iter([False] * 4 + [True] * 9)
    config = config_for(server, train_layer_indices="1")
    steps = train_beside(server, tmp_path / "run", config, EventfulSource({2: end}), stop=lambda: next(asked))
    assert steps == 2
    state = checkpoints.load(tmp_path / "run/checkpoints/step_2", model_name=str(server.model))
    saved, untrained = weights_of(tmp_path / "run/checkpoints/step_2"), weights_of(server.model)
    dtype = getattr(torch, server.dtype)
    assert 0 < len(state.masters) < len(saved)
    for name, values in saved.items():
        assert torch.equal(values, state.masters.get(name, untrained[name]).to(dtype)), name
    assert not any(torch.equal(saved[name], untrained[name].to(dtype)) for name in state.masters)


def test_a_request_to_stop_ends_the_wait_for_a_server(
    server: Serving, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(bridge_to(server, "shared_vllm", tmp_path, is_stopping=lambda: True)) as bridge:
        model = bridge.attach().model
        expected = model_logprobs(model, PROMPT, [40, 50])
        pid = read_bridge_file(server.bridge_file).pid
        server.end()
        with caplog.at_level(logging.WARNING), pytest.raises(PeerUnavailable, match="training is stopping"):
            bridge.prepare_step()
        assert mapped_segments() == set()
        assert torch.equal(
            model_logprobs(model, PROMPT, [40, 50]), expected
        )  # nothing was published: all of it is kept
    [line] = [record.message for record in caplog.records if record.name.endswith("transport.in_place")]
    assert f"inference server (pid {pid}) has exited" in line
    assert f"waiting for {server.bridge_file} of a new server" in line
