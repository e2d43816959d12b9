"""Terminals of any size, also smaller than the smallest that is shown: each is drawn for a moment during a resize."""

from __future__ import annotations

from pathlib import Path

import pytest
from machine_fakes import machine, on_machines
from screen_fakes import NOW, gpu, metrics_line, run_status, service, state_after
from shown_screen import LARGE, SMALL, shown

from grpo_engine.wire.supervisor import Snapshot, UsageSampled
from grpo_tui.ui.screens.logs import SUPERVISOR, LogsScreen
from grpo_tui.ui.screens.reading import ReadingScreen
from grpo_tui.ui.widgets.gpu_report import GpuReport
from grpo_tui.ui.widgets.lines import Lines
from grpo_tui.ui.widgets.log_page import LogPage
from grpo_tui.ui.widgets.main.gpu_panel import GpuPanel
from grpo_tui.ui.widgets.main.metrics_panel import MetricsPanel
from grpo_tui.ui.widgets.main.services_table import ServicesTable
from grpo_tui.ui.widgets.main.start_panel import StartPanel
from grpo_tui.ui.widgets.main.warnings_bar import WarningsBar
from grpo_tui.ui.widgets.metric_list import MetricList
from grpo_tui.ui.widgets.plot_panel import PlotPanel
from grpo_tui.view.gpus.state import moment_of
from grpo_tui.view.logs.reader import LogFile, LogReader
from grpo_tui.view.state import ViewState

PHASES = {"time/sampling": 6.0, "time/training": 3.0, "time/syncing": 1.0, "memory/sampling_gb": 31.2}
PARTS = [ServicesTable, GpuPanel, MetricsPanel, MetricList, WarningsBar, StartPanel, GpuReport, PlotPanel]


@pytest.mark.parametrize("part", PARTS)
def test_every_part_is_drawn_at_any_size(part: type[Lines]) -> None:
    lines = [metrics_line(step, **PHASES) for step in range(1, 20)]
    many = [machine(number, f"vllm-{number}", gpus=[gpu(index) for index in range(8)]) for number in range(1, 5)]
    for status in (on_machines(), on_machines(machines=many), run_status(gpus=[gpu(index) for index in range(8)])):
        state = state_after(status=status, steps=lines)
        drawn = part()
        for width in (1, 2, 5, 9, 14, 22, 31, 40, 80):
            for height in (1, 2, 3, 6, 11):
                drawn.lines(state, width, height)


@pytest.mark.slow
async def test_a_terminal_that_becomes_tiny_behind_a_dialog_ends_nothing(tmp_path: Path) -> None:
    """Behind one, the parts of a screen have the sizes that the terminal leaves them."""
    async with shown(tmp_path, LARGE, on_machines(run=tmp_path.name), num_steps=20) as screen:
        await screen.go_to("metrics")
        await screen.press("question_mark")
        await screen.until_screen(ReadingScreen)
        for size in ((22, 5), (4, 1), SMALL):
            await screen.pilot.resize_terminal(*size)
            await screen.until(lambda size=size: screen.app.screen.size == size)
        await screen.press("escape")
        await screen.until_place("metrics")


@pytest.mark.slow
async def test_logs_of_services_that_are_gone_are_read_again(tmp_path: Path) -> None:
    """As after a resume with other services, where the screen goes back to a moment before it."""
    async with shown(tmp_path, LARGE, on_machines(run=tmp_path.name)) as screen:
        await screen.go_to("logs")
        await screen.until_text(LogPage, "trainer: step 39")
        screen.connection.send(Snapshot(number=2, status=run_status(run=tmp_path.name, services=[service("env")])))
        await screen.until(lambda: screen.app.state.logs.services == ("env", SUPERVISOR))
        await screen.until_text(LogPage, "env: step 39")
        assert "trainer: step 39" not in screen.text(LogPage)


def test_other_logs_that_are_chosen_while_those_of_a_moment_are_read_end_no_screen(tmp_path: Path) -> None:
    """The thread that reads has the reader of before."""
    (tmp_path / "env.log").write_text("2026-01-31 14:03:05 step 1\n")
    screen = LogsScreen(ViewState(run_folder=tmp_path, now=NOW))
    screen._until = NOW + 1e9
    before = LogReader([LogFile(name="env", path=tmp_path / "env.log")])
    assert screen._extent(before).ends == (27,)
    assert screen._extent(LogReader([LogFile(name="api", path=tmp_path / "api.log")])).ends == (0,)
    assert screen._extent(before).ends == (27,)


def test_a_gpu_of_an_index_below_0_has_no_figures_where_there_is_none() -> None:
    """Of a run folder from elsewhere: no driver counts so."""
    usage = UsageSampled(number=1, time=1.0, cpu_percent={}, rss_bytes={}, gpu_memory_bytes={}, gpus=[])
    assert moment_of(usage).gpu(-1) is None
