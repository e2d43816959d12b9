"""Themes (dark, light, 16-colour ANSI, and Textual's own), and the base of our apps.

Every colour that a widget uses is a theme variable. Tests check the contrast of our themes.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from rich.console import RenderableType
from textual import events
from textual._compositor import ChopsUpdate, LayoutUpdate
from textual.app import App, ReturnType
from textual.driver import Driver
from textual.drivers.linux_driver import LinuxDriver
from textual.filter import LineFilter, Monochrome, NoColor
from textual.screen import Screen
from textual.theme import BUILTIN_THEMES, Theme
from textual.timer import Timer, TimerCallback

from grpo_engine.wire.terminal_text import printable
from grpo_tui.ui.glyphs import AsciiOnly
from grpo_tui.ui.terminal.changed_cells import ChangedCells, TerminalCells
from grpo_tui.ui.terminal.line_pace import GIVE_UP_S, LinePace
from grpo_tui.ui.terminal.paste_parser import MAX_PASTED
from grpo_tui.ui.terminal.resumable_driver import ResumableDriver
from grpo_tui.ui.terminal.terminal_watch import TerminalWatch
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
"""Parts of `TERM` that imply more than sixteen colours."""

LAYOUT_LIMIT_S = 0.2
"""Longest wait for the layout of a new screen before it is painted."""
REPAINT_AFTER_S = 0.2
"""Between a frame that failed and the whole one after it: a fault that stays must not use a core."""
LAST_ANSWER_S = 1.0
"""How long to wait for the terminal's answer before leaving."""


