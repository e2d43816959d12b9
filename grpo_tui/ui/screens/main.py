"""The main screen: lays out the panels for the size of the terminal, and passes them the state."""

from __future__ import annotations

from textual import events
from textual.app import ComposeResult
from textual.containers import Container, Vertical

from grpo_tui.ui.keys import ON_MAIN, bindings
from grpo_tui.ui.layout import Layout, Wanted, arrange, left_columns
from grpo_tui.ui.screens.base import RunScreen
from grpo_tui.ui.widgets.frame.header import TabsLine
from grpo_tui.ui.widgets.frame.keys_bar import KeysBar
from grpo_tui.ui.widgets.frame.travel_bar import rows_taken
from grpo_tui.ui.widgets.lines import Lines
from grpo_tui.ui.widgets.main import gpu_panel, phase_timeline, start_panel, warnings_bar
from grpo_tui.ui.widgets.main.gpu_panel import GpuPanel
from grpo_tui.ui.widgets.main.log_panel import LogLines, LogPanel, LogTitle
from grpo_tui.ui.widgets.main.metrics_panel import PRIMARY_METRICS, MetricsPanel, shown_metrics, version_rows_wanted
from grpo_tui.ui.widgets.main.services_table import ServicesTable
from grpo_tui.ui.widgets.main.start_panel import StartPanel
from grpo_tui.ui.widgets.main.warnings_bar import WarningsBar
from grpo_tui.view.state import ViewState

PADDING = 2
"""Empty columns at the edges of every panel."""


class MainScreen(RunScreen):
    """Services, GPUs, metrics, warnings and a log at one glance."""

    PLACE = "run"
    KEYS = ON_MAIN
    BINDINGS = bindings(ON_MAIN)

    def __init__(self, state: ViewState) -> None:
        super().__init__(state)
        self._layout_now: Layout | None = None
        self._arranged_for: tuple[object, ...] = ()

    def body(self) -> ComposeResult:
        """The parts from top to bottom; on a wide terminal the log stands to the right."""
        with Container(id="body"):
            with Vertical(id="left"):
                yield ServicesTable()
                yield StartPanel()
                yield GpuPanel()
                yield MetricsPanel()
                yield WarningsBar()
            yield LogPanel()

    def draw(self, state: ViewState) -> None:
        """Draw a state; parts whose lines did not change paint nothing."""
        self._state = state
        self._arrange()
        for part in self.query(Lines):
            if not isinstance(part, LogTitle):
                part.draw(state)
        self.query_one(LogPanel).draw(state)

    def on_resize(self, event: events.Resize) -> None:
        """Give the parts their rows for the new size."""
        self._arrange()

    def toggle_zoom(self) -> None:
        """Hide or show the other panels."""
        left = self.query_one("#left")
        left.display = not left.display  # not a class of the screen: that would recompute the style of every part

    @property
    def log_lines(self) -> LogLines:
        """The lines of the log, for keys that scroll."""
        return self.query_one(LogLines)

    def _arrange(self) -> None:
        width, height = self.size
        state = self._state
        if not width or not height:
            return
        names = tuple(state.history.last.metrics) if state.history.last else ()
        panel_rows = (gpu_panel.rows_wanted(state), phase_timeline.rows_wanted(state), version_rows_wanted(state))
        height -= rows_taken(state, height)
        left = left_columns(width) - PADDING
        start_rows = start_panel.rows_wanted(state, left)
        asked = (width, height, len(state.rows), start_rows, panel_rows, names, state.warnings)
        if asked == self._arranged_for:
            return
        self._arranged_for = asked
        layout = arrange(width, height, _wanted(state, left))
        if layout == self._layout_now:
            return
        self._layout_now = layout
        self.set_class(layout.is_wide, "-wide")
        self.query_one("#left").styles.width = layout.left_columns if layout.is_wide else "1fr"
        metrics = self.query_one(MetricsPanel)
        metrics.num_columns = layout.metrics_columns
        self.query_one(TabsLine).display = layout.tabs_rows > 0
        self.query_one(KeysBar).lists_screens = not layout.tabs_rows
        for part, rows, gap in (
            (self.query_one(ServicesTable), layout.services_rows, 0),
            (self.query_one(StartPanel), layout.start_rows, 0),
            (self.query_one(GpuPanel), layout.gpu_rows, layout.gap),
            (metrics, layout.metrics_rows, layout.gap),
            (self.query_one(WarningsBar), layout.warning_rows, layout.gap),
        ):
            part.styles.height = rows
            part.styles.margin = (gap, 0, 0, 0)
            part.display = rows > 0


def _wanted(state: ViewState, width: int) -> Wanted:
    has_steps = state.history.last is not None
    return Wanted(
        num_services=max(1, len(state.rows)),
        start_rows=start_panel.rows_wanted(state, width),
        gpu_rows=gpu_panel.rows_wanted(state),
        phase_rows=phase_timeline.rows_wanted(state) + (version_rows_wanted(state) if has_steps else 0),
        num_primary_metrics=len(PRIMARY_METRICS) if has_steps else 1,
        num_metrics=len(shown_metrics(state)) if has_steps else 1,
        warning_rows=warnings_bar.rows_wanted(state, width),
        num_warnings=len(state.warnings),
    )
