"""The rollout screen: recorded groups, their completions token by token, and one prompt over policy versions."""

from __future__ import annotations

import asyncio
import math
from typing import Literal

from textual import events, on
from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.widgets import Input

from grpo_engine.wire.run_folder import ROLLOUTS_FILE
from grpo_tui.ui.keys import Key, bindings
from grpo_tui.ui.messages import StateChanged
from grpo_tui.ui.screens.base import FileScreen
from grpo_tui.ui.widgets.rollout_group import RolloutGroup
from grpo_tui.ui.widgets.rollout_list import RolloutList
from grpo_tui.view.rollouts.reader import RolloutReader
from grpo_tui.view.rollouts.state import (
    CompletionMoved,
    EnvironmentTurned,
    FilterCleared,
    GroupMoved,
    GroupOpened,
    GroupsArrived,
    MarkToggled,
    Narrowed,
    NewestFollowed,
    PromptToggled,
    RewardKindTurned,
    RolloutChange,
    SamePromptToggled,
    SteppedBack,
    TintTurned,
    TokenMoved,
    TokenSet,
)
from grpo_tui.view.state import ViewState

LOOK_PAUSE_S = 0.5
"""Between two looks at the file, while the screen is in sight."""
SEARCH_PAUSE_S = 0.02
"""While a search goes on."""
WIDE_COLUMNS = 120
"""From here on list and group stand side by side, or two completions."""
QUESTIONS = {
    "text": "text in prompt or completions",
    "above": "mean reward above",
    "below": "mean reward below",
}

ON_ROLLOUTS = (
    Key(key="n", shown="n", action="screen.move_group(1)", label="next",
        help="next group in the list: an older one (of one prompt: a later one)"),
    Key(key="p", shown="p", action="screen.move_group(-1)", label="previous",
        help="previous group in the list"),
    Key(key="enter", shown="Enter", action="screen.open", label="open", is_in_footer=False,
        help="open the group (on a narrow screen)"),
    Key(key="escape", shown="Esc", action="screen.back", label="back", is_in_footer=False,
        help="go back one level, finally to the list of all groups"),
    Key(key="up,k", shown="↑ k", action="screen.move(-1)", label="up", is_in_footer=False,
        help="completion above (in the list of a narrow screen: group above)"),
    Key(key="down,j", shown="↓ j", action="screen.move(1)", label="down", is_in_footer=False,
        help="completion below"),
    Key(key="left", shown="←", action="screen.move_token(-1)", label="token back", is_in_footer=False,
        help="previous token; its details are below the text"),
    Key(key="right", shown="→", action="screen.move_token(1)", label="token on", is_in_footer=False,
        help="next token"),
    Key(key="pageup", shown="PgUp", action="screen.page(-1)", label="up", is_in_footer=False,
        help="one page up in the text"),
    Key(key="pagedown", shown="PgDn", action="screen.page(1)", label="down", is_in_footer=False,
        help="one page down in the text"),
    Key(key="home", shown="Home", action="screen.to_token(0)", label="start", is_in_footer=False,
        help="the first token"),
    Key(key="end", shown="End", action="screen.to_token(-1)", label="end", is_in_footer=False,
        help="the last token"),
    Key(key="C", shown="C", action="screen.turn_tint", label="colour",
        help="colour tokens by ratio (trainer over inference), advantage or entropy"),
    Key(key="P", shown="P", action="screen.same_prompt", label="same prompt",
        help="all recorded groups of this prompt, from the first step on; again: back"),
    Key(key="m", shown="m", action="screen.mark", label="mark",
        help="keep this completion in view to compare others with it (120 columns); again: remove it"),
    Key(key="R", shown="R", action="screen.turn_rewards", label="rewards",
        help="filter by rewards: all right (≥ 1), all wrong (≤ 0), mixed, any"),
    Key(key="greater_than_sign", shown=">", action="screen.ask('above')", label="above", is_in_footer=False,
        help="only groups whose mean reward is above a number"),
    Key(key="less_than_sign", shown="<", action="screen.ask('below')", label="below", is_in_footer=False,
        help="only groups whose mean reward is below a number"),
    Key(key="ampersand", shown="&", action="screen.turn_environment", label="filter", is_in_footer=False,
        help="only groups of one environment: the next one, or all again"),
    Key(key="slash", shown="/", action="screen.ask('text')", label="find",
        help="only groups whose prompt or completions contain a text, in any case"),
    Key(key="x", shown="x", action="screen.clear", label="clear", is_in_footer=False,
        help="remove all filters"),
    Key(key="o", shown="o", action="screen.show_prompt", label="open in full", is_in_footer=False,
        help="whole prompt in place of the completion; again: back"),
    Key(key="f", shown="f", action="screen.follow", label="follow", is_in_footer=False,
        help="go to the newest group, and follow new ones"),
)  # fmt: skip