class ThemedApp(App[ReturnType]):
    """Base of our apps: themes, ASCII output, and output limited to what the connection carries."""

    def __init__(self, *, theme: str = DARK, is_ascii: bool = False) -> None:
        self._ascii = AsciiOnly() if is_ascii else None
        self._cells = TerminalCells()
        self._pace = LinePace()
        self._shown_title = ""
        self._is_paint_due = False
        self._leaves_with: tuple[ReturnType | None] | None = None
        self._event_loop: asyncio.AbstractEventLoop | None = None
        super().__init__()
        for own in OWN_THEMES:
            self.register_theme(own)
        self.theme = theme

    def run_on_terminal(self) -> ReturnType | None:
        """Run until the user leaves or the terminal is gone; returns the result."""
        if sys.stdout.isatty():
            for name in ("COLUMNS", "LINES"):  # Textual would take them for the size, also after a resize
                os.environ.pop(name, None)
        with TerminalWatch(self._leave_soon):
            return self.run()

    def get_driver_class(self) -> type[Driver]:
        """Ours in place of Textual's for terminals; another one, as of `textual serve`, stays."""
        chosen = super().get_driver_class()
        return ResumableDriver if chosen is LinuxDriver else chosen

    async def on_event(self, event: events.Event) -> None:
        """Cut what is pasted: an input needs seconds for a line of a megabyte, and nothing is drawn meanwhile."""
        if isinstance(event, events.Paste):
            event.text = event.text[:MAX_PASTED]
        await super().on_event(event)

    def _leave_soon(self) -> None:
        """Exit, called from any thread."""
        if self._event_loop is not None:
            with suppress(RuntimeError):  # it has been closed: the app exits already
                self._event_loop.call_soon_threadsafe(self.exit)

    def _display(self, screen: Screen[Any], renderable: RenderableType | None) -> None:
        """Send only cells that differ; Textual (8.2) sends the whole screen for every layout.

        While the connection is full nothing is sent; afterwards only the newest frame is.
        """
        shown: Any = renderable
        if isinstance(renderable, LayoutUpdate | ChopsUpdate):
            if self._pace.is_full(time.monotonic()):
                self._paint_later()
                return
            shown = ChangedCells(renderable, self._cells, self.size, self._pace, on_error=self._paint_all_later)
        super()._display(screen, shown)

    def _paint_later(self) -> None:
        if not self._is_paint_due:
            self._is_paint_due = True
            self.set_timer(GIVE_UP_S, self._paint_without_answer)

    def _paint_all_later(self) -> None:
        self.set_timer(REPAINT_AFTER_S, self.action_redraw)

    def _paint_without_answer(self) -> None:
        self._paint_what_is_due()
        if self._is_paint_due:  # another frame was painted recently
            self.set_timer(GIVE_UP_S, self._paint_without_answer)

    def _paint_what_is_due(self) -> None:
        if self._is_paint_due and not self._pace.is_full(time.monotonic()):
            self._is_paint_due = False
            self.screen.refresh()

    def on_cursor_position(self, event: events.CursorPosition) -> None:
        """Handle the terminal's answer to a query: paint what is due, or leave."""
        now = time.monotonic()
        self._pace.answered(event.y + 1, event.x + 1, now)
        self._paint_what_is_due()
        if self._leaves_with is not None and not self._pace.expects_answer(now):
            self.exit(*self._leaves_with)

    def leave(self, result: ReturnType | None = None) -> None:
        """Exit with this result once the terminal has answered; a later answer would appear in the shell."""
        self._pace.stop_queries()
        if not self._pace.expects_answer(time.monotonic()):
            self.exit(result)
        elif self._leaves_with is None:
            self._leaves_with = (result,)
            self.set_timer(LAST_ANSWER_S, lambda: self.exit(result))

    @asynccontextmanager
    async def painted_once(self) -> AsyncIterator[None]:
        """Paint once after the block, when the shown screen has its layout."""
        with self.batch_update():
            yield
            laid_out = asyncio.Event()
            self.screen.call_later(laid_out.set)
            await wait_at_most(laid_out, LAYOUT_LIMIT_S)
        self.screen.refresh()

    def show_title(self, text: str) -> None:
        """Set the title of the terminal, where there is one."""
        text = printable(text)
        if text != self._shown_title and isinstance(self._driver, ResumableDriver):
            self._shown_title = text
            self._driver.show_title(text)

    def action_redraw(self) -> None:
        """Send every cell and the title again."""
        self._cells.forget()
        self._shown_title = ""
        self.screen.refresh()

    def on_mount(self) -> None:
        """Repaint everything after another program used the terminal."""
        self._event_loop = asyncio.get_running_loop()
        self.app_resume_signal.subscribe(self, lambda _: self.action_redraw())

    def on_ready(self) -> None:
        """Enable the garbage collector if start-up disabled it, and exempt what is loaded by now."""
        if not gc.isenabled():
            gc.freeze()
            gc.enable()

    def set_timer(
        self, delay: float, callback: TimerCallback | None = None, *, name: str | None = None, pause: bool = False
    ) -> Timer:
        """Textual's, for timers that always run.

        Textual (8.2.8, `Timer._run`) skips a call that is late already when its task begins: of a timer that runs once,
        the only one. The app waits for such a timer of 1/120 s after a resize, and on a busy machine would follow no
        later resize either.
        """
        timer = super().set_timer(delay, callback, name=name, pause=pause)
        timer._skip = False
        return timer

    def on_resize(self) -> None:
        """Repaint everything: terminals move their content when resized."""
        self._cells.forget()

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Textual's filters, and ASCII output if the terminal needs it.

        `NO_COLOR` removes all colours: Textual would draw greys, and fails on text without a style.
        """
        own = [NO_COLOURS if isinstance(each, Monochrome) else each for each in super().get_line_filters()]
        return [*own, *([self._ascii] if self._ascii else [])]

    def get_theme_variable_defaults(self) -> dict[str, str]:
        """Defaults of our variables for Textual's themes."""
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
    """All theme names, ours first."""
    ours = [theme.name for theme in OWN_THEMES]
    return [*ours, *(name for name in sorted(BUILTIN_THEMES) if name not in ours)]


def theme_to_open(asked: str | None, remembered: str | None, environ: Mapping[str, str]) -> str:
    """The requested theme, else the saved one, else one that the terminal can show."""
    for name in (asked, remembered):
        if name in known_themes():
            return str(name)
    term = environ.get("TERM", "")
    colours = {environ.get("COLORTERM"), environ.get("TEXTUAL_COLOR_SYSTEM")}  # the second is of `textual serve`
    has_many_colours = bool({"truecolor", "24bit"} & colours) or any(each in term for each in RICH_TERMINALS)
    return DARK if has_many_colours or not term else ANSI
