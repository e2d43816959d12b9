"""`grpo-tui metrics`: the metrics of a run from its file, as a table, in full, or as data for other programs."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from grpo_engine.errors import ConfigError
from grpo_engine.wire.metrics import MetricsLine
from grpo_engine.wire.run_folder import METRICS_FILE
from grpo_tui.cli.arguments import (
    JsonOption,
    PolicyOption,
    RunArgument,
    folder_of_policy,
    note_unsupervised,
    run_to_read,
)
from grpo_tui.cli.follow import FollowOption, grown, tail
from grpo_tui.cli.printing import one_line, write_bytes, write_line
from grpo_tui.client.api import look_at
from grpo_tui.run_files.metrics import all_steps, read_line

COLUMNS = (
    "reward/mean",
    "eval",
    "grpo/entropy",
    "alignment/diff_abs_mean",
    "grpo/clipped_fraction",
    "train/grad_norm",
    "rollout/length_mean",
    "train/tokens_per_second",
    "grpo/mean_ratio",
    "rollout/truncated_fraction",
    "rollout/staleness_mean",
    "train/loss",
    "train/lr",
)
"""What a terminal shows of each step, the most important first; `eval` stands for the main score."""
STEP_CHARS = 7
VALUE_CHARS = 8

FORMATS = ("csv", "json", "parquet")


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command("metrics")(metrics_command)


def metrics_command(
    run: RunArgument = None,
    follow: FollowOption = False,
    as_json: JsonOption = False,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="NAME", help="Only metrics with this prefix, repeatable."),
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="Every value of each step, on a terminal too.")] = False,
    format_: Annotated[
        str | None,
        typer.Option("--format", metavar="csv|json|parquet", help="The whole run for other programs, one row a step."),
    ] = None,
    policy: PolicyOption = None,
) -> None:
    """Show the metrics of every step.

    On a terminal a line a step, with as many columns as fit; elsewhere, and with --all or --only, every value with its
    name. --json prints the lines of metrics.jsonl unchanged.
    """
    starts = tuple(only or ("",))
    if only and as_json:
        raise typer.BadParameter("--json prints lines unchanged: remove --only")
    if format_ not in (None, *FORMATS):
        raise typer.BadParameter(f"--format {format_}: {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    if format_ is not None and (as_json or follow):
        raise typer.BadParameter(
            f"--format {format_} prints a whole table: remove {'--json' if as_json else '--follow'}; --json follows"
        )
    found = run_to_read(run)
    note_unsupervised(found)
    folder = folder_of_policy(found, policy)
    if format_ is not None:
        _print_data(folder, format_, starts)
        return
    path = folder / METRICS_FILE
    last = tail(path, sys.maxsize, lambda line: True, with_unfinished=not follow)
    shows_table = sys.stdout.isatty() and not (as_json or all_ or only)
    table = StepTable(shutil.get_terminal_size().columns) if shows_table else None
    if table is not None:
        table.expect(step for raw in last.lines if (step := read_line(raw)) is not None)
    num_shown = sum(_put(line, as_json, starts, table) for line in last.lines)
    sys.stdout.flush()
    if follow:
        for line in grown(path, last, lambda: look_at(found.folder).is_live):
            _put(line, as_json, starts, table)
            sys.stdout.flush()
    elif last.lines and not num_shown:
        write_line(f"no metric of {found.id} starts with {' or '.join(starts)}", to_stderr=True)
    elif not last.lines:
        write_line(f"{found.id} has no metrics yet", to_stderr=True)
    if table is not None and table.num_hidden:
        write_line(f"{table.num_hidden} more metrics: --all, or --only NAME", to_stderr=True)


class StepTable:
    """Lines of a table that grows: its columns are those of the metrics seen until now that fit."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._names: set[str] = set()
        self._shown: tuple[str, ...] = ()
        self.num_hidden = 0
        """Metrics without a column."""

    def expect(self, lines: Iterable[MetricsLine]) -> None:
        """Make columns for what these lines measure."""
        from grpo_tui.view.metrics.summary import names_of

        self._names |= names_of(lines)

    def lines_of(self, step: MetricsLine) -> list[str]:
        """The line of a step, after a head where columns are new."""
        from grpo_tui.view.metrics.names import value_text

        self.expect([step])
        columns = self._columns()
        head = [] if columns == self._shown else [self._line("step", {name: name for name in columns}, columns)]
        self._shown = columns
        values = {name: value_text(name, step.metrics[name]) for name in columns if name in step.metrics}
        return [*head, self._line(str(step.step), values, columns)]

    def _columns(self) -> tuple[str, ...]:
        from grpo_tui.view.metrics.names import in_groups, measured_as
        from grpo_tui.view.metrics.summary import evaluated_names

        scores = evaluated_names(self._names)[:1]
        known = [name for ours in COLUMNS for name in (scores if ours == "eval" else [measured_as(ours, self._names)])]
        wanted = [name for name in known if name is not None] or in_groups(self._names)
        left = self._width - STEP_CHARS
        fitting: list[str] = []
        for name in wanted:
            left -= 2 + max(len(name), VALUE_CHARS)
            if left < 0:
                break
            fitting.append(name)
        self.num_hidden = sum(not name.endswith("_se") for name in self._names) - len(fitting)
        return tuple(fitting)

    @staticmethod
    def _line(step: str, cells: dict[str, str], columns: tuple[str, ...]) -> str:
        padded = (one_line(cells.get(name, "")).rjust(max(len(name), VALUE_CHARS)) for name in columns)
        return "  ".join([step.rjust(STEP_CHARS), *padded]).rstrip()


