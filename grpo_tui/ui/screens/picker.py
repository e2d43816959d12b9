"""Chooses a profile to start: what `U` on the board opens, and `grpo-tui` alone where there is no run yet.

Typing filters; the selected entry is described below the list, `^e` shows its plan, `^o` opens it in an editor.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Callable, Sequence

from textual import events, on
from textual.app import ComposeResult, SuspendNotSupported
from textual.binding import Binding
from textual.content import Content
from textual.geometry import Size
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from grpo_engine.errors import GrpoError
from grpo_tui.ui.choices import ProfileChoice, editor_command, matching, own_copy
from grpo_tui.ui.keys import Key
from grpo_tui.ui.pages import keys_page, page_width
from grpo_tui.ui.screens.reading import ReadingScreen
from grpo_tui.ui.themes import DARK, ThemedApp
from grpo_tui.ui.widgets.lines import fit, wrapped

MAX_NAME_WIDTH = 36
ABOUT_SHARE = 0.35
"""Share of the rows for the description."""
KEYS = (
    ("enter", "start"),
    ("^e", "plan"),
    ("^o", "edit"),
    ("↑↓", "select"),
    ("/", "filter"),
    ("?", "help"),
    ("esc", "leave"),
)
KEYS_IN_WORDS = tuple(
    Key(key=key, shown=key, action="", label=key, help=told)
    for key, told in (
        ("enter", "start a run of the selected profile, or attach to the one that is live"),
        ("^e", "the plan of the selected profile: services, commands, ports, GPUs"),
        ("^o", "open the selected profile in $VISUAL or $EDITOR; an installed one is copied into ./profiles first"),
        ("↑ ↓", "select"),
        ("/", "go to the filter"),
        ("esc", "clear the filter, then leave (ctrl+c leaves)"),
    )
)
NOTES = (
    "Type to filter; a row stays if it has every word. Profiles that can run here are listed first; beside another "
    "stands what this machine lacks for it. `grpo-tui doctor --profile NAME` checks everything that a profile needs.",
)


class Filter(Input):
    """What is typed, but for the keys of all screens that no name has: `?` opens the help, `/` is the filter itself."""

    async def _on_key(self, event: events.Key) -> None:
        if event.key in ("question_mark", "slash"):
            event.stop()
            event.prevent_default()
            if event.key == "question_mark":
                await self.run_action("app.help")


class PickerApp(ThemedApp[ProfileChoice]):
    """Returns the choice, or None if the user left."""

    TITLE = "grpo-tui"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { layout: vertical; background: $background; }
    .bar { height: 1; background: $panel; padding: 0 1; text-wrap: nowrap; text-overflow: ellipsis; }
    Input { border: none; height: 1; margin: 1 1 0 1; padding: 0; background: $background; }
    Input:focus { border: none; background: $background; background-tint: $background 0%; }
    Input > .input--placeholder { color: $faint; }
    OptionList { height: 1fr; border: none; padding: 0 1; background: $background; scrollbar-size-vertical: 1;
        text-wrap: nowrap; text-overflow: ellipsis; }
    OptionList:focus { border: none; }
    OptionList > .option-list--option { color: $foreground; }
    OptionList > .option-list--option-highlighted { background: $selected; color: $foreground; text-style: bold; }
    OptionList:ansi > .option-list--option-highlighted { background: ansi_cyan; color: ansi_black; }
    OptionList > .option-list--option-disabled { color: $muted; text-style: bold; }
    OptionList > .option-list--separator { color: $rule; }
    #about { height: auto; padding: 0 1; border-top: solid $rule; color: $foreground; }
    """
    BINDINGS = [
        Binding("up", "mark(-1)", "up", priority=True, tooltip="mark the one above"),
        Binding("down", "mark(1)", "down", priority=True, tooltip="mark the one below"),
        Binding("ctrl+e", "plan", "plan", priority=True, tooltip="show the plan of the selected profile"),
        Binding("ctrl+o", "edit", "edit", priority=True, tooltip="open the selected profile in an editor"),
        Binding("escape", "leave", "leave", tooltip="leave; clears the filter first"),
        Binding("ctrl+c,ctrl+q", "quit", "leave", show=False, priority=True, tooltip="leave"),
    ]

    def __init__(
        self,
        read_choices: Callable[[], Sequence[ProfileChoice]],
        plan_of: Callable[[str], str],
        *,
        theme: str = DARK,
        is_ascii: bool = False,
    ) -> None:
        """Offer choices.

        Args:
            read_choices: returns the choices; called again after a profile was edited.
            plan_of: returns the plan of a profile as text; may block, and raises `GrpoError`.
        """
        super().__init__(theme=theme, is_ascii=is_ascii)
        self._read_choices = read_choices
        self._choices = read_choices()
        self._plan_of = plan_of
        self._listed: dict[str, ProfileChoice] = {}

    def compose(self) -> ComposeResult:
        """A title, the filter, the list, what is marked, and the keys."""
        yield Static(Content.assemble(("grpo-tui", "bold"), "  choose a profile to start"), classes="bar")
        yield Filter(placeholder="type to filter", id="filter")
        yield OptionList(id="list")
        yield Static(id="about")
        keys = [part for key, word in KEYS for part in ((key, "bold $text-accent"), (f" {word}   ", "$muted"))]
        yield Static(Content.assemble(*keys), classes="bar")

    def on_mount(self) -> None:
        """List everything."""
        self._list("")
        self.query_one(Input).focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Narrow the list down."""
        self._list(event.value)

    def on_input_submitted(self) -> None:
        """Take what is marked."""
        if self._marked is not None:
            self._take(self._marked)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Take what was clicked."""
        self._take(self._listed[str(event.option_id)])

    def on_option_list_option_highlighted(self) -> None:
        """Show the description of the selected entry."""
        self._describe()

    @on(events.Resize)
    def _wrap_description(self, event: events.Resize) -> None:
        """Wrap the description for the new size, which the app itself has only later."""
        self._describe(event.size)

    def action_mark(self, by: int) -> None:
        """Mark another, or read on in an open page."""
        if isinstance(self.screen, ReadingScreen):
            self.screen.action_scroll(by)
        elif by < 0:
            self.query_one(OptionList).action_cursor_up()
        else:
            self.query_one(OptionList).action_cursor_down()

    async def action_plan(self) -> None:
        """Open the plan of the selected profile."""
        choice = self._marked
        if isinstance(self.screen, ReadingScreen) or choice is None:
            return
        try:
            text = await asyncio.to_thread(self._plan_of, choice.name)
        except (GrpoError, OSError) as error:
            text = f"{choice.name} cannot start:\n\n{error}"
        page = "\n".join((*choice.words, "", text))
        self.push_screen(ReadingScreen(f"plan of {choice.name}", Content(page), is_wide=True))

    def action_help(self) -> None:
        """Open the help."""
        page = keys_page({"keys of the profiles": KEYS_IN_WORDS}, page_width(self.size.width), NOTES)
        self.push_screen(ReadingScreen("grpo-tui", page))

    def action_edit(self) -> None:
        """Open the marked profile in an editor; one that is installed is copied into `./profiles` first."""
        choice = self._marked
        if isinstance(self.screen, ReadingScreen) or choice is None:
            return
        command = editor_command(os.environ)
        try:
            with own_copy(choice) as path, self.suspend():
                subprocess.run([*command, str(path)], check=False)
        except SuspendNotSupported:
            self.notify("cannot open an editor: this terminal cannot be suspended", severity="error")
        except OSError as error:
            what_to_do = (
                "set EDITOR to another editor" if error.filename == command[0] else "the profile was not opened"
            )
            self.notify(f"{error.filename}: {error.strerror}; {what_to_do}", severity="error", markup=False)
        self._choices = self._read_choices()
        options = self.query_one(OptionList)
        self._list(self.query_one(Input).value)
        if choice.name in self._listed:
            options.highlighted = options.get_option_index(choice.name)

    def action_leave(self) -> None:
        """Clear the filter; where there is none, leave."""
        filter_line = self.query_one(Input)
        if filter_line.value:
            filter_line.value = ""
        else:
            self.leave()

    @property
    def _marked(self) -> ProfileChoice | None:
        option = self.screen_stack[0].query_one(OptionList).highlighted_option
        return self._listed.get(str(option.id)) if option is not None else None

    def _take(self, choice: ProfileChoice) -> None:
        if choice.error is None:  # its error is shown already
            self.leave(choice)

    def _describe(self, size: Size | None = None) -> None:
        """Show the description of the selected entry, as far as it fits into a terminal of this size."""
        width, height = size or self.size
        main, choice = self.screen_stack[0], self._marked
        told = list(choice.words) if choice else []
        if choice is not None and choice.lack is not None:
            told.insert(0, f"{choice.lack}: {choice.lack_note}")
        rows = [row for words in told for row in wrapped(words, width - 2)]
        room = max(2, int(height * ABOUT_SHARE))
        if len(rows) > room:
            rows = [*rows[: room - 1], "… ^e shows the rest and the plan"]
        main.query_one("#about", Static).update(Content("\n".join(rows)))

    def _list(self, typed: str) -> None:
        found = matching(self._choices, typed)
        self._listed = {choice.name: choice for choice in found}
        options = self.query_one(OptionList)
        options.clear_options()
        width = min(MAX_NAME_WIDTH, max((len(choice.name) for choice in found), default=0))
        options.add_options(Option(_row(choice, width), id=key) for key, choice in self._listed.items())
        if not found:
            options.add_option(Option(Content(_nothing(typed)), disabled=True))
        options.action_first()
        self._describe()


def _row(choice: ProfileChoice, width: int) -> Content:
    sign = "✗" if choice.error else " "
    lack = Content.styled(f"{choice.lack} · ", "dim") if choice.lack else Content("")
    return Content(f"{sign} {fit(choice.name, width)}  ") + lack + Content(choice.description)


def _nothing(typed: str) -> str:
    if typed:
        return f"no profile matches {typed!r}; esc clears the filter"
    return "no profile in ./profiles; start one with grpo-tui --profile FILE"
