"""The metrics screen: what the list and the plot show at several sizes, and what each key does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from screen_fakes import metrics_line, write_metrics
from shown_screen import LARGE, SMALL, Shown, shown
from textual.widgets import OptionList

from grpo_tui.ui.glyphs import as_ascii
from grpo_tui.ui.keys import EVERYWHERE
from grpo_tui.ui.screens.choose_run import ChooseRunScreen
from grpo_tui.ui.screens.metrics import KEYS, MetricsScreen, SearchInput
from grpo_tui.ui.widgets.lines import Lines
from grpo_tui.ui.widgets.metric_list import MetricList
from grpo_tui.ui.widgets.plot_panel import PlotPanel
from grpo_tui.view.metrics.state import MAX_MARKED, XAxis, YAxis

pytestmark = pytest.mark.slow
SIZES = pytest.mark.parametrize("size", [SMALL, (120, 36), LARGE], ids=["80x24", "120x36", "200x50"])


async def opened(screen: Shown) -> None:
    await screen.pilot.press("5")
    await screen.until(lambda: isinstance(screen.app.screen, MetricsScreen) and bool(text(screen, PlotPanel)))


def text(screen: Shown, part: type[Lines]) -> str:
    return "\n".join(next(iter(screen.app.screen.query(part))).plain_lines) if screen.app.screen.query(part) else ""


def row(screen: Shown, name: str) -> str:
    return next(line for line in text(screen, MetricList).splitlines() if f" {name} " in line)


async def pressed(screen: Shown, *keys: str) -> None:
    await screen.pilot.press(*keys)
    await screen.until(lambda: True)


@SIZES
async def test_the_selected_metric_is_drawn_with_axes_and_figures(tmp_path: Path, size: tuple[int, int]) -> None:
    async with shown(tmp_path, size, num_steps=100) as screen:
        await opened(screen)
        assert "mean" in row(screen, "mean")
        plot = text(screen, PlotPanel)
        assert "reward/mean" in plot.splitlines()[0]
        assert any("\u2801" <= sign <= "\u28ff" for sign in plot)
        assert plot.count("┤") >= 3
        assert plot.count("┬") >= 2
        assert "step" in plot
        last = f"{metrics_line(100).metrics['reward/mean']:.4f}"
        assert last in plot.splitlines()[-1]
        for part in screen.app.screen.query(Lines):
            for line in part.plain_lines:
                assert len(line) <= part.size.width, (type(part).__name__, line)


async def test_before_the_first_step_the_plot_says_what_will_fill_it(tmp_path: Path) -> None:
    async with shown(tmp_path) as screen:
        await opened(screen)
        assert "no step yet" in text(screen, PlotPanel)
        for key in ("space", "left", "plus", "0", "minus", "x", "y", "s", "l", "b", "u", "down", "escape", "z"):
            await screen.pilot.press(key)
        await screen.until(lambda: screen.app.state.plots.is_wide)


async def test_the_list_says_which_part_is_in_sight_and_cuts_names_so_that_they_differ(tmp_path: Path) -> None:
    more = {f"rollout__time_in_queue_of_priority_{number}": 1.0 for number in range(20)}
    async with shown(tmp_path, num_steps=30, **more) as screen:
        await opened(screen)
        total = len({name for line in screen.app.state.history.lines for name in line.metrics})
        title, *rows = text(screen, MetricList).splitlines()
        num_groups = sum(not any(letter.isdigit() for letter in row) for row in rows)
        assert f"1–{len(rows) - num_groups} of {total}" in title
        await pressed(screen, "slash", *"queue")
        await screen.until(lambda: "of 20" in text(screen, MetricList))
        names = [row.lstrip("▌ ·").split()[0] for row in text(screen, MetricList).splitlines()[1:]]
        assert len(set(names)) == len(names) > 10
        assert all("…" in name for name in names)


async def test_a_name_of_another_trainer_finds_ours(tmp_path: Path) -> None:
    async with shown(tmp_path, num_steps=30) as screen:
        await opened(screen)
        await pressed(screen, "slash", *"pg_clipfrac")
        await screen.until(lambda: "grpo/clipped_fraction" in text(screen, PlotPanel).splitlines()[0])
        assert len(text(screen, MetricList).splitlines()) == 2
        assert "healthy ≤ 0.3 (b)" in text(screen, PlotPanel)
        assert "┈" not in text(screen, PlotPanel)
        await pressed(screen, "enter", "b")
        assert "┈┈ healthy ≤ 0.3" in text(screen, PlotPanel)
        assert not screen.app.screen.query_one(SearchInput).has_focus
        await pressed(screen, "escape")
        assert screen.app.state.plots.query == ""
        assert len(text(screen, MetricList).splitlines()) > 10


async def test_letters_of_a_search_do_nothing_to_the_run(tmp_path: Path) -> None:
    async with shown(tmp_path, num_steps=5) as screen:
        await opened(screen)
        await pressed(screen, "slash", *"v1qtD?")
        assert screen.app.state.plots.query == "v1qtD?"
        assert "no metric matches" in text(screen, MetricList)
        assert screen.connection.asked == []
        await pressed(screen, "escape")
        assert screen.app.state.plots.query == ""


async def test_marked_metrics_are_drawn_together_and_share_the_height_as_is_said(tmp_path: Path) -> None:
    async with shown(tmp_path, LARGE, num_steps=30) as screen:
        await opened(screen)
        await pressed(screen, "space", "down", "down", "down", "space")
        assert len(screen.app.state.plots.marked) == 2
        assert "2 marked" in text(screen, MetricList)
        title = text(screen, PlotPanel).splitlines()[0]
        assert " + ".join(screen.app.state.plots.marked) in title
        ways = []
        for _ in YAxis:
            await pressed(screen, "y")
            ways.append(text(screen, PlotPanel).splitlines()[0].strip("─ ").rpartition("─ ")[2])
        assert ways[:3] == ["one axis for all", "one pane each", "each over its own range"]
        await pressed(screen, "u")
        assert screen.app.state.plots.marked == ()


async def test_a_seventh_mark_is_refused_in_words(tmp_path: Path) -> None:
    async with shown(tmp_path, num_steps=5) as screen:
        await opened(screen)
        for _ in range(MAX_MARKED + 1):
            await screen.pilot.press("space", "down")
        await screen.until(lambda: "metrics are marked already" in (screen.app.state.outcome or "").text)  # type: ignore[union-attr]
        assert len(screen.app.state.plots.marked) == MAX_MARKED


async def test_the_cursor_tells_step_time_and_values(tmp_path: Path) -> None:
    async with shown(tmp_path, (120, 36), num_steps=40) as screen:
        await opened(screen)
        await pressed(screen, "left")
        assert "step 40" in text(screen, PlotPanel)
        await pressed(screen, "left")
        plot = text(screen, PlotPanel)
        assert "step 39" in plot
        assert "policy 39" in plot
        assert f"{metrics_line(39).metrics['reward/mean']:.4f}" in plot
        await pressed(screen, "x")
        assert (screen.app.state.plots.x, screen.app.state.plots.cursor) == (XAxis.TIME, None)
        assert "elapsed" in text(screen, PlotPanel)


async def test_the_plot_is_zoomed_around_the_cursor_moved_and_shown_whole_again(tmp_path: Path) -> None:
    async with shown(tmp_path, (120, 36), num_steps=101) as screen:
        await opened(screen)
        panel = screen.app.screen.query_one(PlotPanel)
        await pressed(screen, "plus")
        assert panel.geometry is not None
        low, high = panel.geometry.window
        assert high - low == pytest.approx((panel.geometry.whole[1] - panel.geometry.whole[0]) / 2)
        assert "zoomed" in text(screen, PlotPanel)
        await pressed(screen, "shift+left")
        assert panel.geometry.window[0] < low
        await pressed(screen, "0")
        assert panel.geometry.window == panel.geometry.whole
        await screen.pilot.click(panel, offset=(panel.geometry.left + 1 + panel.geometry.columns // 2, 8))
        await screen.until(lambda: screen.app.state.plots.cursor is not None)
        assert screen.app.state.plots.cursor == pytest.approx(sum(panel.geometry.window) / 2, abs=2)


async def test_evaluations_are_marks_and_survive_between_steps(tmp_path: Path) -> None:
    write_metrics(tmp_path, 40)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        for step in (50, 60, 70):
            line = metrics_line(step, **{"eval__avg@4": step / 100})
            file.write(json.dumps(line.model_dump()) + "\n")
    async with shown(tmp_path) as screen:
        await screen.until(lambda: screen.app.state.history.last is not None)
        await opened(screen)
        await pressed(screen, "slash", *"avg@4", "enter")
        assert text(screen, PlotPanel).count("●") == 3


async def test_another_run_is_drawn_beside_this_one(tmp_path: Path) -> None:
    here, other = tmp_path / "here", tmp_path / "another-run"
    here.mkdir()
    other.mkdir()
    write_metrics(other, 12)
    (other / "state.json").write_text('{"profile": "tiny", "state": "finished"}')
    async with shown(here, (120, 36), num_steps=20) as screen:
        await opened(screen)
        await pressed(screen, "c")
        await screen.until(lambda: isinstance(screen.app.screen, ChooseRunScreen))
        await screen.until(lambda: screen.app.screen.query_one(OptionList).option_count == 1)
        for words in ("another-run", "tiny", "finished", "12"):
            assert words in screen.picture
        await pressed(screen, "enter")
        await screen.until(lambda: "┄ another-run" in text(screen, PlotPanel))
        values = text(screen, PlotPanel).splitlines()[-1]
        assert f"{metrics_line(12).metrics['reward/mean']:.4f}" in values
        await pressed(screen, "c")
        await screen.until(lambda: isinstance(screen.app.screen, ChooseRunScreen))
        await screen.until(lambda: screen.app.screen.query_one(OptionList).option_count == 2)
        await pressed(screen, "enter")
        await screen.until(lambda: screen.app.state.plots.compared is None)


async def test_every_sign_of_the_screen_has_a_likeness_in_ascii(tmp_path: Path) -> None:
    async with shown(tmp_path, (120, 36), num_steps=30, grpo__mean_ratio=1.5) as screen:
        await opened(screen)
        await pressed(screen, "slash", *"mean_ratio", "enter", "space", "s", "b", "left")
        drawn = text(screen, PlotPanel) + text(screen, MetricList)
        assert {"▲", "┈", "│"} <= set(drawn)
        assert "?" not in as_ascii(drawn)


def test_no_key_has_two_meanings() -> None:
    keys = [one for key in (*KEYS, *EVERYWHERE) for one in key.key.split(",")]
    assert len(keys) == len(set(keys))