def _put(raw: bytes, as_json: bool, starts: tuple[str, ...], table: StepTable | None) -> bool:
    """Print the metrics of a step with these prefixes; returns whether there were any."""
    if as_json:
        write_line(raw.decode(errors="replace").rstrip("\n"))
        return True
    from grpo_tui.view.metrics.names import printed

    line = read_line(raw)
    if line is None:
        write_line(f"not a valid line of metrics.jsonl: {raw[:120]!r}", to_stderr=True)
        return False
    if table is not None:
        for text in table.lines_of(line):
            write_line(text)
        return True
    shown = {name: value for name, value in line.metrics.items() if name.startswith(starts)}
    if shown:
        write_line(
            f"step {line.step}  "
            + "  ".join(f"{one_line(name)} {printed(name, value)}" for name, value in shown.items())
        )
    return bool(shown)


# --- data for other programs -----------------------------------------------------------------------------------------


def _print_data(folder: Path, format_: str, starts: tuple[str, ...]) -> None:
    """Print a row for each step: `step`, `time`, `policy_version`, and a column for each metric of the run.

    Raises:
        ConfigError: Parquet, and stdout is a terminal or pyarrow is not installed.
    """
    from grpo_tui.view.csv_text import csv_rows
    from grpo_tui.view.metrics.names import in_groups
    from grpo_tui.view.metrics.summary import names_of

    steps = all_steps(folder)
    names = in_groups(name for name in names_of(steps) if name.startswith(starts))
    columns = ["step", "time", "policy_version", *names]
    rows = ({name: _cell(line, name) for name in columns} for line in steps)  # not all at once: a row has every name
    match format_:
        case "csv":
            for row in csv_rows(columns, rows):
                write_line(row.removesuffix("\n"))
        case "json":
            _print_json(rows)
        case _:
            _print_parquet(columns, steps)


def _cell(line: MetricsLine, column: str) -> float | None:
    match column:
        case "step" | "time" | "policy_version":
            value: float = getattr(line, column)
            return value
        case _:
            return line.metrics.get(column)


def _print_json(rows: Iterable[dict[str, float | None]]) -> None:
    import json

    before = None
    for row in rows:
        text = json.dumps(row)
        if before is not None:
            write_line(f"{before},")
        before = f"[{text}" if before is None else f" {text}"
    write_line("[]" if before is None else f"{before}]")


def _print_parquet(columns: list[str], steps: list[MetricsLine]) -> None:
    if sys.stdout.isatty():
        raise ConfigError("--format parquet is not text: write it to a file, as in `… --format parquet > run.parquet`")
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(
            "--format parquet needs pyarrow, which is not installed: pip install 'grpo-tui[data]', or use --format csv"
        ) from None
    whole = {"step", "policy_version"}
    table = {
        name: pyarrow.array(
            [_cell(line, name) for line in steps], type=pyarrow.int64() if name in whole else pyarrow.float64()
        )
        for name in columns
    }
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table(table), sink)
    write_bytes(sink.getvalue().to_pybytes())
