"""The last line: the keys, clickable."""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content
from textual.style import Style

from grpo_engine.wire.supervisor import ServiceState
from grpo_tui.ui.keys import FIRST_EVERYWHERE, LAST_EVERYWHERE, ON_TRAVEL, PLACES, Key
from grpo_tui.ui.widgets.lines import Lines
from grpo_tui.view.state import ViewState, inference_service

STOPPED_STATES = frozenset({ServiceState.STOPPED, ServiceState.FINISHED, ServiceState.FAILED})

MOST = ("question_mark", "q")
"""Keys that are never left out: the help names the others."""


class KeysBar(Lines):
    """One line under everything."""

    DEFAULT_CSS = """
    KeysBar { height: 1; background: $panel; padding: 0 1; }
    KeysBar > .key { color: $text-accent; text-style: bold; }
    """
    COMPONENT_CLASSES = {"key"}

    def __init__(self, keys: Sequence[Key]) -> None:
        """Show `keys`, those of one screen, between those that work everywhere."""
        super().__init__()
        self.lists_screens = False
        """Whether the screens are listed here, because the tabs line is hidden."""
        self._keys = keys

    def inputs(self, state: ViewState) -> tuple[object, ...]:
        """Which keys work, and the label of the start and stop key."""
        has_server = inference_service(state) is not None
        return (self._is_stopped(state), self.lists_screens, state.may_act, has_server, state.travel.is_open,
                state.viewer.has_board)  # fmt: skip

    @staticmethod
    def _is_stopped(state: ViewState) -> bool:
        return bool(state.chosen) and all(service.state in STOPPED_STATES for service in state.chosen)

    def lines(self, state: ViewState, width: int, height: int) -> list[Content]:
        """The keys, two spaces apart, or one if needed; the last of the screen's own keys are dropped first."""
        keys = [
            key
            for key in self._working(state)
            if key.is_in_footer
            and is_available(key, state)
            and not (key.action == "app.travel" and state.travel.is_open)
        ]
        everywhere = {key.key for key in (*FIRST_EVERYWHERE, *LAST_EVERYWHERE)}
        items = self._items(keys, state)
        while _length(items, 1) > width and (
            least := [key for key in keys if key.key not in everywhere] or [key for key in keys if key.key not in MOST]
        ):
            keys.remove(least[-1])
            items = self._items(keys, state)
        gap = 2 if _length(items, 2) <= width else 1
        return [Content(" " * gap).join(items).truncate(width)]

    def _working(self, state: ViewState) -> list[Key]:
        """The keys in effect: an open timeline takes precedence over keys of the screen."""
        if not state.travel.is_open:
            return [*FIRST_EVERYWHERE, *self._keys, *LAST_EVERYWHERE]
        taken = {part for key in ON_TRAVEL for part in key.key.split(",")}
        own = [key for key in self._keys if key.key.partition(",")[0] not in taken]  # the one that is shown
        return [*ON_TRAVEL, *own, *LAST_EVERYWHERE]

    def _items(self, keys: Sequence[Key], state: ViewState) -> list[Content]:
        items = [_item(key, state, is_stopped=self._is_stopped(state)) for key in keys]
        if self.lists_screens:
            items.append(Content.assemble((f"1-{len(PLACES)}", ".key"), " ", ("more", ".muted")))
        return items


def is_available(key: Key, state: ViewState) -> bool:
    """Whether a key works in this state; one that does not shows why when pressed."""
    if key.action == "app.restart_inference" and inference_service(state) is None:
        return False
    return state.may_act or not key.changes_run


def _length(items: Sequence[Content], gap: int) -> int:
    return sum(item.cell_length for item in items) + gap * (len(items) - 1)


def _item(key: Key, state: ViewState, *, is_stopped: bool) -> Content:
    label = key.label
    if key.action == "app.detach" and state.viewer.has_board:
        label = "board"
    if key.action == "app.start_or_stop":
        label = "start" if is_stopped else "stop"
    item = Content.assemble((key.shown, ".key"), " ", (label, ".muted"))
    return item.stylize(Style.from_meta({"@click": key.action}))
