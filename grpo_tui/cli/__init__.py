"""The command line: `grpo-tui`. stdout is data, stderr is messages; exit codes are in `grpo_tui.exit_codes`.

Each command is imported when it is used, so that `status` imports neither profiles nor the screen.
"""

from __future__ import annotations

import errno
import importlib
import os
import resource
import shlex
import signal
import sys
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from grpo_engine.errors import ConfigError, GrpoError
from grpo_tui.cli.arguments import (
    JoinOption,
    NewOption,
    ReadOnlyOption,
    ThemeOption,
    place_of_profile,
    require_option,
    second_of,
)
from grpo_tui.cli.printing import drop_stdout, open_stdout, write_line
from grpo_tui.exit_codes import ExitCode

COMMANDS = {
    "up": "up",
    "resume": "resume",
    "branch": "resume",
    "attach": "attach",
    "ps": "look",
    "status": "look",
    "metrics": "metrics",
    "compare": "compare",
    "sweep": "sweep",
    "simulate": "simulate",
    "logs": "follow",
    "start": "act",
    "stop": "act",
    "restart": "act",
    "down": "act",
    "upgrade": "act",
    "export": "export",
    "plan": "planning",
    "doctor": "planning",
    "profiles": "planning",
}
"""Each command with the module of this package that registers it."""
TAKE_OVERRIDES = frozenset({"up", "plan", "doctor", "sweep", "simulate"})
"""Those that take overrides of a profile."""

ENGINE_COMMANDS = frozenset(
    {"api", "server", "env", "atropos-env", "reference", "parameters", "train", "launch", "check"}
)
"""Those of `grpo-engine` whose names are none of ours."""

ELSEWHERE = {"list": "ps", "ls": "ps", "runs": "ps", "kill": "down", "end": "down", "tail": "logs", "validate": "plan"}
"""What other tools call a command of ours, which no likeness of letters finds."""


class LazyGroup(TyperGroup):
    """Imports the module of a command when that command, or the list of all, is needed."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Every command, in the order of a run's life."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command, from its module."""
        module = COMMANDS.get(cmd_name)
        if module is None:
            return None
        own = typer.Typer(rich_markup_mode=None)
        own.callback()(lambda: None)
        importlib.import_module(f"grpo_tui.cli.{module}").register(own)
        return typer.main.get_group(own).commands[cmd_name]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The arguments; an override needs no `--set` before it, and Hydra's flags are answered with what is here."""
        if "--config-name" in args or ("--multirun" in args and args[0] != "sweep"):
            from grpo_engine.other_names import FLAGS

            flag = next(word for word in args if word in FLAGS)
            ctx.fail(f"No such option: {flag}: {FLAGS[flag]}")
        if args and (args[0] in TAKE_OVERRIDES or args[0].startswith("-")) and any("=" in word for word in args):
            from grpo_tui.cli.overrides import with_set

            args = with_set(args)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the arguments begin with; an error says what to type instead."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            ctx.fail(f"No such command {args[0]!r}{_meant(args)}.")
        if args and args[0] in TAKE_OVERRIDES - {"sweep"}:  # that has commands
            require_option(ctx, args[0], args[1:])
        return super().resolve_command(ctx, args)


def _meant(args: list[str]) -> str:
    """` (did you mean …?)` about arguments that begin with no command of ours; nothing when none is near."""
    if place_of_profile(args[:1]) is not None:
        return f" (did you mean `{shlex.join(['grpo-tui', '--profile', *args])}`?)"
    if args[0] in ENGINE_COMMANDS:
        return f" (did you mean `{shlex.join(['grpo-engine', *args])}`?)"
    from grpo_engine.config import did_you_mean

    meant = ELSEWHERE.get(args[0])
    return did_you_mean(args[0], COMMANDS) if meant is None else f" (did you mean {meant!r}?)"


def build_app() -> typer.Typer:
    """The whole command line."""
    app = typer.Typer(
        cls=LazyGroup,
        invoke_without_command=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_screen)
    return app


