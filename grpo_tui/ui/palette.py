"""The command palette (ctrl+p): the action of every key, every service, every screen and every theme."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

from textual.await_complete import AwaitComplete
from textual.command import CommandPalette, DiscoveryHit, Hit, Hits, Provider
from textual.content import Content
from textual.dom import DOMNode
from textual.errors import NoWidget
from textual.fuzzy import Matcher
from textual.geometry import Region
from textual.message import Message
from textual.widget import Widget
from textual.widgets import Input, OptionList

from grpo_engine.wire.supervisor import ServiceStatus
from grpo_tui.ui.keys import FIRST_EVERYWHERE, LAST_EVERYWHERE, PLACES, Key
from grpo_tui.ui.screens.base import RunScreen
from grpo_tui.ui.text_screen import ClosesOnce
from grpo_tui.ui.themes import known_themes
from grpo_tui.ui.widgets.frame.keys_bar import STOPPED_STATES, is_available
from grpo_tui.view.state import ViewState


class Palette(CommandPalette, ClosesOnce[None]):
    """Textual's palette (8.2), without what ends the app."""

    def _action_command_list(self, action: str) -> None:
        with suppress(KeyError):  # a page up or down in a list that has no lines yet
            super()._action_command_list(action)

    def dismiss(self, result: None = None) -> AwaitComplete:
        """Close it, and end its search, which would find no list; once it is mounted, where a key came before."""
        if not self.is_mounted:
            self.call_later(self._action_escape)
            return AwaitComplete()
        self._cancel_gather_commands()
        return super().dismiss(result)

    def get_widget_at(self, x: int, y: int) -> tuple[Widget, Region]:
        """Its background where nothing is: a click may come from a terminal that has become smaller since."""
        try:
            return super().get_widget_at(x, y)
        except NoWidget:
            return self, self.region

    async def _on_message(self, message: Message) -> None:
        """Leave out what was typed or chosen before it was closed, and comes now: a search would find no list."""
        is_of_its_parts = isinstance(message, Input.Changed | Input.Submitted | OptionList.OptionMessage)
        if not is_of_its_parts or self in self.app.screen_stack:
            await super()._on_message(message)


class RunApp(Protocol):
    """What the palette calls of the app."""

    state: ViewState

    @property
    def shown(self) -> RunScreen | None:
        """The screen of the run that is in front."""

    @property
    def main(self) -> RunScreen:
        """The main screen."""

    def choose_theme(self, name: str) -> None:
        """Draw in other colours."""

    def select(self, service: str) -> None:
        """Select a service."""

    def restart(self, services: Sequence[ServiceStatus]) -> None:
        """Restart services."""

    def start_or_stop(self, services: Sequence[ServiceStatus]) -> None:
        """Start stopped services, stop running ones."""

    def kill(self, services: Sequence[ServiceStatus]) -> None:
        """Kill services."""

    async def action_show(self, place: str) -> None:
        """Switch to another screen."""

    async def run_action(self, action: str, default_namespace: DOMNode | None = None) -> bool:
        """Run the action of a key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A line of the palette."""

    words: str
    help: str
    run: Callable[[], Any]
    is_shown_at_once: bool = True
    """Whether it is listed before anything is typed."""


class RunCommands(Provider):
    """Matches the typed letters in order, as Textual's palette does; in a help text beginnings of words alone."""

    async def discover(self) -> Hits:
        """Yield the commands that are listed before anything is typed."""
        for command in self._commands():
            if command.is_shown_at_once:
                yield DiscoveryHit(Content(command.words), command.run, text=command.words, help=command.help)

    async def search(self, query: str) -> Hits:
        """Yield commands whose words match the query, then those whose help has its words."""
        matcher = self.matcher(query)
        for command in self._commands():
            score = matcher.match(command.words) or (_OF_HELP if _has_words(command.help, query) else 0)
            if score > 0:
                shown = _highlighted(command.words, matcher)
                yield Hit(score, shown, command.run, text=command.words, help=command.help)

    @property
    def _grpo(self) -> RunApp:
        return cast(RunApp, self.app)

    def _commands(self) -> Iterator[Command]:
        yield from self._of_keys()
        yield from self._of_services()
        for name in known_themes():
            yield Command(
                words=f"theme {name}",
                help="colours of the screen; saved for the next start",
                run=partial(self._grpo.choose_theme, name),
                is_shown_at_once=False,
            )

    def _of_keys(self) -> Iterator[Command]:
        shown = self._grpo.shown or self._grpo.main
        own: tuple[Key, ...] = tuple(shown.KEYS)
        for key in (*FIRST_EVERYWHERE, *own, *LAST_EVERYWHERE):
            if key.action == "app.command_palette" or not is_available(key, self._grpo.state):
                continue
            yield Command(
                words=f"{key.label}  ({key.shown})",
                help=key.help,
                run=partial(self._grpo.run_action, key.action, shown),
                is_shown_at_once=key.is_in_footer or key.label in PLACES,
            )

    def _of_services(self) -> Iterator[Command]:
        app = self._grpo
        for service in app.state.services:
            name = service.name
            yield Command(
                words=f"show log of {name}",
                help="select the service and go to the main screen",
                run=partial(self._show_log, name),
            )
            if not app.state.may_act:
                continue
            yield Command(
                words=f"restart {name}",
                help="and the services that depend on it",
                run=partial(app.restart, [service]),
            )
            is_down = service.state in STOPPED_STATES
            yield Command(
                words=f"{'start' if is_down else 'stop'} {name}",
                help="asks before stopping the trainer or ending a foreign process",
                run=partial(app.start_or_stop, [service]),
            )
            if not is_down:
                yield Command(
                    words=f"kill {name}", help="SIGKILL, nothing is saved; asks first", run=partial(app.kill, [service])
                )

    async def _show_log(self, name: str) -> None:
        self._grpo.select(name)
        await self._grpo.action_show("run")


_OF_HELP = 0.1
"""Below the score of any match in the words of a command."""


def _has_words(text: str, query: str) -> bool:
    """Whether each word of the query begins one of the text: letters in any order are in nearly every sentence."""
    words = re.findall(r"[\w-]+", text.lower())
    return all(any(word.startswith(each) for word in words) for each in query.lower().split())


def _highlighted(words: str, matcher: Matcher) -> Content:
    """As `Matcher.highlight`, which reads markup: the name of a service may look like it."""
    content = Content(words)
    for offset in matcher.fuzzy_search.match(matcher.query, words)[1]:
        content = content.stylize(matcher.match_style, offset, offset + 1)
    return content
