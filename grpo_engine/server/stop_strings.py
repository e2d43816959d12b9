"""Where a text ends: stop strings are found while tokens arrive, across token borders.

Only rows that have stop strings pay for it; all others are turned into text once, at their end.
"""

from __future__ import annotations

from typing import Protocol

_REPLACEMENT = "�"
"""What a decoder writes for bytes that are no whole character yet."""


class Tokenizer(Protocol):
    """The part of a tokenizer that turns tokens into text."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


class StopWatch:
    """The text of one row so far, and whether one of its stop strings is complete."""

    def __init__(self, tokenizer: Tokenizer, stops: list[str], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._skip_special_tokens = skip_special_tokens
        self._token_ids: list[int] = []
        self._window_at = 0
        """First token of the window that is decoded again with every token: merges depend on their neighbours."""
        self._read_at = 0
        """First token whose text is not in `text` yet."""
        self._searched = 0
        self.text = ""
        self.is_cut = False

    def add(self, token_id: int, *, may_end: bool) -> bool:
        """Take one more token; True once a stop string stands in the text, which is then cut before it.

        A stop string that stands there before the row `may_end` is passed over.
        """
        self._token_ids.append(token_id)
        before = self._decode(self._token_ids[self._window_at : self._read_at])
        now = self._decode(self._token_ids[self._window_at :])
        if len(now) <= len(before) or now.endswith(_REPLACEMENT):
            return False
        fresh = now[len(before) :]
        self._window_at, self._read_at = self._read_at, len(self._token_ids)
        overlap = max(map(len, self._stops)) - 1
        self.text += fresh
        if not may_end:
            self._searched = len(self.text)
            return False
        cuts = [at for stop in self._stops if (at := self.text.find(stop, self._searched)) >= 0]
        self._searched = max(self._searched, len(self.text) - overlap)
        if cuts:
            self.text, self.is_cut = self.text[: min(cuts)], True
        return self.is_cut

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