class Question(Input, can_focus=False):
    """An input line for a filter; shown and focused only while a filter is typed."""

    BINDINGS = [("escape", "screen.drop_question", "back")]
    DEFAULT_CSS = """
    Question { display: none; height: 3; border: round $primary; border-title-color: $foreground; }
    Question.-asked { display: block; }
    """


class RolloutsScreen(FileScreen):
    """List and group: side by side where there is room, else one of them."""

    PLACE = "rollouts"
    KEYS = ON_ROLLOUTS
    BINDINGS = bindings(ON_ROLLOUTS)
    DEFAULT_CSS = """
    RolloutsScreen #panes { height: 1fr; }
    RolloutsScreen #marked, RolloutsScreen #group { display: none; }
    RolloutsScreen.-group RolloutList { display: none; }
    RolloutsScreen.-group #group { display: block; }
    RolloutsScreen.-wide RolloutList { display: block; width: 9fr; max-width: 80; }
    RolloutsScreen.-wide #group { display: block; width: 11fr; }
    RolloutsScreen.-wide.-comparing RolloutList { display: none; }
    RolloutsScreen.-wide.-comparing #marked { display: block; width: 1fr; }
    RolloutsScreen.-wide.-comparing #group { width: 1fr; }
    """

    def __init__(self, state: ViewState) -> None:
        super().__init__(state)
        self._reader = RolloutReader(state.run_folder / ROLLOUTS_FILE)
        self._asked: Literal["text", "above", "below"] = "text"

    def body(self) -> ComposeResult:
        """The list, what is compared with, and the group; below them a line to type into."""
        with Horizontal(id="panes"):
            yield RolloutList()
            yield RolloutGroup(id="marked", is_marked=True)
            yield RolloutGroup(id="group")
        yield Question(id="question")

    def read_request(self, state: ViewState) -> object:
        """The filter, the group, and the moment."""
        return state.rollouts.filter, state.rollouts.selected, state.until

    def draw(self, state: ViewState) -> None:
        """Draw a state, and read if it asks for something else."""
        self._arrange(state)
        super().draw(state)

    def on_resize(self, event: events.Resize) -> None:
        """Put list and group side by side where there is room."""
        self._arrange(self._state)

    def _arrange(self, state: ViewState) -> None:
        view = state.rollouts
        self.set_class(self.size.width >= WIDE_COLUMNS, "-wide")
        self.set_class(view.is_in_group, "-group")
        self.set_class(view.marked is not None, "-comparing")

    async def look(self) -> None:
        """Read what the state asks for: at once after a key, else whenever something may have been added."""
        pause_s: float | None = None
        while True:
            await self.wait_for_request(pause_s)
            state = self._state
            view = state.rollouts
            read = await asyncio.to_thread(self._reader.look, view.filter, view.selected, until=state.until)
            if view.read is None or not view.read.is_same(read):
                self._change(GroupsArrived(read=read))
            is_done = not read.is_searching and read.has_all_heads
            pause_s = LOOK_PAUSE_S if is_done else SEARCH_PAUSE_S

    def _change(self, change: RolloutChange) -> None:
        self.app.post_message(StateChanged(change))

    @property
    def _shows_list_alone(self) -> bool:
        return self.size.width < WIDE_COLUMNS and not self._state.rollouts.is_in_group

    def action_move_group(self, by: int) -> None:
        """So many groups on."""
        self._change(GroupMoved(by=by))

    def action_move(self, by: int) -> None:
        """So many rows on, of the list that is in sight."""
        self._change(GroupMoved(by=by) if self._shows_list_alone else CompletionMoved(by=by))

    def action_move_token(self, by: int) -> None:
        """So many tokens on."""
        self._change(TokenMoved(by=by))

    def action_to_token(self, number: int) -> None:
        """To a token, counted from the end where negative."""
        completion = self._state.rollouts.chosen_completion
        if self._shows_list_alone:
            self._change(GroupMoved(by=-(1 << 40) if number == 0 else 1 << 40))
        elif completion is not None:
            self._change(TokenSet(token=number if number >= 0 else len(completion.token_ids) + number))

    def action_page(self, pages: int) -> None:
        """So many pages on in the text, or in the list of a narrow screen."""
        if self._shows_list_alone:
            self._change(GroupMoved(by=pages * max(1, self.query_one(RolloutList).size.height - 3)))
            return
        self._change(self.query_one("#group", RolloutGroup).page(self._state.rollouts, pages))

    def action_scroll_text(self, lines: int) -> None:
        """So many lines on in the text."""
        self._change(self.query_one("#group", RolloutGroup).scrolled(self._state.rollouts, lines))

    def action_turn_tint(self) -> None:
        """Colour by the next thing."""
        self._change(TintTurned())

    def action_turn_rewards(self) -> None:
        """The next kind of rewards."""
        self._change(RewardKindTurned())

    def action_turn_environment(self) -> None:
        """The next environment."""
        self._change(EnvironmentTurned())

    def action_clear(self) -> None:
        """Let all groups through."""
        self._change(FilterCleared())

    def action_same_prompt(self) -> None:
        """The groups of this prompt, or back."""
        self._change(SamePromptToggled())

    def action_mark(self) -> None:
        """Pin this completion for comparison, or unpin it."""
        if self.size.width < WIDE_COLUMNS and self._state.rollouts.marked is None:
            self.show_message(
                f"comparing two completions needs {WIDE_COLUMNS} columns; this terminal has {self.size.width}"
            )
            return
        self._change(MarkToggled())

    def action_show_prompt(self) -> None:
        """The whole prompt, or back."""
        self._change(GroupOpened())
        self._change(PromptToggled())

    def action_follow(self) -> None:
        """Go to the newest group and stay with it."""
        self._change(NewestFollowed())

    def action_open(self) -> None:
        """From the list to the group."""
        self._change(GroupOpened())

    def action_back(self) -> None:
        """Out of what was entered last."""
        self._change(SteppedBack())

    def action_ask(self, what: Literal["text", "above", "below"]) -> None:
        """Let a filter be typed."""
        self._asked = what
        question = self.query_one(Question)
        question.value = self._state.rollouts.filter.text if what == "text" else ""
        question.border_title = f"{QUESTIONS[what]} (Enter applies, Esc cancels)"
        question.add_class("-asked")
        question.can_focus = True
        question.focus()

    def action_drop_question(self) -> None:
        """Ask no more."""
        question = self.query_one(Question)
        question.remove_class("-asked")
        question.can_focus = False
        self.set_focus(None)

    @on(Input.Submitted, "#question")
    def _take_answer(self, event: Input.Submitted) -> None:
        text = event.value.strip()
        if self._asked == "text":
            self._change(Narrowed(by="text", text=text))
        else:
            number = _number(text)
            if number is None:
                self.show_message(f"{text!r} is not a number: type one such as 0.5")
                return
            self._change(Narrowed(by=self._asked, number=number))
        self.action_drop_question()


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
