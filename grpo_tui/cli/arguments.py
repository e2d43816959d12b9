"""Arguments that several commands share: `[RUN]`, `[RUN] SERVICE`, and how a run is found from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from grpo_tui.cli.printing import write_line

if TYPE_CHECKING:
    from grpo_tui.client.local import Run

RunArgument = Annotated[
    str | None, typer.Argument(metavar="[RUN]", help="Run id or unique prefix; default: the newest live run here.")
]
RunAndService = Annotated[
    list[str],
    typer.Argument(metavar="[RUN] SERVICE", help="The service, optionally after a run id or unique prefix."),
]
TakePortsOption = Annotated[
    bool,
    typer.Option(
        "--take-ports", help="End processes of your own that hold a declared port, also if no run started them."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]

ReadOnlyOption = Annotated[bool, typer.Option("--read-only", help="Watch only: keys that change the run are refused.")]
ThemeOption = Annotated[
    str | None,
    typer.Option("--theme", metavar="NAME", help="Colours: dark, light, ansi or one of Textual's; default: the last."),
]


def split(words: list[str]) -> tuple[str | None, str]:
    """`SERVICE` or `RUN SERVICE`."""
    if len(words) > 2:
        raise typer.BadParameter(f"expected [RUN] SERVICE, not {' '.join(words)}")
    return (None, words[0]) if len(words) == 1 else (words[0], words[1])


def run_to_read(prefix: str | None) -> Run:
    """The run to read from: without a prefix the newest live one, else the newest, with a note on stderr."""
    from grpo_tui.client.local import find_run

    run = find_run(prefix, also_ended=True)
    if prefix is None and not run.is_live:
        write_line(f"no live run here; showing {run.id}, which has ended", to_stderr=True)
    return run


def run_to_act_on(prefix: str | None) -> Run:
    """The live run to act on: without a prefix the newest, with a note on stderr if there are others."""
    from grpo_tui.client.local import find_run, runs

    live = [run for run in runs() if run.is_live] if prefix is None else []
    if not live:
        return find_run(prefix, also_ended=False)
    newest, *others = live
    if others:
        also = ", ".join(run.id for run in others)
        write_line(f"using {newest.id}, the newest live run; others: {also}", to_stderr=True)
    return newest
