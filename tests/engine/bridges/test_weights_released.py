"""A server that exits during training: its memory is unmapped, no weights are lost, and the numbers stay equal."""

from __future__ import annotations

import gc
import logging
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
    curve,
    mapped_segments,
    served_logprobs,
)
from safetensors.torch import load_file
from serving import model_logprobs, our_segments, save_tiny_model, shift
from training import ListedSource, made_up_groups, weights_of

from grpo_engine.bridges.memory.bridge_files import read_bridge_file
from grpo_engine.errors import PeerUnavailable
from grpo_engine.train import loop
from grpo_engine.train.checkpointing import checkpoints
from grpo_engine.train.config import TrainConfig
from grpo_engine.train.loop import train
from grpo_engine.train.recording.recorder import Recorder
from grpo_engine.wire.rollouts import ScoredGroup

pytestmark = pytest.mark.slow
STEPS = RUN_STEPS


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    before = our_segments()
    yield
    assert our_segments() == before
    gc.collect()
    assert mapped_segments() == set()


@pytest.fixture
def serving(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Serving]:
    model = save_tiny_model(tmp_path / "model", seed=1)
    server = Serving(model, tmp_path, getattr(request, "param", "bfloat16"))
    server.start()
    yield server
    server.close()


class EventfulSource(ListedSource):
    """Lets things happen while the batch with a certain number is awaited."""

    def __init__(self, count: int, events: dict[int, Callable[[Callable[[], None]], None]]) -> None:
        super().__init__([made_up_groups(seed) for seed in range(count)])
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


def run(serving: Serving, folder: Path, config: TrainConfig, source: ListedSource, **more: object) -> int:
    torch.manual_seed(config.seed)  # adapters begin with random numbers
    bridge = bridge_to(serving, config.bridge.mode)
    try:
        with Recorder(folder, total_steps=config.training_steps, show_times=False) as recorder:
            save_path = folder / "checkpoints"
            return train(config, source, bridge, recorder, decode=str, save_path=save_path, **more)
    finally:
        bridge.close()


def assert_same_training(one: Path, other: Path, model_name: str) -> None:
    assert curve(one) == curve(other)
    assert len(curve(one)) == STEPS
    states = [checkpoints.load(folder / f"checkpoints/step_{STEPS}", model_name=model_name) for folder in (one, other)]
    assert states[0].masters.keys() == states[1].masters.keys()
    assert all(torch.equal(states[0].masters[name], states[1].masters[name]) for name in states[0].masters)
    torch.testing.assert_close(states[0].optimizer, states[1].optimizer, rtol=0, atol=0)
    files = [next((folder / f"checkpoints/step_{STEPS}").glob("*model.safetensors")) for folder in (one, other)]
    saved = [load_file(path) for path in files]
    assert saved[0].keys() == saved[1].keys()
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0])


