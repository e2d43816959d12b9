"""Trackers: each is given every step under its own name and number, and none can end a run.

The services are the real ones, kept on this machine: wandb offline, trackio's local store, TensorBoard's event files.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from training import settings

from grpo_engine.environments import main as environment
from grpo_engine.environments import tracking
from grpo_engine.environments.clients import WandbInfo
from grpo_engine.environments.config import EnvironmentConfig
from grpo_engine.environments.tasks.puzzles import Sort6
from grpo_engine.environments.tracking import check_tracker, start_tracker
from grpo_engine.errors import ConfigError
from grpo_engine.trackers import FaultTolerant, Tracker, public_settings, set_up_wandb
from grpo_engine.train.recording.recorder import Recorder
from grpo_engine.train.recording.trackers import build_trackers

STEPS = [{"train/loss": 0.5, "reward/mean": 0.25}, {"train/loss": 0.25, "reward/mean": 0.5}]


class FailingTracker:
    """Takes the first step and fails from then on, as without a network."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, Mapping[str, float]]] = []
        self.calls = 0

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.calls += 1
        if self.calls > 1:
            raise ConnectionError("no route to host")
        self.taken.append((step, metrics))

    def close(self) -> None:
        self.calls += 1
        raise ConnectionError("still no route")


class LongReason(FailingTracker):
    """Fails with the whole answer of a server."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        raise ConnectionError("x" * 1_000_000)


def record(folder: Path, kept: list[Tracker], steps: list[dict[str, float]] = STEPS, *, first: int = 1) -> None:
    with Recorder(folder, total_steps=9, show_times=False, trackers=kept) as recorder:
        for step, metrics in enumerate(steps, start=first):
            recorder.step(step, step, metrics)


def test_a_tracker_that_fails_is_logged_once_gets_no_more_steps_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flaky, other = FailingTracker(), FailingTracker()
    with caplog.at_level(logging.ERROR):
        record(
            tmp_path,
            [FaultTolerant("wandb", flaky, instead="x"), FaultTolerant("trackio", other, instead="x")],
            STEPS + STEPS,
        )
    assert flaky.taken == other.taken == [(1, STEPS[0])]
    assert flaky.calls == 3  # two steps, and the close
    assert [text.partition(";")[0] for text in caplog.messages if text.startswith("wandb failed")] == [
        "wandb failed at step 2 and gets no more metrics (ConnectionError: no route to host)"
    ]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4


def test_of_a_long_reason_of_a_tracker_the_beginning_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        record(tmp_path, [FaultTolerant("wandb", LongReason(), instead="x")])
    assert len(caplog.text) < 2000


@pytest.mark.parametrize(
    ("setting", "module", "extra"),
    [
        ("use_wandb", "wandb", "trackers"),
        ("use_tensorboard", "torch.utils.tensorboard.writer", "trackers"),
        ("use_trackio", "trackio", "trackio"),
    ],
)
def test_a_tracker_that_is_chosen_and_not_installed_is_an_error_that_says_what_to_install(
    setting: str, module: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert build_trackers(settings(), tmp_path) == []
    monkeypatch.setitem(sys.modules, module, None)  # import then fails as where it is missing
    with pytest.raises(ConfigError, match=rf"{setting}: .* is not installed: pip install 'grpo-tui\[{extra}\]'"):
        build_trackers(settings(**{setting: True, "wandb_project": "p"}), tmp_path)


def test_a_tracker_that_does_not_start_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**given: object) -> None:
        raise RuntimeError("no API key configured" + "E" * 10**6)  # as a server of W&B wrote it

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    with pytest.raises(ConfigError, match=r"wandb did not start \(RuntimeError: no API key configuredE{979}\)"):
        build_trackers(settings(use_wandb=True, wandb_project="p"), tmp_path)


@pytest.mark.parametrize("asked", [None, "7"])
def test_a_run_that_ends_waits_two_minutes_for_wandb_unless_the_user_says_otherwise(
    asked: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("WANDB_FINISH_TIMEOUT", "WANDB_FINISH_TIMEOUT_RAISES"):
        monkeypatch.setenv(name, asked or "")
        if asked is None:
            monkeypatch.delenv(name)
    set_up_wandb(SimpleNamespace(setup=lambda: None), tmp_path)
    assert os.environ["WANDB_FINISH_TIMEOUT"] == (asked or "120")


def test_the_settings_that_are_sent_hold_no_secret() -> None:
    server_urls = ("http://run:hunter2@10.0.0.1:9001", "http://10.0.0.1:9002/?api_key=hunter2")
    sent = public_settings(
        settings(atropos_url="http://user:hunter2@10.0.0.1:8000/api?token=hunter2", server_urls=server_urls, lr=3e-4)
    )
    assert sent["server_urls"] == ["http://10.0.0.1:9001", "http://10.0.0.1:9002/"]
    assert sent["atropos_url"] == "http://10.0.0.1:8000/api"
    assert sent["lr"] == 3e-4
    assert isinstance(sent["bridge"], dict)
    assert "hunter2" not in json.dumps(sent)


def test_wandb_which_sends_the_command_line_sees_no_secret_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []
    given = ["grpo-engine", "env", "--api-key", "hunter2", "--inference-url", "http://me:hunter2@10.0.0.1:9001"]
    monkeypatch.setattr(sys, "argv", given)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: seen.append(sys.argv)))
    build_trackers(settings(use_wandb=True, wandb_project="p"), tmp_path)
    start_tracker(EnvironmentConfig(task=Sort6(), model_name="m"), WandbInfo(project="p", group="g"))
    assert seen == [[*given[:3], "***", "--inference-url", "http://me:***@10.0.0.1:9001"]] * 2
    assert sys.argv is given


def test_an_environment_without_wandb_says_so_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "is_installed", lambda _name: False)
    check_tracker(EnvironmentConfig(task=Sort6(), model_name="m"))
    with pytest.raises(ConfigError, match=r"use_wandb: wandb is not installed: pip install 'grpo-tui\[trackers\]'"):
        environment.run(EnvironmentConfig(task=Sort6(), model_name="m", use_wandb=True))


def test_tensorboard_gets_every_step_and_a_resumed_run_replaces_those_it_repeats(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = settings(use_tensorboard=True)
    record(tmp_path, build_trackers(config, tmp_path))
    record(tmp_path, build_trackers(config, tmp_path), first=2)  # killed after step 2, resumed from step 1
    written = EventAccumulator(str(tmp_path / "tensorboard"))
    written.Reload()
    assert sorted(written.Tags()["scalars"]) == ["reward/mean", "train/loss"]
    assert [(e.step, e.value) for e in written.Scalars("train/loss")] == [(1, 0.5), (2, 0.5), (3, 0.25)]


def wandb_records(file: Path) -> Iterator[Any]:
    """What wandb keeps offline: 7 bytes, then protobufs in LevelDB's log format (checksum, length, kind)."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at = file.read_bytes(), 7
    assert len(content) < 2**15  # below that no record is split
    while at < len(content):
        _, length, kind = struct.unpack_from("<IHB", content, at)
        assert kind == 1
        yield Record.FromString(content[at + 7 : at + 7 + length])
        at += 7 + length


