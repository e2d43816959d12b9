"""A run's folder that is deleted while a screen shows it: how it is noticed, and the warning."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from screen_fakes import STARTED, run_status
from shown_screen import SMALL, shown

from grpo_engine.wire.run_folder import PLAN_FILE
from grpo_engine.wire.supervisor import Bye, RunState, Snapshot
from grpo_tui.ui.widgets.main.warnings_bar import WarningsBar
from grpo_tui.view.folder_watch import FolderState, FolderWatch
from grpo_tui.view.logs.tail import LogView
from grpo_tui.view.state import ConnectionLost, FolderChecked, ViewState, reduce
from grpo_tui.view.timeline.past import displayed
from grpo_tui.view.timeline.state import Past


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "logs" / "a-run"
    folder.mkdir(parents=True)
    (folder / PLAN_FILE).write_text("{}")
    return folder


def test_a_folder_that_is_moved_or_lost_its_files_is_gone_until_it_is_back(folder: Path, tmp_path: Path) -> None:
    watch = FolderWatch(folder)
    assert watch.look() is FolderState.THERE
    folder.rename(tmp_path / "elsewhere")
    assert watch.look() is FolderState.GONE
    (tmp_path / "elsewhere").rename(folder)
    assert watch.look() is FolderState.THERE
    (folder / PLAN_FILE).unlink()
    assert watch.look() is FolderState.GONE
    assert FolderWatch(tmp_path / "absent").look() is FolderState.THERE, "it never existed: nothing to warn of"


def test_a_folder_that_was_recreated_is_another_one_whatever_its_inode(folder: Path) -> None:
    watch = FolderWatch(folder)
    for _ in range(3):
        shutil.rmtree(folder)
        assert watch.look() is FolderState.GONE
        folder.mkdir()
        (folder / PLAN_FILE).write_text("{}")
        assert watch.look() is FolderState.RECREATED


def test_a_watch_keeps_no_file_open_after_its_end(folder: Path) -> None:
    def num_open() -> int:
        return sum(os.path.realpath(each).startswith(str(folder)) for each in Path("/proc/self/fd").iterdir())

    watch = FolderWatch(folder)
    assert num_open() == 1
    del watch
    assert num_open() == 0


LIVE = reduce(
    ViewState(run_folder=Path("/runs/logs/a-run"), now=STARTED + 60), Snapshot(number=1, status=run_status(run="a-run"))
)
GONE = reduce(LIVE, FolderChecked(state=FolderState.GONE))


@pytest.mark.parametrize(
    ("state", "severity", "text", "hint"),
    [
        (GONE, "error", "deleted or moved while the run goes on", "check that /runs/logs is writable"),
        (
            reduce(GONE, ConnectionLost(note="closed the connection")),
            "error",
            "no supervisor answers",
            "`grpo-tui down a-run` in /runs ends them",
        ),
        (reduce(GONE, Bye(state=RunState.FINISHED)), "warning", "", "Move the folder back to /runs/logs/a-run to read"),
        (
            reduce(LIVE, FolderChecked(state=FolderState.RECREATED)),
            "error",
            "created an empty one",
            "r restarts it",
        ),
    ],
    ids=["run goes on", "no supervisor", "run has ended", "recreated"],
)
def test_the_warning_says_whether_the_run_goes_on_and_what_to_do(
    state: ViewState, severity: str, text: str, hint: str
) -> None:
    (warning,) = state.warnings
    assert warning.severity == severity
    assert text in warning.text
    assert hint in (warning.hint or "")


def test_the_warning_is_shown_as_long_as_the_folder_is_gone_and_for_past_moments_too() -> None:
    assert LIVE.folder_warnings == ()
    assert reduce(GONE, FolderChecked(state=FolderState.THERE)).warnings == ()
    past = Past(
        moment=STARTED + 30, status=run_status(run="a-run"), transitions={}, start_phases={}, notices=(), log=LogView()
    )
    travelling = replace(GONE, travel=replace(GONE.travel, is_open=True, moment=STARTED + 30, past=past))
    assert [warning.id for warning in displayed(travelling).warnings] == ["folder"]


@pytest.mark.slow
async def test_the_warning_about_a_deleted_folder_is_readable_in_80_columns(folder: Path) -> None:
    async with shown(folder, SMALL, num_steps=5) as screen:
        shutil.rmtree(folder)
        warning = "✗ this run's folder was deleted or moved while the run goes on"
        await screen.until(lambda: warning in screen.text(WarningsBar))
        await screen.pilot.press("w")
        await screen.until(lambda: "without logs and metrics" in screen.picture)
