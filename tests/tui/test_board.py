"""The board: its rows, what keys do to them, what is read of runs, and curves of several of them."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from board_runs import copied_run, make_sweep
from picture_scenes import RECORDED
from recorded_runs import unpacked
from screen_fakes import NOW
from textual.pilot import Pilot

from grpo_engine.wire.metrics import MetricsLine
from grpo_engine.wire.supervisor import RunState, Warning
from grpo_tui.cli import screen as cli_screen
from grpo_tui.exit_codes import TO_BOARD, ExitCode
from grpo_tui.run_files.metrics import TAIL_BYTES, spread_lines
from grpo_tui.ui.board import app as board_app
from grpo_tui.ui.board import reading
from grpo_tui.ui.board.app import BoardApp, BoardScreen, Choice
from grpo_tui.ui.board.curves import CurvesPanel, CurvesScreen
from grpo_tui.ui.board.reading import BoardReader
from grpo_tui.ui.board.table import ABOUT_ROWS, AboutRow, AnswerLine, BoardHeader, BoardTable, _spark, spans
from grpo_tui.ui.screens.confirm import ConfirmScreen
from grpo_tui.ui.screens.reading import ReadingScreen
from grpo_tui.ui.widgets.lines import Lines
from grpo_tui.ui.widgets.plot_drawing import drawn_of
from grpo_tui.view.board import state as view
from grpo_tui.view.board.seeds import Group, MarkedRun, curve_over, groups_of, metrics_of, scores_of
from grpo_tui.view.board.state import Board, BoardRun, BoardSweep, after, rows
from grpo_tui.view.metrics.curves import Curve, Point
from grpo_tui.view.metrics.history import MetricHistory, extended
from grpo_tui.view.metrics.state import PlotView, XAxis
from grpo_tui.view.metrics.summary import Score
from grpo_tui.view.progress import Progress

FURTHER = pytest.mark.extended("the same at 80x24")
LOGS = Path("/logs")
SWEEP = LOGS / "sweeps" / "rates"


def run(name: str, **changes: Any) -> BoardRun:
    """A run that has finished."""
    values: dict[str, Any] = {"state": RunState.FINISHED, "profile": "tiny", "began_at": 100.0}
    return BoardRun(folder=LOGS / name, **{**values, **changes})


LIVE = run("live", state=RunState.RUNNING, is_live=True, began_at=50.0, reward=0.2,
           progress=Progress(step=5, steps=9, steps_left=4, time_left_s=40.0))  # fmt: skip
OLD, FAILED = run("old", began_at=10.0, reward=0.9), run("failed", state=RunState.FAILED, note="trainer: out of memory")
POINTS = [run(f"p{n}", sweep=SWEEP, label=f"lr={n}", reward=n / 10, began_at=20.0 + n) for n in (1, 2)]
RATES = BoardSweep(folder=SWEEP, num_points=3, best=Score(step=0, value=0.5, error=0.1), best_label="lr=2")
RUNS = (LIVE, OLD, FAILED, *POINTS)
BOARD = after(Board(), view.RunsRead(runs=RUNS, sweeps=(RATES,), now=NOW))


def names(board: Board) -> list[str]:
    return [view.row_name(row) for row in rows(board)]


def changed(board: Board, *changes: view.Change) -> Board:
    for change in changes:
        board = after(board, change)
    return board


def test_live_runs_come_first_then_the_newest_and_runs_of_a_sweep_stand_below_it() -> None:
    assert names(BOARD) == ["live", "failed", "rates", "old"]
    unfolded = changed(BOARD, view.Selected(key=str(SWEEP)), view.Folded(is_folded=False))
    assert names(unfolded) == ["live", "failed", "rates", "p2", "p1", "old"]


def test_a_sweep_that_runs_is_unfolded_until_it_is_folded_by_hand() -> None:
    running = BoardSweep(folder=SWEEP, num_points=3, is_running=True)
    board = after(BOARD, view.RunsRead(runs=RUNS, sweeps=(running,), now=NOW))
    assert names(board)[:4] == ["live", "rates", "p2", "p1"]
    folded = changed(board, view.Selected(key=str(LOGS / "p1")), view.Folded(is_folded=True))
    assert names(folded)[:3] == ["live", "rates", "failed"]
    assert folded.selected == str(SWEEP)


def test_every_order_keeps_the_runs_of_a_sweep_together_and_turns_around() -> None:
    board = changed(BOARD, view.Selected(key=str(SWEEP)), view.Folded(is_folded=False))
    by_order = {}
    for _ in view.Order:
        by_order[board.order] = names(board)
        board = after(board, view.OrderTurned())
    assert board.order is view.Order.NEWEST
    assert by_order[view.Order.NAME] == ["failed", "live", "old", "rates", "p1", "p2"]
    assert by_order[view.Order.REWARD] == ["old", "rates", "p2", "p1", "live", "failed"]
    assert by_order[view.Order.TIME_LEFT][0] == "live"
    assert by_order[view.Order.STATE][0] == "live"
    backwards = changed(board, view.OrderTurned(), view.OrderTurned(is_reversed=True))
    assert names(backwards) == ["rates", "p2", "p1", "old", "live", "failed"]


def test_a_filter_matches_every_word_and_shows_matching_runs_of_folded_sweeps() -> None:
    assert names(after(BOARD, view.Filtered(query="rates LR=2"))) == ["rates", "p2"]
    assert names(after(BOARD, view.Filtered(query="failed tiny"))) == ["failed"]
    nothing = after(BOARD, view.Filtered(query="nothing like it"))
    assert names(nothing) == []
    assert view.selected_row(nothing) is None
    assert changed(nothing, view.Moved(by=1), view.MarkTurned(), view.Folded(is_folded=True)).marked == ()


def test_marking_a_sweep_marks_its_runs_and_marks_go_with_runs_that_are_gone() -> None:
    marked = changed(BOARD, view.Selected(key=str(SWEEP)), view.MarkTurned())
    assert [each.name for each in marked.chosen] == ["p2", "p1"]
    assert after(marked, view.MarkTurned()).marked == ()
    left = after(marked, view.RunsRead(runs=RUNS[:-1], sweeps=(RATES,), now=NOW))
    assert [each.name for each in left.chosen] == ["p1"]


def test_the_selection_stays_at_its_place_when_its_run_is_deleted() -> None:
    at_failed = after(BOARD, view.Selected(key=str(FAILED.folder)))
    left = after(at_failed, view.RunsRead(runs=(LIVE, OLD), sweeps=(), now=NOW))
    assert left.selected == str(OLD.folder)
    assert after(left, view.RunsRead(runs=(), sweeps=(), now=NOW)).selected is None


def test_gpus_next_to_each_other_are_one_span() -> None:
    assert spans((0, 1, 2, 3, 6)) == "0-3,6"
    assert spans(()) == ""


# --- curves ----------------------------------------------------------------------------------------------------------


def marked_run(name: str, rewards: Sequence[float], *, lr: float, seed: int, port: int = 8000) -> MarkedRun:
    lines = [
        MetricsLine(time=float(step), step=step, policy_version=step, metrics={"reward/mean": reward})
        for step, reward in enumerate(rewards)
    ]
    resolved = {"services": {"trainer": {"lr": lr, "seed": seed, "kind": "trainer"}, "api": {"port": port}}}
    return MarkedRun(name=name, history=extended(MetricHistory(), lines), resolved=resolved)


def test_runs_that_differ_in_seeds_and_ports_alone_are_one_curve_with_its_standard_error() -> None:
    runs = [
        marked_run("a", [0.0, 0.2], lr=0.1, seed=0),
        marked_run("b", [0.4, 0.6, 0.9], lr=0.1, seed=1, port=8001),
        marked_run("c", [1.0, 1.0], lr=0.2, seed=0),
    ]
    groups = groups_of(runs)
    assert [[each.name for each in group.runs] for group in groups] == [["a", "b"], ["c"]]
    assert [dict(group.settings) for group in groups] == [
        {"services.trainer.lr": 0.1}, {"services.trainer.lr": 0.2}
    ]  # fmt: skip
    curve = curve_over(groups[0], "reward/mean", 1, XAxis.STEP)
    # Step 2 was done by one of them alone; (0, 0.4) has mean 0.2 and error 0.2828/sqrt(2).
    assert curve.measured == [(0.0, pytest.approx(0.2)), (1.0, pytest.approx(0.4))]
    assert curve.errors == (pytest.approx(0.2), pytest.approx(0.2))
    assert curve.edge(1)[0] == (0.0, pytest.approx(0.4))
    assert curve_over(groups[1], "reward/mean", 2, XAxis.STEP).errors == ()


def test_two_runs_with_the_same_seed_are_two_curves() -> None:
    runs = [marked_run(name, [0.5], lr=0.1, seed=0) for name in ("before", "after")]
    assert [len(group.runs) for group in groups_of(runs)] == [1, 1]


def test_a_run_whose_settings_cannot_be_read_is_a_curve_of_its_own() -> None:
    unknown = MarkedRun(name="x", history=MetricHistory(), resolved={})
    assert len(groups_of([unknown, unknown, marked_run("a", [0.5], lr=0.1, seed=0)])) == 3


def test_the_mean_of_long_runs_is_taken_over_spans_of_steps() -> None:
    runs = [marked_run(str(seed), [float(seed)] * 1500, lr=0.1, seed=seed) for seed in (0, 1)]
    curve = curve_over(Group(runs=tuple(runs), settings={}), "reward/mean", 1, XAxis.STEP)
    assert 300 <= len(curve.points) <= 400
    assert {y for _, y in curve.measured} == {0.5}
    assert metrics_of(runs) == ["reward/mean"]
    final, best = scores_of(Group(runs=tuple(runs), settings={}), "reward/mean")
    assert final is not None
    assert (final.value, final.error) == (0.5, pytest.approx(0.5))
    assert best is not None
    assert (best.value, best.step) == (0.5, 9)


def test_the_error_of_an_evaluation_is_not_smoothed_since_its_mean_is_not() -> None:
    points = tuple(Point(x=x, y=y, step=x, time=0.0, policy_version=0) for x, y in enumerate((0.1, 0.9, 0.2, 0.7)))
    curve = Curve(name="eval/avg@4", number=1, points=points, errors=(0.1,) * 4, is_sparse=True)
    plain, smooth = (drawn_of([curve], PlotView(smoothing=weight), (0.0, 3.0), 60, 12).rows for weight in (0.0, 0.9))
    assert [row.text for row in plain] == [row.text for row in smooth]
    assert any("⠁" <= sign <= "⣿" for row in plain for sign in row.text)
    assert {span.style for row in plain for span in row.spans} == {".share-0"}  # the line, too, has its curve's colour


def test_curves_of_evaluations_have_their_numbers_in_the_plot_and_are_not_told_apart_by_colour_alone() -> None:
    curves = [
        Curve(
            name="eval/avg@4",
            number=number,
            points=tuple(Point(x=x, y=x + number, step=x, time=0.0, policy_version=0) for x in range(6)),
            is_sparse=True,
        )
        for number in (1, 2)
    ]
    drawn = drawn_of(curves, PlotView(), (0.0, 5.0), 60, 12).rows
    assert sorted(sign for row in drawn for sign in row.text if sign in "12●") == [*"111222", *"●" * 6]


@pytest.mark.parametrize(("note", "is_whole"), [("", True), ("out of memory " * 9, False)])
def test_what_a_selected_run_came_to_is_folded_into_rows_that_are_left(note: str, is_whole: bool) -> None:
    services = " ".join(f"{name} stopped," for name in ("api", "vllm", "env", "reference", "trainer"))
    runs = (run("long", services=services, note=note),)
    board = after(Board(), view.RunsRead(runs=runs, sweeps=(), now=NOW))
    rows = [row.plain for row in AboutRow().lines(board, 50, ABOUT_ROWS + 1)]
    assert (services in " ".join(rows)) is is_whole
    assert rows[1].endswith("…") is not is_whole
    assert len(rows) <= ABOUT_ROWS + 1


def test_a_failure_is_told_once_in_the_words_of_its_warning() -> None:
    warning = Warning(id="failed:trainer", severity="error", text="trainer failed: out of memory")
    board = after(Board(), view.RunsRead(runs=(replace(FAILED, warnings=(warning,)),), sweeps=(), now=NOW))
    assert [row.plain for row in AboutRow().lines(board, 50, ABOUT_ROWS + 1)][2:] == ["✗ trainer failed: out of memory"]


def test_without_a_live_run_names_have_the_room_of_the_time_that_is_left() -> None:
    name = "tiny-cpu-1128-213553-bd3e"
    board = after(Board(), view.RunsRead(runs=(run(name),), sweeps=(), now=NOW))
    titles, row = (line.plain for line in BoardTable().lines(board, 78, 9))
    assert name in row
    assert "left" not in titles
    assert "left" in BoardTable().lines(BOARD, 78, 9)[0].plain


def test_a_sparkline_has_no_holes_between_the_places_that_were_read() -> None:
    bars = _spark(((0, 0.0), (9, 0.5), (10, 0.6), (30, 1.0)), 31)
    assert len(bars) == 31
    assert " " not in bars


# --- what is read ----------------------------------------------------------------------------------------------------


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    return unpacked(RECORDED / "tiny-cpu.tar.gz", tmp_path / "recorded")


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs with a sweep; tests only read it."""
    folder = tmp_path_factory.mktemp("swept")
    make_sweep(unpacked(RECORDED / "tiny-cpu.tar.gz", folder / "recorded"), folder / "logs")
    return folder / "logs"


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No run of this host but those of the test."""
    monkeypatch.setattr(reading, "registered_folders", set)
    monkeypatch.setattr(reading, "marked_folders", set)


def test_runs_and_sweeps_are_read_from_their_folders(swept: Path, alone: None) -> None:
    reader = BoardReader(swept)
    assert reader.has_runs()
    runs, sweeps = reader.read()
    by_name = {each.name: each for each in runs}
    found = by_name["tiny-cpu-1124-010001-0001"]
    assert (found.state, found.is_live, found.label) == (RunState.FINISHED, False, "lr=0.0001 seed=0")
    assert (found.progress.step, found.progress.steps, found.progress.steps_left) == (150, 150, 0)
    assert found.reward == pytest.approx(0.82, abs=0.03)
    assert found.rewards[0][0] == 1
    (sweep,) = sweeps
    assert (sweep.name, sweep.num_points, sweep.is_running, sweep.best_label) == ("rates", 9, False, "lr=0.0003")
    assert {each.sweep for each in runs} == {sweep.folder}


def test_a_run_that_has_ended_is_read_again_only_when_a_file_of_it_changed(
    recorded: Path, tmp_path: Path, alone: None
) -> None:
    folder = copied_run(recorded, tmp_path / "logs" / "a", settings={})
    reader = BoardReader(tmp_path / "logs")
    (before,), _ = reader.read()
    assert reader.read()[0][0] is before
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**state, "profile": "other"}))
    assert reader.read()[0][0].profile == "other"


def test_damaged_and_hostile_files_leave_a_row_that_says_so(recorded: Path, tmp_path: Path, alone: None) -> None:
    logs = tmp_path / "logs"
    broken, hostile, pipe = (copied_run(recorded, logs / name, settings={}) for name in ("a", "b", "c"))
    (broken / "state.json").write_text("{")
    state = json.loads((hostile / "state.json").read_text())
    (hostile / "state.json").write_text(json.dumps({**state, "profile": "\x1b]0;x\x07tiny\nb"}))
    (hostile / "sweep.json").write_text(json.dumps({"sweep": "../../etc", "id": "1", "point": 1}))
    (pipe / "plan.json").unlink()
    os.mkfifo(pipe / "plan.json")
    runs, sweeps = BoardReader(logs).read()
    by_name = {each.name: each for each in runs}
    assert by_name["a"].state is None
    assert "damaged" in by_name["a"].note
    assert by_name["b"].profile == "]0;xtinyb"
    assert by_name["b"].sweep is None
    assert "not a regular file" in by_name["c"].note
    assert sweeps == ()


def test_of_a_long_run_lines_are_read_at_places_spread_over_it(tmp_path: Path) -> None:
    lines = [{"time": n, "step": n, "policy_version": n, "metrics": {"reward/mean": 0.5}} for n in range(20_000)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = [line.step for line in spread_lines(tmp_path, num_places=4, bytes_a_place=1000)]
    assert found == sorted(found)
    assert found[-1] == 19_999
    assert len(found) < 4 * 20 + TAIL_BYTES / 60
    assert {step // 5000 for step in found} == {0, 1, 2, 3}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:50]))
    assert [line.step for line in spread_lines(tmp_path, num_places=4, bytes_a_place=1000)] == list(range(50))
    assert spread_lines(tmp_path / "none", num_places=4, bytes_a_place=1000) == []


# --- the screen ------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def board(
    runs: Sequence[BoardRun] = RUNS, sweeps: Sequence[BoardSweep] = (RATES,), *, size: tuple[int, int] = (80, 24),
    state: Board | None = None,
) -> AsyncIterator[tuple[BoardApp, Pilot[Choice]]]:  # fmt: skip
    reader = SimpleNamespace(read=lambda: (tuple(runs), tuple(sweeps)))
    app = BoardApp(reader, state or Board(), clock=lambda: NOW)
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: app.board.is_read and not app._is_draw_due)
        yield app, pilot


async def until(pilot: Pilot[Choice], is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_so():
            await pilot.pause(0.01)
    await pilot.pause()


def text(app: BoardApp, part: type[Lines[Any]]) -> str:
    return "\n".join(line for each in app.screen_stack[0].query(part) for line in each.plain_lines)


@pytest.mark.slow
async def test_the_board_shows_runs_the_filter_takes_letters_that_are_keys_and_enter_opens_the_selected_run() -> None:
    async with board() as (app, pilot):
        await until(pilot, lambda: "live" in text(app, BoardTable))
        table = text(app, BoardTable).splitlines()
        assert table[1].split() == ["▌", "live", "●", "running", "5/9", "0.2000", "40s", "–"]
        assert table[3].split()[:4] == ["+", "rates", "■", "2/3"]
        assert "best lr=2 0.500 ± 0.100" in table[3]
        assert "5 runs, 1 live, 1 sweep" in text(app, BoardHeader)
        await pilot.press("slash", "O", "l", "D")
        await until(pilot, lambda: app.board.query == "OlD")
        assert names(app.board) == ["old"]
        await pilot.press("enter", "D")
        await until(pilot, lambda: "ended already" in text(app, AnswerLine))
        assert app.board.order is view.Order.NEWEST
        await pilot.press("escape")
        await until(pilot, lambda: app.board.query == "")
        await pilot.press("home", "down")
        await until(pilot, lambda: "out of memory" in text(app, AboutRow))
        await pilot.press("enter")
        await until(pilot, lambda: app._exit)
        assert app.return_value == Choice(run_folder=FAILED.folder)


@pytest.mark.slow
@pytest.mark.parametrize("answer", ["y", pytest.param("n", marks=pytest.mark.extended("the other answer"))])
async def test_ending_runs_asks_first_and_names_them(answer: str) -> None:
    ended = list[str]()

    async def end(run: BoardRun) -> str:
        ended.append(run.name)
        return ""

    async with board() as (app, pilot):
        with mock.patch.object(board_app, "_end_run", end):
            await pilot.press("space", "space", "D")
            await until(pilot, lambda: isinstance(app.screen, ConfirmScreen))
            picture = app.export_screenshot().replace("&#160;", " ")
            assert "End the run live?" in picture
            assert "and every process that it started" in picture
            assert "live, running, step 5" in picture
            await pilot.press(answer)
            await until(pilot, lambda: isinstance(app.screen, BoardScreen))
            if answer == "y":
                await until(pilot, lambda: "ending live" in text(app, AnswerLine))
        assert ended == (["live"] if answer == "y" else [])


@pytest.mark.slow
async def test_curves_of_a_sweep_have_a_row_for_each_setting_with_its_error_over_seeds(
    swept: Path, alone: None
) -> None:
    runs, sweeps = BoardReader(swept).read()
    async with board(runs, sweeps) as (app, pilot):
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, CurvesScreen))
        panel = app.screen.query_one(CurvesPanel)
        await until(pilot, lambda: any("±" in line for line in panel.plain_lines[-3:]))
        last = [line.split() for line in panel.plain_lines[-3:]]
        assert [row[2] for row in last] == ["0.0001", "0.0003", "0.001"]
        assert [row[3] for row in last] == ["3", "3", "3"]
        assert "◀" in last[1]
        assert "standard error" in panel.plain_lines[0]
        await pilot.press("right")
        await until(pilot, lambda: "eval/avg@4" in panel.plain_lines[0])
        await pilot.press("d")
        await until(pilot, lambda: isinstance(app.screen, ReadingScreen))
        assert "services.trainer.lr" in app.export_screenshot()
        await pilot.press("escape", "tab")
        await until(pilot, lambda: isinstance(app.screen, BoardScreen))


@pytest.mark.slow
@pytest.mark.parametrize("size", [(80, 24), *(pytest.param(size, marks=FURTHER) for size in ((40, 10), (200, 50)))])
async def test_anything_fits_every_size_and_a_read_only_board_ends_and_starts_nothing(size: tuple[int, int]) -> None:
    warned = [Warning(id=str(n), severity="warning", text="very long " * 30) for n in range(12)]
    odd = run("n" * 90, warnings=tuple(warned), gpus=tuple(range(0, 16, 2)), services="s" * 300, label="宽" * 60)
    async with board([odd, *RUNS], size=size, state=Board(is_read_only=True)) as (app, pilot):
        await until(pilot, lambda: "▲12" in text(app, BoardTable) or size[0] == 40)
        parts = [part for part in app.screen.query(Lines) if part.size.width]
        assert all(len(line) <= part.size.width for part in parts for line in part.plain_lines)
        for key in ("D", "U"):
            await pilot.press(key)
            await until(pilot, lambda: "read-only board" in text(app, AnswerLine))
            await pilot.press("end", "home")
        await pilot.press("down", "w")
        await until(pilot, lambda: isinstance(app.screen, ReadingScreen))
        assert not app._exit


# --- between the board and runs --------------------------------------------------------------------------------------


def answers(monkeypatch: pytest.MonkeyPatch, *, has_runs: bool, chosen: Sequence[Choice | None]) -> list[str]:
    """What is opened, in order; boards are left with `chosen`, a picker with a profile, and runs for the board."""
    opened = list[str]()
    left = iter(chosen)
    monkeypatch.setattr(reading.BoardReader, "has_runs", lambda _: has_runs)

    def leave_board(app: BoardApp) -> Choice | None:
        opened.append("board")
        return next(left)

    monkeypatch.setattr(BoardApp, "run_on_terminal", leave_board)

    def pick(*_: object) -> tuple[str, int]:
        opened.append("picker")
        return "tiny", ExitCode.OK

    monkeypatch.setattr(cli_screen, "_pick_profile", pick)
    for name in ("show", "start_and_show"):

        def open_(what: object, *_: object, has_board: bool = False, **__: object) -> int:
            opened.append(f"{what}")
            return TO_BOARD if has_board else ExitCode.OK

        monkeypatch.setattr(cli_screen, name, open_)
    return opened


def test_from_a_run_one_goes_back_to_the_board_and_on_to_a_new_run(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = answers(monkeypatch, has_runs=True, chosen=[Choice(run_folder=Path("a")), Choice(run_folder=None), None])
    assert cli_screen.show_board([]) == ExitCode.OK
    assert opened == ["board", "a", "board", "picker", "tiny", "board"]


def test_where_there_is_no_run_yet_profiles_are_offered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = answers(monkeypatch, has_runs=False, chosen=[])
    assert cli_screen.show_board([]) == ExitCode.OK
    assert opened == ["picker", "tiny"]
