"""Training metrics: value, verdict against the healthy band, and a sparkline over the whole run.

The sparkline of a metric with a healthy band spans the band, on a coloured background; values outside are signs
(▲ above, ▼ below) in the colour of warnings.
"""

from __future__ import annotations

from dataclasses import dataclass

from textual import events
from textual.content import Content

from grpo_engine.wire.metrics import EVALUATION_PREFIX, Band, is_evaluated_score
from grpo_tui.ui.glyphs import SPARK_BARS
from grpo_tui.ui.messages import StateChanged
from grpo_tui.ui.widgets.lines import Lines, Styled, fit, line, rule
from grpo_tui.ui.widgets.main.phase_timeline import phase_lines, rows_wanted, ticks
from grpo_tui.view.format import duration_text
from grpo_tui.view.metrics.history import RECENT_LINES, MetricHistory, band_heights, bar_heights, bucketed
from grpo_tui.view.metrics.names import band_of, measured_as, unit_of, value_text
from grpo_tui.view.metrics.state import MetricSelected
from grpo_tui.view.state import ViewState
from grpo_tui.view.versions import version_words, versions_of

PRIMARY_METRICS = (
    "reward/mean", "grpo/mean_ratio", "grpo/clipped_fraction", "alignment/diff_mean", "alignment/diff_abs_mean",
    "train/loss", "train/grad_norm", "grpo/entropy", "train/tokens_per_second",
)  # fmt: skip
"""Always shown, in this order."""
OTHER_METRICS = (
    "reward/std", "reward/frac_zero_std", "grpo/kl", "grpo/ess", "alignment/diff_max", "rollout/length_mean",
    "rollout/truncated_fraction", "rollout/staleness_mean", "rollout/staleness_max", "train/lr", "train/step_time",
    "train/sync_time", "train/data_fetch_time", "train/gpu_memory_gb", "logprobs/training_mean",
    "logprobs/inference_mean",
)  # fmt: skip
"""Shown as far as there is room, where they are measured."""
SHORT_NAMES = {
    "reward/frac_zero_std": "frac_zero_std",
    "train/tokens_per_second": "tokens/s",
    "rollout/truncated_fraction": "truncated",
    "logprobs/training_mean": "training_logprob",
    "logprobs/inference_mean": "infer_logprob",
}
"""Names for narrow columns, where the last part of the name is too long or unclear."""
MAX_VERSION_ROWS = 2
"""A row for each rollout API: a run of more than two policies is rare."""
VALUE_WIDTH = 8
BAND_WIDTH = 10
GAP = 2
FULL_NAME_COLUMNS = 64
"""Width of a column from which names are written out and bands stand in numbers."""
LONGEST_NAME = max(len(name) for name in (*PRIMARY_METRICS, *OTHER_METRICS))
LONGEST_SHORT_NAME = 16
TOLD_SPARK_COLUMNS = 28
"""Sparkline width from which the band in numbers or the unit is shown too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How a value stands to its band."""

    sign: str
    style: str


