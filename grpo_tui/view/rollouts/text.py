"""Completions as lines of tokens: what a terminal must not get made visible, each token with its value and its tone.

Pure. Whatever a model wrote, nothing in it reaches the terminal as a command: control characters, escapes, changes of
direction and other invisible ones stand as `\\x1b`, `\\u202e`.
"""

from __future__ import annotations

import math
import re
import unicodedata
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rich.cells import cell_len

from grpo_engine.wire.metrics import SampledCompletion
from grpo_tui.view.logs.folding import CHARACTERS_A_CELL
from grpo_tui.view.rollouts.state import Tint

ValueT = TypeVar("ValueT")

MAX_LOG_RATIO = 20.0
MAX_CHARACTERS, MAX_LINES = 1 << 20, 1 << 16
"""Of a text that is shown: it is laid out in one go, and 10 MB of line feeds took 30 s and 1.2 GB."""
MAX_TOKEN_CHARACTERS = 256
"""Of a token in a title."""
_PLAIN = re.compile(r"[ -~]*")
"""Most tokens: they stand as they are, one cell a character."""
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_WITHOUT_SHAPE = re.compile(r"[\u034f\u115f\u1160\u3164\ufe00-\ufe0d\uffa0\U000e0100-\U000e01ef]")
"""Letters and marks that are not seen either; a model can hide text in them. Selectors of emoji (U+FE0F) are seen."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text of a line."""

    text: str
    token: int | None
    """Its token's number; None for what the model did not write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How a value becomes one of five tones."""

    name: str
    edges: tuple[float, float, float, float]
    tones: tuple[str, str, str, str, str]
    """Styles from the lowest to the highest; those of the ends are also underlined and bold."""
    labels: tuple[str, str, str, str, str]

    def tone(self, value: float | None) -> str:
        """The style for a value; none without one."""
        return "" if value is None or math.isnan(value) else self.tones[bisect_left(self.edges, value)]


SCALES = {
    Tint.RATIO: Scale(
        name="ratio",
        edges=(0.8, 0.95, 1.05, 1.2),
        tones=(".cool-end", ".cool", "", ".warm", ".warm-end"),
        labels=("<0.8", "0.8–0.95", "0.95–1.05", "1.05–1.2", ">1.2"),
    ),
    Tint.ADVANTAGE: Scale(
        name="advantage",
        edges=(-1.0, -0.05, 0.05, 1.0),
        tones=(".bad-end", ".bad", "", ".good", ".good-end"),
        labels=("<-1", "-1 to -0.05", "about 0", "0.05 to 1", ">1"),
    ),
    Tint.ENTROPY: Scale(
        name="entropy, nats",
        edges=(0.02, 0.5, 1.0, 2.0),
        tones=(".cool-end", ".cool", "", ".warm", ".warm-end"),
        labels=("<0.02", "0.02–0.5", "0.5–1", "1–2", ">2"),
    ),
}


def visible(text: str) -> str:
    """`text` on one line, with escapes in the place of what cannot be seen."""
    if _PLAIN.fullmatch(text):
        return text
    return "".join(_visible(letter) for letter in text)


def _visible(letter: str) -> str:
    if letter == "\n":
        return r"\n"
    if letter == "\t":
        return r"\t"
    if unicodedata.category(letter) in _HIDDEN or _WITHOUT_SHAPE.match(letter):
        return letter.encode("unicode_escape", "surrogatepass").decode("ascii")
    return letter


def telling_starts(prompts: Sequence[str]) -> list[str]:
    """The prompts without the words that all of them begin with: the markup of a chat, a system prompt."""
    first, last = min(prompts, default=""), max(prompts, default="")
    shared = next((place for place, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), 0)
    at_word = max(first.rfind(end, 0, shared) + 1 for end in " \n>")
    return [prompt[at_word:] for prompt in prompts]


def pieces_of(completion: SampledCompletion) -> Iterator[Piece]:
    """A completion token by token, with what was read between its turns; as one piece where tokens have no texts."""
    if len(completion.token_texts) != len(completion.token_ids) or not completion.token_texts:
        yield Piece(completion.text, None)
        return
    for number, text in enumerate(completion.token_texts):
        if number in completion.read_before:
            yield Piece(completion.read_before[number], None)
        yield Piece(text, number)


def wrapped(pieces: Iterable[Piece], width: int) -> list[list[Piece]]:
    """Lines of at most `width` cells; a token that does not fit begins the next one, a new line in the text too.

    Of a text longer than `MAX_CHARACTERS` or `MAX_LINES`, the beginning and a line that says so.
    """
    lines: list[list[Piece]] = [[]]
    room, num_characters = width, 0
    for piece in pieces:
        is_cut = len(piece.text) > MAX_CHARACTERS - num_characters
        text = piece.text[: MAX_CHARACTERS - num_characters]
        num_characters += max(1, len(text))  # a piece without text takes time, too
        for part in _parts(text):
            if len(lines) > MAX_LINES:
                is_cut = True
                break
            shown = visible(part)
            length = _cells(shown)
            if length > room and length <= width:
                lines.append([])
                room = width
            for chunk in _chunks(shown, room, width) if length > room else [shown]:
                size = _cells(chunk)
                if size > room:
                    lines.append([])
                    room = width
                lines[-1].append(Piece(chunk, piece.token))
                room -= size
            if part.endswith("\n"):
                lines.append([])
                room = width
        if is_cut:
            return [*lines, [Piece("… what follows is too long to be shown"[:width], None)]]
    if not lines[-1]:
        lines.pop()
    return lines


