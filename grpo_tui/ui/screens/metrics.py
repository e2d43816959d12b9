"""The metrics screen: every metric in a list, and those that are marked over each other in one plot."""

from __future__ import annotations

import asyncio

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.widgets import Input

from grpo_tui.ui.keys import Key, bindings
from grpo_tui.ui.messages import StateChanged
from grpo_tui.ui.screens.base import RunScreen
from grpo_tui.ui.screens.choose_run import NO_RUN, ChooseRunScreen
from grpo_tui.ui.widgets.metric_list import MetricList
from grpo_tui.ui.widgets.plot_panel import PAN, ZOOM, PlotPanel
from grpo_tui.view.metrics import state as plot_view
from grpo_tui.view.metrics.curves import listed
from grpo_tui.view.metrics.other_runs import read_lineage, read_parent
from grpo_tui.view.metrics.state import MAX_MARKED, ComparedRun, PlotChange
from grpo_tui.view.state import MessageShown, ViewState

LIST_SHARE = 0.3
MIN_LIST_COLUMNS, MAX_LIST_COLUMNS = 30, 46
CURSOR_JUMP = 10

KEYS = (
    Key(key="space", shown="space", action="screen.mark", label="mark",
        help=f"mark the selected metric (at most {MAX_MARKED}); marked metrics share one plot"),
    Key(key="slash", shown="/", action="screen.search", label="search",
        help="search by part of a name, or by the name in TRL, verl, prime-rl or OpenRLHF"),
    Key(key="X", shown="X", action="screen.turn('XAxisTurned')", label="axis",
        help="x axis: steps, time since the first step, or policy versions"),
    Key(key="Y", shown="Y", action="screen.turn('YAxisTurned')", label="axis",
        help="y axis of several metrics: automatic, shared, a pane each, or each over its own range"),
    Key(key="S", shown="S", action="screen.turn('SmoothingTurned')", label="smooth",
        help="exponential moving average (0.6, 0.9, 0.98); the raw curve stays behind it"),
    Key(key="L", shown="L", action="screen.turn('LogScaleTurned')", label="log",
        help="logarithmic y axis; values of 0 and below are not drawn"),
    Key(key="a", shown="a", action="screen.compare", label="another run",
        help="draw another run of the same folder as dashed curves"),
    Key(key="z", shown="z", action="screen.turn('WidthTurned')", label="zoom", is_in_footer=False,
        help="show the plot over the whole width, and back"),
    Key(key="b", shown="b", action="screen.turn('BandTurned')", label="band", is_in_footer=False,
        help="extend the y axis to the whole healthy band"),
    Key(key="x", shown="x", action="screen.turn('MarksCleared')", label="clear", is_in_footer=False,
        help="remove all marks"),
    Key(key="up,k", shown="↑ k", action="screen.select(-1)", label="up", is_in_footer=False,
        help="select the metric above; it is plotted if none is marked"),
    Key(key="down,j", shown="↓ j", action="screen.select(1)", label="down", is_in_footer=False,
        help="select the metric below"),
    Key(key="left,p", shown="← p", action="screen.move(-1)", label="previous", is_in_footer=False,
        help="move the cursor to an earlier measurement; the first press shows it"),
    Key(key="right,n", shown="→ n", action="screen.move(1)", label="next", is_in_footer=False,
        help="move the cursor to a later measurement"),
    Key(key="pageup", shown="PgUp", action=f"screen.move({-CURSOR_JUMP})", label="back", is_in_footer=False,
        help=f"move the cursor back by {CURSOR_JUMP} columns"),
    Key(key="pagedown", shown="PgDn", action=f"screen.move({CURSOR_JUMP})", label="on", is_in_footer=False,
        help=f"move the cursor on by {CURSOR_JUMP} columns"),
    Key(key="plus,equals_sign", shown="+", action="screen.zoom(True)", label="in", is_in_footer=False,
        help="zoom in by 2 around the cursor or the middle (mouse wheel too)"),
    Key(key="minus", shown="-", action="screen.zoom(False)", label="out", is_in_footer=False,
        help="zoom out by 2"),
    Key(key="0", shown="0", action="screen.whole", label="all", is_in_footer=False,
        help="show the whole run"),
    Key(key="shift+left,ctrl+left", shown="⇧←", action="screen.pan(-1)", label="earlier", is_in_footer=False,
        help="move a zoomed plot to earlier times (ctrl+←, shift and wheel too)"),
    Key(key="shift+right,ctrl+right", shown="⇧→", action="screen.pan(1)", label="later", is_in_footer=False,
        help="move a zoomed plot to later times (ctrl+→ too)"),
    Key(key="escape", shown="esc", action="screen.leave", label="leave", is_in_footer=False,
        help="clear the search, then the cursor, then the zoom"),
)  # fmt: skip


