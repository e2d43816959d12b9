"""Select another run of the same folder for comparison."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from rich.cells import cell_len
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from grpo_tui.ui.text_screen import ClosesOnce
from grpo_tui.ui.widgets.lines import fit
from grpo_tui.view.format import UNKNOWN, age_text, number_text
from grpo_tui.view.metrics.other_runs import OtherRun, other_runs

NO_RUN = ""
"""The choice that ends a comparison."""
COLUMNS = (("run", 32), ("profile", 16), ("state", 9), ("steps", 7), ("reward", 8), ("ago", 6))


class ChooseRunScreen(ModalScreen[str], ClosesOnce[str]):
    """Runs with profile, state, steps and last reward; yields the folder's name, `NO_RUN`, or None."""

    BINDINGS = [
        Binding("escape,q,c,ctrl+c", "dismiss", "cancel", tooltip="change nothing"),
        Binding("j", "move(1)", "down", show=False),
        Binding("k", "move(-1)", "up", show=False),
    ]
    DEFAULT_CSS = """
    ChooseRunScreen { align: center middle; }
    ChooseRunScreen > Vertical {
        width: 94; max-width: 96%; height: auto; max-height: 90%;
        padding: 0 1; background: $surface; border: round $primary;
        border-title-color: $foreground; border-subtitle-color: $foreground;
    }
    ChooseRunScreen OptionList {
        height: auto; max-height: 100%; border: none; padding: 0; background: $surface; text-wrap: nowrap;
        text-overflow: ellipsis;
    }
    ChooseRunScreen OptionList:focus { border: none; }
    ChooseRunScreen Static { height: 1; text-wrap: nowrap; text-overflow: ellipsis; }
    """

    def __init__(self, run_folder: Path, compared: str | None, now: float) -> None:
        super().__init__()
        self._run_folder = run_folder
        self._compared = compared
        self._now = now

    def compose(self) -> ComposeResult:
        """A title line over the list."""
        frame = Vertical(Static("reading runs …"), OptionList())
        frame.border_title = "compare with"
        frame.border_subtitle = "enter selects · esc cancels"
        yield frame

    def on_mount(self) -> None:
        """List runs in a thread: a network folder may be slow."""
        self.run_worker(self._look())

    async def _look(self) -> None:
        runs = await asyncio.to_thread(other_runs, self._run_folder)
        header, options = self.query_one(Static), self.query_one(OptionList)
        titles, *rows = _rows(runs, self._now)
        if not runs:
            header.update(Content(f"no other run in {self._run_folder.parent} has metrics yet"))
        else:
            header.update(Content.styled(titles, "bold"))
        choices = [Option("none: end the comparison", id=NO_RUN)] if self._compared else []
        choices += [Option(Content(row), id=run.run) for run, row in zip(runs, rows, strict=True)]
        options.add_options(choices)
        if choices:
            options.highlighted = 0
            options.focus()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Take it."""
        self.dismiss(event.option_id)

    def action_move(self, by: int) -> None:
        """Up or down."""
        options = self.query_one(OptionList)
        if by > 0:
            options.action_cursor_down()
        else:
            options.action_cursor_up()


def _rows(runs: Sequence[OtherRun], now: float) -> list[str]:
    """The titles, then a row for each run; columns are as wide as what they have, and at most as `COLUMNS` says."""
    table = [[title for title, _ in COLUMNS], *(_cells(run, now) for run in runs)]
    columns = zip(*table, strict=True)
    widths = [min(most, max(map(cell_len, cells))) for cells, (_, most) in zip(columns, COLUMNS, strict=True)]
    return [
        "  ".join(
            fit(text, width, right=title in ("steps", "reward", "ago"))
            for text, width, (title, _) in zip(cells, widths, COLUMNS, strict=True)
        )
        for cells in table
    ]


def _cells(run: OtherRun, now: float) -> list[str]:
    steps = UNKNOWN if run.last_step is None else f"{run.last_step:,}"
    ago = UNKNOWN if run.last_time is None else age_text(max(0.0, now - run.last_time))
    return [text or UNKNOWN for text in (run.run, run.profile, run.state, steps, number_text(run.last_reward), ago)]
