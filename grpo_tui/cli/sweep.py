"""`grpo-tui sweep`: runs of one profile with different settings, some at a time, and a table of what they came to."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from grpo_tui.cli.arguments import JsonOption, require_option
from grpo_tui.cli.overrides import own_overrides
from grpo_tui.cli.printing import indented, one_line, table, write_line
from grpo_tui.exit_codes import ExitCode

SweepArgument = Annotated[
    str | None, typer.Argument(metavar="[NAME]", help="Name or unique prefix of a sweep; default: the newest.")
]
DetachOption = Annotated[
    bool, typer.Option("--detach", "-d", help="Go on in the background; sweep.log has what it prints.")
]
JobsOption = Annotated[int | None, typer.Option("--jobs", "-j", min=1, help="Runs at a time; default: 1.")]


class SweepGroup(TyperGroup):
    """Says of a word that is no command what shows sweeps."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the arguments begin with."""
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            from grpo_engine.config import did_you_mean
            from grpo_tui.sweeps.folder import names

            require_option(ctx, "sweep", args)
            ctx.fail(
                f"No such command {args[0]!r}{did_you_mean(args[0], self.commands)}. `grpo-tui` alone lists all sweeps "
                f"and runs, `grpo-tui sweep status NAME` shows one; sweeps here: {', '.join(names()) or 'none'}"
            )
        return super().resolve_command(ctx, args)


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    sweep = typer.Typer(cls=SweepGroup, invoke_without_command=True, rich_markup_mode=None)
    sweep.callback()(sweep_command)
    sweep.command("resume")(resume_command)
    sweep.command("status")(status_command)
    sweep.command("stop")(stop_command)
    app.add_typer(sweep, name="sweep")


