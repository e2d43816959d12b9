"""The keys, each with one word for the last line and a sentence for the help.

Here are keys that work on every screen, and those of the main screen; the other screens declare their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from textual.binding import Binding, BindingType


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key and what it is for."""

    key: str
    """As Textual names it."""
    shown: str
    """As the screen writes it."""
    action: str
    label: str
    """For the last line."""
    help: str
    is_in_footer: bool = True
    changes_run: bool = False
    """Whether it acts on the run; a read-only screen refuses it."""


PLACES = ("run", "gpus", "alignment", "rollouts", "metrics", "logs")
"""The screens of a run, by the keys 1 to 6."""
PLACE_WORDS = {
    "run": "the main screen: services, GPUs, metrics, warnings and a log",
    "gpus": "GPUs: memory by service and process, now and over the run",
    "alignment": "alignment: log-probs of trainer and inference compared token by token",
    "rollouts": "rollouts: prompts, completions, rewards, advantages",
    "metrics": "metrics: plots of one or several metrics, of one or two runs",
    "logs": "logs: of one service or all, with search and filter",
}

FIRST_EVERYWHERE = (
    Key(key="v", shown="v", action="app.restart_inference", label="restart vLLM", changes_run=True,
        help="restart the inference server; each phase shows its seconds (screens 2 to 6 ask first)"),
)  # fmt: skip
"""The most used key is the first in the last line."""

LAST_EVERYWHERE = (
    *(
        Key(key=str(number), shown=str(number), action=f"app.show('{place}')", label=place, is_in_footer=False,
            help=PLACE_WORDS[place])
        for number, place in enumerate(PLACES, start=1)
    ),
    Key(key="t", shown="t", action="app.travel", label="past",
        help="go back in time: every screen shows the run as it was then"),
    Key(key="w", shown="w", action="app.warnings", label="warnings", is_in_footer=False,
        help="every warning in full: what is wrong, and what to change; there 1 to 9 copy the commands"),
    Key(key="M", shown="M", action="app.messages", label="messages", is_in_footer=False,
        help="past messages in full: answers to keys, refusals, and notices of the supervisor"),
    Key(key="y", shown="y", action="screen.copy", label="copy", is_in_footer=False,
        help="copy what was selected with the mouse (ctrl+c too) to the terminal's clipboard; on screen 6 without a "
        "selection the marked lines, on a page all of it"),
    Key(key="question_mark", shown="?", action="app.help", label="help",
        help="every key, sign and healthy band explained"),
    Key(key="q", shown="q", action="app.detach", label="detach",
        help="leave the screen; the run keeps running (ctrl+c does the same where nothing is selected)"),
    Key(key="ctrl+p", shown="^p", action="app.command_palette", label="all", is_in_footer=False,
        help="search all actions, services, screens and themes"),
    Key(key="ctrl+l", shown="^l", action="app.redraw", label="redraw", is_in_footer=False,
        help="redraw the whole screen, after another program wrote over it"),
    Key(key="D", shown="D", action="app.end_run", label="end", changes_run=True,
        help="end the run and every process it started (asks first)"),
)  # fmt: skip

EVERYWHERE = (*FIRST_EVERYWHERE, *LAST_EVERYWHERE)

