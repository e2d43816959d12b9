"""The body of the alignment screen: verdict, charts and worst tokens, laid out for the size."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from rich.cells import cell_len
from textual.content import Content
from textual.style import Style

from grpo_engine.diagnosis.finding import Finding
from grpo_engine.diagnosis.token_differences import AlignmentNumbers, WorstToken
from grpo_tui.ui.glyphs import SEVERITY_GLYPHS
from grpo_tui.ui.widgets.alignment_charts import (
    differences_chart,
    position_chart,
    ratios_chart,
    series_lines,
    version_lines,
)
from grpo_tui.ui.widgets.charts import side_by_side
from grpo_tui.ui.widgets.lines import Lines, Styled, Wheel, fit, line, rule
from grpo_tui.view.alignment.state import AlignmentView, Measured, Page
from grpo_tui.view.format import count_text
from grpo_tui.view.state import ViewState

WIDE = 110
"""Columns from which charts stand beside the words; below it they are pages."""
GAP = 2
SEVERITY_STYLES = {"error": ".error", "warning": ".warning", "info": ".ok"}
HEALTHY_SIGN = "✓"
ALIGNMENT_WARNINGS = frozenset({"alignment", "inference-logprobs", "mean-ratio", "clipped-fraction", "staleness"})
"""Warnings from metrics alone, shown if no tokens are recorded."""
READING = "reading the recorded groups …"


class AlignmentBody(Lines, Wheel):
    """Everything between the names of the screens and what happens."""

    ON_WHEEL = ("screen.scroll_tokens(-1)", "screen.scroll_tokens(1)")

    DEFAULT_CSS = """
    AlignmentBody { height: 1fr; padding: 0 1; }
    """

    def inputs(self, state: ViewState) -> tuple[object, ...]:
        """Not the clock."""
        return (state.alignment, state.history, state.warnings)

    def lines(self, state: ViewState, width: int, height: int) -> list[Content]:
        """Two columns on a wide screen, one page of three on a narrow one, metrics alone where nothing was recorded."""
        measured = state.alignment.measured
        if measured is None:
            return [rule(width, "alignment"), line((fit(f" {READING}", width), ".muted"))]
        if measured.numbers is None or measured.ratios is None:
            return _without_tokens(state, measured, width, height)
        if width >= WIDE:
            return _two_columns(state, measured, measured.numbers, width, height)
        return _one_page(state, measured, measured.numbers, width, height)


def _two_columns(
    state: ViewState, measured: Measured, numbers: AlignmentNumbers, width: int, height: int
) -> list[Content]:
    view = state.alignment
    assert measured.ratios is not None
    left_width = (width - GAP) // 2
    right_width = width - GAP - left_width
    head = _window_line(view, measured, width)
    height -= 1
    series_rows = 9 if height >= 40 else 0
    first = (height - series_rows) // 2
    left = [
        *differences_chart(numbers, view.settings, left_width, first),
        *ratios_chart(numbers, measured.ratios, view.settings, left_width, height - series_rows - first),
        *(series_lines(state.history, left_width, series_rows) if series_rows else []),
    ]
    told = verdict_lines(measured.findings, right_width, max(5, height // 3))
    rest = height - len(told)
    position_rows = min(12, max(7, rest // 3))
    version_rows = min(2 + max(1, len(numbers.by_age)), max(4, rest // 4))
    right = [
        *told,
        *token_lines(numbers.worst, view.first_token, right_width, rest - position_rows - version_rows),
        *position_chart(numbers, right_width, position_rows),
        *version_lines(numbers, right_width, version_rows),
    ]
    return [head, *side_by_side(left, right, left_width, GAP)]


def _one_page(
    state: ViewState, measured: Measured, numbers: AlignmentNumbers, width: int, height: int
) -> list[Content]:
    view = state.alignment
    assert measured.ratios is not None
    head = _window_line(view, measured, width)
    told = verdict_lines(measured.findings, width, max(4, min(7, height // 3)))
    turn = Content("   ").join([_page_name(page, is_here=page is view.page) for page in Page])
    turn = (Content(" tab: ") + turn).stylize_before(".muted").truncate(width, ellipsis=True)
    rest = height - len(told) - 2
    match view.page:
        case Page.CHARTS:
            half = (width - GAP) // 2
            page = side_by_side(
                differences_chart(numbers, view.settings, half, rest),
                ratios_chart(numbers, measured.ratios, view.settings, width - GAP - half, rest),
                half,
                GAP,
            )
        case Page.TOKENS:
            page = token_lines(numbers.worst, view.first_token, width, rest)
        case Page.PLACES:
            version_rows = min(2 + max(1, len(numbers.by_age)), max(4, rest // 2))
            page = [
                *position_chart(numbers, width, rest - version_rows),
                *version_lines(numbers, width, version_rows),
            ]
    return [head, *told, turn, *page]


def _without_tokens(state: ViewState, measured: Measured, width: int, height: int) -> list[Content]:
    words = (
        f"No token data: {measured.why_none}. Histogram, worst tokens and a sure verdict appear with the first "
        "recorded group. Below is what the metrics show."
    )
    rows = [
        rule(width, "alignment"),
        *(line((f" {text}", ".muted")) for text in textwrap.wrap(words, max(10, width - 2), break_on_hyphens=False)),
    ]
    for warning in state.warnings:
        if warning.id in ALIGNMENT_WARNINGS:
            rows += _wrapped(f"{SEVERITY_GLYPHS[warning.severity]} {warning.text}", width, ".warning")
            rows += _wrapped(f"→ {warning.hint}", width, "") if warning.hint else []
    rows.append(Content(""))
    return [*rows, *series_lines(state.history, width, max(3, height - len(rows)))][:height]


def _page_name(page: Page, *, is_here: bool) -> Content:
    """A click goes there."""
    name = Content(f"[{page}]" if is_here else str(page))
    return name.stylize(Style.from_meta({"@click": f"screen.turn_page({str(page)!r})"}))


def _window_line(view: AlignmentView, measured: Measured, width: int) -> Content:
    """Which steps these are, and of how many tokens: the title of everything below it."""
    numbers = measured.numbers
    assert numbers is not None
    first, last = numbers.first_step, numbers.last_step
    steps = f"step {last:,}" if first == last else f"steps {first:,}–{last:,}"
    steps += f" of {measured.newest_step:,}"
    groups = count_text(numbers.num_groups, "group")
    if numbers.num_groups < measured.num_groups_known:
        groups = f"{numbers.num_groups:,} of {measured.num_groups_known:,} groups"
    told = f"{steps} · {groups} · {numbers.all.num:,} tokens"
    if numbers.num_untrained:
        told += f" · {count_text(numbers.num_untrained, 'completion')} not trained on"
    if numbers.num_without:
        told += f" · {numbers.num_without:,} tokens without a log-prob"
    newest = "" if view.until_step is None else " · end: newest"
    return rule(width, told, f"h: {view.window}{newest}")


def verdict_lines(findings: Sequence[Finding], width: int, height: int) -> list[Content]:
    """Each cause with how sure it is, its evidence and what to change; as many as have room, the surest first."""
    rows = [rule(width, "verdict")]
    for number, finding in enumerate(findings):
        sign = HEALTHY_SIGN if finding.severity == "ok" else SEVERITY_GLYPHS[finding.severity]
        sure = f" {sign} {finding.certainty}: "
        cause, *rest = textwrap.wrap(sure + (finding.cause or ""), max(10, width - 1), subsequent_indent="   ")
        style = SEVERITY_STYLES["info" if finding.severity == "ok" else finding.severity]
        told = [
            line((sure, ".muted"), (cause[len(sure) :], style)).truncate(width, ellipsis=True),
            *(line((row, style)) for row in rest),
            *_wrapped(finding.text, width, ".muted"),
            *(_wrapped(f"→ {finding.hint}", width, "") if finding.hint else []),
        ]
        if number and len(rows) + len(told) > height:
            left = len(findings) - number
            rows.append(
                line((f"   and {count_text(left, 'other possible cause')}: {_names(findings[number:])}", ".muted"))
            )
            rows[-1] = rows[-1].truncate(width, ellipsis=True)
            break
        rows += told
    return rows


def _names(findings: Sequence[Finding]) -> str:
    return ", ".join(finding.cause for finding in findings if finding.cause)


def token_lines(worst: Sequence[WorstToken], first: int, width: int, height: int) -> list[Content]:
    """The tokens that differ most, each in its text: what both sides gave it, and where it stands."""
    room = max(1, height - 2)
    first = min(first, max(0, len(worst) - room))
    shown = worst[first : first + room]
    note = f"{first + 1}–{first + len(shown)} of {len(worst)}, ↑ ↓" if len(worst) > room else f"{len(worst)}"
    is_wide = width >= 76
    head = f" {'diff':>6}  {'infer→train':<13}  {'step':>5} {'token':>9} "
    head += f"{'age':>3} {'same':>5}  " if is_wide else " "
    text_width = width - len(head)
    rows = [rule(width, "worst tokens", note), line((fit(f"{head}context", width), ".muted"))]
    for token in shown:
        figures = f" {token.difference:>+6.2f}  {_chances(token):<13}  {token.step:>5} {_place(token):>9} "
        age, alike = "–" if token.age is None else str(token.age), f"×{token.num}" if token.num > 1 else ""
        figures += f"{age:>3} {alike:>5}  " if is_wide else " "
        row = line((figures, "" if abs(token.difference) < 1 else ".strong"), *_context(token, text_width))
        rows.append(row.truncate(width, ellipsis=True))
    return rows[:height]


def _chances(token: WorstToken) -> str:
    return f"{_chance(token.inference)}→{_chance(token.training)}"


def _chance(logprob: float) -> str:
    """A log-probability as a share: `97%`, `4.2%`, `0.42%`, `0.004%`, `2e-05%`."""
    percent = 100 * math.exp(min(0.0, logprob))
    if percent >= 9.95:
        return f"{percent:.0f}%"
    if percent >= 0.995:
        return f"{percent:.1f}%"
    if percent >= 0.0995:
        return f"{percent:.2f}%"
    return f"{percent:.3f}%" if percent >= 0.00095 else f"{percent:.0e}%"


def _place(token: WorstToken) -> str:
    return f"{token.position + 1}/{token.length}"


def _context(token: WorstToken, width: int) -> list[Styled]:
    """The token in brackets, always in the same column, with what stands around it."""
    before, text, after = visible(token.before), visible(token.text), visible(token.after)
    left = max(4, width * 2 // 5)
    mark = f"[{text}]"
    mark = fit(mark, min(cell_len(mark), max(3, width - left)))
    right = max(0, width - left - cell_len(mark))
    return [(_last_cells(before, left), ".muted"), (mark, ".accent"), (fit(after, right), ".muted")]


def visible(text: str) -> str:
    """One line of text: line ends and tabs as people write them, other control characters as a dot."""
    written = text.replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r")
    return "".join(letter if letter.isprintable() else "·" for letter in written)


def _last_cells(text: str, width: int) -> str:
    """The end of a text in exactly so many cells."""
    if cell_len(text) <= width:
        return " " * (width - cell_len(text)) + text
    while text and cell_len(text) > width - 1:
        text = text[1:]
    return fit("…" + text, width, right=True)


def _wrapped(text: str, width: int, style: str) -> list[Content]:
    hanging = "  " if text.startswith("→ ") else ""
    folded = textwrap.wrap(text, max(10, width - 4), break_on_hyphens=False, subsequent_indent=hanging)
    return [line((f"   {row}", style)) for row in folded]
