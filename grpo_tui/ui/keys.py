"""Keys: what each does, in one word for the last line and in a sentence for the help.

Those that work on every screen of a run are here, and those of the main screen; every other screen says its own.
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
    """As it is written for people."""
    action: str
    label: str
    """For the last line."""
    help: str
    is_in_footer: bool = True
    acts: bool = False
    """Whether it does something to the run: a read-only screen refuses it."""


PLACES = ("run", "gpus", "alignment", "rollouts", "metrics", "logs")
"""The screens of a run, by the keys 1 to 6."""
PLACE_WORDS = {
    "run": "the main screen: services, GPUs, metrics, warnings and a log",
    "gpus": "GPUs: who holds which memory, now and over the run",
    "alignment": "alignment: trainer against inference, token by token",
    "rollouts": "rollouts: prompts, completions, rewards, advantages",
    "metrics": "metrics: plots of any of them, over each other or two runs",
    "logs": "logs: of one service or all, searched and filtered",
}

FIRST_EVERYWHERE = (
    Key(key="v", shown="v", action="app.restart_inference", label="restart vLLM", acts=True,
        help="restart the inference server; each phase shows its seconds"),
)  # fmt: skip
"""What people come for stands first in the last line."""

LAST_EVERYWHERE = (
    *(
        Key(key=str(number), shown=str(number), action=f"app.show('{place}')", label=place, is_in_footer=False,
            help=PLACE_WORDS[place])
        for number, place in enumerate(PLACES, start=1)
    ),
    Key(key="t", shown="t", action="app.travel", label="past",
        help="go back in time: the whole screen shows the run as it was at a moment"),
    Key(key="question_mark", shown="?", action="app.help", label="help",
        help="every key, sign and healthy band in words"),
    Key(key="q", shown="q", action="app.detach", label="detach",
        help="leave the screen; the run goes on (ctrl+c does the same)"),
    Key(key="ctrl+p", shown="^p", action="app.command_palette", label="all", is_in_footer=False,
        help="find anything by its words: actions, services, screens, themes"),
    Key(key="ctrl+l", shown="^l", action="app.paint_anew", label="paint anew", is_in_footer=False,
        help="paint the whole screen anew, when something else has written over it"),
    Key(key="D", shown="D", action="app.end_run", label="end", acts=True,
        help="end the run and everything it started (asks first)"),
)  # fmt: skip

EVERYWHERE = (*FIRST_EVERYWHERE, *LAST_EVERYWHERE)

ON_TRAVEL = (
    Key(key="left", shown="← →", action="screen.travel_move(-1)", label="move",
        help="a little back in time, or on"),
    Key(key="right", shown="→", action="screen.travel_move(1)", label="", is_in_footer=False, help="a little on"),
    Key(key="shift+left,ctrl+left", shown="⇧←", action="screen.travel_move(-10)", label="far", is_in_footer=False,
        help="ten times as far back (ctrl+← too)"),
    Key(key="shift+right,ctrl+right", shown="⇧→", action="screen.travel_move(10)", label="far", is_in_footer=False,
        help="ten times as far on (ctrl+→ too)"),
    Key(key="left_square_bracket", shown="[ ]", action="screen.travel_jump('event', -1)", label="event",
        help="the event before or after: a state changed, a warning, an evaluation"),
    Key(key="right_square_bracket", shown="]", action="screen.travel_jump('event', 1)", label="", is_in_footer=False,
        help="the next event"),
    Key(key="comma", shown=", .", action="screen.travel_jump('step', -1)", label="step",
        help="the optimizer step before or after"),
    Key(key="full_stop", shown=".", action="screen.travel_jump('step', 1)", label="", is_in_footer=False,
        help="the next optimizer step"),
    Key(key="home", shown="Home", action="screen.travel_jump('end', -1)", label="start", is_in_footer=False,
        help="where the run began"),
    Key(key="end", shown="End", action="screen.travel_jump('end', 1)", label="end", is_in_footer=False,
        help="where it ended, or now"),
    Key(key="colon", shown=":", action="screen.travel_type", label="type",
        help="type a time (14:03:05), a step (120), or how long ago (-5m)"),
    Key(key="t", shown="t", action="screen.travel_close", label="now",
        help="back to the present"),
)  # fmt: skip
"""Those of the line of time, while it is there; a pair is told at its first."""

ON_MAIN = (
    Key(key="r", shown="r", action="app.restart_chosen", label="restart", acts=True,
        help="restart the selected or tagged services and those that must follow"),
    Key(key="s", shown="s", action="app.start_or_stop", label="start/stop", acts=True,
        help="stop or start them; asks before the trainer or a stranger ends"),
    Key(key="K", shown="K", action="app.kill_chosen", label="kill", is_in_footer=False, acts=True,
        help="kill them now, with no time to save anything (asks first)"),
    Key(key="space", shown="space", action="app.tag", label="tag", is_in_footer=False, acts=True,
        help="tag the selected service, or take the tag away; r, s, K act on all tagged"),
    Key(key="escape", shown="esc", action="app.clear_tags", label="untag", is_in_footer=False, acts=True,
        help="take all tags away"),
    Key(key="c", shown="c", action="app.crash_report", label="crash", is_in_footer=False,
        help="the selected service's newest crash report: why it failed, how everything stood"),
    Key(key="f", shown="f", action="app.follow", label="follow",
        help="let the log follow its end, or hold still to read"),
    Key(key="z", shown="z", action="app.zoom", label="zoom",
        help="give the whole screen to the log, and back"),
    Key(key="w", shown="w", action="app.warnings", label="why", is_in_footer=False,
        help="every warning in full: what is wrong, and what to change"),
    Key(key="up,k", shown="↑ k", action="app.select(-1)", label="up", is_in_footer=False,
        help="select the service above; its log is shown"),
    Key(key="down,j", shown="↓ j", action="app.select(1)", label="down", is_in_footer=False,
        help="select the service below"),
    Key(key="pageup", shown="PgUp", action="app.scroll_log(-1)", label="back", is_in_footer=False,
        help="read back in the log; following stops"),
    Key(key="pagedown", shown="PgDn", action="app.scroll_log(1)", label="on", is_in_footer=False,
        help="read on in the log; following resumes at its end"),
    Key(key="home", shown="Home", action="app.scroll_log_to_start", label="start", is_in_footer=False,
        help="go to the oldest line in memory"),
    Key(key="end", shown="End", action="app.scroll_log_to_end", label="end of log", is_in_footer=False,
        help="go to the newest line and follow"),
    Key(key="left", shown="←", action="app.shift_log(-1)", label="left", is_in_footer=False,
        help="shift long log lines back"),
    Key(key="right", shown="→", action="app.shift_log(1)", label="right", is_in_footer=False,
        help="see the rest of long log lines"),

)  # fmt: skip


def bindings(keys: Iterable[Key]) -> list[BindingType]:
    """The same for Textual."""
    return [
        Binding(key.key, key.action, key.label, show=key.is_in_footer, key_display=key.shown, tooltip=key.help)
        for key in keys
    ]
