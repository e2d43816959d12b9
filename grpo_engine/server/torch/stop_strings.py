"""Stop strings: found while tokens arrive, also across token borders.

Only rows with stop strings are decoded at every token; all others are decoded once, when they have finished.
"""

from __future__ import annotations

from typing import Protocol

_REPLACEMENT = "�"
"""What a tokenizer decodes incomplete characters to."""


class Tokenizer(Protocol):
    """A tokenizer's decoding."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


class StopDetector:
    """The text of one row so far, and whether one of its stop strings is complete."""

    def __init__(self, tokenizer: Tokenizer, stops: list[str], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._skip_special_tokens = skip_special_tokens
        self._token_ids: list[int] = []
        self._window_at = 0
        """First token of the window that is decoded with every new token: text depends on neighbouring tokens."""
        self._read_at = 0
        """First token whose text is not part of `text` yet."""
        self._searched = 0
        self.text = ""
        self.is_cut = False

    def add(self, token_id: int, *, may_end: bool) -> bool:
        """Add a token; whether the text now contains a stop string, before which it is cut.

        Stop strings are ignored until the row `may_end`.
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