class MetricsPanel(Lines):
    """One metric a cell, in one column or two."""

    DEFAULT_CSS = """
    MetricsPanel { padding: 0 1; }
    MetricsPanel > .band { color: $spark; background: $success 15%; }
    MetricsPanel:ansi > .band { background: ansi_default; }
    """
    COMPONENT_CLASSES = {"band"}

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.num_columns = 1
        self._names: list[str] = []
        """In the order of the cells, column by column."""
        self._first_row = 1

    def inputs(self, state: ViewState) -> tuple[object, ...]:
        """Rebuilt after each step, not each second, unless a phase that goes on counts its seconds."""
        versions = versions_of(state.status).values() if state.status is not None else ()
        reported = [*versions, *[None] * MAX_VERSION_ROWS][:MAX_VERSION_ROWS]
        return (state.history, self.num_columns, state.now if ticks(state) else None, *reported)

    def lines(self, state: ViewState, width: int, height: int) -> list[Content]:
        """A title with the newest step, phases or versions in flight, then metrics, the most telling first."""
        if not height:
            return []
        title = rule(width, "metrics", _pace(state))
        if state.history.last is None:
            return [title, line(("  no step yet: metrics appear after the trainer's first step", ".muted"))]
        phases = (phase_lines(state, width) or version_lines(state, width))[: max(0, height - 2)]  # a metric stays
        self._first_row = 1 + len(phases)
        names = self._names = shown_metrics(state)[: (height - self._first_row) * self.num_columns]
        cell_width = (width - GAP * (self.num_columns - 1)) // self.num_columns
        num_rows = -(-len(names) // self.num_columns)
        cells = [_cell(name, state.history, cell_width) for name in names]
        rows = [cells[row::num_rows] for row in range(num_rows)]
        return [title, *phases, *(_joined(row) for row in rows)]

    async def on_click(self, event: events.Click) -> None:
        """Open the metric under the pointer on the metrics screen."""
        place, num_rows = event.get_content_offset_capture(self), -(-len(self._names) // self.num_columns)
        column = place.x * self.num_columns // max(1, self.content_size.width)
        row = place.y - self._first_row
        number = column * num_rows + row
        if 0 <= row < num_rows and number < len(self._names):
            self.post_message(StateChanged(MetricSelected(name=self._names[number])))
            await self.run_action("app.show('metrics')")


def version_rows_wanted(state: ViewState) -> int:
    """A row for each rollout API that reports versions, where no phases stand there."""
    return 0 if rows_wanted(state) or state.status is None else min(len(versions_of(state.status)), MAX_VERSION_ROWS)


def version_lines(state: ViewState, width: int) -> list[Content]:
    """`versions  served 120  sampling 12 groups  queued 120: 4, 119: 16`."""
    versions = versions_of(state.status) if state.status is not None else {}
    lines = []
    for name, of_api in list(versions.items())[:MAX_VERSION_ROWS]:
        pieces: list[str | Styled] = [("versions  " if len(versions) == 1 else f"{name}  ", ".title")]
        for what, figures in version_words(of_api):
            pieces += [(f"{what} ", ".muted"), f"{figures}  "]
        lines.append(line(*pieces).truncate(width, ellipsis=True))
    return lines


def shown_metrics(state: ViewState) -> list[str]:
    """Names in the order of the panel: the primary ones always, evaluations and the others where measured.

    A metric under an alias of another trainer takes the place of ours.
    """
    history = state.history
    evaluated = next((line for line in reversed(history.lines) if "eval/time" in line.metrics), None)
    scores = [name for name in evaluated.metrics if is_evaluated_score(name)] if evaluated else []
    measured = {name for line in history.lines[-RECENT_LINES:] for name in line.metrics}
    primary = [measured_as(name, measured) or name for name in PRIMARY_METRICS]
    environments = sorted(name for name in measured if name.startswith("reward/") and name.count("/") == 2)
    others = [found for name in OTHER_METRICS if (found := measured_as(name, measured))]
    return list(dict.fromkeys([*primary, *scores, *environments, *others]))


def judge(value: float | None, band: Band | None) -> Verdict:
    """The sign and the style of a value in its band."""
    if value is None or band is None:
        return Verdict(sign=" ", style="")
    if band.holds(value):
        return Verdict(sign="✓", style=".ok")
    is_above = band.high is not None and value > band.high
    return Verdict(sign="▲" if is_above else "▼", style=".warning")


def band_text(band: Band | None) -> str:
    """`0.8 – 1.2`, `≤ 0.3`, `± 0.1`; nothing without a band."""
    if band is None:
        return ""
    if band.low is None or band.high is None:
        return f"≤ {band.high:g}" if band.low is None else f"≥ {band.low:g}"
    return f"± {band.high:g}" if band.low == -band.high else f"{band.low:g} – {band.high:g}"


def _cell(name: str, history: MetricHistory, width: int) -> Content:
    assert history.last is not None
    band = band_of(name, history.bands)
    series = history.series(name)
    # Between two evaluations the last one still holds.
    is_lasting = name.startswith(EVALUATION_PREFIX) and series
    value = series[-1][1] if is_lasting else history.last.metrics.get(name)
    verdict = judge(value, band)
    is_roomy = width >= FULL_NAME_COLUMNS
    name_width = LONGEST_NAME if is_roomy else LONGEST_SHORT_NAME
    shown_name = name if is_roomy else _short_name(name)
    pieces: list[str | Styled] = [
        (fit(shown_name, name_width), ".muted"),
        (" " + fit(value_text(name, value), VALUE_WIDTH, right=True), verdict.style or ".strong"),
        (f" {verdict.sign} ", verdict.style),
    ]
    spark_width = width - name_width - VALUE_WIDTH - 4
    if is_roomy or spark_width >= TOLD_SPARK_COLUMNS:
        unit = unit_of(name)
        pieces.append((fit(band_text(band) or (unit if unit != shown_name else ""), BAND_WIDTH), ".muted"))
        spark_width -= BAND_WIDTH
    pieces += _sparkline(series, spark_width, band)
    return line(*pieces).truncate(width, pad=True)


def _short_name(name: str) -> str:
    """`diff_mean` of `alignment/diff_mean`; a mean is named for what it is of: `reward/sort6`."""
    bare = name.removesuffix("/mean")
    if name in SHORT_NAMES or not name.startswith("reward/"):
        return SHORT_NAMES.get(name, bare.rpartition("/")[-1])
    return bare if name.count("/") == 2 else name


def _sparkline(series: list[tuple[int, float]], width: int, band: Band | None) -> list[Styled]:
    values = bucketed(series, width)
    top = len(SPARK_BARS)
    heights = bar_heights(values, top) if band is None else band_heights(values, band, top)
    pieces: list[Styled] = []
    for height in heights:
        if height is None:
            bar, style = " ", "" if band is None else ".band"
        elif 0 <= height < top:
            bar, style = SPARK_BARS[height], ".spark" if band is None else ".band"
        else:
            bar, style = "▲" if height >= top else "▼", ".warning"
        if pieces and pieces[-1][1] == style:
            pieces[-1] = (pieces[-1][0] + bar, style)
        else:
            pieces.append((bar, style))
    return pieces


def _joined(cells: list[Content]) -> Content:
    row = cells[0]
    for cell in cells[1:]:
        row = row + Content(" " * GAP) + cell
    return row


def _pace(state: ViewState) -> str:
    """How the newest step went: `policy version 12 · 2.3s a step`."""
    last = state.history.last
    if last is None:
        return ""
    parts = [f"step {last.step:,}", f"policy version {last.policy_version:,}"]
    if "train/step_time" in last.metrics:
        parts.append(f"{duration_text(last.metrics['train/step_time'])} a step")
    if state.num_bad_metric_lines:
        parts.append(f"{state.num_bad_metric_lines} unreadable lines")
    return " · ".join(parts)
