"""The mouse wheel over a part that does not scroll by itself: a key's action for each notch."""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.widget import Widget


class Wheel(Widget):
    """Base of such parts, after the one that has their styles: Textual takes those of the first alone."""

    ON_WHEEL: ClassVar[tuple[str, str]]
    """The actions of a notch up and of a notch down."""

    async def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """As the key upwards."""
        event.stop()
        await self.run_action(self.ON_WHEEL[0])

    async def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """As the key downwards."""
        event.stop()
        await self.run_action(self.ON_WHEEL[1])
