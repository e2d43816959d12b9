"""The list of recorded groups, newest first: step, rewards, environment and start of the prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from textual import events
from textual.content import Content

from grpo_engine.wire.supervisor import ServiceStatus
from grpo_tui.ui.glyphs import SPARK_BARS
from grpo_tui.ui.messages import StateChanged
from grpo_tui.ui.widgets.lines import Lines, Styled, Wheel, fit, line, rule
from grpo_tui.view.format import count_text, shortened
from grpo_tui.view.rollouts.file import GroupHead
from grpo_tui.view.rollouts.state import GroupChosen, GroupOpened, RolloutView
from grpo_tui.view.rollouts.text import telling_starts, visible
from grpo_tui.view.service_rules import TRAINER_KIND
from grpo_tui.view.state import ViewState

BAR_WIDTH = 8
ENVIRONMENT_WIDTH = 7
NUM_FIGURE_COLUMNS = 31
"""Of a row, before the prompt."""
NUM_HEADINGS = 2
NOTE_MARGIN = 14
"""Cells of a title beside its note."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What the rows of a list have in common."""

    width: int
    scale: tuple[float, float]
    """Rewards of the lowest and of the highest bar."""
    words: Mapping[int, str]
    """The start of each group's prompt, or its policy versions if all have the same prompt."""
    environment_width: int
    """0 where there is only one."""


