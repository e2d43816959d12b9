"""The text that each token adds to a completion, for readers that have no tokenizer.

Joined, the pieces are what the tokenizer makes of all tokens at once, if it does not tidy up between them. Where a
character is split over several tokens, it stands whole at the last of them, and the others have nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

Decode = Callable[[list[int]], str]
"""Token ids to text, special tokens included: an end token that is missing must be seen."""
HALF_CHARACTER = "\ufffd"
"""What tokenizers write for bytes that are no character, or not yet."""
MAX_TOKENS_A_CHARACTER = 8
"""After so many, the bytes are none that make one: models write such, early in training."""


def token_texts(tokens: Sequence[int], decode: Decode) -> list[str]:
    """One piece a token, of one token at least."""
    pieces = [decode([tokens[0]]), *(_within_a_text(decode, token) for token in tokens[1:])]
    begun = 0  # the first token whose text is not told yet
    for place, piece in enumerate(pieces):
        if begun < place or HALF_CHARACTER in piece:
            together = decode(list(tokens[begun : place + 1]))
            can_go_on = place + 1 < len(tokens) and place + 1 - begun < MAX_TOKENS_A_CHARACTER
            if together.endswith(HALF_CHARACTER) and can_go_on:
                pieces[place] = ""
                continue
            pieces[place] = together
        begun = place + 1
    return pieces


@lru_cache(maxsize=1 << 16)
def _within_a_text(decode: Decode, token: int) -> str:
    """What a token adds to itself: some tokenizers drop the space of the first one."""
    return decode([token, token])[len(decode([token])) :]
