"""Textual's parser of what a terminal sends, for pastes (bracketed, mode 2004) of any text.

Textual (8.2.8) looks for escape sequences within a paste too: text after an ESC acts as keys, so that what was copied
from elsewhere could end a run. Here nothing in a paste is a key, whatever bytes it has; its first characters are kept.
Other input at which Textual raises is ignored.
"""

from __future__ import annotations

from collections.abc import Iterable

from textual import events
from textual._xterm_parser import BRACKETED_PASTE_END as END
from textual._xterm_parser import BRACKETED_PASTE_START as START
from textual._xterm_parser import XTermParser
from textual.geometry import Size
from textual.keys import Keys
from textual.message import Message

from grpo_engine.wire.terminal_text import printable

MAX_PASTED = 4096
"""Characters."""
MAX_SIZE = Size(4096, 1024)
"""Columns and rows that a terminal may have: Textual makes every cell. Larger than any display."""


class PasteParser(XTermParser):
    """Takes pastes out of the input before Textual's parser sees them."""

    def __init__(self, debug: bool = False) -> None:
        self._pasted: str | None = None
        """The beginning of a paste that has not ended."""
        self._tail = ""
        """What was read last; a mark may begin in it."""
        super().__init__(debug)

    def feed(self, data: str) -> Iterable[Message]:
        """Messages for this part of the input; it may begin and end anywhere."""
        if not data:  # the end of the input
            yield from super().feed(data)
        while data:
            mark = START if self._pasted is None else END
            seen = self._tail + data
            before, found, after = seen.partition(mark)
            new = (before + found)[len(self._tail) :]
            self._tail, data = ("", after) if found else (seen[1 - len(mark) :], "")
            if self._pasted is None:  # to Textual's parser the paste is empty
                yield from filter(_is_taken, super().feed(new + END if found else new))
                self._pasted = "" if found else None
                continue
            self._pasted = (self._pasted + new)[: MAX_PASTED + len(END)]
            if found:
                yield events.Paste(printable(self._pasted.removesuffix(END)[:MAX_PASTED], keep="\n\t\r"))
                self._pasted = None

    def parse_mouse_code(self, code: str) -> Message | None:
        """No mouse event where the terminal has reported 0 columns, rows or pixels: Textual divides by all of them."""
        reported = [each for each in (self.terminal_size, self.terminal_pixel_size) if each is not None]
        return None if any(0 in tuple(each) for each in reported) else super().parse_mouse_code(code)

    def _parse_extended_key(self, sequence: str) -> list[events.Key] | None:  # type: ignore[override]  # lru_cache
        """No key for a number that is no character, as in `ESC[1114112u`: Textual raises what `chr` does."""
        try:
            return super()._parse_extended_key(sequence)
        except (ValueError, OverflowError):
            return [events.Key(Keys.Ignore, None)]  # with none, its bytes would be taken one by one


def _is_taken(message: Message) -> bool:
    """Whether it is neither a paste, which is read here, nor a size that no terminal has."""
    if isinstance(message, events.Resize):
        return message.size.width <= MAX_SIZE.width and message.size.height <= MAX_SIZE.height
    return not isinstance(message, events.Paste)