def _screen(
    ctx: typer.Context,
    profile: Annotated[
        str | None, typer.Option("--profile", "-p", help="Name in ./profiles or installed, or a TOML file.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a setting, repeatable.")
    ] = None,
    new: NewOption = False,
    join: JoinOption = False,
    read_only: ReadOnlyOption = False,
    theme: ThemeOption = None,
    is_version_asked: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """Bring up, watch and take down a whole GRPO training stack.

    `grpo-tui --profile NAME` starts the profile, or joins its run, and opens the screen; `q` leaves it running.
    `grpo-tui` alone, in a terminal, opens the board of all runs; where there is none yet it offers profiles.
    """
    if is_version_asked:
        from importlib.metadata import version

        typer.echo(f"grpo-tui {version('grpo-tui')}")
        raise typer.Exit
    if ctx.invoked_subcommand is not None:
        if profile is not None or set_ or new or join or read_only or theme is not None:
            raise typer.BadParameter(f"options come after the command: {ctx.invoked_subcommand} --profile …")
        return
    from grpo_tui.cli.overrides import own_overrides
    from grpo_tui.cli.screen import has_terminal, show_board, start_and_show

    if profile is not None:
        second = second_of(new=new, join=join)
        if read_only and new:
            raise typer.BadParameter("--read-only starts no run: leave out --new")
        raise typer.Exit(
            start_and_show(
                profile, own_overrides(profile, set_ or []), second=second, theme=theme, is_read_only=read_only
            )
        )
    if new or join:
        raise typer.BadParameter("--new and --join need --profile")
    if not has_terminal():
        typer.echo(ctx.get_help())
        raise typer.Exit(ExitCode.USAGE)
    raise typer.Exit(show_board(set_ or [], theme=theme, is_read_only=read_only))


def main() -> NoReturn:
    """Run the command line; errors for people go to stderr, with the exit code of their kind."""
    signal.signal(signal.SIGINT, _interrupt)
    open_stdout()
    try:
        try:
            _check_current_folder()
            build_app()(prog_name="grpo-tui")
        finally:
            sys.stdout.flush()  # as the process exits, its failure would be a traceback
    except GrpoError as error:
        write_line(error, to_stderr=True)
        sys.exit(_exit_code(error))
    except BrokenPipeError:
        drop_stdout()
        sys.exit(ExitCode.FAILED)
    except MemoryError:
        drop_stdout()
        write_line("out of memory: free some, or raise the limit (ulimit -v), and try again", to_stderr=True)
        sys.exit(ExitCode.FAILED)
    except OSError as error:
        drop_stdout()
        words = _shortage(error)
        if words is None:
            raise
        write_line(words, to_stderr=True)
        sys.exit(ExitCode.FAILED)
    sys.exit(ExitCode.OK)


def _shortage(error: OSError) -> str | None:
    """What has run out, and what to do, or where something is forbidden, too long or in the way; else None."""
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            return f"{error.filename or os.getcwd()}: {error.strerror}: make room, and try again"
        case errno.EMFILE:
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            return (
                f"{error.strerror}: the limit is {limit} (ulimit -n): raise it, e.g. by ulimit -n 1024, and try again"
            )
        case errno.EFBIG:
            return f"{error.strerror}: files may not become longer than `ulimit -f` says: raise it, and try again"
        case (
            errno.EACCES | errno.EPERM | errno.EROFS | errno.ENAMETOOLONG | errno.EEXIST | errno.ENOTDIR | errno.ELOOP
        ) if error.filename is not None:
            return f"{error.filename}: {error.strerror}"
        case _:
            return None


def _check_current_folder() -> None:
    try:
        folder = os.getcwd()
        folder.encode()
    except FileNotFoundError:
        raise GrpoError("the current folder was deleted: cd to an existing one") from None
    except UnicodeEncodeError:
        words = f"the name of the current folder is not UTF-8: {os.fsencode(folder)!r}"
        raise GrpoError(f"{words}; the files of a run cannot hold it: rename it, or cd to another") from None


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """Exit on Ctrl-C without a traceback; every `finally` block runs."""
    sys.exit(ExitCode.INTERRUPTED)


def _exit_code(error: GrpoError) -> ExitCode:
    from grpo_tui.client.local import NoSuchRun, StartRefused
    from grpo_tui.client.start_queue import NotInTime

    match error:
        case ConfigError():
            return ExitCode.USAGE
        case StartRefused():
            return ExitCode.REFUSED
        case NoSuchRun():
            return ExitCode.NO_SUCH_RUN
        case NotInTime():
            return ExitCode.NOT_IN_TIME
        case _:
            return ExitCode.FAILED
