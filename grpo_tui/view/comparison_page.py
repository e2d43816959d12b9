"""A comparison of runs as one file to send around: HTML, or a picture in SVG. Pure.

Curves over each other, of runs that differ in their seeds alone the mean with its standard error; what they come to,
the best first; the settings in which they differ. Nothing in it is fetched from elsewhere or executed, and all text of
the runs is escaped. Where things are on the machine of the runs, and secrets, are left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from statistics import fmean
from typing import Any

from grpo_engine.wire.terminal_text import printable
from grpo_tui.view.board.seeds import Group, MarkedRun, curve_over, groups_of, metrics_of, scores_of
from grpo_tui.view.comparison import ComparedRun
from grpo_tui.view.format import UNKNOWN, shortened
from grpo_tui.view.metrics.curves import Curve, Scale, own_scale, tick_texts, ticks, x_range, x_ticks
from grpo_tui.view.metrics.history import MetricHistory, extended
from grpo_tui.view.metrics.names import is_evaluation, meaning_of, measured_as
from grpo_tui.view.metrics.state import XAxis
from grpo_tui.view.metrics.summary import REWARD, WINDOW, evaluated_names, names_of, score_text
from grpo_tui.view.settings import without_folder

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8c6d31", "#56b4e9", "#e69f00", "#444444")
"""Of Okabe and Ito: told apart without red or green, too."""
DASHES = ("", "7 3", "2 3")
"""Of the curves after those, in turn."""
MAX_LABEL_CHARS, MAX_VALUE_CHARS = 60, 80
WIDTH, HEIGHT = 960.0, 320.0
LEFT, RIGHT, TOP, BOTTOM = 64.0, 16.0, 34.0, 40.0
"""Margins of a chart, in pixels."""
ROW_HEIGHT, CHAR_WIDTH = 21.0, 7.9
"""Of a line of text at 13 pixels, in a font of one width."""
MAX_TICKS_X, MAX_TICKS_Y = 10, 6
MAX_DRAWN = 600
"""Points of a curve; of more, evenly chosen ones."""
SVG_STYLE = """\
text { font: 12px system-ui, sans-serif; fill: #333 } .head { font-size: 15px; font-weight: 600; fill: #111 }
.cell { font: 13px ui-monospace, monospace; white-space: pre } .title { font-size: 20px; font-weight: 600; fill: #111 }
.grid { stroke: #e3e3e3 } .axis { stroke: #888 } .line { fill: none; stroke-width: 2; stroke-linejoin: round }"""
HTML_STYLE = """\
:root { color-scheme: light } body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff;
  max-width: 1000px; margin: 2rem auto; padding: 0 1rem } h1 { font-size: 1.5rem }
h2 { font-size: 1.1rem; margin-top: 2rem }
svg { width: 100%; height: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
div { overflow-x: auto } th, td { text-align: left; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid #ddd;
  vertical-align: top; white-space: nowrap } th { font-weight: 600 }
.swatch { width: 34px } .swatch svg { width: 30px; height: 12px }
p, small { color: #555 } td.runs { color: #555; font-size: .85em; white-space: normal; overflow-wrap: anywhere }"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
NOTES = (
    f"Rewards are means over {WINDOW} steps. Runs with the same settings and different seeds are one line, their mean;",
    "± and the shaded band are its standard error over them. Of a single run, ± is over the prompts of its evaluation.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """A group of runs as it is drawn."""

    group: Group
    label: str
    colour: str
    dash: str

    @property
    def stroke(self) -> str:
        return f'stroke="{self.colour}"' + (f' stroke-dasharray="{self.dash}"' if self.dash else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Page:
    title: str
    lines: Sequence[_Line]
    metrics: Sequence[str]
    """Each has a chart."""
    figures: list[tuple[str, ...]]
    """A row for each line, below a head."""
    settings: list[tuple[str, ...]]


def to_html(runs: Sequence[ComparedRun], metrics: Sequence[str] = ()) -> str:
    """A page with everything in it.

    Args:
        metrics: that have a chart besides the reward and the evaluation, by the runs' names.
    """
    page = _page(runs, metrics)
    head, *rows = page.figures
    parts = [f"<h1>{safe(page.title)}</h1>"]
    if page.lines:
        cells = [
            f'<tr><td class="swatch"><svg viewBox="0 0 30 12"><line x1="0" y1="6" x2="30" y2="6" stroke-width="3" '
            f"{line.stroke}/></svg></td>{_cells(row)}</tr>"
            for line, row in zip(page.lines, rows, strict=True)
        ]
        parts.append(f'<div><table><tr><th class="swatch"></th>{_cells(head, "th")}</tr>{"".join(cells)}</table></div>')
        parts.append(f"<p><small>{safe(' '.join(NOTES))}</small></p>")
    parts += [svg(_chart(page, name), WIDTH, HEIGHT) for name in page.metrics]
    if len(page.settings) > 1:
        body = "".join(f"<tr>{_cells(row)}</tr>" for row in page.settings[1:])
        parts.append("<h2>Settings in which they differ</h2>")
        parts.append(f"<div><table><tr>{_cells(page.settings[0], 'th')}</tr>{body}</table></div>")
    parts.append("<h2>Runs</h2><div><table>")
    for line in page.lines:
        names = ", ".join(run.name for run in line.group.runs)
        parts.append(f'<tr><td>{safe(line.label)}</td><td class="runs">{safe(names)}</td></tr>')
    parts.append("</table></div>")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{safe(page.title)}</title><style>{HTML_STYLE}</style></head><body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def to_svg(runs: Sequence[ComparedRun], metrics: Sequence[str] = ()) -> str:
    """A picture with the same content, as far as a picture has it."""
    page = _page(runs, metrics)
    y, parts = 44.0, [f'<text class="title" x="{LEFT}" y="30">{safe(page.title)}</text>']
    figures, width, y = _text_table(page.figures, y, page.lines)
    parts.append(figures)
    for note in NOTES:
        y += 17
        parts.append(f'<text x="{LEFT}" y="{y:.0f}">{safe(note)}</text>')
    y += 24
    for name in page.metrics:
        parts.append(f'<g transform="translate(0 {y:.0f})">{_chart(page, name)}</g>')
        y += HEIGHT
    if len(page.settings) > 1:
        parts.append(f'<text class="head" x="{LEFT}" y="{y + 24:.0f}">settings in which they differ</text>')
        settings, settings_width, y = _text_table(page.settings, y + 28, ())
        parts.append(settings)
        width = max(width, settings_width)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + svg("\n".join(parts), max(WIDTH, width), y + 20) + "\n"


# --- content ---------------------------------------------------------------------------------------------------------


def _page(runs: Sequence[ComparedRun], metrics: Sequence[str]) -> _Page:
    marked = [_marked(run) for run in runs]
    measured = metrics_of(marked)
    scores = evaluated_names(measured)[:1]
    groups = sorted(groups_of(marked), key=lambda group: _rank(group, [*scores, REWARD][0]))
    wanted = [REWARD, *scores, *metrics]
    labels = _labels(groups)
    lines = [
        _Line(
            group=group,
            label=label,
            colour=COLOURS[place % len(COLOURS)],
            dash=DASHES[place // len(COLOURS) % len(DASHES)],
        )
        for place, (group, label) in enumerate(zip(groups, labels, strict=True))
    ]
    shown = [name for name in (REWARD, *scores) if name in measured]
    head = ("", "runs", "steps", *(f"{name}, {when}" for name in shown for when in ("end", "best")))
    return _Page(
        title=" · ".join(dict.fromkeys(run.profile for run in runs if run.profile)) + f" · {len(runs)} runs",
        lines=lines,
        metrics=list(dict.fromkeys(name for name in wanted if name in measured)),
        figures=[head, *(_figures(line, shown, runs) for line in lines)],
        settings=_settings(lines),
    )


def _rank(group: Group, name: str) -> float:
    """Where a group stands among the others: the best first, then those that have not measured it."""
    final, _ = scores_of(group, name)
    return float("inf") if final is None else -final.value


def _marked(run: ComparedRun) -> MarkedRun:
    """A run whose reward is the mean over the last steps, as in all tables."""
    name = measured_as(REWARD, names_of(run.lines))
    lines, recent = [], list[float]()
    for line in run.lines:
        metrics: Mapping[str, float] = line.metrics
        if name is not None and name in metrics:
            recent = [*recent[1 - WINDOW :], metrics[name]]
            metrics = {**metrics, name: fmean(recent)}
        lines.append(line.model_copy(update={"metrics": metrics}))
    return MarkedRun(name=run.run, history=extended(MetricHistory(), lines), resolved=run.resolved)


def _labels(groups: Sequence[Group]) -> list[str]:
    """The settings of each group, or the name of its run where those do not tell it from the others."""
    labels = [
        " ".join(
            f"{key.rpartition('.')[2]}={_value(value)}" for key, value in group.settings.items() if value is not None
        )
        for group in groups
    ]
    return [
        shortened(label if label and labels.count(label) == 1 and len(label) <= MAX_LABEL_CHARS else group.runs[0].name,
                  MAX_LABEL_CHARS)
        for group, label in zip(groups, labels, strict=True)
    ]  # fmt: skip


def _figures(line: _Line, names: Sequence[str], runs: Sequence[ComparedRun]) -> tuple[str, ...]:
    members = [run for run in runs if run.run in {each.name for each in line.group.runs}]
    steps = sorted({run.last_step for run in members if run.last_step is not None})
    of_steps = UNKNOWN if not steps else f"{steps[0]:,}" if len(steps) == 1 else f"{steps[0]:,} – {steps[-1]:,}"
    scores = [score_text(score) for name in names for score in _scores(line.group, name, members)]
    return (line.label, str(len(members)), of_steps, *scores)


def _scores(group: Group, name: str, members: Sequence[ComparedRun]) -> tuple[Any, Any]:
    """Of the runs as they are, not of their means over steps."""
    plain = [
        MarkedRun(name=run.run, history=extended(MetricHistory(), run.lines), resolved=run.resolved) for run in members
    ]
    return scores_of(Group(runs=tuple(plain), settings=group.settings), name)


def _settings(lines: Sequence[_Line]) -> list[tuple[str, ...]]:
    keys = dict.fromkeys(key for line in lines for key in line.group.settings)
    rows = [(key, *(_value(line.group.settings.get(key)) for line in lines)) for key in keys]
    return [("setting", *(line.label for line in lines)), *rows]


def _value(value: Any) -> str:
    if value is None:
        return UNKNOWN
    text = without_folder(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return shortened(text, MAX_VALUE_CHARS)


# --- drawing ---------------------------------------------------------------------------------------------------------


def _chart(page: _Page, name: str) -> str:
    """The curves of one metric, with axes, as elements of SVG."""
    curves = [_of_group(line.group, name, place) for place, line in enumerate(page.lines, 1)]
    window = x_range(curves) or (0.0, 1.0)
    if window[0] == window[1]:
        window = window[0] - 1, window[1] + 1
    scale = own_scale(curves, window, is_log=False)
    parts = [f'<text class="head" x="{LEFT}" y="20">{safe(name)}</text>']
    about = f"mean over {WINDOW} steps" if name == REWARD else "" if is_evaluation(name) else meaning_of(name)
    if about:
        parts.append(f'<text x="{WIDTH - RIGHT}" y="20" text-anchor="end">{safe(about)}</text>')
    values = ticks(scale, MAX_TICKS_Y)
    for value, text in zip(values, tick_texts(values, is_log=False), strict=True):
        y = _y(value, scale)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    floor = HEIGHT - BOTTOM
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{floor}" y2="{floor}"/>')
    for place, text in x_ticks(window, XAxis.STEP, MAX_TICKS_X):
        parts.append(f'<text x="{_x(place, window):.1f}" y="{floor + 18}" text-anchor="middle">{text}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{floor + 34}" text-anchor="end">step</text>')
    drawn = [(line, _thinned(curve)) for line, curve in zip(page.lines, curves, strict=True)]
    parts += [_band(line, curve, window, scale) for line, curve in drawn if not curve.is_sparse]
    parts += [_curve(line, curve, window, scale) for line, curve in drawn]
    return "\n".join(filter(None, parts))


def _of_group(group: Group, name: str, number: int) -> Curve:
    """The curve of a group; of a single run the evaluation has its own errors, over prompts."""
    curve = curve_over(group, name, number, XAxis.STEP)
    if curve.errors or not is_evaluation(name):
        return curve
    measured = {line.step: line.metrics.get(f"{name}_se") for run in group.runs for line in run.history.lines}
    errors = [measured.get(point.step) for point in curve.points]
    known = tuple(error for error in errors if error is not None)
    return replace(curve, errors=known) if len(known) == len(errors) else curve


def _thinned(curve: Curve) -> Curve:
    """At most `MAX_DRAWN` measured points, evenly; the last one stays."""
    places = [place for place, point in enumerate(curve.points) if point.y is not None]
    stride = -(-len(places) // MAX_DRAWN) or 1
    kept = places[::-1][::stride][::-1]
    errors = tuple(curve.errors[place] for place in kept) if curve.errors else ()
    return replace(curve, points=tuple(curve.points[place] for place in kept), errors=errors)


def _band(line: _Line, curve: Curve, window: tuple[float, float], scale: Scale) -> str:
    edge = [*curve.edge(1), *reversed(curve.edge(-1))]
    if len(edge) < 4:
        return ""
    points = " ".join(f"{_x(x, window):.1f},{_y(y, scale):.1f}" for x, y in edge)
    return f'<polygon points="{points}" fill="{line.colour}" fill-opacity="0.16"/>'


def _curve(line: _Line, curve: Curve, window: tuple[float, float], scale: Scale) -> str:
    places = [(_x(x, window), _y(y, scale)) for x, y in curve.measured]
    if not places:
        return ""
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    parts = [f'<polyline class="line" points="{points}" {line.stroke}/>']
    if curve.is_sparse or len(places) == 1:
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{line.colour}"/>' for x, y in places]
    if curve.is_sparse:
        for (x, high), (_, low) in zip(curve.edge(1), curve.edge(-1), strict=True):
            at, top, bottom = _x(x, window), _y(high, scale), _y(low, scale)
            parts.append(
                f'<path d="M{at - 3:.1f} {top:.1f}h6m-3 0V{bottom:.1f}m-3 0h6" fill="none" stroke="{line.colour}"/>'
            )
    return "".join(parts)


def _x(x: float, window: tuple[float, float]) -> float:
    return LEFT + (x - window[0]) / (window[1] - window[0]) * (WIDTH - LEFT - RIGHT)


def _y(y: float, scale: Scale) -> float:
    return HEIGHT - BOTTOM - (scale.place(y) or 0.0) * (HEIGHT - TOP - BOTTOM)


# --- text ------------------------------------------------------------------------------------------------------------


def safe(text: str) -> str:
    """Text of a run as text of a page: without control characters, which XML forbids, and escaped."""
    return escape(printable(text), quote=True)


def _cells(row: Sequence[str], tag: str = "td") -> str:
    return "".join(f"<{tag}>{safe(cell)}</{tag}>" for cell in row)


def _text_table(rows: Sequence[Sequence[str]], y: float, lines: Sequence[_Line]) -> tuple[str, float, float]:
    """Rows of text in columns, the sample of a line before each row after the head; with its right and lower end."""
    parts: list[str] = []
    widths = [max(len(printable(row[column])) for row in rows) + 2 for column in range(len(rows[0]))]
    for number, row in enumerate(rows):
        y += ROW_HEIGHT
        x = LEFT
        if lines and number:
            parts.append(
                f'<line x1="{LEFT - 42}" x2="{LEFT - 10}" y1="{y - 4:.0f}" y2="{y - 4:.0f}" stroke-width="3" '
                f"{lines[number - 1].stroke}/>"
            )
        for cell, width in zip(row, widths, strict=True):
            weight = "" if number else ' font-weight="600"'
            parts.append(f'<text class="cell" x="{x:.0f}" y="{y:.0f}"{weight}>{safe(cell)}</text>')
            x += width * CHAR_WIDTH
    return "\n".join(parts), LEFT + sum(widths) * CHAR_WIDTH + RIGHT, y + 8


def svg(content: str, width: float, height: float) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}"><style>{SVG_STYLE}</style>\n'
        f'<rect width="100%" height="100%" fill="#fff"/>\n{content}\n</svg>'
    )