@pytest.mark.slow
def test_wandb_gets_every_step_and_a_run_that_is_started_again_keeps_its_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = settings(use_wandb=True, wandb_project="p", wandb_group="g")
    for _ in range(2):
        record(tmp_path, build_trackers(config, tmp_path))
    identities, steps = set(), []
    for file in tmp_path.glob("wandb/offline-run-*/run-*.wandb"):
        for read in wandb_records(file):
            if read.HasField("run"):
                identities.add((read.run.project, read.run.display_name, read.run.run_group, read.run.run_id))
            if read.HasField("history"):
                items = {item.key or "/".join(item.nested_key): item.value_json for item in read.history.item}
                steps.append((json.loads(items["_step"]), json.loads(items["train/loss"])))
    assert identities == {("p", tmp_path.name, "g", (tmp_path / "wandb-run-id").read_text())}
    assert steps == [(1, 0.5), (2, 0.25)] * 2


TRACK = """
import sys
from pathlib import Path
from training import settings
from test_trackers import record
from grpo_engine.train.recording.trackers import build_trackers
folder = Path(sys.argv[1])
record(folder, build_trackers(settings(use_trackio=True, trackio_project="p"), folder))
"""


@pytest.mark.slow
def test_trackio_gets_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))  # read where it is imported: hence another process
    monkeypatch.setenv("PYTHONPATH", ":".join([str(Path(__file__).parent), *sys.path]))
    subprocess.run([sys.executable, "-c", TRACK, str(tmp_path / "run-7")], check=True, capture_output=True)
    with sqlite3.connect(tmp_path / "store" / "p.db") as store:
        rows = store.execute("select run_name, step, metrics from metrics order by step").fetchall()
    assert [(name, step, json.loads(metrics)) for name, step, metrics in rows] == [
        ("run-7", step, metrics) for step, metrics in enumerate(STEPS, start=1)
    ]
