"""The metrics screen: what the list and the plot show at several sizes, and what each key does."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from screen_fakes import metrics_line, write_metrics
from shown_screen import LARGE, SMALL, Shown, shown
from textual.widgets import OptionList, Static

from grpo_engine.wire.checkpoints import ParentRun
from grpo_tui.ui.glyphs import as_ascii
from grpo_tui.ui.screens.choose_run import ChooseRunScreen
from grpo_tui.ui.screens.metrics import SearchInput
from grpo_tui.ui.widgets.metric_list import MetricList
from grpo_tui.ui.widgets.plot_panel import PlotPanel
from grpo_tui.view.metrics.other_runs import read_lineage, read_parent
from grpo_tui.view.metrics.state import MAX_MARKED, PlotView, XAxis, YAxis

pytestmark = pytest.mark.slow
MIDDLE = (120, 36)


class Metrics(Shown):
    """The open metrics screen."""

    @property
    def view(self) -> PlotView:
        return self.app.state.plots

    @property
    def plot(self) -> str:
        return self.text(PlotPanel)

    @property
    def title(self) -> str:
        """Of the plot."""
        return self.plot.partition("\n")[0]

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.until(lambda: True)


@asynccontextmanager
async def metrics(
    run_folder: Path, size: tuple[int, int] = SMALL, num_steps: int = 30, **last_steps: float | None
) -> AsyncIterator[Metrics]:
    """Open the metrics screen of a run with so many steps."""
    async with shown(run_folder, size, num_steps=num_steps, **last_steps) as screen:
        opened = Metrics(screen.app, screen.pilot, screen.connection)
        await opened.go_to("metrics")
        await opened.until(lambda: bool(opened.plot))
        yield opened


async def test_the_selected_metric_is_drawn_with_axes_and_figures(tmp_path: Path) -> None:
    async with metrics(tmp_path, SMALL, num_steps=100) as screen:
        assert any(" mean " in line for line in screen.lines(MetricList))
        assert "reward/mean" in screen.title
        assert any("\u2801" <= sign <= "\u28ff" for sign in screen.plot)
        assert screen.plot.count("┤") >= 3
        assert screen.plot.count("┬") >= 2
        assert "step" in screen.plot
        assert f"{metrics_line(100).metrics['reward/mean']:.4f}" in screen.plot.splitlines()[-1]
        assert "?" not in as_ascii(screen.plot + screen.text(MetricList))
        await screen.check_widths()


async def test_before_the_first_step_the_plot_says_so_and_every_key_is_accepted(tmp_path: Path) -> None:
    async with metrics(tmp_path, num_steps=0) as screen:
        assert "no step yet" in screen.plot
        await screen.press("space", "left", "plus", "0", "minus", "X", "Y", "S", "L", "b", "x", "down", "escape", "z")
        await screen.until(lambda: screen.view.is_wide)


async def test_the_list_says_which_part_is_shown_and_cuts_names_so_that_they_differ(tmp_path: Path) -> None:
    more = {f"rollout__time_in_queue_of_priority_{number}": 1.0 for number in range(20)}
    async with metrics(tmp_path, **more) as screen:
        total = len({name for line in screen.app.state.history.lines for name in line.metrics})
        title, *rows = screen.lines(MetricList)
        num_groups = sum(not any(letter.isdigit() for letter in row) for row in rows)
        assert f"1–{len(rows) - num_groups} of {total}" in title
        await screen.press("slash", *"queue")
        await screen.until_text(MetricList, "of 20")
        names = [row.lstrip("▌ ·").split()[0] for row in screen.lines(MetricList)[1:]]
        assert len(set(names)) == len(names) > 10
        assert all("…" in name for name in names)


async def test_a_search_finds_ours_by_the_name_of_another_trainer_and_its_letters_are_no_commands(
    tmp_path: Path,
) -> None:
    async with metrics(tmp_path) as screen:
        await screen.press("slash", *"v1qtD?")
        assert screen.view.query == "v1qtD?"
        assert "no metric matches" in screen.text(MetricList)
        assert screen.connection.commands == []
        await screen.press("escape")
        assert screen.view.query == ""
        await screen.press("slash", *"pg_clipfrac")
        await screen.until(lambda: "grpo/clipped_fraction" in screen.title)
        assert len(screen.lines(MetricList)) == 2
        assert "healthy ≤ 0.3 (b)" in screen.plot
        assert "┈" not in screen.plot
        await screen.press("enter", "b")
        assert "┈┈ healthy ≤ 0.3" in screen.plot
        assert not screen.part(SearchInput).has_focus
        await screen.press("escape")
        assert screen.view.query == ""
        assert len(screen.lines(MetricList)) > 10


async def test_marked_metrics_are_drawn_together_on_the_axis_that_is_named(tmp_path: Path) -> None:
    async with metrics(tmp_path, LARGE) as screen:
        await screen.press("space", "down", "down", "down", "space")
        assert len(screen.view.marked) == 2
        assert "2 marked" in screen.text(MetricList)
        assert " + ".join(screen.view.marked) in screen.title
        axes = []
        for _ in YAxis:
            await screen.press("Y")
            axes.append(screen.title.strip("─ ").rpartition("─ ")[2])
        assert axes[:3] == ["one axis for all", "one pane each", "each over its own range"]
        await screen.press("x")
        assert screen.view.marked == ()
        await screen.press(*["space", "down"] * (MAX_MARKED + 1))
        assert screen.app.state.outcome is not None
        assert "metrics are marked already" in screen.app.state.outcome.text
        assert len(screen.view.marked) == MAX_MARKED


async def test_the_cursor_shows_step_time_and_values_and_the_plot_is_zoomed_around_it(tmp_path: Path) -> None:
    async with metrics(tmp_path, MIDDLE, num_steps=40) as screen:
        await screen.press("left")
        assert "step 40" in screen.plot
        await screen.press("left")
        for words in ("step 39", "policy version 39", f"{metrics_line(39).metrics['reward/mean']:.4f}"):
            assert words in screen.plot
        await screen.press("X")
        assert (screen.view.x, screen.view.cursor) == (XAxis.TIME, None)
        assert "elapsed" in screen.plot

        await screen.press(*["X"] * (len(XAxis) - 1))
        assert screen.view.x is XAxis.STEP
        panel = screen.part(PlotPanel)
        await screen.press("plus")
        assert panel.geometry is not None
        low, high = panel.geometry.window
        assert high - low == pytest.approx((panel.geometry.whole[1] - panel.geometry.whole[0]) / 2)
        assert "zoomed" in screen.plot
        await screen.press("shift+left")
        assert panel.geometry.window[0] < low
        await screen.press("0")
        assert panel.geometry.window == panel.geometry.whole
        await screen.pilot.click(panel, offset=(panel.geometry.left + 1 + panel.geometry.columns // 2, 8))
        await screen.until(lambda: screen.view.cursor is not None)
        assert screen.view.cursor == pytest.approx(sum(panel.geometry.window) / 2, abs=2)


async def test_evaluations_are_marks_of_their_own_between_steps(tmp_path: Path) -> None:
    write_metrics(tmp_path, 40)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        for step in (50, 60, 70):
            file.write(json.dumps(metrics_line(step, **{"eval__avg@4": step / 100}).model_dump()) + "\n")
    async with metrics(tmp_path, num_steps=0) as screen:
        await screen.until(lambda: screen.app.state.history.last is not None)
        await screen.press("slash", *"avg@4", "enter")
        assert screen.plot.count("●") == 3


async def test_another_run_is_drawn_beside_this_one(tmp_path: Path) -> None:
    here, other = tmp_path / "here", tmp_path / "another-run"
    here.mkdir()
    other.mkdir()
    write_metrics(other, 12)
    (other / "state.json").write_text('{"profile": "tiny", "state": "finished"}')

    async def choose_run(screen: Metrics, num_options: int) -> None:
        await screen.press("a")
        await screen.until_screen(ChooseRunScreen)
        await screen.until(lambda: screen.app.screen.query_one(OptionList).option_count == num_options)

    async with metrics(here, MIDDLE, num_steps=20) as screen:
        await choose_run(screen, 1)
        for words in ("another-run", "tiny", "finished", "12"):
            assert words in screen.picture
        chooser = screen.app.screen
        titles, row = str(chooser.query_one(Static).content), str(chooser.query_one(OptionList).options[0].prompt)
        assert titles.index("profile") == row.index("tiny")
        assert titles.index("state") == row.index("finished")
        await screen.press("enter")
        await screen.until_text(PlotPanel, "┄ another-run")
        assert f"{metrics_line(12).metrics['reward/mean']:.4f}" in screen.plot.splitlines()[-1]
        await choose_run(screen, 2)
        await screen.press("enter")
        await screen.until(lambda: screen.view.compared is None)


async def test_a_branch_is_drawn_from_the_first_step_of_its_line_beside_what_became_of_its_parent(
    tmp_path: Path,
) -> None:
    first, parent, here = (tmp_path / name for name in ("first", "parent", "here"))
    for folder, steps in ((first, range(1, 13)), (parent, range(9, 17)), (here, range(13, 21))):
        folder.mkdir()
        lines = [metrics_line(step, reward__mean=len(folder.name) / 10) for step in steps]
        (folder / "metrics.jsonl").write_text("".join(f"{line.model_dump_json()}\n" for line in lines))
    (parent / "parent.json").write_text('{"run": "first", "step": 8}')
    (here / "parent.json").write_text('{"run": "parent", "step": 12}')
    async with metrics(here, MIDDLE, num_steps=0) as screen:
        await screen.until_text(PlotPanel, "┄ parent")
        panel = screen.app.screen.query_one(PlotPanel)
        assert panel.geometry is not None
        assert panel.geometry.whole[0] == 1
        assert panel.geometry.places == tuple(range(1, 21))  # of one curve: 8 steps of first, 4 of parent, 8 here
        own, others = panel._curves
        assert [point.y for point in own.points] == [0.5] * 8 + [0.6] * 4 + [0.4] * 8
        assert [point.step for point in others.points] == list(range(1, 17))


@pytest.mark.parametrize("name", ["/elsewhere", "../elsewhere", "..", ".", ".hidden", "a/b", ""])
def test_a_branch_reads_no_parent_outside_the_folder_of_runs(tmp_path: Path, name: str) -> None:
    (tmp_path / "parent.json").write_text(json.dumps({"run": name, "step": 5}))
    assert read_parent(tmp_path) is None
    (tmp_path / "parent.json").write_text(json.dumps({"run": "p-1123-000000-abcd.2", "step": 5}))
    assert read_parent(tmp_path) == ParentRun(run="p-1123-000000-abcd.2", step=5)


def test_a_pipe_in_a_run_folder_is_not_waited_for(tmp_path: Path) -> None:
    for name in ("parent.json", "metrics.jsonl"):
        os.mkfifo(tmp_path / name)
    assert read_parent(tmp_path) is None
    with pytest.raises(OSError, match="not a regular file"):
        read_lineage(tmp_path)
