"""What the palette (ctrl+p) finds: every key's action by its words, every service, every screen, every theme."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from textual.command import DiscoveryHit, Hit, Hits, Provider

from grpo_tui.ui.keys import FIRST_EVERYWHERE, LAST_EVERYWHERE, PLACES, Key
from grpo_tui.ui.themes import known_themes
from grpo_tui.ui.widgets.keys_bar import STOPPED_STATES, does_something

if TYPE_CHECKING:
    from grpo_tui.ui.app import GrpoScreen


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A line of the palette."""

    words: str
    help: str
    run: Callable[[], Any]
    is_shown_at_once: bool = True
    """Whether it is there before anything is typed."""


class RunCommands(Provider):
    """Finds by words in any order of letters, as Textual's palette does."""

    async def discover(self) -> Hits:
        """What is listed before anything is typed."""
        for command in self._commands():
            if command.is_shown_at_once:
                yield DiscoveryHit(command.words, command.run, help=command.help)

    async def search(self, query: str) -> Hits:
        """Commands whose words, or those of their help, have the letters of the query."""
        matcher = self.matcher(query)
        for command in self._commands():
            score = max(matcher.match(command.words), 0.5 * matcher.match(command.help))
            if score > 0:
                yield Hit(score, matcher.highlight(command.words), command.run, help=command.help)

    @property
    def _grpo(self) -> GrpoScreen:
        return cast("GrpoScreen", self.app)

    def _commands(self) -> Iterator[Command]:
        yield from self._of_keys()
        yield from self._of_services()
        for name in known_themes():
            yield Command(
                words=f"theme {name}",
                help="the colours of the screen; remembered for next time",
                run=partial(self._grpo.choose_theme, name),
                is_shown_at_once=False,
            )

    def _of_keys(self) -> Iterator[Command]:
        shown = self._grpo.shown or self._grpo.main
        own: tuple[Key, ...] = tuple(shown.KEYS)
        for key in (*FIRST_EVERYWHERE, *own, *LAST_EVERYWHERE):
            if key.action == "app.command_palette" or not does_something(key, self._grpo.state):
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
                help="select it and go to the main screen",
                run=partial(self._show_log, name),
            )
            if not app.state.may_act:
                continue
            yield Command(
                words=f"restart {name}", help="and those that must follow it", run=partial(app.restart, [service])
            )
            is_down = service.state in STOPPED_STATES
            yield Command(
                words=f"{'start' if is_down else 'stop'} {name}",
                help="asks before the trainer or a stranger ends",
                run=partial(app.start_or_stop, [service]),
            )
            if not is_down:
                yield Command(
                    words=f"kill {name}", help="no time to save anything; asks first", run=partial(app.kill, [service])
                )

    async def _show_log(self, name: str) -> None:
        self._grpo.select(name)
        await self._grpo.action_show("run")
