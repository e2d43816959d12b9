"""The last line: what the keys do. A click does it too."""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content
from textual.style import Style

from grpo_engine.wire.supervisor import ServiceState
from grpo_tui.ui.keys import FIRST_EVERYWHERE, LAST_EVERYWHERE, ON_TRAVEL, PLACES, Key
from grpo_tui.ui.widgets.lines import Lines
from grpo_tui.view.state import ViewState, inference_service

STOPPED_STATES = frozenset({ServiceState.STOPPED, ServiceState.FINISHED, ServiceState.FAILED})


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
        self.tells_screens = False
        """Whether the other screens are told here, for want of a line with their names."""
        self._keys = keys

    def inputs(self, state: ViewState) -> tuple[object, ...]:
        """Which keys do something, and the word of the start and stop key."""
        has_server = inference_service(state) is not None
        return (self._is_stopped(state), self.tells_screens, state.may_act, has_server, state.travel.is_open)

    @staticmethod
    def _is_stopped(state: ViewState) -> bool:
        return bool(state.chosen) and all(service.state in STOPPED_STATES for service in state.chosen)

    def lines(self, state: ViewState, width: int, height: int) -> list[Content]:
        """The keys, two spaces apart, or one where that is what it takes; the last of the screen's own give way."""
        keys = [
            key
            for key in self._working(state)
            if key.is_in_footer
            and does_something(key, state)
            and not (key.action == "app.travel" and state.travel.is_open)
        ]
        everywhere = {key.key for key in (*FIRST_EVERYWHERE, *LAST_EVERYWHERE)}
        items = self._items(keys, state)
        while _length(items, 1) > width and (own := [key for key in keys if key.key not in everywhere]):
            keys.remove(own[-1])
            items = self._items(keys, state)
        gap = 2 if _length(items, 2) <= width else 1
        return [Content(" " * gap).join(items).truncate(width)]

    def _working(self, state: ViewState) -> list[Key]:
        """The screen's own between those that work everywhere; the line of time takes some for itself."""
        if not state.travel.is_open:
            return [*FIRST_EVERYWHERE, *self._keys, *LAST_EVERYWHERE]
        taken = {part for key in ON_TRAVEL for part in key.key.split(",")}
        own = [key for key in self._keys if key.key.partition(",")[0] not in taken]  # the one that is shown
        return [*ON_TRAVEL, *own, *LAST_EVERYWHERE]

    def _items(self, keys: Sequence[Key], state: ViewState) -> list[Content]:
        items = [_item(key, is_stopped=self._is_stopped(state)) for key in keys]
        if self.tells_screens:
            items.append(Content.assemble((f"1-{len(PLACES)}", ".key"), " ", ("more", ".muted")))
        return items


def does_something(key: Key, state: ViewState) -> bool:
    """Whether a key is for something as things stand; one that is not says why when it is pressed."""
    if key.action == "app.restart_inference" and inference_service(state) is None:
        return False
    return state.may_act or not key.acts


def _length(items: Sequence[Content], gap: int) -> int:
    return sum(item.cell_length for item in items) + gap * (len(items) - 1)


def _item(key: Key, *, is_stopped: bool) -> Content:
    label = key.label
    if key.action == "app.start_or_stop":
        label = "start" if is_stopped else "stop"
    item = Content.assemble((key.shown, ".key"), " ", (label, ".muted"))
    return item.stylize(Style.from_meta({"@click": key.action}))
