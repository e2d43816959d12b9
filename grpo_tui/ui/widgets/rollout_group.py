"""One group: prompt, table of completions, and the text of one completion with coloured tokens.

The legend has the ranges of the colours, the ends of a scale are underlined and bold, and the last lines have the
values of the token under the cursor.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rich.cells import cell_len
from textual import events
from textual.content import Content

from grpo_engine.wire.metrics import RolloutLine, SampledCompletion
from grpo_tui.ui.messages import StateChanged
from grpo_tui.ui.widgets.lines import Lines, Styled, Wheel, fit, line, rule
from grpo_tui.ui.widgets.rollout_list import wrapped_words
from grpo_tui.view.rollouts.state import CompletionMoved, RolloutView, Tint, TokenMoved, TokenSet, environment_words
from grpo_tui.view.rollouts.text import (
    SCALES,
    Piece,
    line_of,
    pieces_of,
    token_at,
    token_name,
    token_words,
    value_of,
    visible,
    wrapped,
)
from grpo_tui.view.state import ViewState

TONES = frozenset({"cool-end", "cool", "warm", "warm-end", "bad-end", "bad", "good", "good-end", "cursor", "read"})
MAX_PROMPT_CHARACTERS = 4000
"""Longest prompt above the completions; `o` shows all of it."""
PROMPT_WORD = "prompt: "
ROOMY_ROWS = 30
"""From so many on, the table of completions may have more."""
NUM_HEADINGS = 3
"""Of the group, of the table, and of the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What a pane shows."""

    index: int
    group: RolloutLine
    place: int
    """The number of the completion."""
    is_marked: bool = False

    @property
    def completion(self) -> SampledCompletion | None:
        """None in a group that has none."""
        return self.group.completions[self.place] if self.group.completions else None


class RolloutGroup(Lines, Wheel):
    """A pane with the chosen group, or with the one that was marked to be compared with it."""

    ON_WHEEL = ("screen.scroll_text(-3)", "screen.scroll_text(3)")

    COMPONENT_CLASSES = set(TONES)
    DEFAULT_CSS = """
    RolloutGroup { height: 1fr; padding: 0 1; }
    RolloutGroup > .cool { color: $text-primary; }
    RolloutGroup > .cool-end { color: $text-primary; text-style: underline; }
    RolloutGroup > .warm { color: $text-warning; }
    RolloutGroup > .warm-end { color: $text-error; text-style: bold; }
    RolloutGroup > .bad { color: $text-error; }
    RolloutGroup > .bad-end { color: $text-error; text-style: underline; }
    RolloutGroup > .good { color: $text-success; }
    RolloutGroup > .good-end { color: $text-success; text-style: bold; }
    RolloutGroup > .cursor { color: $background; background: $foreground; text-style: bold underline; }
    RolloutGroup:ansi > .cursor { color: ansi_default; background: ansi_default; text-style: reverse bold underline; }
    RolloutGroup > .read { color: $muted; text-style: italic; }
    """

    def __init__(self, *, id: str | None = None, is_marked: bool = False) -> None:
        """Make a pane.

        Args:
            is_marked: for the completion that was marked, not the chosen one.
        """
        super().__init__(id=id)
        self._is_marked = is_marked
        self._wrapped: list[list[Piece]] = []
        self._wrapped_for: tuple[object, ...] = ()
        self._num_body_lines = 1
        self._clickable: dict[int, int | list[Piece]] = {}
        """By the row of the pane: the number of a completion, or what stands in a row of its text."""
        self._last: list[Content] = []
        """The lines of the group that was shown last."""
        self._last_size = (0, 0)

    def inputs(self, state: ViewState) -> tuple[object, ...]:
        """Not the clock."""
        return (state.rollouts,)

    def lines(self, state: ViewState, width: int, height: int) -> list[Content]:
        """From top to bottom: title, prompt, completions, text, token, legend."""
        view = state.rollouts
        self._clickable = {}
        subject = self._subject(view)
        if subject is None and view.is_reading and self._last_size == (width, height):
            # The last group stays until then: clearing it would cost as much output as the next group.
            return [rule(width, "reading …"), *self._last[1:]]
        self._last_size = (width, height)
        if subject is None:
            self._last = self._words_for_nothing(view, width)
        else:
            self._last = self._lines_of(view, subject, width, height)
        return self._last

    def _lines_of(self, view: RolloutView, subject: Subject, width: int, height: int) -> list[Content]:
        title = rule(width, _title(subject), _place(view, subject))
        prompt = self._prompt_lines(subject.group.prompt, width, max(1, height // 8))
        completion = subject.completion
        if completion is None:
            return [title, *prompt, line(("this group has no completions", ".warning"))]
        below = _token_lines(completion, view, width)
        most_rows = height // 4 if height < ROOMY_ROWS else height // 3 - 1
        longest = max(_rows_of(each.text, width) for each in subject.group.completions)
        left_rows = height - NUM_HEADINGS - len(prompt) - len(below) - longest
        num_rows = max(3, min(len(subject.group.completions), max(most_rows, left_rows)))
        table = _table(subject, width, num_rows)
        head = [title, *prompt, *table]
        self._clickable = dict(enumerate(_numbers(subject, num_rows), start=len(head) - len(table) + 1))
        self._num_body_lines = max(1, height - len(head) - 1 - len(below))
        if view.shows_prompt:
            below = []
            self._num_body_lines = max(1, height - len(head) - 1)
            body_title, body = self._prompt_body(view, subject, width)
        else:
            body_title, body, texts = self._completion_body(view, subject, completion, width)
            self._clickable |= dict(enumerate(texts, start=len(head) + 1))
        body += [Content("")] * (self._num_body_lines - len(body))
        return [*head, body_title, *body, *below]

    def page(self, view: RolloutView, pages: int) -> TokenSet | TokenMoved:
        """The change that goes so many pages on."""
        return self.scrolled(view, pages * max(1, self._num_body_lines - 1))

    def scrolled(self, view: RolloutView, by: int) -> TokenSet | TokenMoved:
        """The change that goes so many lines on."""
        if view.shows_prompt:
            return TokenMoved(by=by, last_line=max(0, len(self._wrapped) - self._num_body_lines))
        token = token_at(self._wrapped, line_of(self._wrapped, view.token) + by)
        return TokenSet(token=view.token if token is None else token)

    def on_click(self, event: events.Click) -> None:
        """Choose the completion of a row, or the token under the pointer."""
        place = event.get_content_offset_capture(self)
        clicked = self._clickable.get(place.y)
        if clicked is None or self._state is None or self._is_marked:
            return
        if isinstance(clicked, int):
            self.post_message(StateChanged(CompletionMoved(by=clicked - self._state.rollouts.completion)))
            return
        for piece in clicked:
            place -= (cell_len(piece.text), 0)
            if place.x < 0:
                if piece.token is not None:
                    self.post_message(StateChanged(TokenSet(token=piece.token)))
                return

    def _subject(self, view: RolloutView) -> Subject | None:
        if self._is_marked:
            marked = view.marked
            if marked is None:
                return None
            return Subject(index=marked.index, group=marked.line, place=marked.completion, is_marked=True)
        if view.group is None or view.chosen is None:
            return None
        place = max(0, min(view.completion, len(view.group.completions) - 1))
        return Subject(index=view.chosen, group=view.group, place=place)

    def _words_for_nothing(self, view: RolloutView, width: int) -> list[Content]:
        title = rule(width, "group")
        if view.chosen is None or view.read is None:
            return [title]
        if view.is_reading:
            return [title, line(("reading …", ".muted"))]
        words = (
            f"Line {view.chosen + 1:,} of rollouts.jsonl cannot be read: it is damaged or has another format. "
            "n and p go to other groups."
        )
        return [title, *(line((text, ".warning")) for text in wrapped_words(words, width))]

    def _prompt_lines(self, prompt: str, width: int, most: int) -> list[Content]:
        if not prompt:
            return [line(("prompt: empty", ".muted"))]
        shown = wrapped([Piece(prompt[-MAX_PROMPT_CHARACTERS:], None)], width - len(PROMPT_WORD))
        is_whole = len(shown) <= most and len(prompt) <= MAX_PROMPT_CHARACTERS
        shown = shown[-most:]  # the end: the question follows the shared instructions
        rows = [line((PROMPT_WORD if number == 0 else " " * len(PROMPT_WORD), ".muted"), _plain(row))
                for number, row in enumerate(shown)]  # fmt: skip
        if not is_whole:
            rows[0] = line(("prompt …", ".muted"), _plain(shown[0]))
            note = Content.styled(" o: whole prompt", ".muted")
            rows[-1] = rows[-1].truncate(width - note.cell_length, ellipsis=True, pad=True) + note
        return rows

    def _prompt_body(self, view: RolloutView, subject: Subject, width: int) -> tuple[Content, list[Content]]:
        lines = self._layout(("prompt", subject.group, width), [Piece(subject.group.prompt, None)], width)
        first = max(0, min(view.token, len(lines) - self._num_body_lines))
        note = _lines_note(first, self._num_body_lines, len(lines))
        return rule(width, "the whole prompt", f"{note}o shows the completion"), [
            line(_plain(row)) for row in lines[first : first + self._num_body_lines]
        ]

    def _completion_body(
        self, view: RolloutView, subject: Subject, completion: SampledCompletion, width: int
    ) -> tuple[Content, list[Content], list[list[Piece]]]:
        lines = self._layout(("completion", completion, width), pieces_of(completion), width)
        at = line_of(lines, view.token)
        first = max(0, min(at - self._num_body_lines // 2, len(lines) - self._num_body_lines))
        note = _lines_note(first, self._num_body_lines, len(lines))
        title = rule(width, f"completion {subject.place + 1}", f"{note}coloured by {view.tint}, C: next")
        if not completion.text and not any(completion.token_texts):
            return title, [line(("empty: the model ended without any text", ".warning"))], []
        texts = lines[first : first + self._num_body_lines]
        rows = [_coloured(row, completion, view, is_cursor_shown=not subject.is_marked) for row in texts]
        if not completion.token_texts:
            rows.append(line(("recorded without token texts, so tokens are not coloured", ".muted")))
        return title, rows, texts

    def _layout(self, key: tuple[object, ...], pieces: Iterable[Piece], width: int) -> list[list[Piece]]:
        """The wrapped text, cached by text and width."""
        known = self._wrapped_for
        if len(known) != len(key) or any(
            now is not then and not (isinstance(now, int | str) and now == then)
            for now, then in zip(key, known, strict=True)
        ):
            self._wrapped, self._wrapped_for = wrapped(pieces, max(1, width)), key
        return self._wrapped


def _title(subject: Subject) -> str:
    environment = f" · {environment_words(visible(subject.group.environment))}" if subject.group.environment else ""
    compared = "compared with: " if subject.is_marked else ""
    return f"{compared}step {subject.group.step:,}{environment}"


def _place(view: RolloutView, subject: Subject) -> str:
    if subject.is_marked:
        return "m removes it"
    if subject.index not in view.found:
        return ""
    return f"group {view.found.index(subject.index) + 1:,} of {len(view.found):,}"


def _lines_note(first: int, num_shown: int, total: int) -> str:
    if total <= num_shown:
        return ""
    return f"lines {first + 1:,}–{min(total, first + num_shown):,} of {total:,} · "


def _rows_of(text: str, width: int) -> int:
    """About how many rows a text takes."""
    return text.count("\n") + 1 + len(text) // max(1, width)


def _plain(row: list[Piece]) -> str:
    return "".join(piece.text for piece in row)


def _table(subject: Subject, width: int, num_rows: int) -> list[Content]:
    """The completions around the chosen one, a row each."""
    completions = subject.group.completions
    numbers = _numbers(subject, num_rows)
    text = f"{'no.':>5} {'reward':>8} {'advantage':>9} {'tokens':>7} {'policy':>9}  ended"
    heading = line((fit(text, width), ".title"))
    rows = []
    for number in numbers:
        one = completions[number]
        is_chosen = number == subject.place
        advantage = f"{one.advantage:+.3f}"
        pieces: list[str | Styled] = [
            ("▌" if is_chosen else " ", ".accent"),
            (f"{number + 1:>4}", ".strong" if is_chosen else ""),
            f" {one.reward:>8.3f} ",
            " " * (9 - len(advantage)),  # an underline is below the number alone
            (advantage, SCALES[Tint.ADVANTAGE].tone(one.advantage)),
            f" {len(one.token_ids):>7,} {_versions(one):>9}  ",
            (_ended(one), ".warning" if one.is_truncated else ".muted"),
            ("  " if width > 76 else "", ""),
            (visible(one.text[: 2 * width]) if width > 76 else "", ".muted"),
        ]
        row = line(*pieces).truncate(width, ellipsis=True, pad=True)
        rows.append(row.stylize(".selected") if is_chosen else row)
    hidden = len(completions) - len(rows)
    if hidden > 0:
        more = f" {hidden} more ↑↓"
        heading = line((fit(text, width - len(more)) + more, ".title"))
    return [heading, *rows]


def _numbers(subject: Subject, num_rows: int) -> range:
    """The completions of the table: those around the chosen one."""
    num = len(subject.group.completions)
    first = max(0, min(subject.place - num_rows // 2, num - num_rows))
    return range(first, min(num, first + num_rows))


def _versions(completion: SampledCompletion) -> str:
    known = [version for version in completion.policy_versions if version >= 0]
    if not known:
        return "-"
    low, high = min(known), max(known)
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"


def _ended(completion: SampledCompletion) -> str:
    state = {True: "truncated", False: "complete", None: "-"}[completion.is_truncated]
    return state if completion.training_logprobs else f"{state}, not trained"


def _coloured(row: list[Piece], completion: SampledCompletion, view: RolloutView, *, is_cursor_shown: bool) -> Content:
    scale = SCALES[view.tint]
    pieces: list[Styled] = []
    for piece in row:
        if piece.token is None:
            style = ".read" if completion.token_texts else ""
        elif is_cursor_shown and piece.token == min(view.token, len(completion.token_ids) - 1):
            style = ".cursor"
        else:
            style = scale.tone(value_of(completion, piece.token, view.tint))
        if pieces and pieces[-1][1] == style:
            pieces[-1] = (pieces[-1][0] + piece.text, style)
        else:
            pieces.append((piece.text, style))
    return line(*pieces)


def _token_lines(completion: SampledCompletion, view: RolloutView, width: int) -> list[Content]:
    """All about the token under the cursor, on three or four lines, the legend the last of them."""
    rows = wrapped_words(token_words(completion, view.token), width)[:3]
    rows += [""] * (2 - len(rows))
    return [rule(width, token_name(completion, view.token) or "no token"), *map(line, rows), _legend(view.tint, width)]


def _legend(tint: Tint, width: int) -> Content:
    """The ranges in their own colours."""
    scale = SCALES[tint]
    pieces: list[str | Styled] = [(f"{scale.name}: ", ".muted")]
    for number, (label, tone) in enumerate(zip(scale.labels, scale.tones, strict=True)):
        pieces += [(" · " if number else "", ".muted"), (label, tone)]
    return line(*pieces).truncate(width, ellipsis=True)