class SearchInput(Input, can_focus=False):
    """One line for the query; it can have the focus only while it is open, or it would take every letter."""

    BINDINGS = [Binding("escape", "screen.leave", "leave the search", show=False)]
    DEFAULT_CSS = """
    SearchInput { height: 1; margin: 0 1; display: none; }
    SearchInput.-open { display: block; }
    """

    def __init__(self) -> None:
        super().__init__(placeholder="name, or ppo_kl, clipfrac …", compact=True)


class MetricsScreen(RunScreen):
    """A list on the left, the plot on the right."""

    PLACE = "metrics"
    KEYS = KEYS
    BINDINGS = bindings(KEYS)
    DEFAULT_CSS = """
    MetricsScreen { layout: vertical; background: $background; }
    MetricsScreen #metrics-body { height: 1fr; }
    MetricsScreen PlotPanel { height: 1fr; }
    MetricsScreen.-wide #metrics-list { display: none; }
    """

    def __init__(self, state: ViewState) -> None:
        super().__init__(state)
        self._knows_parent = False

    def body(self) -> ComposeResult:
        """The search stands over the list while it is open."""
        with Horizontal(id="metrics-body"):
            with Vertical(id="metrics-list"):
                yield SearchInput()
                yield MetricList()
            yield PlotPanel()

    def draw(self, state: ViewState) -> None:
        """Show another state."""
        plots = state.plots
        self.set_class(plots.is_wide and not plots.is_searching, "-wide")
        for search in self.query(SearchInput):  # none before it is composed
            if plots.is_searching != search.has_class("-open"):
                search.set_class(plots.is_searching, "-open")
                search.value, search.can_focus = plots.query, plots.is_searching
                self.set_focus(search if plots.is_searching else None)
        super().draw(state)

    def on_mount(self) -> None:
        """Divide the columns between list and plot."""
        self._share_columns(self.size.width)

    def on_resize(self, event: object) -> None:
        """Divide the columns between list and plot."""
        self._share_columns(self.size.width)

    def on_screen_resume(self) -> None:
        """Draw a branch together with its parent, the first time that the screen is shown."""
        if not self._knows_parent:
            self._knows_parent = True
            self.run_worker(self._read_parent(), name="compare", exclusive=True, group="compare")

    def _share_columns(self, width: int) -> None:
        columns = min(max(int(width * LIST_SHARE), MIN_LIST_COLUMNS), MAX_LIST_COLUMNS)
        for part in self.query("#metrics-list"):  # none before it is composed
            part.styles.width = columns

    # --- keys ------------------------------------------------------------------------------------------------------

    def action_turn(self, change: str) -> None:
        """Post the change of this name."""
        turned: PlotChange = getattr(plot_view, change)()
        self._post(turned)

    def action_select(self, by: int) -> None:
        """The metric so many rows further."""
        names = listed(self._state.history, self._state.plots.query)
        self._post(plot_view.SelectionMoved(by=by, names=tuple(names)))

    def action_mark(self) -> None:
        """Mark the selected metric, or take its mark away."""
        plots = self._state.plots
        names = listed(self._state.history, plots.query)
        name = plots.selected if plots.selected in names else next(iter(names), None)
        if name is None:
            return
        if len(plots.marked) == MAX_MARKED and name not in plots.marked:
            text = f"{MAX_MARKED} metrics are marked already; space or x removes marks"
            self.post_message(StateChanged(MessageShown(severity="info", text=text)))
            return
        self._post(plot_view.MetricMarked(name=name))

    def action_search(self) -> None:
        """Type a query."""
        self._post(plot_view.SearchChanged(query=self._state.plots.query, is_searching=True))

    @on(Input.Changed)
    def _typed(self, event: Input.Changed) -> None:
        if self._state.plots.is_searching and event.value != self._state.plots.query:
            self._post(plot_view.SearchChanged(query=event.value, is_searching=True))
            best = listed(self._state.history, event.value)[:1]
            if best:
                self._post(plot_view.MetricSelected(name=best[0]))

    @on(Input.Submitted)
    def _taken(self) -> None:
        self._post(plot_view.SearchChanged(query=self._state.plots.query))

    def action_leave(self) -> None:
        """Take away the search, then the cursor, then the zoom."""
        plots = self._state.plots
        if plots.is_searching or plots.query:
            self._post(plot_view.SearchChanged(query=""))
        elif plots.cursor is not None:
            self._post(plot_view.CursorSet(cursor=None))
        else:
            self._post(plot_view.WindowSet(window=None))

    def action_move(self, columns: int) -> None:
        """Move the cursor."""
        self._post(self._plot.cursor_moved(columns))

    def action_zoom(self, is_in: bool) -> None:
        """See less, or more."""
        self._post(self._plot.zoomed(ZOOM if is_in else 1 / ZOOM))

    def action_pan(self, by: int) -> None:
        """See another part."""
        self._post(self._plot.panned(by * PAN))

    def action_whole(self) -> None:
        """See everything."""
        self._post(plot_view.WindowSet(window=None))

    def action_compare(self) -> None:
        """Choose another run."""
        compared = self._state.plots.compared
        chooser = ChooseRunScreen(self._state.run_folder, compared.run if compared else None, self._state.now)
        self.app.push_screen(chooser, self._compare_with)

    def _compare_with(self, run: str | None) -> None:
        if run is None:
            return
        if run == NO_RUN:
            self._post(plot_view.ComparisonRead(compared=None))
            return
        self._post(plot_view.ComparisonBegan(run=run))
        self.run_worker(self._read(run), name="compare", exclusive=True, group="compare")

    async def _read_parent(self) -> None:
        parent = await asyncio.to_thread(read_parent, self._state.run_folder)
        if parent is not None and self._state.plots.compared is None:
            self._post(plot_view.ComparisonBegan(run=parent.run))
            await self._read(parent.run)

    async def _read(self, run: str) -> None:
        """Read the other run in a thread; a long one takes a second or two."""
        folder = self._state.run_folder.parent / run
        try:
            parent = await asyncio.to_thread(read_parent, self._state.run_folder)
            history = await asyncio.to_thread(read_lineage, folder)
        except OSError as error:
            self._post(plot_view.ComparisonRead(compared=None))
            text = f"the metrics of {run} cannot be read: {error}"
            self.post_message(StateChanged(MessageShown(severity="error", text=text)))
            return
        branched_at = parent.step if parent is not None and parent.run == run else None
        compared = ComparedRun(run=run, history=history, branched_at=branched_at)
        self._post(plot_view.ComparisonRead(compared=compared))

    @property
    def _plot(self) -> PlotPanel:
        return self.query_one(PlotPanel)

    def _post(self, change: PlotChange | None) -> None:
        if change is not None:
            self.post_message(StateChanged(change))