ON_TRAVEL = (
    Key(key="left", shown="← →", action="screen.travel_move(-1)", label="move",
        help="one small step back or forward in time"),
    Key(key="right", shown="→", action="screen.travel_move(1)", label="", is_in_footer=False,
        help="one small step forward"),
    Key(key="shift+left,ctrl+left", shown="⇧←", action="screen.travel_move(-10)", label="far", is_in_footer=False,
        help="ten steps back (ctrl+← too)"),
    Key(key="shift+right,ctrl+right", shown="⇧→", action="screen.travel_move(10)", label="far", is_in_footer=False,
        help="ten steps forward (ctrl+→ too)"),
    Key(key="left_square_bracket", shown="[ ]", action="screen.travel_jump('event', -1)", label="event",
        help="previous or next event: state change, warning, evaluation"),
    Key(key="right_square_bracket", shown="]", action="screen.travel_jump('event', 1)", label="", is_in_footer=False,
        help="next event"),
    Key(key="comma", shown=", .", action="screen.travel_jump('step', -1)", label="step",
        help="previous or next optimizer step"),
    Key(key="full_stop", shown=".", action="screen.travel_jump('step', 1)", label="", is_in_footer=False,
        help="next optimizer step"),
    Key(key="home", shown="Home", action="screen.travel_jump('end', -1)", label="start", is_in_footer=False,
        help="start of the run"),
    Key(key="end", shown="End", action="screen.travel_jump('end', 1)", label="end", is_in_footer=False,
        help="end of the run, or now"),
    Key(key="colon", shown=":", action="screen.travel_type", label="type",
        help="type a time (14:03:05), a step (120), or how long ago (-5m)"),
    Key(key="t", shown="t", action="screen.travel_close", label="now",
        help="back to the present; of a run that is over, to its end"),
)  # fmt: skip
"""Keys of the timeline while it is open; the first key of a pair explains both."""

ON_MAIN = (
    Key(key="r", shown="r", action="app.restart_chosen", label="restart", changes_run=True,
        help="restart the selected or tagged services and those that depend on them"),
    Key(key="s", shown="s", action="app.start_or_stop", label="start/stop", changes_run=True,
        help="stop or start them; asks before it stops the trainer or ends a foreign process"),
    Key(key="K", shown="K", action="app.kill_chosen", label="kill", is_in_footer=False, changes_run=True,
        help="kill them with SIGKILL, nothing is saved (asks first)"),
    Key(key="space", shown="space", action="app.tag", label="tag", is_in_footer=False, changes_run=True,
        help="tag or untag the selected service; r, s and K act on all tagged ones"),
    Key(key="escape", shown="esc", action="app.clear_tags", label="untag", is_in_footer=False, changes_run=True,
        help="remove all tags"),
    Key(key="d", shown="d", action="app.details", label="details", is_in_footer=False,
        help="all about the selected service: command, environment, needs, probe and its answers, attempts, ports; "
        "or about the selected machine"),
    Key(key="c", shown="c", action="app.crash_report", label="crash", is_in_footer=False,
        help="newest crash report of the selected service, else of one that failed: why, and the run's state then"),
    Key(key="f", shown="f", action="app.follow", label="follow",
        help="follow the end of the log, or pause to read"),
    Key(key="z", shown="z", action="app.zoom", label="zoom",
        help="show the log on the whole screen, and back"),
    Key(key="up,k", shown="↑ k", action="app.select(-1)", label="up", is_in_footer=False,
        help="select the service above, its log is shown; or a machine"),
    Key(key="down,j", shown="↓ j", action="app.select(1)", label="down", is_in_footer=False,
        help="select the service below"),
    Key(key="pageup", shown="PgUp", action="app.scroll_log(-1)", label="back", is_in_footer=False,
        help="page up in the log; stops following"),
    Key(key="pagedown", shown="PgDn", action="app.scroll_log(1)", label="on", is_in_footer=False,
        help="page down in the log; follows again at its end"),
    Key(key="home", shown="Home", action="app.scroll_log_to_start", label="start", is_in_footer=False,
        help="go to the oldest line in memory"),
    Key(key="end", shown="End", action="app.scroll_log_to_end", label="end of log", is_in_footer=False,
        help="go to the newest line and follow"),
    Key(key="left", shown="←", action="app.shift_log(-1)", label="left", is_in_footer=False,
        help="scroll long lines to the left; on the row of a machine, hide its services"),
    Key(key="right", shown="→", action="app.shift_log(1)", label="right", is_in_footer=False,
        help="scroll long lines to the right; on the row of a machine, show its services"),
    Key(key="F", shown="F", action="app.fold", label="fold", is_in_footer=False,
        help="on several machines: hide the services of all of them, or show them again"),

)  # fmt: skip


def bindings(keys: Iterable[Key]) -> list[BindingType]:
    """Convert keys to Textual bindings."""
    return [
        Binding(key.key, key.action, key.label, show=key.is_in_footer, key_display=key.shown, tooltip=key.help)
        for key in keys
    ]
