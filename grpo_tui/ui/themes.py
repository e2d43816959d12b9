"""Colours: a dark theme, a light one, and one of the terminal's own sixteen; Textual's themes may be chosen as well.

Every colour that a part draws with is a variable, so that a theme reaches it. Ours are checked for contrast.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from rich.console import RenderableType
from textual import events
from textual._compositor import ChopsUpdate, LayoutUpdate
from textual.app import App, ReturnType
from textual.filter import LineFilter, Monochrome, NoColor
from textual.screen import Screen
from textual.theme import BUILTIN_THEMES, Theme

from grpo_tui.ui.changed_cells import ChangedCells, TerminalCells
from grpo_tui.ui.glyphs import AsciiOnly
from grpo_tui.ui.line_pace import GIVE_UP_S, LinePace
from grpo_tui.ui.waiting import wait_at_most

DARK, LIGHT, ANSI = "dark", "light", "ansi"
OWN_THEMES = (
    Theme(
        name=DARK,
        primary="#6cb6ff", secondary="#8fa3c8", accent="#f0b072",
        success="#4cc27a", warning="#e3b341", error="#ff7a70",
        foreground="#d9dfe7", background="#0e1217", surface="#161c24", panel="#1c242f",
        variables={
            "muted": "#9fabb8", "faint": "#8b97a5", "rule": "#3d4855", "spark": "#5aa2e6", "selected": "#1d3048",
            "scrollbar": "#3d4855", "scrollbar-hover": "#6b7785", "scrollbar-active": "#6b7785",
            "scrollbar-background": "#0e1217", "scrollbar-background-hover": "#0e1217",
            "scrollbar-background-active": "#0e1217",
            "block-cursor-background": "#1d3048", "block-cursor-foreground": "#d9dfe7",
            "share-0": "#58a6ff", "share-1": "#46bd64", "share-2": "#bc8cff", "share-3": "#39c5cf",
            "share-4": "#f778ba", "share-5": "#e0914f", "share-6": "#a3b8cf", "share-7": "#b5c95a",
        },
    ),
    Theme(
        name=LIGHT, dark=False,
        primary="#0757ba", secondary="#57606a", accent="#9a3d00",
        success="#1a7f37", warning="#8f5b00", error="#c4222c",
        foreground="#1f2328", background="#fcfcfa", surface="#f1f2f0", panel="#e4e8ee",
        variables={
            "muted": "#4f5863", "faint": "#59626d", "rule": "#c3c9d1", "spark": "#2f74c8", "selected": "#d3e4fa",
            "scrollbar": "#c3c9d1", "scrollbar-hover": "#8d96a1", "scrollbar-active": "#8d96a1",
            "scrollbar-background": "#fcfcfa", "scrollbar-background-hover": "#fcfcfa",
            "scrollbar-background-active": "#fcfcfa",
            "block-cursor-background": "#d3e4fa", "block-cursor-foreground": "#1f2328",
            "share-0": "#0969da", "share-1": "#1a7f37", "share-2": "#8250df", "share-3": "#0b7a83",
            "share-4": "#bf3989", "share-5": "#b35900", "share-6": "#57606a", "share-7": "#65720d",
        },
    ),
    Theme(
        name=ANSI, ansi=True,
        primary="ansi_cyan", secondary="ansi_cyan", accent="ansi_yellow",
        success="ansi_green", warning="ansi_yellow", error="ansi_bright_red",
        foreground="ansi_default", background="ansi_default", surface="ansi_default", panel="ansi_default",
        boost="ansi_default",
        variables={
            **BUILTIN_THEMES["ansi-dark"].variables,
            "muted": "ansi_default", "faint": "ansi_default", "rule": "ansi_default", "spark": "ansi_cyan",
            "selected": "ansi_default", "border": "ansi_cyan",
            "share-0": "ansi_cyan", "share-1": "ansi_green", "share-2": "ansi_bright_magenta", "share-3": "ansi_white",
            "share-4": "ansi_yellow", "share-5": "ansi_bright_red", "share-6": "ansi_bright_green",
            "share-7": "ansi_bright_cyan",
            "block-cursor-foreground": "ansi_black", "block-cursor-background": "ansi_cyan",
            "input-selection-background": "ansi_cyan", "input-selection-foreground": "ansi_black",
            "screen-selection-background": "ansi_cyan", "screen-selection-foreground": "ansi_black",
        },
    ),
)  # fmt: skip
NO_COLOURS = NoColor()
RICH_TERMINALS = ("256color", "direct", "kitty", "alacritty", "ghostty", "wezterm", "foot", "iterm")
"""Parts of `TERM` that promise more than sixteen colours."""

LAYOUT_LIMIT_S = 0.2
"""An empty frame is better than none for longer."""
LAST_ANSWER_S = 1.0
"""How long a terminal that owes an answer is waited for, before it goes to another program."""


class ThemedApp(App[ReturnType]):
    """Base of our apps: themes, and plain characters where the terminal has no others."""

    def __init__(self, *, theme: str = DARK, is_ascii: bool = False) -> None:
        self._ascii = AsciiOnly() if is_ascii else None
        self._cells = TerminalCells()
        self._pace = LinePace()
        self._is_paint_due = False
        self._leaves_with: tuple[ReturnType | None] | None = None
        super().__init__()
        for own in OWN_THEMES:
            self.register_theme(own)
        self.theme = theme

    def _display(self, screen: Screen[Any], renderable: RenderableType | None) -> None:
        """Send cells that differ, where Textual (8.2) would send all of a screen for every layout.

        While the line is full nothing is sent: then the newest is, whatever came between.
        """
        shown: Any = renderable
        if isinstance(renderable, LayoutUpdate | ChopsUpdate):
            if self._pace.is_full(time.monotonic()):
                self._paint_later()
                return
            shown = ChangedCells(renderable, self._cells, self.size, self._pace)
        super()._display(screen, shown)

    def _paint_later(self) -> None:
        if not self._is_paint_due:
            self._is_paint_due = True
            self.set_timer(GIVE_UP_S, self._paint_without_answer)

    def _paint_without_answer(self) -> None:
        self._paint_what_is_due()
        if self._is_paint_due:  # something else was painted lately
            self.set_timer(GIVE_UP_S, self._paint_without_answer)

    def _paint_what_is_due(self) -> None:
        if self._is_paint_due and not self._pace.is_full(time.monotonic()):
            self._is_paint_due = False
            self.screen.refresh()

    def on_cursor_position(self, event: events.CursorPosition) -> None:
        """The terminal answers how far it has come: go on, or leave."""
        now = time.monotonic()
        self._pace.answered(event.y + 1, event.x + 1, now)
        self._paint_what_is_due()
        if self._leaves_with is not None and not self._pace.owes_an_answer(now):
            self.exit(*self._leaves_with)

    def leave(self, result: ReturnType | None = None) -> None:
        """End with this result, when the terminal has answered: what comes later is typed into the shell."""
        self._pace.ask_no_more()
        if not self._pace.owes_an_answer(time.monotonic()):
            self.exit(result)
        elif self._leaves_with is None:
            self._leaves_with = (result,)
            self.set_timer(LAST_ANSWER_S, lambda: self.exit(result))

    @asynccontextmanager
    async def painted_once(self) -> AsyncIterator[None]:
        """Paint nothing meanwhile, nor before the screen that is in sight then has shared out its room."""
        with self.batch_update():
            yield
            laid_out = asyncio.Event()
            self.screen.call_later(laid_out.set)
            await wait_at_most(laid_out, LAYOUT_LIMIT_S)
        self.screen.refresh()

    def action_paint_anew(self) -> None:
        """Send every cell, whatever the terminal should show already."""
        self._cells.forget()
        self.screen.refresh()

    def on_mount(self) -> None:
        """Send everything anew when the terminal comes back from another program."""
        self.app_resume_signal.subscribe(self, lambda _: self._cells.forget())

    def on_ready(self) -> None:
        """Have garbage collected again, where that was put off: but not looked for in what was loaded."""
        if not gc.isenabled():
            gc.freeze()
            gc.enable()

    def on_resize(self) -> None:
        """Send everything anew: a terminal of another size has moved what stands on it."""
        self._cells.forget()

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Textual's own, and plain characters where the terminal has no others.

        `NO_COLOR` means none: Textual would draw in greys, and fails at text without a style.
        """
        own = [NO_COLOURS if isinstance(each, Monochrome) else each for each in super().get_line_filters()]
        return [*own, *([self._ascii] if self._ascii else [])]

    def get_theme_variable_defaults(self) -> dict[str, str]:
        """Our colours in a theme that does not know them."""
        colours = self.current_theme.to_color_system().generate()
        return {
            "muted": f"{colours['foreground']} 72%",
            "faint": f"{colours['foreground']} 55%",
            "rule": f"{colours['foreground']} 30%",
            "spark": colours["text-primary"],
            "selected": f"{colours['primary']} 25%",
            **{f"share-{number}": colours[name] for number, name in enumerate(SHARES_OF_OTHER_THEMES)},
        }


SHARES_OF_OTHER_THEMES = (
    "text-primary", "text-success", "text-accent", "text-secondary", "primary", "success", "accent", "secondary",
)  # fmt: skip


def known_themes() -> list[str]:
    """Every name that may be chosen, ours first."""
    ours = [theme.name for theme in OWN_THEMES]
    return [*ours, *(name for name in sorted(BUILTIN_THEMES) if name not in ours)]


def theme_to_open(asked: str | None, remembered: str | None, environ: Mapping[str, str]) -> str:
    """What was asked for now, else what was chosen before, else what the terminal can show."""
    for name in (asked, remembered):
        if name in known_themes():
            return str(name)
    term = environ.get("TERM", "")
    colours = {environ.get("COLORTERM"), environ.get("TEXTUAL_COLOR_SYSTEM")}  # the second is of `textual serve`
    has_many_colours = bool({"truecolor", "24bit"} & colours) or any(each in term for each in RICH_TERMINALS)
    return DARK if has_many_colours or not term else ANSI
