"""`grpo-tui compare`: what runs come to, and in which settings they differ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from string import ascii_uppercase
from typing import Annotated, Any

import typer

from grpo_engine.errors import GrpoError, PeerError
from grpo_tui.cli.arguments import JsonOption
from grpo_tui.cli.printing import table, write_bytes, write_file, write_line
from grpo_tui.client.local import Run, find_run, look_at, stored_status
from grpo_tui.run_files.metrics import all_steps
from grpo_tui.run_files.resolved import read_resolved
from grpo_tui.view.comparison import Aligned, ComparedRun, Comparison, SameStep, compare
from grpo_tui.view.format import UNKNOWN, shortened, span_text
from grpo_tui.view.metrics.names import our_name, printed
from grpo_tui.view.metrics.summary import REWARD, WINDOW, Score, Summary, score_text

FORMATS = ("html", "svg")
MAX_RUNS_OF_A_PAGE = 200
MAX_VALUE_CHARS = 40
"""Of a setting in the table; --json has it in full."""


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command("compare")(compare_command)


def compare_command(
    runs: Annotated[
        list[str] | None, typer.Argument(metavar="RUN", help="Two or more run ids, their beginnings or last parts.")
    ] = None,
    metric: Annotated[
        list[str] | None, typer.Option("--metric", metavar="NAME", help="Also step by step, repeatable.")
    ] = None,
    as_json: JsonOption = False,
    sweep: Annotated[str | None, typer.Option("--sweep", metavar="NAME", help="All runs of a sweep.")] = None,
    format_: Annotated[
        str | None,
        typer.Option("--format", metavar="html|svg", help="One file to send around, with curves over each other."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Where to write that; default: stdout.")
    ] = None,
) -> None:
    """Put runs beside each other.

    Reward and evaluations at the end, at their best, and at the same step, and the settings in which they differ.
    Runs may have different numbers of steps, and may be live. With --format runs that differ only in their seeds are
    one curve, their mean with its standard error.
    """
    if format_ not in (None, *FORMATS):
        raise typer.BadParameter(f"--format {format_}: {' or '.join(FORMATS)}")
    if format_ is not None and as_json:
        raise typer.BadParameter(f"--format {format_} writes a file: remove --json")
    if output is not None and format_ is None:
        raise typer.BadParameter("--output takes what --format writes: add --format html or svg")
    found = [find_run(prefix, also_ended=True) for prefix in runs or []]
    if sweep is not None:
        found += [run for run in _runs_of_sweep(sweep) if run.id not in {each.id for each in found}]
    most = MAX_RUNS_OF_A_PAGE if format_ is not None else len(ascii_uppercase)
    if not 2 <= len({run.id for run in found}) == len(found) <= most:
        raise typer.BadParameter(f"give 2 to {most} different runs, as `grpo-tui ps` lists them")
    compared = [_compared(run) for run in found]
    if format_ is not None:
        _write_page(compared, metric or [], format_, output)
        return
    comparison = compare(compared, metric or [])
    for name in metric or []:
        if not any(each.name in (name, our_name(name)) for each in comparison.aligned):
            write_line(f"--metric {name}: not every run has measured it", to_stderr=True)
    if as_json:
        write_line(json.dumps(_document(compared, comparison), indent=1))
        return
    write_line("\n\n".join(table(rows) for rows in _tables(compared, comparison) if len(rows) > 1))
    write_line(
        f"\n± is the standard error over prompts; rewards are means over {WINDOW} steps; (n) is the step",
        to_stderr=True,
    )


def _runs_of_sweep(name: str) -> list[Run]:
    """The runs of all points that were started."""
    from grpo_tui.sweeps.folder import find_sweep, runs_of

    return [look_at(run.folder) for run in runs_of(find_sweep(name)) if run.folder is not None]


def _write_page(runs: Sequence[ComparedRun], metrics: Sequence[str], format_: str, output: Path | None) -> None:
    from grpo_tui.view.comparison_page import to_html, to_svg

    for name in metrics:
        if not any(name in line.metrics for run in runs for line in run.lines):
            write_line(f"--metric {name}: no run has measured it", to_stderr=True)
    content = (to_html if format_ == "html" else to_svg)(runs, metrics).encode()
    if output is None:
        write_bytes(content)
        return
    try:
        write_file(output, content)
    except OSError as error:
        raise GrpoError(f"{output} cannot be written: {error.strerror or error}") from None
    write_line(f"{len(runs)} runs are compared in {output}", to_stderr=True)


def _compared(run: Run) -> ComparedRun:
    try:
        status = stored_status(run)
        profile, state = status.profile, str(status.state)
    except PeerError:
        profile, state = "", "unknown"
    try:
        resolved = read_resolved(run.folder)
    except ValueError as error:
        write_line(f"{run.id}: {error}; settings are not compared", to_stderr=True)
        resolved = {}
    return ComparedRun(run=run.id, profile=profile, state=state, lines=all_steps(run.folder), resolved=resolved)


def _tables(runs: Sequence[ComparedRun], comparison: Comparison) -> list[list[tuple[str, ...]]]:
    letters = ascii_uppercase[: len(runs)]
    return [
        [("", "RUN", "PROFILE", "STATE", "STEPS"), *(_run_row(*pair) for pair in zip(letters, runs, strict=True))],
        [("SCORE", "", *letters), *_score_rows(comparison)],
        [("SAME STEP", "", *letters, *(f"{each} - A" for each in letters[1:])), *map(_same_row, comparison.same_step)],
        *([(f"{each.name.upper()}, STEPS", *letters), *_span_rows(each)] for each in comparison.aligned),
        [("SETTING", *letters), *((key, *map(_value, found)) for key, found in comparison.settings.items())],
    ]


def _run_row(letter: str, run: ComparedRun) -> tuple[str, ...]:
    last = run.last_step
    return letter, run.run, run.profile or UNKNOWN, run.state, UNKNOWN if last is None else str(last)


def _score_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name, found in {REWARD: comparison.rewards, **comparison.evaluations}.items():
        if any(found):
            rows.append((name, "final", *(_at_step(each.final if each else None) for each in found)))
            rows.append(("", "best", *(_at_step(each.best if each else None) for each in found)))
    return rows


def _same_row(found: SameStep) -> tuple[str, ...]:
    differences = (("+" if each.value >= 0 else "") + score_text(each) for each in found.differences)
    return found.name, f"({found.step})", *map(score_text, found.scores), *differences


def _span_rows(aligned: Aligned) -> list[tuple[str, ...]]:
    return [
        (
            span_text(first, last),
            *(UNKNOWN if mean is None else printed(aligned.name, mean) for mean in means),
        )
        for (first, last), means in zip(aligned.spans, aligned.means, strict=True)
    ]


def _at_step(score: Score | None) -> str:
    return UNKNOWN if score is None else f"{score_text(score)} ({score.step})"


def _value(value: Any) -> str:
    return UNKNOWN if value is None else shortened(json.dumps(value, ensure_ascii=False), MAX_VALUE_CHARS)


def _document(runs: Sequence[ComparedRun], comparison: Comparison) -> dict[str, Any]:
    return {
        "runs": [
            {
                "run": run.run,
                "profile": run.profile,
                "state": run.state,
                "steps": run.last_step,
                "reward": _summary(comparison.rewards[place]),
                "evaluations": {
                    name: _summary(found[place]) for name, found in comparison.evaluations.items() if found[place]
                },
            }
            for place, run in enumerate(runs)
        ],
        "reward_window": WINDOW,
        "same_step": [asdict(each) for each in comparison.same_step],
        "aligned": [asdict(each) for each in comparison.aligned],
        "settings": comparison.settings,
    }


def _summary(summary: Summary | None) -> dict[str, Any] | None:
    return None if summary is None else asdict(summary)
