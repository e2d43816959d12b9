"""Versions that a trainer computes again after a kill reach only those who lack them, or share memory with it."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import training
from bridging import Serving, assert_agreement, bridge_to, make_bridge
from curves import curve
from forked import run_forked
from serving import shift

from grpo_engine.bridges import Bridge
from grpo_engine.train.loop import train
from grpo_engine.train.recording.recorder import Recorder
from grpo_engine.wire.run_folder import SERVED_FILE

pytestmark = pytest.mark.slow

KEPT = [
    {"mode": "none", "every_steps": 4},
    {"mode": "broadcast"},
    pytest.param({"mode": "lora_restart", "every_steps": 4}, marks=pytest.mark.extended("the case of mode none")),
]
OF_THE_NEXT = {"none": 8, "lora_restart": 8, "broadcast": 6}
"""First version that the next trainer sends, where the journal leads from version 2 to 6."""


def settings_of(case: object) -> str:
    return str(case["mode"]) if isinstance(case, dict) else ""


@pytest.fixture(scope="module")
def started(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("server")
    server = Serving(model_folder, folder, "--receives-weights", "--handover", str(folder / "handover"))
    try:
        server.start()
        yield server
    finally:
        server.close()


def bridge_of(settings: dict[str, object], model: Path, url: str, folder: Path, server: Path) -> Bridge:
    torch.manual_seed(0)  # of the first values of an adapter
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir(exist_ok=True)
    return make_bridge(
        {**settings, "handover": server / "handover"}, model, url, folder, served_file=checkpoints / SERVED_FILE
    )


def weights_of(model: torch.nn.Module) -> list[Callable[[], None]]:
    """What writes the weights of each version; the same in every trainer, before it has written any."""
    return [shift(model, version) for version in range(12)]


def publish_and_die(settings: dict[str, object], model: Path, url: str, folder: Path, server: Path) -> None:
    """A trainer that is killed after its fifth step."""
    tempfile.tempdir = str(folder)  # it leaves the folder in which its weight groups meet
    bridge = bridge_of(settings, model, url, folder, server)
    write = weights_of(bridge.attach().model)
    for version in range(1, 6):
        bridge.publish(version, write[version])
    os.kill(os.getpid(), signal.SIGKILL)


def updates(server: Serving) -> tuple[int, int]:
    """The version that it serves, and how many updates it has had."""
    with server.now.client as client:
        info = client.get("/bridge/info").json()
    return info["policy_version"], info["update_count"]


def kill_a_trainer(settings: dict[str, object], server: Serving, folder: Path) -> int:
    """One that has published versions 1 to 5; returns what is served then."""
    assert run_forked(publish_and_die, settings, server.model, server.url, folder, server.folder) == -signal.SIGKILL
    version, _ = updates(server)
    return version


Next = Callable[[dict[str, object]], Bridge]


@pytest.fixture
def next_bridge(server: Serving, tmp_path: Path) -> Iterator[Next]:
    """Makes the bridge of the next trainer of this run."""
    made: list[Bridge] = []

    def make(settings: dict[str, object]) -> Bridge:
        made.append(bridge_of(settings, server.model, server.url, tmp_path, server.folder))
        return made[-1]

    yield make
    for bridge in made:
        bridge.close()


@pytest.mark.parametrize("settings", KEPT, ids=settings_of)
def test_a_server_stays_at_the_version_that_a_killed_trainer_sent_until_a_later_one_is_due(
    settings: dict[str, object], server: Serving, next_bridge: Next, tmp_path: Path
) -> None:
    kept = kill_a_trainer(settings, server, tmp_path)
    before = updates(server)
    bridge = next_bridge(settings)
    attached = bridge.attach()
    model = attached.model.eval()
    write = weights_of(model)
    attached.repeat(range(7))
    first = OF_THE_NEXT[str(settings["mode"])]
    for version in range(2, first):
        assert bridge.publish(version, write[version]) is None
        bridge.prepare_step()
        assert updates(server) == before
    assert kept in (5, 1)
    update = bridge.publish(first + 1, write[first + 1])
    assert update is not None
    assert update.num_servers == 1
    assert_agreement(server.now, model, first + 1)


@pytest.mark.parametrize("settings", KEPT, ids=settings_of)
def test_a_server_that_is_restarted_meanwhile_serves_weights_under_their_own_version(
    settings: dict[str, object], server: Serving, next_bridge: Next, tmp_path: Path
) -> None:
    kept = kill_a_trainer(settings, server, tmp_path)
    bridge = next_bridge(settings)
    attached = bridge.attach()
    model = attached.model.eval()
    write = weights_of(model)
    attached.repeat(range(7))
    bridge.publish(3, write[3])
    server.end(signal.SIGKILL)
    server.start()
    bridge.prepare_step()
    served, _ = updates(server)
    assert served == (3 if settings["mode"] == "broadcast" else kept)
    write[served]()
    assert_agreement(server.now, model, served)
    bridge.publish(4, write[4])
    assert updates(server)[0] == served


def of_another_trainer(server: Serving, folder: Path) -> None:
    with closing(bridge_to(server, {"mode": "none", "every_steps": 1}, folder / "other")) as bridge:
        bridge.publish(server_version(server), shift(bridge.attach().model, 9))


def server_version(server: Serving) -> int:
    return updates(server)[0]


def restarted(server: Serving, folder: Path) -> None:
    server.end(signal.SIGKILL)
    server.start()


def cut_off(server: Serving, folder: Path) -> None:
    """An update that the killed trainer had begun."""
    (folder / "checkpoints" / SERVED_FILE).unlink()


@pytest.mark.parametrize("happens", [of_another_trainer, restarted, cut_off])
def test_a_server_of_other_weights_is_sent_the_first_version_and_the_one_that_the_journal_leads_to(
    happens: Callable[[Serving, Path], None], server: Serving, next_bridge: Next, tmp_path: Path
) -> None:
    settings: dict[str, object] = {"mode": "none", "every_steps": 1}
    assert kill_a_trainer(settings, server, tmp_path) == 5
    happens(server, tmp_path)
    bridge = next_bridge(settings)
    attached = bridge.attach()
    model = attached.model.eval()
    write = weights_of(model)
    attached.repeat(range(7))
    for version, served in ((2, 2), (3, 2), (4, 2), (5, 2), (6, 6)):
        bridge.publish(version, write[version])
        bridge.prepare_step()
        assert updates(server)[0] == served
    assert_agreement(server.now, model, 6)


@pytest.mark.parametrize("repeated", [range(2, 5), range(6, 9)], ids=["newer", "set aside"])
def test_a_version_to_which_the_journal_does_not_lead_is_replaced_at_once(
    repeated: range, server: Serving, next_bridge: Next, tmp_path: Path
) -> None:
    settings: dict[str, object] = {"mode": "broadcast"}
    assert kill_a_trainer(settings, server, tmp_path) == 5
    bridge = next_bridge(settings)
    attached = bridge.attach()
    model = attached.model.eval()
    write = weights_of(model)
    attached.repeat(repeated)
    bridge.publish(repeated[0], write[repeated[0]])
    assert_agreement(server.now, model, repeated[0])


# --- a whole trainer --------------------------------------------------------------------------------------------------


class KilledInStep6(Recorder):
    def step(self, step: int, *arguments: Any) -> None:
        if step == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        super().step(step, *arguments)


def train_beside(model: Path, url: str, folder: Path, server: Path, *, is_killed: bool, first_batch: int) -> None:
    config = training.settings(model_name=str(model), training_steps=9, checkpoint_interval=20)
    batches = [training.made_up_groups(seed) for seed in range(first_batch, 9)]
    if is_killed:
        tempfile.tempdir = str(folder)
    bridge = bridge_of({"mode": "none", "every_steps": 4}, model, url, folder, server)
    recorder = (KilledInStep6 if is_killed else Recorder)(folder, total_steps=9, show_times=False)
    with closing(bridge), recorder:
        source = training.ListedSource(batches)
        train(config, source, bridge, recorder, decode=str, save_path=folder / "checkpoints")  # type: ignore[arg-type]


def updates_of_a_run(server: Serving, folder: Path, *, is_killed: bool) -> list[int]:
    """How many updates the server has had when the trainer is killed after six steps, and at its end after nine."""
    folder.mkdir()
    _, before = updates(server)
    counts = []
    train_once = partial(train_beside, server.model, server.url, folder, server.folder)
    if is_killed:
        assert run_forked(partial(train_once, is_killed=True, first_batch=0)) == -signal.SIGKILL
        counts.append(updates(server)[1] - before)
    train_once(is_killed=False, first_batch=6 if is_killed else 0)
    assert server_version(server) == 8
    return [*counts, updates(server)[1] - before]


def test_a_trainer_that_repeats_its_journal_updates_the_server_when_one_that_was_not_killed_does(
    server: Serving, tmp_path: Path
) -> None:
    assert updates_of_a_run(server, tmp_path / "whole", is_killed=False) == [3]  # versions 0, 4 and 8
    server.reset()
    assert updates_of_a_run(server, tmp_path / "killed", is_killed=True) == [2, 3]
    assert curve(tmp_path / "killed") == curve(tmp_path / "whole")