class RolloutList(Lines, Wheel):
    """Groups that pass the filter; the chosen one stays in sight."""

    ON_WHEEL = ("screen.move_group(-1)", "screen.move_group(1)")

    DEFAULT_CSS = """
    RolloutList { height: 1fr; padding: 0 1; }
    """

    def inputs(self, state: ViewState) -> tuple[object, ...]:
        """Not the clock; the first steps change the words of an empty list."""
        return (state.rollouts, state.until, state.history.last if not _has_groups(state.rollouts) else None)

    def lines(self, state: ViewState, width: int, height: int) -> list[Content]:
        """A title that tells the filter, the names of the columns, and a row for each group."""
        view = state.rollouts
        title = rule(width, "groups", _note(view, width - NOTE_MARGIN))
        if view.read is None or not view.found:
            return [title, *(line((text, ".muted")) for text in wrapped_words(_words_for_nothing(state), width))]
        heads = view.read.heads
        known = [head for head in heads.values() if head is not None]
        is_same_prompt = view.filter.prompt_key is not None
        look = Look(
            width=width,
            scale=_scale(known),
            words={head.index: versions_text(head) for head in known}
            if is_same_prompt
            else _telling_starts(known, width - NUM_FIGURE_COLUMNS),
            environment_width=ENVIRONMENT_WIDTH if len(view.read.environments) > 1 else 0,
        )
        environment = f"{'env':<{look.environment_width}} " if look.environment_width else ""
        words = "policy version" if is_same_prompt else "prompt"
        columns = f"  step   mean spread {'rewards':<{BAR_WIDTH}} {environment}{words}"
        heading = line((fit(columns, width), ".title"))
        first = self._first(view, height)
        rows = [
            _row(index, heads.get(index), index in heads, look, is_chosen=index == view.chosen)
            for index in view.found[first : first + height - NUM_HEADINGS]
        ]
        return [title, heading, *rows]

    def on_click(self, event: events.Click) -> None:
        """Read the group of the row; the second of two clicks opens it, as Enter does."""
        if self._state is None:
            return
        view = self._state.rollouts
        place = self._first(view, self.size.height) + event.y - NUM_HEADINGS
        if event.y >= NUM_HEADINGS and place < len(view.found):
            self.post_message(StateChanged(GroupChosen(index=view.found[place])))
            if event.chain > 1:
                self.post_message(StateChanged(GroupOpened()))

    def _first(self, view: RolloutView, height: int) -> int:
        """The place of the first row in sight."""
        room = max(1, height - NUM_HEADINGS)
        place = view.found.index(view.chosen) if view.chosen in view.found else 0
        return max(0, min(place - room // 2, len(view.found) - room))


def wrapped_words(text: str, width: int) -> list[str]:
    """A paragraph in lines of at most `width` characters."""
    lines = [""]
    for word in text.split(" "):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return lines


def _has_groups(view: RolloutView) -> bool:
    return view.read is not None and view.read.total > 0


def _note(view: RolloutView, width: int) -> str:
    """What is listed, and how; the last of it where that is what fits."""
    if view.read is None:
        return ""
    parts = []
    if not view.filter.is_open:
        parts.append(f"{view.filter.words}: {len(view.found):,} of {view.read.total:,}")
    elif view.read.total:
        parts.append(f"{view.read.total:,} recorded")
    if view.read.is_searching:
        parts.append(f"searched {view.read.num_looked_at:,}")
    elif view.found and view.filter.prompt_key is not None:
        parts.append("oldest first; P: back")
    elif view.found:
        parts += ["newest first", "following" if view.is_following else "paused: f follows"]
    while len(parts) > 1 and cell_len(" · ".join(parts)) > width:
        parts.pop(0 if view.filter.is_open else 1)
    return shortened(" · ".join(parts), max(1, width))


def _row(index: int, head: GroupHead | None, is_read: bool, look: Look, *, is_chosen: bool) -> Content:
    mark = "▌" if is_chosen else " "
    if head is None:
        words = f"line {index + 1:,} of rollouts.jsonl cannot be read" if is_read else "…"
        row = line((f"{mark} ", ".accent"), (words, ".muted"))
    else:
        spread = head.max_reward - head.min_reward
        pieces: list[str | Styled] = [
            (mark, ".accent"),
            (fit(f"{head.step:,}", 5, right=True), ".strong" if is_chosen else ""),
            f" {_reward(head.mean_reward)} ",
            (_reward(spread), "" if spread > 0 else ".muted"),
            " ",
            (fit(reward_bars(head.rewards, BAR_WIDTH, look.scale), BAR_WIDTH), ".spark"),
            " ",
            (fit(visible(head.environment or "-"), look.environment_width), ".muted"),
            " " if look.environment_width else "",
            visible(look.words[index][: look.width]),
        ]
        row = line(*pieces)
    row = row.truncate(look.width, ellipsis=True, pad=True)
    return row.stylize(".selected") if is_chosen else row


def _reward(value: float) -> str:
    return fit("-" if math.isnan(value) else f"{value:.3f}", 6, right=True)


def reward_bars(rewards: Sequence[float], width: int, scale: tuple[float, float]) -> str:
    """One bar a completion, in their order; of many, as many as fit, evenly taken from the lowest to the highest."""
    if len(rewards) > width:
        ordered = sorted(reward for reward in rewards if not math.isnan(reward))
        rewards = [ordered[place * (len(ordered) - 1) // (width - 1)] for place in range(width)] if ordered else []
    low, high = scale
    top = len(SPARK_BARS) - 1
    span = high / 2 - low / 2  # halves: the difference of two numbers may be too large for a float
    return "".join(
        "?" if math.isnan(reward) else SPARK_BARS[round((min(max(reward, low), high) / 2 - low / 2) / span * top)]
        for reward in rewards
    )


def _telling_starts(heads: Sequence[GroupHead], room: int) -> dict[int, str]:
    """The prompts; those that do not fit, without the beginning that all prompts of an environment share."""
    if all(cell_len(head.prompt_start) <= room for head in heads):
        return {head.index: head.prompt_start for head in heads}
    starts: dict[int, str] = {}
    for environment in {head.environment for head in heads}:
        of_it = [head for head in heads if head.environment == environment]
        told = telling_starts([head.prompt_start for head in of_it])
        for head, start in zip(of_it, told, strict=True):
            starts[head.index] = start if start == head.prompt_start else f"…{start}"
    return starts


def versions_text(head: GroupHead) -> str:
    """`39–40`: the policy versions of a group's tokens."""
    if head.policy_versions is None:
        return "-"
    low, high = head.policy_versions
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"


def _scale(heads: Sequence[GroupHead]) -> tuple[float, float]:
    """From the lowest reward in sight to the highest, at least from 0 to 1."""
    return (
        min([0.0, *(head.min_reward for head in heads if head.known_rewards)]),
        max([1.0, *(head.max_reward for head in heads if head.known_rewards)]),
    )


def _words_for_nothing(state: ViewState) -> str:
    view = state.rollouts
    if view.read is None or (view.filter != view.read.filter):
        return "reading rollouts.jsonl …"
    if view.read.total and view.read.is_searching:
        return f"no match in the {view.read.num_looked_at:,} groups searched so far; x removes the filters"
    if view.read.total:
        groups = count_text(view.read.total, "recorded group")
        return f"none of {groups} matches: {view.filter.words}; x removes the filters"
    if state.until is not None:
        return "no group had been recorded at this time"
    trainer = next((service for service in state.services if service.kind == TRAINER_KIND), None)
    return _why_none(trainer, state)


def _why_none(trainer: ServiceStatus | None, state: ViewState) -> str:
    what = "Groups come from the trainer, which writes a few of each step into rollouts.jsonl in the run's folder"
    if state.history.last is None and trainer is not None:
        return f"No training step yet. {what}: the first appear with the first step."
    steps = f"after {count_text(state.history.last.step, 'step')}" if state.history.last else "in this run"
    return (
        f"No rollouts recorded {steps}. {what}, if it is `grpo-engine train` (a service of kind `trainer`) with "
        "rollouts_every above 0. Other trainers do not record rollouts."
    )
