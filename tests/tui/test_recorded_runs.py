"""Recorded runs (tests/recorded): the screen state is built from their events, and the screen shows their folders."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from recorded_runs import RECORDED, events_of, unpacked

from grpo_engine.wire.metrics import RolloutLine
from grpo_engine.wire.supervisor import RunState, ServiceChanged, ServiceState
from grpo_tui.client.local import find_run, latest_metrics, stored_status
from grpo_tui.run_files.metrics import MetricsTail
from grpo_tui.ui.app import GrpoScreen
from grpo_tui.ui.connection import LocalRun
from grpo_tui.ui.widgets.main.log_panel import LogLines
from grpo_tui.ui.widgets.main.services_table import ServicesTable
from grpo_tui.view.state import ViewState, reduce
from grpo_tui.view.timeline.file import TimelineFile
from grpo_tui.view.timeline.state import MarkKind

NAMES = re.compile(r"(?<![\w./…])/(?:work|root|home|tmp|opt|mnt)/|\b(?:10|172|192\.168)\.\d+\.\d+\.\d+\b")


@pytest.fixture(scope="module", params=RECORDED, ids=lambda path: path.name.partition(".")[0])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a recorded run, which no test changes."""
    assert request.param.stat().st_size <= 400_000
    return unpacked(request.param, tmp_path_factory.mktemp("recorded") / "logs")


def test_there_is_a_recorded_run() -> None:
    assert RECORDED


def test_a_recorded_run_is_found_and_read_as_one_that_is_over(folder: Path) -> None:
    run = find_run(folder.name[:-2], folder.parent, also_ended=True)
    assert not run.is_live
    status = stored_status(run)
    assert {service.state for service in status.services} <= {ServiceState.STOPPED, ServiceState.FINISHED}
    assert all((folder / service.log).stat().st_size for service in status.services)
    assert "alignment/diff_abs_mean" in latest_metrics(folder)


def test_all_services_of_a_recorded_run_become_ready_and_it_ends_without_errors(folder: Path) -> None:
    state = ViewState(run_folder=folder, now=0.0)
    were_ready, num_warned = set(), 0
    for message in events_of(folder):
        state = reduce(state, message)
        were_ready |= {service.name for service in state.services if service.state is ServiceState.READY}
        num_warned += any(warning.severity == "error" for warning in state.warnings)
    assert were_ready == {service.name for service in state.services}
    assert state.has_ended
    assert num_warned == 0


def test_every_moment_of_a_recorded_run_can_be_shown(folder: Path) -> None:
    timeline = TimelineFile(folder)
    while timeline.read():
        pass
    assert timeline.begins is not None
    assert timeline.ends is not None
    kinds = {mark.kind for mark in timeline.marks()}
    assert kinds >= {MarkKind.READY, MarkKind.RESTART, MarkKind.CHECKPOINT}
    lasted, restarts, lengths = timeline.ends - timeline.begins, [], []
    for part in range(51):
        past = timeline.past(timeline.begins + lasted * part / 50, "trainer")
        assert past.status is not None
        restarts.append(next(each.restarts for each in past.status.services if each.name == "vllm"))
        lengths.append(0 if "was not recorded" in past.log.lines[:1] else len(past.log.lines))
    assert (restarts, lengths) == (sorted(restarts), sorted(lengths))
    assert restarts[-1] == 1
    ended = stored_status(find_run(folder.name, folder.parent, also_ended=True)).state
    assert past.status.state is ended in {RunState.STOPPED, RunState.FINISHED}
    assert lengths[-1] == (folder / "trainer.log").read_bytes().count(b"\n")
    assert len(set(lengths)) > 20


def test_a_recorded_run_has_groups_for_every_screen_that_shows_them(folder: Path) -> None:
    lines = [RolloutLine.model_validate_json(line) for line in (folder / "rollouts.jsonl").read_bytes().splitlines()]
    assert len(lines) >= 40
    trained = [each for line in lines for each in line.completions if each.training_logprobs]
    assert all(len(each.token_texts) == len(each.token_ids) == len(each.entropies) for each in trained)


@pytest.mark.slow
async def test_the_screen_shows_a_recorded_run_from_its_folder(folder: Path) -> None:
    last_step = MetricsTail(folder / "metrics.jsonl").read().lines[-1].step
    names = {message.service.name for message in events_of(folder) if isinstance(message, ServiceChanged)}
    app = GrpoScreen(folder, LocalRun(folder))
    async with app.run_test(size=(140, 45)) as pilot:
        async with asyncio.timeout(60):
            while not app.state.has_ended or not app.state.log.lines or app.state.history.last is None:
                await pilot.pause(0.01)
            while not all(name in shown(app, ServicesTable) for name in names) or not shown(app, LogLines):
                await pilot.pause(0.01)
        assert app.state.history.last.step == last_step
        assert {service.name for service in app.state.services} == names


def shown(app: GrpoScreen, part: type[ServicesTable] | type[LogLines]) -> str:
    """The text of a part of the screen."""
    return "".join(app.main.query_one(part).plain_lines).strip()


def test_a_recording_has_no_path_and_no_address_of_the_machine_it_was_made_on(folder: Path) -> None:
    files = [path for path in folder.rglob("*") if path.is_file()]
    found = {path.name: NAMES.findall(path.read_text(encoding="utf-8")) for path in files}
    assert not any(found.values()), found