def sweep_command(
    ctx: typer.Context,
    profile: Annotated[
        str | None, typer.Option("--profile", "-p", help="Name in ./profiles or installed, or a TOML file.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", "--multirun", metavar="KEY=VALUE,VALUE…", help="The values of a setting, repeatable."),
    ] = None,
    jobs: JobsOption = None,
    random: Annotated[
        int | None, typer.Option("--random", min=1, help="So many combinations at random instead of all.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option("--seeds", min=1, help="Runs of each combination, with seeds from 0.")
    ] = None,
    optuna: Annotated[
        int | None,
        typer.Option(
            "--optuna", min=1, help="So many combinations, chosen by Optuna from the values and ranges of --set."
        ),
    ] = None,
    sampler: Annotated[
        str | None, typer.Option("--sampler", metavar="tpe|random", help="How Optuna chooses; default: tpe.")
    ] = None,
    halving: Annotated[
        str | None,
        typer.Option(
            metavar="eta=N,min_steps=N",
            help="End hopeless points early (ASHA): at min_steps, min_steps·eta, … the best 1/eta go on.",
        ),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(metavar="N,N…", help="GPUs that the runs divide; without --jobs as many runs as they hold."),
    ] = None,
    from_: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="A TOML file as sweep.toml; options come on top.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Of its folder; default: the profile and the time.")
    ] = None,
    detach: DetachOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run a profile with every combination of settings. Each is an ordinary run.

    `--set services.trainer.lr=1e-4,1e-5 --set services.trainer.loss=grpo,dapo` makes four runs; commas in brackets and
    quotes are part of a value. A wrong setting is refused before anything starts; a run that fails is kept with its
    reason, and the others go on. The table is in logs/sweeps/NAME/ (results.csv, points.csv, results.json), and on
    stdout at the end. Ctrl-C ends the live runs; `sweep resume NAME` goes on, also after a crash or a reboot. With
    --detach it goes on when the terminal is closed.
    """
    if ctx.invoked_subcommand is not None:
        given = (
            *(profile, set_, jobs, random, seeds, optuna, sampler, halving, gpus),
            *(from_, name, detach, as_json),
        )
        if any(option not in (None, False, []) for option in given):
            raise typer.BadParameter(f"options come after the command: sweep {ctx.invoked_subcommand} …")
        return
    from grpo_tui.sweeps.folder import begin

    options = {
        **{"jobs": jobs, "random": random, "seeds": seeds, "optuna": optuna, "sampler": sampler},
        "gpus": None if gpus is None else _numbers("--gpus", gpus),
    }
    asked = _asked(profile, own_overrides(profile, set_ or []), from_, **options, halving=_table("--halving", halving))
    sweep = begin(asked, name)
    if detach:
        _detach(sweep, as_json=as_json)
    _run(sweep, as_json=as_json)


def resume_command(
    name: SweepArgument = None,
    jobs: JobsOption = None,
    failed: Annotated[bool, typer.Option("--failed", help="Start points that failed again, too.")] = False,
    detach: DetachOption = False,
    as_json: JsonOption = False,
) -> None:
    """Go on with a sweep that was stopped, killed or switched off.

    Live runs are kept, ended ones go on from their last checkpoint and journal, and the rest is started.
    """
    from dataclasses import replace

    from grpo_tui.sweeps.folder import find_sweep

    sweep = find_sweep(name, to_run=True)
    if detach:
        options = [*([] if jobs is None else [f"--jobs={jobs}"]), *(["--failed"] if failed else [])]
        _detach(sweep, options, as_json=as_json)
    if jobs is not None:
        sweep = replace(sweep, asked=sweep.asked.model_copy(update={"jobs": jobs}))
    _run(sweep, as_json=as_json, retries_failed=failed)


def status_command(name: SweepArgument = None, as_json: JsonOption = False) -> None:
    """Show the table of a sweep as it is now."""
    from grpo_tui.sweeps.folder import ENDED_STATES, find_sweep, holder, runs_of
    from grpo_tui.sweeps.table import document, result_of

    sweep = find_sweep(name)
    points = [result_of(run) for run in runs_of(sweep)]
    pid = holder(sweep)
    is_complete = pid is None and all(each.state in ENDED_STATES for each in points)
    if as_json:
        write_line(json.dumps({**document(sweep, points), "pid": pid, "is_complete": is_complete}, indent=1))
        return
    _print_points(points)
    running = f"is running (pid {pid})"
    if is_complete:
        running = "is complete"
    elif pid is None:
        running = f"is not running; `grpo-tui sweep resume {sweep.name}` goes on with it"
    write_line(f"\nsweep {sweep.name} {running}; its files are in {sweep.folder}", to_stderr=True)


def stop_command(name: SweepArgument = None) -> None:
    """End a sweep and its live runs. `sweep resume` goes on with it."""
    from grpo_tui.sweeps.files import ask_to_stop
    from grpo_tui.sweeps.folder import ENDED_STATES, find_sweep, holder, holding, live_folders, runs_of
    from grpo_tui.sweeps.runner import POLL_S, end_runs

    sweep = find_sweep(name, to_run=True)
    while (pid := ask_to_stop(sweep.folder)) is not None:
        while holder(sweep) == pid:
            time.sleep(POLL_S)
    with holding(sweep):
        end_runs(live_folders(find_sweep(sweep.name, sweep.logs)))  # it may have more points by now
    if all(run.state in ENDED_STATES for run in runs_of(find_sweep(sweep.name, sweep.logs))):
        ended = "was complete; nothing of it is left to stop"
    else:
        ended = f"is stopped; `grpo-tui sweep resume {sweep.name}` goes on with it"
    write_line(f"sweep {sweep.name} {ended}", to_stderr=True)


def _table(option: str, text: str | None) -> dict[str, Any] | None:
    """The table in `eta=3,min_steps=20`."""
    from grpo_engine.config import toml_value
    from grpo_engine.errors import ConfigError

    if text is None:
        return None
    table = toml_value(f"{{ {text} }}")
    if not isinstance(table, dict):
        raise ConfigError(f"{option} {text}: expected KEY=VALUE,KEY=VALUE, as in eta=3,min_steps=20")
    return table


def _numbers(option: str, text: str) -> list[int]:
    """The numbers in `0,1,2`."""
    from grpo_engine.errors import ConfigError

    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdecimal() for word in words):
        raise ConfigError(f"{option} {text}: expected numbers with commas between them, as in 0,1,2,3")
    return [int(word) for word in words]


def _asked(profile: str | None, sets: Sequence[str], file: Path | None, **options: Any) -> Any:
    """What options and a file ask for together."""
    from grpo_engine.config import validated
    from grpo_engine.errors import ConfigError
    from grpo_tui.run_files.resolved import flat
    from grpo_tui.sweeps.asked import Asked, read_asked
    from grpo_tui.sweeps.grid import values_of

    given = dict(map(values_of, sets))
    if len(given) < len(sets):
        raise ConfigError("--set: one setting is given twice; write its values with commas between them")
    settings: dict[str, Any] = {}
    if file is not None:
        before = read_asked(file)
        stated = before.model_fields_set
        options = {
            name: getattr(before, name) if value is None and name in stated else value
            for name, value in options.items()
        }
        settings = dict(flat(before.settings))
        profile = profile or before.profile
    if profile is None:
        raise typer.BadParameter("give --profile NAME, or --from FILE with a profile in it")
    known = {name: value for name, value in options.items() if value is not None}
    return validated(Asked, {"profile": profile, "settings": {**settings, **given}, **known}, where="")


def _detach(sweep: Any, options: Sequence[str] = (), *, as_json: bool) -> NoReturn:
    """Go on with a sweep in the background, and exit."""
    from grpo_tui.sweeps.detached import start_detached
    from grpo_tui.sweeps.folder import SWEEP_LOG

    pid = start_detached(sweep, options)
    if as_json:
        write_line(json.dumps({"sweep": sweep.name, "folder": str(sweep.folder), "pid": pid}, indent=1))
    log = sweep.folder / SWEEP_LOG
    write_line(
        f"sweep {sweep.name} goes on in the background (pid {pid}) and prints into {log}; `grpo-tui sweep status "
        f"{sweep.name}` shows its table, `grpo-tui sweep stop {sweep.name}` ends it",
        to_stderr=True,
    )
    raise typer.Exit(ExitCode.OK)


def _run(sweep: Any, *, as_json: bool, retries_failed: bool = False) -> NoReturn:
    """Run a sweep to its end, print its table, and exit."""
    import signal

    from grpo_engine.errors import GrpoError
    from grpo_tui.sweeps.folder import find_sweep, holding, live_folders
    from grpo_tui.sweeps.runner import Sweeper, end_runs
    from grpo_tui.sweeps.table import document
    from grpo_tui.view.format import count_text

    def interrupt(number: int, _: object) -> NoReturn:
        raise SystemExit(ExitCode.INTERRUPTED)

    began = time.monotonic()

    def say(text: str) -> None:
        write_line(f"{time.monotonic() - began:6.1f} s  {indented(text)}", to_stderr=True, flush=True)

    signal.signal(signal.SIGTERM, interrupt)
    with holding(sweep):
        num_points = count_text(sweep.num_points, "point")
        say(f"sweep {sweep.name}: {num_points}, {sweep.asked.jobs} at a time; files in {sweep.folder}")
        try:
            points = Sweeper(sweep, say, retries_failed=retries_failed).run()
        except OSError as error:
            why = f"{error.strerror or error}; live runs go on, and so does `grpo-tui sweep resume {sweep.name}`"
            raise GrpoError(f"{error.filename or sweep.folder}: {why}") from error
        except SystemExit:
            live = live_folders(find_sweep(sweep.name, sweep.logs))
            say(f"interrupted; ending {len(live)} live runs")
            end_runs(live)
            say(f"`grpo-tui sweep resume {sweep.name}` goes on with it")
            raise
    if as_json:
        write_line(json.dumps(document(sweep, points), indent=1))
    else:
        _print_settings(points)
    num_failed = sum(each.state == "failed" for each in points)
    if num_failed:
        say(f"{num_failed} of {len(points)} points failed; `grpo-tui sweep resume {sweep.name} --failed` tries again")
    raise typer.Exit(ExitCode.FAILED if num_failed else ExitCode.OK)


# --- tables --------------------------------------------------------------------------------------------------------


def _print_settings(points: Sequence[Any]) -> None:
    """A row for each combination, the best one first."""
    from grpo_tui.sweeps.grid import shown_setting
    from grpo_tui.sweeps.results import by_settings
    from grpo_tui.view.format import UNKNOWN

    rows = by_settings(points)
    keys = list(dict.fromkeys(key for row in rows for key in row.settings))
    evaluation = next((row.evaluation for row in rows if row.evaluation), None)
    head = [*map(_short, keys), "RUNS", *([evaluation, "BEST"] if evaluation else []), "REWARD", "BEST"]
    lines = [(*head, "TOKENS", "TIME", "WARNINGS")]
    for row in rows:
        scores = [_with_error(row.score, row.score_error), _with_error(row.best_score)] if evaluation else []
        lines.append(
            (
                *(shown_setting(key, row.settings[key]) for key in keys),
                f"{row.num_finished}/{row.num_runs}",
                *scores,
                _with_error(row.reward, row.reward_error),
                _with_error(row.best_reward),
                UNKNOWN if row.tokens is None else f"{row.tokens:,}",
                _hours(row.hours),
                str(len(row.warnings)),
            )
        )
    write_line(table(lines))
    for row in rows:
        if row.reason is not None:
            label = " ".join(f"{_short(key)}={shown_setting(key, value)}" for key, value in row.settings.items())
            write_line(one_line(f"{label}: {row.reason}"), to_stderr=True)
    over = next((row.error_over for row in rows if row.error_over), None)
    if over is not None:
        write_line(f"\n± is the standard error over {over}", to_stderr=True)


def _print_points(points: Sequence[Any]) -> None:
    """A row for each point, in order."""
    from grpo_tui.sweeps.grid import shown_setting
    from grpo_tui.view.format import UNKNOWN

    keys = list(dict.fromkeys(key for row in points for key in row.settings))
    has_seeds = any(row.seed is not None for row in points)
    head = ("POINT", *map(_short, keys), *(["SEED"] if has_seeds else []), "STATE", "STEP", "REWARD", "SCORE", "TIME")
    lines: list[tuple[str, ...]] = [(*head, "RUN")]
    for row in points:
        lines.append(
            (
                str(row.point),
                *(shown_setting(key, row.settings[key]) for key in keys),
                *([str(row.seed)] if has_seeds else []),
                row.state,
                UNKNOWN if row.steps is None else str(row.steps),
                _with_error(row.reward),
                _with_error(row.score, row.score_error),
                _hours(row.hours),
                row.run or UNKNOWN,
            )
        )
    write_line(table(lines))
    for row in points:
        if row.reason is not None:
            write_line(f"point {row.point}: {row.state}: {indented(row.reason)}", to_stderr=True)


def _short(key: str) -> str:
    return key.removeprefix("services.")


def _with_error(value: float | None, error: float | None = None) -> str:
    from grpo_tui.view.metrics.summary import Score, score_text

    return score_text(None if value is None else Score(step=0, value=value, error=error))


def _hours(hours: float | None) -> str:
    from grpo_tui.view.format import duration_text

    return duration_text(None if hours is None else hours * 3600)