def _parts(text: str) -> list[str]:
    """Cut after new lines, and there alone: a carriage return ends no line here."""
    parts = text.split("\n")
    return [*(f"{part}\n" for part in parts[:-1]), *([parts[-1]] if parts[-1] else [])]


def _cells(text: str) -> int:
    """How wide a text is; a cell for every `CHARACTERS_A_CELL` at least, so that no row has marks without end."""
    if text.isascii():
        return len(text)
    return max(cell_len(text), -(-len(text) // CHARACTERS_A_CELL))


def _chunks(text: str, room: int, width: int) -> list[str]:
    """A text that is wider than a line, in pieces that fit: the first into `room`."""
    if text.isascii():
        return [
            chunk for chunk in (text[:room], *(text[at : at + width] for at in range(room, len(text), width))) if chunk
        ]
    chunks, used, limit = [""], 0, room
    for letter in text:
        size = cell_len(letter)
        if used + size > limit or len(chunks[-1]) >= CHARACTERS_A_CELL * limit:
            chunks.append("")
            used, limit = 0, width
        chunks[-1] += letter
        used += size
    return [chunk for chunk in chunks if chunk]


def line_of(lines: Sequence[Sequence[Piece]], token: int) -> int:
    """Where a token stands; the last line for one beyond the end."""
    for number, line in enumerate(lines):
        if any(piece.token is not None and piece.token >= token for piece in line):
            return number
    return max(0, len(lines) - 1)


def token_at(lines: Sequence[Sequence[Piece]], number: int) -> int | None:
    """The first token from a line on, or the last before it; None where nothing was written."""
    number = max(0, min(number, len(lines) - 1))
    after = (piece.token for line in lines[number:] for piece in line if piece.token is not None)
    before = (piece.token for line in reversed(lines[:number]) for piece in reversed(line) if piece.token is not None)
    return next(after, next(before, None))


def ratio_of(completion: SampledCompletion, token: int) -> float | None:
    """Of the trainer's probability over inference's; None where the completion was not trained on."""
    trainer, inference = _at(completion.training_logprobs, token), _at(completion.inference_logprobs, token)
    if trainer is None or inference is None or math.isnan(trainer - inference):
        return None
    return math.exp(max(-MAX_LOG_RATIO, min(MAX_LOG_RATIO, trainer - inference)))


def value_of(completion: SampledCompletion, token: int, tint: Tint) -> float | None:
    """What a token is coloured by."""
    match tint:
        case Tint.RATIO:
            return ratio_of(completion, token)
        case Tint.ADVANTAGE:
            return completion.advantage
        case Tint.ENTROPY:
            return _at(completion.entropies, token)


def token_name(completion: SampledCompletion, token: int) -> str:
    """Which token it is: `token 3 of 64 "foo"`; nothing where there are none."""
    if not completion.token_ids:
        return ""
    token = min(token, len(completion.token_ids) - 1)
    text = _at(completion.token_texts, token)
    text = None if text is None else text[:MAX_TOKEN_CHARACTERS]
    shown = "" if text is None else f' "{visible(text)}"' if text else " (part of a character)"
    return f"token {token + 1:,} of {len(completion.token_ids):,}{shown}"


def token_words(completion: SampledCompletion, token: int) -> str:
    """All that is known of one token: `ratio 1.020, log-prob -0.130 inference, -0.110 trainer, …`."""
    if not completion.token_ids:
        return ""
    token = min(token, len(completion.token_ids) - 1)
    known = []
    ratio, entropy = ratio_of(completion, token), _at(completion.entropies, token)
    trainer, inference = _at(completion.training_logprobs, token), _at(completion.inference_logprobs, token)
    version = _at(completion.policy_versions, token)
    if ratio is not None:
        known.append(f"ratio {ratio:.3f}")
    if inference is not None:
        known.append(f"log-prob {inference:.3f} inference" + ("" if trainer is None else f", {trainer:.3f} trainer"))
    if entropy is not None:
        known.append(f"entropy {entropy:.3f} nats")
    known.append(f"advantage {completion.advantage:+.3f}")
    if version is not None and version >= 0:
        known.append(f"policy version {version:,}")
    if trainer is None:
        known.append("not trained on")
    return ", ".join(known)


def _at(values: Sequence[ValueT], place: int) -> ValueT | None:
    return values[place] if 0 <= place < len(values) else None