@pytest.fixture(params=["shared_vllm", "lora_merged"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def undisturbed(serving: Serving, mode: str, tmp_path: Path) -> Path:
    """A run whose server stays; then a new server, since the version that one serves is where a run begins."""
    run(serving, tmp_path / "undisturbed", config_for(serving, mode), EventfulSource(STEPS, {}))
    serving.end()
    serving.start()
    return tmp_path / "undisturbed"


@pytest.mark.parametrize(
    "serving",
    [pytest.param("float32", marks=pytest.mark.extended("the same in bfloat16, as vLLM serves")), "bfloat16"],
    indirect=True,
)
def test_a_restart_while_a_batch_is_awaited_changes_no_number(
    serving: Serving, mode: str, undisturbed: Path, tmp_path: Path
) -> None:
    def restart(meanwhile: Callable[[], None]) -> None:
        assert mapped_segments()
        serving.end(signal.SIGKILL)
        meanwhile()
        assert mapped_segments() == set()
        meanwhile()
        serving.start()
        meanwhile()
        assert mapped_segments()
        with serving.now.client as client:
            assert client.get("/bridge/info").json()["policy_version"] == 3

    run(serving, tmp_path / "run", config_for(serving, mode), EventfulSource(STEPS, {3: restart}))
    assert_same_training(tmp_path / "run", undisturbed, str(serving.model))


def test_a_new_server_samples_nothing_before_the_trainer_has_written_its_weights(serving: Serving) -> None:
    """In the time between, a batch was sampled from the checkpoint, 41 versions old, and trained on."""
    bridge = bridge_to(serving)
    model = bridge.attach().model.eval()
    bridge.publish(41, shift(model, 41))
    serving.end(signal.SIGKILL)
    serving.start()
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(served_logprobs, serving.now, 2)
        with serving.now.client as client:
            assert client.get("/bridge/is_paused").json() == {"paused": True}
        bridge.poll_server()
        answer, *_ = asked.result()
    assert answer["policy_versions"] == [[41, 41]]
    bridge.close()


def test_a_new_server_does_not_wait_for_a_trainer_that_has_exited(serving: Serving) -> None:
    file = read_bridge_file(serving.folder / "bridge.json")
    write = f"with WeightLock.attach({file.fence_segment!r}).writing(41): pass"
    subprocess.run(
        [sys.executable, "-c", f"from grpo_engine.bridges.memory.weight_lock import WeightLock\n{write}"], check=True
    )
    with serving.now.client as client:
        assert client.get("/bridge/info").json()["policy_version"] == 41
    serving.end(signal.SIGKILL)
    serving.start()
    answer, *_ = served_logprobs(serving.now, 2)
    assert answer["policy_versions"] == [[0, 0]]


def test_a_server_that_ends_in_mid_step_costs_nothing(
    serving: Serving, mode: str, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step_with = loop.gradient_step

    def step_while_it_ends(trainee, batch, *, step, policy_version):
        score = trainee.logprobs

        def end_and_score(rows):
            if step == 2:
                serving.end()
            assert mapped_segments()
            return score(rows)

        monkeypatch.setattr(trainee, "logprobs", end_and_score)
        result = step_with(trainee, batch, step=step, policy_version=policy_version)
        monkeypatch.setattr(trainee, "logprobs", score)
        return result

    def come_back(meanwhile: Callable[[], None]) -> None:
        assert mapped_segments() == set()
        serving.start()
        meanwhile()
        with serving.now.client as client:
            assert client.get("/bridge/info").json()["policy_version"] == 3

    monkeypatch.setattr(loop, "gradient_step", step_while_it_ends)
    run(serving, tmp_path / "run", config_for(serving, mode), EventfulSource(STEPS, {3: come_back}))
    assert_same_training(tmp_path / "run", undisturbed, str(serving.model))


def test_frozen_weights_are_kept_in_host_memory_and_written_to_the_next_server(
    serving: Serving, tmp_path: Path
) -> None:
    bridge = bridge_to(serving)
    model = bridge.attach().model.eval()
    trained, frozen = model.model.layers[0].mlp.up_proj.weight, model.model.layers[1].mlp.up_proj.weight
    for parameter in model.parameters():
        parameter.requires_grad_(parameter is trained)
    with torch.no_grad():
        frozen.data.mul_(2)  # as a server has it that was not started from the same file

    def write() -> None:
        trained.data.fill_(values[-1])

    values = [0.25]
    bridge.publish(1, write)
    others = {name: p.detach().clone() for name, p in model.named_parameters() if p is not trained}
    for version in (1, 2):
        serving.end()
        bridge.poll_server()
        assert mapped_segments() == set()
        if version == 2:
            values.append(0.5)
            bridge.publish(2, write)  # no server runs
        serving.start()
        bridge.ensure_current()
        now = dict(model.named_parameters())
        assert all(torch.equal(now[name], others[name]) for name in others)
        assert torch.equal(trained.detach(), torch.full_like(trained, values[-1]))
        assert_agreement(serving.now, model, version, tolerance=0.5)
    bridge.close()


def test_weights_without_a_server_are_saved_completely(serving: Serving, tmp_path: Path) -> None:
    def end(meanwhile: Callable[[], None]) -> None:
        serving.end(signal.SIGKILL)
        meanwhile()

    asked = iter([False] * 4 + [True] * 9)
    config = config_for(serving, train_layer_indices="1")
    steps = run(serving, tmp_path / "run", config, EventfulSource(STEPS, {2: end}), stop=lambda: next(asked))
    assert steps == 2
    state = checkpoints.load(tmp_path / "run/checkpoints/step_2", model_name=str(serving.model))
    saved, untrained = weights_of(tmp_path / "run/checkpoints/step_2"), weights_of(serving.model)
    dtype = getattr(torch, serving.dtype)
    assert 0 < len(state.masters) < len(saved)
    for name, values in saved.items():
        assert torch.equal(values, state.masters.get(name, untrained[name]).to(dtype)), name
    assert not any(torch.equal(saved[name], untrained[name].to(dtype)) for name in state.masters)


def test_a_request_to_stop_ends_the_wait_for_a_server(serving: Serving, caplog: pytest.LogCaptureFixture) -> None:
    bridge = bridge_to(serving, is_stopping=lambda: True)
    model = bridge.attach().model
    expected = model_logprobs(model, PROMPT, [40, 50])
    pid = read_bridge_file(serving.folder / "bridge.json").pid
    serving.end()
    with caplog.at_level(logging.WARNING), pytest.raises(PeerUnavailable, match="training is stopping"):
        bridge.ensure_current()
    assert mapped_segments() == set()
    assert torch.equal(model_logprobs(model, PROMPT, [40, 50]), expected)  # nothing was published: all of it is kept
    [line] = [record.message for record in caplog.records if record.name.endswith("transport.in_place")]
    assert f"inference server (pid {pid}) has exited" in line
    assert f"waiting for {serving.folder / 'bridge.json'} of a new server" in line
    bridge.close()
