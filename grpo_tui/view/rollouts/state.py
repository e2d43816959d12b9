"""What the rollout screen knows: the groups in its list, the one that is read, and the token under the cursor. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Literal, assert_never

from grpo_engine.wire.metrics import RolloutLine, SampledCompletion
from grpo_tui.view.rollouts.file import GroupHead

RIGHT_FROM = 1.0
WRONG_UP_TO = 0.0


class RewardKind(StrEnum):
    """Groups by their rewards."""

    ANY = "any rewards"
    ALL_RIGHT = "all right"
    ALL_WRONG = "all wrong"
    MIXED = "mixed"
    ABOVE = "mean above"
    BELOW = "mean below"


CYCLED_KINDS = (RewardKind.ANY, RewardKind.ALL_RIGHT, RewardKind.ALL_WRONG, RewardKind.MIXED)


class Tint(StrEnum):
    """What the tokens are coloured by."""

    RATIO = "ratio"
    ADVANTAGE = "advantage"
    ENTROPY = "entropy"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFilter:
    """Which groups are listed."""

    kind: RewardKind = RewardKind.ANY
    number: float = 0.0
    """For `ABOVE` and `BELOW`."""
    environment: str | None = None
    text: str = ""
    """That prompt or a completion must hold, whatever the case."""
    prompt_key: int | None = None
    """Of one prompt alone; its groups are listed from the first step on."""

    @property
    def is_open(self) -> bool:
        """Whether it lets everything through."""
        return self == GroupFilter()

    def takes(self, head: GroupHead) -> bool:
        """Whether a group passes, its text aside."""
        if self.environment is not None and head.environment != self.environment:
            return False
        if self.prompt_key is not None and head.prompt_key != self.prompt_key:
            return False
        match self.kind:
            case RewardKind.ANY:
                return True
            case RewardKind.ALL_RIGHT:
                return head.min_reward >= RIGHT_FROM
            case RewardKind.ALL_WRONG:
                return head.max_reward <= WRONG_UP_TO
            case RewardKind.MIXED:
                return head.max_reward > head.min_reward
            case RewardKind.ABOVE:
                return head.mean_reward > self.number
            case RewardKind.BELOW:
                return head.mean_reward < self.number
            case _:
                assert_never(self.kind)

    @property
    def words(self) -> str:
        """What it lets through: `mixed · sort6 · “31”`."""
        parts = []
        if self.prompt_key is not None:
            parts.append("same prompt")
        if self.kind in (RewardKind.ABOVE, RewardKind.BELOW):
            parts.append(f"{self.kind} {self.number:g}")
        elif self.kind is not RewardKind.ANY:
            parts.append(str(self.kind))
        if self.environment is not None:
            parts.append(environment_words(self.environment))
        if self.text:
            parts.append(f"“{self.text}”")
        return " · ".join(parts)


def environment_words(name: str) -> str:
    """An environment by its name; by its number where the rollout API told no name."""
    return f"environment {name}" if name.isdecimal() else name


@dataclass(frozen=True, slots=True, kw_only=True)
class Marked:
    """A completion that others are compared with."""

    index: int
    line: RolloutLine
    completion: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupsRead:
    """What a look at the file found for one filter."""

    filter: GroupFilter
    total: int
    """Groups in the file, up to the moment that is shown."""
    found: Sequence[int] = ()
    """Those that the filter lets through, the newest first; of one prompt the oldest first."""
    num_looked_at: int = 0
    is_searching: bool = False
    """Whether some have not been looked at yet."""
    has_all_heads: bool = True
    """Whether `heads` has all that a list may show around the chosen one."""
    heads: Mapping[int, GroupHead | None] = field(default_factory=lambda: MappingProxyType({}))
    """Those around the chosen one; None for a line that cannot be read."""
    chosen: int | None = None
    group: RolloutLine | None = None
    """The chosen one; None where there is none, or it cannot be read."""
    environments: tuple[str, ...] = ()
    """All that were met until now."""
    generation: int = 0
    """Of the file: when it rises, numbers mean other groups."""

    def is_same(self, other: GroupsRead) -> bool:
        """Whether a later look found nothing else."""
        return _outcome(self) == _outcome(other)


def _outcome(read: GroupsRead) -> tuple[object, ...]:
    how_far = (read.num_looked_at, read.is_searching, len(read.heads), read.environments)
    return read.generation, read.filter, read.total, read.chosen, how_far, read.found


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutView:
    """What the rollout screen knows."""

    filter: GroupFilter = GroupFilter()
    read: GroupsRead | None = None
    """None before the first look."""
    selected: int | None = None
    """The number of the group that was moved to; None follows the newest."""
    completion: int = 0
    token: int = 0
    tint: Tint = Tint.RATIO
    is_in_group: bool = False
    """Whether a narrow screen shows the group in place of the list."""
    shows_prompt: bool = False
    marked: Marked | None = None
    before_same_prompt: tuple[GroupFilter, int | None] | None = None
    """Filter and selection to go back to from the groups of one prompt."""

    @property
    def chosen(self) -> int | None:
        """The group that is selected, or the newest; None when the list is empty."""
        found = self.found
        if self.selected is not None and self.selected in found:
            return self.selected
        if self.selected is None and self.filter.prompt_key is None:
            return found[0] if found else None
        return self.read.chosen if self.read else None

    @property
    def found(self) -> Sequence[int]:
        """The groups of the list; none while another filter was asked for and nothing was read for it yet."""
        return self.read.found if self.read is not None and self.read.filter == self.filter else ()

    @property
    def group(self) -> RolloutLine | None:
        """The chosen group, once it was read."""
        return self.read.group if self.read is not None and self.read.chosen == self.chosen else None

    @property
    def is_reading(self) -> bool:
        """Whether the chosen group is still to be read."""
        return self.read is not None and self.chosen is not None and self.read.chosen != self.chosen

    @property
    def chosen_completion(self) -> SampledCompletion | None:
        """The completion that is read."""
        if self.group is None or not self.group.completions:
            return None
        return self.group.completions[min(self.completion, len(self.group.completions) - 1)]

    @property
    def is_following(self) -> bool:
        """Whether the newest group is shown whenever one comes."""
        return self.selected is None


class RolloutChange:
    """Base of all that changes it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupsArrived(RolloutChange):
    """The file was looked at."""

    read: GroupsRead


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMoved(RolloutChange):
    """So many groups further down the list."""

    by: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupChosen(RolloutChange):
    """A group was clicked."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NewestFollowed(RolloutChange):
    """The newest group is wanted, and every one that comes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionMoved(RolloutChange):
    """So many completions further down."""

    by: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSet(RolloutChange):
    """The cursor was put on a token, or on a line of the prompt."""

    token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMoved(RolloutChange):
    """So many tokens further on; in the whole prompt, which is scrolled by pages, so many lines."""

    by: int
    last_line: int | None = None
    """Of the prompt: the last one that the screen can begin with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TintTurned(RolloutChange):
    """Tokens are coloured by the next thing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptToggled(RolloutChange):
    """The whole prompt is wanted in place of the completion, or no longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardKindTurned(RolloutChange):
    """The next kind of rewards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentTurned(RolloutChange):
    """The next environment, after the last one all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Narrowed(RolloutChange):
    """A text to look for or a bound of rewards was typed."""

    by: Literal["text", "above", "below"]
    text: str = ""
    number: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterCleared(RolloutChange):
    """Every group is wanted again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamePromptToggled(RolloutChange):
    """All groups of the chosen one's prompt are wanted, or what was listed before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkToggled(RolloutChange):
    """The completion in sight is to stay beside others, or no longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOpened(RolloutChange):
    """A narrow screen goes from the list to the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SteppedBack(RolloutChange):
    """Escape: out of what was entered last."""


def after(rollouts: RolloutView, change: RolloutChange) -> RolloutView:
    """What it is after a change."""
    match change:
        case GroupsArrived(read=read):
            return _with_groups(rollouts, read)
        case GroupMoved(by=by):
            return _moved(rollouts, by)
        case GroupChosen(index=index):
            return _at(rollouts, index)
        case NewestFollowed():
            return _fresh(replace(rollouts, selected=None))
        case CompletionMoved(by=by):
            last = len(rollouts.group.completions) - 1 if rollouts.group else rollouts.completion + abs(by)
            place = max(0, min(last, min(rollouts.completion, last) + by))
            return replace(_holding(rollouts), completion=place, token=0, shows_prompt=False)
        case TokenSet(token=token):
            return replace(_holding(rollouts), token=max(0, token))
        case TokenMoved(by=by):
            completion = rollouts.chosen_completion
            if rollouts.shows_prompt and change.last_line is not None:
                return replace(rollouts, token=max(0, min(change.last_line, rollouts.token + by)))
            if completion is None or rollouts.shows_prompt:
                return rollouts
            last = max(0, len(completion.token_ids) - 1)
            return replace(_holding(rollouts), token=max(0, min(last, min(rollouts.token, last) + by)))
        case TintTurned():
            tints = list(Tint)
            return replace(rollouts, tint=tints[(tints.index(rollouts.tint) + 1) % len(tints)])
        case PromptToggled():
            return replace(_holding(rollouts), shows_prompt=not rollouts.shows_prompt, token=0)
        case RewardKindTurned():
            kind = rollouts.filter.kind
            place = CYCLED_KINDS.index(kind) if kind in CYCLED_KINDS else 0
            return _filtered(rollouts, kind=CYCLED_KINDS[(place + 1) % len(CYCLED_KINDS)])
        case EnvironmentTurned():
            names = [None, *(rollouts.read.environments if rollouts.read else ())]
            place = names.index(rollouts.filter.environment) if rollouts.filter.environment in names else 0
            return _filtered(rollouts, environment=names[(place + 1) % len(names)])
        case Narrowed(by="text", text=text):
            return _filtered(rollouts, text=text)
        case Narrowed(by=by, number=number):
            kind = RewardKind.ABOVE if by == "above" else RewardKind.BELOW
            return _filtered(rollouts, kind=kind, number=number)
        case FilterCleared():
            return replace(rollouts, filter=GroupFilter(), before_same_prompt=None)
        case SamePromptToggled():
            return _of_same_prompt(rollouts)
        case MarkToggled():
            return _with_mark(rollouts)
        case GroupOpened():
            return replace(rollouts, is_in_group=True)
        case SteppedBack():
            return _stepped_back(rollouts)
        case _:
            return rollouts


def _with_groups(rollouts: RolloutView, read: GroupsRead) -> RolloutView:
    if read.filter != rollouts.filter:
        return rollouts  # of a question that is no longer asked
    before = rollouts.read
    if before is not None and read.generation != before.generation:
        return RolloutView(filter=replace(rollouts.filter, prompt_key=None), tint=rollouts.tint, read=read)
    known = replace(rollouts, read=read)
    if rollouts.selected is not None and rollouts.selected not in read.found and read.chosen is not None:
        known = _fresh(replace(known, selected=read.chosen))  # the filter lets another one through
    elif rollouts.chosen != known.chosen:
        known = _fresh(known)
    return known


def _moved(rollouts: RolloutView, by: int) -> RolloutView:
    found, chosen = rollouts.found, rollouts.chosen
    if not found or chosen not in found:
        return rollouts
    return _at(rollouts, found[max(0, min(len(found) - 1, found.index(chosen) + by))])


def _at(rollouts: RolloutView, index: int) -> RolloutView:
    if index == rollouts.chosen:
        return _holding(rollouts)
    completion = rollouts.completion if rollouts.filter.prompt_key is not None else 0
    return replace(rollouts, selected=index, completion=completion, token=0, shows_prompt=False)


def _fresh(rollouts: RolloutView) -> RolloutView:
    """At the beginning of another group."""
    return replace(rollouts, completion=0, token=0, shows_prompt=False)


def _holding(rollouts: RolloutView) -> RolloutView:
    """On the group in sight, though newer ones come."""
    return rollouts if rollouts.selected is not None else replace(rollouts, selected=rollouts.chosen)


def _filtered(
    rollouts: RolloutView,
    *,
    kind: RewardKind | None = None,
    number: float = 0.0,
    environment: str | Literal[False] | None = False,
    text: str | None = None,
) -> RolloutView:
    was = rollouts.filter
    return replace(
        rollouts,
        filter=GroupFilter(
            kind=was.kind if kind is None else kind,
            number=was.number if kind is None else number,
            environment=was.environment if environment is False else environment,
            text=was.text if text is None else text,
            prompt_key=was.prompt_key,
        ),
    )


def _of_same_prompt(rollouts: RolloutView) -> RolloutView:
    if rollouts.before_same_prompt is not None:
        was_filter, was_selected = rollouts.before_same_prompt
        return replace(rollouts, filter=was_filter, selected=was_selected, before_same_prompt=None)
    chosen = rollouts.chosen
    head = rollouts.read.heads.get(chosen) if rollouts.read is not None and chosen is not None else None
    if head is None:
        return rollouts
    return replace(
        rollouts,
        filter=GroupFilter(prompt_key=head.prompt_key),
        selected=chosen,
        before_same_prompt=(rollouts.filter, rollouts.selected),
    )


def _with_mark(rollouts: RolloutView) -> RolloutView:
    if rollouts.marked is not None:
        return replace(rollouts, marked=None)
    if rollouts.group is None or rollouts.chosen is None or not rollouts.group.completions:
        return rollouts
    place = min(rollouts.completion, len(rollouts.group.completions) - 1)
    marked = Marked(index=rollouts.chosen, line=rollouts.group, completion=place)
    return replace(_holding(rollouts), marked=marked, is_in_group=True)


def _stepped_back(rollouts: RolloutView) -> RolloutView:
    if rollouts.shows_prompt:
        return replace(rollouts, shows_prompt=False, token=0)
    if rollouts.marked is not None:
        return replace(rollouts, marked=None)
    if rollouts.is_in_group:
        return replace(rollouts, is_in_group=False)
    if rollouts.before_same_prompt is not None:
        return _of_same_prompt(rollouts)
    return replace(rollouts, filter=GroupFilter())
