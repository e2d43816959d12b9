"""The rows of each panel of the main screen, from the size of the terminal. Pure.

Narrow: panels are stacked, the log below. Wide: the log is on the right. The log always keeps some rows; what does not
fit scrolls (services) or is left to its own page (warnings).
"""

from __future__ import annotations

from dataclasses import dataclass

WIDE_COLUMNS = 150
"""Width from which the log is beside the other panels."""
LEFT_SHARE = 0.56
TWO_COLUMN_METRICS = 70
"""Width from which metrics are in two columns if rows are scarce."""
NUM_FRAME_ROWS = 3
"""Header, activity line, keys."""
MIN_LOG_ROWS = 4
MIN_GPU_ROWS = 3
"""One bar of several, how many more there are, and the legend."""
ROOMY_ROWS = 32
"""Height from which empty rows separate the panels."""
NUM_GAPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Rows that each part could fill."""

    num_services: int
    start_rows: int = 0
    """What a starting run waits for."""
    gpu_rows: int
    phase_rows: int = 0
    """Above the metrics: phases of a trainer that takes turns, or policy versions in flight."""
    num_primary_metrics: int
    num_metrics: int
    warning_rows: int
    """With hints and wrapped; one row a warning will do."""
    num_warnings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Rows that each part gets, titles included."""

    is_wide: bool
    left_columns: int
    tabs_rows: int
    services_rows: int
    start_rows: int
    gpu_rows: int
    metrics_rows: int
    metrics_columns: int
    warning_rows: int
    gap: int
    """Empty rows above GPUs, metrics and warnings."""


def arrange(width: int, height: int, wanted: Wanted) -> Layout:
    """Divide `height` rows of `width` columns among the panels."""
    is_wide = width >= WIDE_COLUMNS
    left = left_columns(width)
    metrics_columns = 2 if left >= TWO_COLUMN_METRICS and not is_wide else 1
    for_log = 0 if is_wide else max(MIN_LOG_ROWS, height // 4 - _rows_lent(wanted)) + 1
    gap = 1 if height >= ROOMY_ROWS else 0
    tabs = 1 if height >= ROOMY_ROWS else 0
    rows = max(0, height - NUM_FRAME_ROWS - tabs - for_log - NUM_GAPS * gap)

    services = min(wanted.num_services + 1, max(3, rows // 2))
    rows -= services
    start = min(wanted.start_rows, max(0, rows - 2))
    rows -= start
    gpu = min(wanted.gpu_rows, max(MIN_GPU_ROWS if rows >= 2 * MIN_GPU_ROWS else 0, rows // 3))
    rows -= gpu
    warnings = min(max(1, wanted.num_warnings), max(1, rows // 3))
    rows -= warnings

    primary = 1 + wanted.phase_rows + -(-wanted.num_primary_metrics // metrics_columns)
    everything = 1 + wanted.phase_rows + -(-wanted.num_metrics // metrics_columns)
    metrics = max(0, min(primary, rows))
    rows -= metrics
    further = max(0, min(wanted.num_services + 1 - services, rows))
    services += further
    rows -= further
    if rows > 0 and warnings < wanted.warning_rows:
        more = min(wanted.warning_rows - warnings, rows if is_wide else rows // 2)
        warnings += more
        rows -= more
    metrics += max(0, min(everything - metrics, rows))
    return Layout(
        is_wide=is_wide,
        left_columns=left,
        tabs_rows=tabs,
        services_rows=services,
        start_rows=start,
        gpu_rows=gpu,
        metrics_rows=metrics,
        metrics_columns=metrics_columns,
        warning_rows=warnings,
        gap=gap,
    )


def left_columns(width: int) -> int:
    """Columns of all panels but the log."""
    return int(width * LEFT_SHARE) if width >= WIDE_COLUMNS else width


def _rows_lent(wanted: Wanted) -> int:
    """Rows that the log gives to further warnings."""
    return min(2, max(0, wanted.num_warnings - 1))
