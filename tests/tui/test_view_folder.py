"""A run's folder that is deleted while somebody looks: what is found, and what stands on the screen."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from screen_fakes import NOW, run_status
from shown_screen import SMALL, shown

from grpo_engine.wire.run_folder import PLAN_FILE
from grpo_engine.wire.supervisor import Bye, RunState, Snapshot
from grpo_tui.ui.widgets.main.warnings_bar import WarningsBar
from grpo_tui.view.folder_watch import FolderState, FolderWatch
from grpo_tui.view.logs.tail import LogView
from grpo_tui.view.state import ConnectionLost, FolderChecked, ViewState, reduce
from grpo_tui.view.timeline.past import displayed
from grpo_tui.view.timeline.state import Past


def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "logs" / "a-run"
    folder.mkdir(parents=True)
    (folder / PLAN_FILE).write_text("{}")
    return folder


def test_a_folder_that_is_deleted_or_moved_is_gone_until_it_is_put_back(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    watch = FolderWatch(folder)
    assert watch.look() is FolderState.THERE
    folder.rename(tmp_path / "elsewhere")
    assert watch.look() is FolderState.GONE
    (tmp_path / "elsewhere").rename(folder)
    assert watch.look() is FolderState.THERE


def test_a_folder_that_was_made_anew_is_another_one_whatever_its_inode(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    watch = FolderWatch(folder)
    for _ in range(3):
        shutil.rmtree(folder)
        assert watch.look() is FolderState.GONE
        folder.mkdir()
        (folder / PLAN_FILE).write_text("{}")
        assert watch.look() is FolderState.RECREATED


def test_a_folder_whose_files_alone_were_deleted_is_gone_too(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    watch = FolderWatch(folder)
    (folder / PLAN_FILE).unlink()
    assert watch.look() is FolderState.GONE


def test_a_folder_that_never_was_is_nothing_to_warn_of(tmp_path: Path) -> None:
    assert FolderWatch(tmp_path / "absent").look() is FolderState.THERE


def test_a_watch_keeps_no_file_open_after_its_end(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    watch = FolderWatch(folder)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    del watch
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_warning_says_whether_the_run_goes_on_and_what_to_do() -> None:
    fresh = ViewState(run_folder=Path("/runs/logs/a-run"), now=NOW)
    live = reduce(fresh, Snapshot(number=1, status=run_status(run="a-run")))
    assert live.folder_warnings == ()

    gone = reduce(live, FolderChecked(state=FolderState.GONE))
    (warning,) = gone.warnings
    assert warning.severity == "error"
    assert "deleted or moved while the run goes on" in warning.text
    assert "check that /runs/logs is writable" in (warning.hint or "")

    (unattended,) = reduce(gone, ConnectionLost(note="closed the connection")).warnings
    assert "no supervisor answers" in unattended.text
    assert "`grpo-tui down a-run` in /runs ends them" in (unattended.hint or "")

    (over,) = reduce(gone, Bye(state=RunState.FINISHED)).warnings
    assert over.severity == "warning"
    assert "Move the folder back to /runs/logs/a-run to read more" in (over.hint or "")

    (recreated,) = reduce(live, FolderChecked(state=FolderState.RECREATED)).warnings
    assert "created an empty one" in recreated.text
    assert "r restarts it" in (recreated.hint or "")

    assert reduce(gone, FolderChecked(state=FolderState.THERE)).warnings == ()


def test_the_warning_stands_while_somebody_travels_in_time() -> None:
    fresh = ViewState(run_folder=Path("/runs/logs/a-run"), now=NOW)
    connected = reduce(fresh, Snapshot(number=1, status=run_status(run="a-run")))
    gone = reduce(connected, FolderChecked(state=FolderState.GONE))
    past = Past(
        moment=NOW - 60, status=run_status(run="a-run"), transitions={}, start_phases={}, notices=(), log=LogView()
    )
    travelling = replace(gone, travel=replace(gone.travel, is_open=True, moment=NOW - 60, past=past))
    assert [warning.id for warning in displayed(travelling).warnings] == ["folder"]


@pytest.mark.slow
async def test_a_run_deleted_under_the_screen_is_told_whole_in_80_columns(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    async with shown(folder, SMALL, num_steps=5) as screen:
        shutil.rmtree(folder)
        told = "✗ this run's folder was deleted or moved while the run goes on"
        await screen.until(lambda: told in screen.text(WarningsBar))
        await screen.pilot.press("w")
        await screen.until(lambda: "without logs and metrics" in screen.picture)
