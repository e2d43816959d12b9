"""The numbers below a plot: what a cursor stands at, and what each curve comes to."""

from __future__ import annotations

import time
from collections.abc import Sequence

from textual.content import Content

from grpo_tui.ui.widgets.lines import Styled, fit, line
from grpo_tui.ui.widgets.metrics_panel import judge
from grpo_tui.ui.widgets.plot_drawing import curve_style, metric_text
from grpo_tui.view.curves import Curve
from grpo_tui.view.format import duration_text
from grpo_tui.view.metric_names import band_of, value_text
from grpo_tui.view.plot_view import PlotView

DASHES = "┄"
"""Before what is of another run."""
VALUE_WIDTH = 9
MIN_NAME_WIDTH = 18


def cursor_line(own: Sequence[Curve], plots: PlotView) -> Content:
    """`at step 120 · 04:15:33 · 4m48s since the first step · policy 118`."""
    assert plots.cursor is not None
    points = [point for curve in own for point in curve.points if point.y is not None]
    if not points:
        return line(("this run has not measured it", ".muted"))
    point = min(points, key=lambda each: abs(each.x - plots.cursor))  # type: ignore[operator]
    began = min(each.time for each in points)
    clock = time.strftime("%H:%M:%S", time.localtime(point.time))
    return line(
        ("▲ ", ".accent"),
        (f"step {point.step:,}", ".strong"),
        (f" · {clock} · {duration_text(point.time - began)} in · policy {point.policy_version:,}", ".muted"),
    )


def table(curves: Sequence[Curve], plots: PlotView, window: tuple[float, float], width: int) -> list[Content]:
    """One line a curve: its value at the cursor, and what it comes to within the window."""
    wanted = ["last", "least", "most", "mean"]
    if plots.cursor is not None:
        wanted.insert(0, "▲ cursor")
    names = wanted[: max(1, (width - MIN_NAME_WIDTH) // VALUE_WIDTH)]
    names = [name for name in ("▲ cursor", "last", "mean", "least", "most") if name in names]
    name_width = width - VALUE_WIDTH * len(names)
    where = "in sight" if plots.window is not None else "over the run"
    header = line((fit(f"  {where}", name_width), ".faint"),
                  *((fit(name, VALUE_WIDTH, right=True), ".muted") for name in names))  # fmt: skip
    rows = [header]
    for curve in sorted(curves, key=lambda each: (each.number, each.run is not None)):
        sums = curve.figures(window)
        at = None if plots.cursor is None else curve.at(plots.cursor)
        values: dict[str, float | None] = {"▲ cursor": at.y if at else None}
        if sums is not None:
            values |= {"last": sums.last, "mean": sums.mean, "least": sums.least, "most": sums.most}
        sign = str(curve.number) if curve.run is None else DASHES
        label = metric_text(curve.name) if curve.run is None else curve.run
        band = band_of(curve.name)
        cells: list[Styled] = []
        for name in names:
            value = values.get(name)
            verdict = judge(value, band) if name != "mean" else judge(None, None)
            cells.append(
                (
                    fit(value_text(curve.name, value), VALUE_WIDTH, right=True),
                    verdict.style if verdict.style == ".warning" else "",
                )
            )
        rows.append(line((f"{sign} ", curve_style(curve.number)), fit(label, name_width - 2), *cells))
    return rows
