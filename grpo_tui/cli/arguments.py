"""Arguments that several commands share: `[RUN]`, `[RUN] SERVICE`, and how a run is found from them."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from grpo_engine.errors import ConfigError
from grpo_tui.cli.printing import write_line

if TYPE_CHECKING:
    from grpo_tui.client.launch import Second
    from grpo_tui.client.local import Run

RunArgument = Annotated[
    str | None,
    typer.Argument(metavar="[RUN]", help="Run id, its beginning or last part; default: the newest live run here."),
]
RunAndService = Annotated[
    list[str] | None,
    typer.Argument(metavar="[RUN] SERVICE", help="The service, optionally after a run id, its beginning or last part."),
]
TakePortsOption = Annotated[
    bool,
    typer.Option(
        "--take-ports", help="End processes of your own that hold a declared port, also if no run started them."
    ),
]
NewOption = Annotated[
    bool, typer.Option("--new", help="Start another run beside live ones, with free ports in place of used ones.")
]
JoinOption = Annotated[bool, typer.Option("--join", help="Join the live run of the profile, whatever its settings.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override, repeatable.")]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]

ReadOnlyOption = Annotated[bool, typer.Option("--read-only", help="Watch only: keys that change the run are refused.")]
ThemeOption = Annotated[
    str | None,
    typer.Option("--theme", metavar="NAME", help="Colours: dark, light, ansi or one of Textual's; default: the last."),
]

FLAGS = frozenset({"--new", "--join", "--detach", "-d", "--json", "--scale-batch"})
"""Options without a value of commands that take a profile."""


def second_of(*, new: bool, join: bool) -> Second | None:
    """What `--new` and `--join` ask for."""
    if new and join:
        raise typer.BadParameter("--new and --join exclude each other")
    return "new" if new else "join" if join else None


def place_of_profile(words: list[str]) -> int | None:
    """Index of the word that names a profile, or a file of one, with no option before it that takes it."""
    from grpo_tui.paths import available_profiles

    profiles = available_profiles()
    for place, (before, word) in enumerate(zip(["", *words], words, strict=False)):
        is_value = before.startswith("-") and before not in FLAGS
        if not is_value and not word.startswith("-") and (word.endswith(".toml") or word in profiles):
            return place
    return None


def require_option(ctx: typer.Context, command: str, words: list[str]) -> None:
    """Refuse a profile without `--profile`, with the command to type."""
    place = None if {"--profile", "-p"} & set(words) else place_of_profile(words)
    if place is not None:
        meant = shlex.join(["grpo-tui", command, *words[:place], "--profile", *words[place:]])
        ctx.fail(f"A profile comes after --profile (did you mean `{meant}`?).")


def split(words: list[str] | None) -> tuple[str | None, str]:
    """`SERVICE` or `RUN SERVICE`."""
    if not words or len(words) > 2:
        raise typer.BadParameter(f"expected [RUN] SERVICE, not {' '.join(words or ())}")
    return (None, words[0]) if len(words) == 1 else (words[0], words[1])


def run_to_read(prefix: str | None) -> Run:
    """The run to read from: without a prefix the newest live one, else the newest, with a note on stderr."""
    from grpo_tui.client.local import find_run

    run = find_run(prefix, also_ended=True)
    if prefix is None and not run.is_live:
        write_line(f"no live run here; showing {run.id}, which has ended", to_stderr=True)
    return run


PolicyOption = Annotated[
    str | None,
    typer.Option("--policy", metavar="NAME", help="Of a run that trains several policies: which; default: the first."),
]


def folder_of_policy(run: Run, policy: str | None) -> Path:
    """The folder with the metrics and checkpoints of a policy.

    Raises:
        ConfigError: the run has none of that name.
    """
    from grpo_engine.wire.run_folder import POLICIES, policy_folder

    folder = policy_folder(run.folder, policy)
    if policy is not None and not _is_policy(run, policy):
        names = sorted(path.name for path in (run.folder / POLICIES).glob("*"))
        there = ", ".join(names) if names else "one without a name alone"
        from grpo_engine.config import did_you_mean  # here: status and up import no settings

        raise ConfigError(
            f"--policy {policy}: {run.id} has no such policy{did_you_mean(policy, names)}; it has {there}"
        )
    return folder


def _is_policy(run: Run, policy: str) -> bool:
    """Whether a run has such a folder; in one that is not this user's alone it must be no link."""
    from grpo_engine.wire.run_folder import POLICIES
    from grpo_tui.paths import is_own

    policies = run.folder / POLICIES
    folder = policies / policy
    if policy in ("", ".", "..") or folder.parent != policies or not folder.is_dir():
        return False
    return is_own(run.folder.stat()) or not (policies.is_symlink() or folder.is_symlink())


def note_unsupervised(run: Run) -> None:
    """Print to stderr that a live run has lost its supervisor: a command that only reads starts none."""
    if run.is_live and not run.has_daemon:
        how = f"`grpo-tui upgrade {run.id}` starts one that takes them over"
        write_line(f"{run.id} has no supervisor; its services keep running, and {how}", to_stderr=True)


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
