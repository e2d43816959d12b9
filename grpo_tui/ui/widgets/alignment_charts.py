"""The charts of the alignment screen: differences, ratios with the clip, by position, by version, and over training."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right

from textual.content import Content

from grpo_engine.diagnosis.evidence import LIMIT, RunSettings
from grpo_engine.diagnosis.token_differences import AlignmentNumbers, Part
from grpo_tui.ui.glyphs import SPARK_BARS
from grpo_tui.ui.widgets.charts import (
    AXIS_WIDTH,
    axis_lines,
    bar,
    columns_chart,
    count_labels,
    edges_between,
    log_share,
    place_of,
    short_count,
    styles_of,
)
from grpo_tui.ui.widgets.lines import Styled, fit, line, rule
from grpo_tui.ui.widgets.main.metrics_panel import band_text, judge
from grpo_tui.view.alignment.ratios import Ratios, counts_between, round_up
from grpo_tui.view.format import number_text
from grpo_tui.view.metrics.history import MetricHistory, bar_heights, bucketed

SHOWN_SHARE = 0.995
"""Of the values, those that the scale of a histogram reaches; the rest stands in its outermost columns."""
QUANTILES = (("median", 0.5), ("90%", 0.9), ("99%", 0.99), ("max", 1.0))
NARROW = 50
FEW = 5
"""Places with fewer tokens are left out: their mean is noise and would stretch the scale."""
SERIES = (
    "alignment/diff_abs_mean", "alignment/diff_mean", "alignment/diff_max", "grpo/mean_ratio",
    "grpo/clipped_fraction", "rollout/staleness_mean", "logprobs/training_mean", "logprobs/inference_mean",
)  # fmt: skip
"""Alignment metrics, the most important first."""


def differences_chart(numbers: AlignmentNumbers, settings: RunSettings, width: int, height: int) -> list[Content]:
    """How many tokens differ by how much; those whose ratio is outside the clip look as they do there."""
    title = "trainer − inference" if width < NARROW else "log-prob difference: trainer − inference"
    rising = numbers.differences
    reach = round_up(max(numbers.quantile(SHOWN_SHARE), 1e-7))
    num_columns = _odd(width - AXIS_WIDTH)
    edges = edges_between(-reach, reach, num_columns)
    beyond = bisect_left(rising, -reach) + len(rising) - bisect_right(rising, reach)
    counts = counts_between(rising, edges)
    counts[0] += bisect_left(rising, -reach)
    counts[-1] += len(rising) - bisect_right(rising, reach)
    styles = styles_of(edges, lambda value: ".spark" if _is_inside(value, settings) else ".warning")
    middle = num_columns // 2
    marks = {middle: ".faint"} | _clip_marks(settings, reach, num_columns)
    ticks = {0: f"{-reach:g}", middle // 2: f"{-reach / 2:g}", middle: "0"}
    ticks |= {num_columns - 1 - middle // 2: f"{reach / 2:g}", num_columns - 1: f"{reach:g}"}
    most = max(counts)
    shares = [log_share(count, most) for count in counts]
    plot_rows = max(1, height - 5)
    sizes = QUANTILES if width >= NARROW else QUANTILES[1:3]
    told = "  ".join(f"{name} {number_text(numbers.quantile(share))}" for name, share in sizes)
    size_name = "abs mean" if width >= NARROW else "abs"
    mean = f"mean {_signed(numbers.all.mean)}  {size_name} {number_text(numbers.all.abs_mean)}"
    mean += f"  {short_count(beyond)} beyond" if beyond else ""
    mean += "  (│ the clip)" if len(marks) > 1 and width >= NARROW else ""
    return [
        rule(width, title, "tokens (log scale)" if width >= NARROW + 10 else "tokens"),
        *columns_chart(shares, styles, plot_rows, count_labels(most, plot_rows), marks=marks),
        *axis_lines(num_columns, ticks),
        line((fit(f" {mean}", width), ".muted")),
        line((fit(f" abs: {told}", width), ".muted")),
    ]


def ratios_chart(
    numbers: AlignmentNumbers, measured: Ratios, settings: RunSettings, width: int, height: int
) -> list[Content]:
    """How many ratios lie where, and the edges of the clip."""
    of = "completions" if settings.clips_sequences else "tokens"
    rising = numbers.sequence_differences if settings.clips_sequences else numbers.differences
    far = max(abs(math.expm1(rising[0])), abs(math.expm1(rising[-1])) if rising[-1] < 1 else 1.0)
    edge = max(1 - measured.low_edge, measured.high_edge - 1)
    reach = min(1.0, max(round_up(2 * edge), min(round_up(far), 1.0)))
    num_columns = _odd(width - AXIS_WIDTH)
    ends = edges_between(1 - reach, 1 + reach, num_columns)
    # Ratios rise with differences, so that columns of ratios are columns of differences with other ends.
    counts = counts_between(rising, [math.log(end) if end > 0 else -math.inf for end in ends])
    counts[0] += bisect_left(rising, math.log(ends[0])) if ends[0] > 0 else 0
    beyond = len(rising) - bisect_right(rising, math.log(ends[-1]))
    counts[-1] += beyond
    low = place_of(measured.low_edge, ends[0], ends[-1], num_columns)
    high = place_of(measured.high_edge, ends[0], ends[-1], num_columns)
    inside = range(low + 1, high) if high > low + 1 else range(low, high + 1)
    styles = [".spark" if place in inside else ".warning" for place in range(num_columns)]
    most = max(counts)
    plot_rows = max(1, height - 5)
    ticks = {0: f"{ends[0]:g}", num_columns - 1: f"{ends[-1]:g}{' and more' if beyond and width >= NARROW else ''}"}
    ticks |= {num_columns // 2: "1", low: f"{measured.low_edge:g}", high: f"{measured.high_edge:g}"}
    below, above = _percent(measured.num_below, measured.num), _percent(measured.num_above, measured.num)
    outside = f" {100 * measured.share_outside:.1f}% outside: {below} below, {above} above"
    if len(outside) > width:
        outside = f" outside: {below} below, {above} above"
    clip = f"clip {measured.low_edge:g} – {measured.high_edge:g}{'' if settings.is_clip_known else ' (assumed)'}"
    return [
        rule(width, "ratio" if width < NARROW else "ratio = exp(difference), and the clip │", of),
        *columns_chart(
            [log_share(count, most) for count in counts],
            styles,
            plot_rows,
            count_labels(most, plot_rows),
            marks={low: ".accent", high: ".accent"},
        ),
        *axis_lines(num_columns, ticks),
        line((fit(f" mean {measured.mean:.4f}  {clip}", width), ".muted")),
        line((fit(outside, width),
              ".muted" if measured.share_outside < 0.3 else ".warning")),
    ]  # fmt: skip


def position_chart(numbers: AlignmentNumbers, width: int, height: int) -> list[Content]:
    """Mean magnitude of the differences along the completion, and at its first and last token."""
    parts = [at for at in numbers.by_position if at.part.num >= FEW] or numbers.by_position
    title = rule(width, "by position in the completion", "mean |difference|")
    edges = line((fit(f" first {_size(numbers.firsts)}  last {_size(numbers.ends)}  "
                      f"between {_size(numbers.inner)}", width), ".muted"))  # fmt: skip
    if not parts or height < 5:
        return [title, edges][:height]
    num_columns = width - AXIS_WIDTH
    each = max(1, min(10, num_columns // len(parts)))
    most = max(LIMIT, *(at.part.abs_mean for at in parts))
    shares = [at.part.abs_mean / most for at in parts for _ in range(each)]
    styles = [".spark" if at.part.abs_mean <= LIMIT else ".warning" for at in parts for _ in range(each)]
    plot_rows = height - 4
    ticks = {number * each: str(at.low) for number, at in enumerate(parts) if number % max(1, len(parts) // 8) == 0}
    return [
        title,
        *columns_chart(shares, styles, plot_rows, {0: f"{most:.3g}"}),
        *axis_lines(min(num_columns, len(parts) * each), ticks),
        edges,
    ]


def version_lines(numbers: AlignmentNumbers, width: int, height: int) -> list[Content]:
    """The differences by how many policy versions the sampling weights were behind."""
    title = rule(width, "by age of the sampling weights", "policy versions")
    if not numbers.by_age:
        return [title, line((fit(" unknown: inference does not report its policy version", width), ".muted"))][:height]
    room = max(1, height - 2)
    shown = numbers.by_age if len(numbers.by_age) <= room else numbers.by_age[: max(1, room - 1)]
    most = max(LIMIT, *(at.part.abs_mean for at in numbers.by_age))
    head = f" {'age':>5} {'tokens':>7} {'mean':>8} {'abs mean':>9} "
    rows = [title, line((fit(head.rstrip(), width), ".muted"))]
    for at in shown:
        style = ".spark" if at.part.abs_mean <= LIMIT else ".warning"
        sign = " " if at.part.abs_mean <= LIMIT else "▲"
        figures = f" {at.low:>5} {short_count(at.part.num):>7} {_signed(at.part.mean):>8} "
        figures += f"{number_text(at.part.abs_mean):>9}{sign} "
        rows.append(line(figures, (bar(at.part.abs_mean / most, min(30, width - len(figures))), style)))
    if len(shown) < len(numbers.by_age):
        rest = numbers.by_age[len(shown) :]
        num = sum(at.part.num for at in rest)
        size = sum(at.part.abs_mean * at.part.num for at in rest) / num
        rows.append(line((fit(f" {rest[0].low}–{rest[-1].high:<4} {short_count(num):>6} tokens still older, abs mean "
                              f"{number_text(size)}", width), ".muted")))  # fmt: skip
    return rows[:height]


def series_lines(history: MetricHistory, width: int, height: int) -> list[Content]:
    """The metrics of alignment over the run, each with its value, its verdict and its healthy band."""
    rows = [rule(width, "over the run", "from metrics.jsonl; healthy band on the right")]
    name_width, value_width, band_width = max(map(len, SERIES)) + 1, 8, 10
    for name in SERIES:
        series = history.series(name)
        if not series:
            continue
        band = history.bands.get(name)
        value = series[-1][1]
        verdict = judge(value, band)
        spark_width = max(0, width - name_width - value_width - band_width - 5)
        values = bucketed(series, spark_width)
        shown = [] if band is None else [band.low if band.low is not None else 0.0, band.high or 0.0]
        pieces: list[Styled] = []
        for one, level in zip(values, bar_heights(values, len(SPARK_BARS), shown=shown), strict=True):
            is_outside = band is not None and one is not None and not band.holds(one)
            pieces.append((" " if level is None else SPARK_BARS[level], ".warning" if is_outside else ".spark"))
        rows.append(
            line(
                (fit(name, name_width), ".muted"),
                (fit(number_text(value), value_width, right=True), verdict.style or ".strong"),
                (f" {verdict.sign} ", verdict.style),
                *pieces,
                " " * (spark_width - len(pieces) + 1),
                (band_text(band), ".muted"),
            )
        )
    if len(rows) == 1:
        rows.append(line((fit("  no alignment metric yet", width), ".muted")))
    return rows[:height]


def _clip_marks(settings: RunSettings, reach: float, num_columns: int) -> dict[int, str]:
    """The columns of a histogram from −reach to reach in which the clip of tokens has its edges."""
    if settings.clips_sequences:
        return {}
    low, high = 1 - settings.clip_low, math.log1p(settings.clip_high)
    edges = [math.log(low) if low > 0 else -math.inf, high]
    return {place_of(edge, -reach, reach, num_columns): ".accent" for edge in edges if abs(edge) < reach}


def _is_inside(difference: float, settings: RunSettings) -> bool:
    """Whether the ratio of a token lies in its clip; where completions are clipped, a token has none."""
    return (
        settings.clips_sequences or 1 - settings.clip_low <= math.exp(min(difference, 50.0)) <= 1 + settings.clip_high
    )


def _odd(width: int) -> int:
    """A number of columns with one in the middle, for 0 or for 1."""
    width = max(3, width)
    return width if width % 2 else width - 1


def _percent(num: int, of: int) -> str:
    return f"{100 * num / of:.1f}%" if of else "0%"


def _size(part: Part | None) -> str:
    return number_text(part.abs_mean) if part else "–"


def _signed(value: float) -> str:
    """With its sign, rounded: `+0.012`, `0`."""
    return f"{value:+.4f}" if abs(value) >= 5e-5 else "0"
