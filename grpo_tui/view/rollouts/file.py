"""Read a growing `rollouts.jsonl` of any size: where lines begin, the head of each group, and whole groups on demand.

Holds eight bytes a line, some heads, and few groups in full. A file that is missing, replaced, cut or damaged is an
ordinary case. Meant for one thread at a time; every call may wait for the disk.
"""

from __future__ import annotations

import math
import os
import re
from array import array
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, FailFast, ValidationError
from pydantic_core import from_json

from grpo_engine.wire.codec import Message, Time, Whole, num_marks
from grpo_engine.wire.inference import ShortText
from grpo_engine.wire.metrics import RolloutLine, SampledCompletion
from grpo_tui.run_files.line_tail import Bookmark
from grpo_tui.run_files.opening import open_file

MAX_BYTES_A_REFRESH = 64 << 20
"""Some 50 ms; a longer file takes several calls."""
MAX_LINES_A_REFRESH = 100_000
"""As long; more lines than that in so many bytes are no groups."""
BLOCK_BYTES = 1 << 20
MAX_LINE_BYTES = 64 << 20
"""A longer line is no group of ours."""
MAX_COMPLETIONS = 4096
"""A group of more is not shown: a line may hold a million, whose objects fill memory."""
MAX_TEXTS_BETWEEN = 65_536
"""In `read_before` of a completion, the same."""
MAX_VALUES = 8 << 20
"""Commas, brackets, braces and quotes of a line: six million numbers and texts in the longest that a trainer writes."""
MAX_DAMAGED_LINES = 256
"""In `num_until`: so many one after another end the search, and what follows them counts as later."""
MAX_HEADS = 10_000
MAX_CACHED_BYTES = 8 << 20
"""Of lines whose groups are kept; as Python's objects they take some four times as much."""
PROMPT_START_CHARACTERS = 800
NUMBER_LISTS = ("inference_logprobs", "training_logprobs", "entropies")


_USER_TURN = re.compile(
    r"(?:<\|im_start\|>u(?:ser)?|<\|start_header_id\|>user<\|end_header_id\|>|<start_of_turn>user|<\|user\|>|\[INST\])"
    r"(.*?)(?:<\|im_end\|>|<\|eot_id\|>|<end_of_turn>|<\|end\|>|<\|assistant\|>|\[/INST\]|$)",
    re.DOTALL,
)
"""In the templates of ChatML (and the tiny model's, whose role is `u`), Llama, Gemma, Phi and Mistral. It matches no
white space before an end, which would take time with the square of its length."""


def user_part(prompt: str) -> str:
    """What the user said last; the whole prompt where it has no turns of a chat that we know."""
    turns: list[str] = _USER_TURN.findall(prompt)
    return next((told for turn in reversed(turns) if (told := turn.strip())), prompt)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHead:
    """What a list shows of a group."""

    index: int
    """Its number in the file, the oldest first."""
    time: float
    """Unix seconds."""
    step: int
    environment: str | None
    prompt_start: str
    """The beginning of what the user says in it, without the markup of a chat."""
    prompt_key: int
    """Equal for equal prompts; of this process alone."""
    rewards: tuple[float, ...]
    """One a completion; those that could not be read are NaN."""
    policy_versions: tuple[int, int] | None
    """The lowest and the highest of its tokens."""

    @property
    def known_rewards(self) -> list[float]:
        """Those that are finite."""
        return [reward for reward in self.rewards if math.isfinite(reward)]

    @property
    def num_completions(self) -> int:
        """How many completions the group has."""
        return len(self.rewards)

    @property
    def mean_reward(self) -> float:
        """NaN where none is known."""
        known = self.known_rewards
        return sum(known) / len(known) if known else math.nan

    @property
    def min_reward(self) -> float:
        """NaN where none is known."""
        return min(self.known_rewards, default=math.nan)

    @property
    def max_reward(self) -> float:
        """NaN where none is known."""
        return max(self.known_rewards, default=math.nan)


class RolloutFile:
    """The groups of `path`, numbered from 0, the oldest first; the file need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.generation = 0
        """Rises when the file was replaced or cut: numbers of groups then mean other groups."""
        self.is_behind = False
        """Whether the next `refresh` will find more at once."""
        self._forget()

    def _forget(self) -> None:
        self._starts = array("Q")
        self._end = 0
        """Of the last whole line."""
        self._scanned = Bookmark()
        """Up to where line ends were looked for; beyond `_end` within a line that is not whole yet."""
        self._heads: OrderedDict[int, GroupHead | None] = OrderedDict()
        self._groups: OrderedDict[int, tuple[int, RolloutLine | None]] = OrderedDict()

    def __len__(self) -> int:
        """Groups known now."""
        return len(self._starts)

    def refresh(self) -> int:
        """Look for lines that were added, in at most `MAX_BYTES_A_REFRESH`; returns how many are known now."""
        try:
            with open_file(self._path) as file:
                if not self._scanned.is_in(file.fileno()):
                    self._begin_anew()
                self._index(file.fileno())
        except OSError:
            self.is_behind = False
            if self._scanned.offset:
                self._begin_anew()
        return len(self._starts)

    def head(self, index: int) -> GroupHead | None:
        """What a list shows of a group; None for a line that cannot be read, or that is gone."""
        if not 0 <= index < len(self._starts):
            return None
        if index in self._heads:
            self._heads.move_to_end(index)
            return self._heads[index]
        searched = _searched(self._line(index))
        head = self._heads[index] = None if searched is None else searched.head(index)
        if len(self._heads) > MAX_HEADS:
            self._heads.popitem(last=False)
        return head

    def read(self, index: int) -> RolloutLine | None:
        """The whole group; None for a line that cannot be read, or that is gone. Missing numbers are NaN."""
        if not 0 <= index < len(self._starts):
            return None
        if index in self._groups:
            self._groups.move_to_end(index)
            return self._groups[index][1]
        line = self._line(index)
        group = _group_of(line)
        self._groups[index] = (len(line), group)
        while len(self._groups) > 1 and sum(size for size, _ in self._groups.values()) > MAX_CACHED_BYTES:
            self._groups.popitem(last=False)
        return group

    def num_until(self, time: float) -> int:
        """How many groups, from the first on, were written up to this moment (Unix seconds)."""
        low, high = 0, len(self._starts)
        while low < high:
            middle = (low + high) // 2
            looked_at = range(middle, min(high, middle + MAX_DAMAGED_LINES))
            head = next((head for index in looked_at if (head := self.head(index)) is not None), None)
            if head is None or head.time > time:
                high = middle
            else:
                low = head.index + 1
        return low

    def may_hold(self, index: int, needle: str) -> bool:
        """Whether `texts` may hold a text, in whatever case: a quick look at the bytes, before they are read as JSON.

        Args:
            needle: in lower case.
        """
        if not needle.isascii() or not needle.isprintable() or '"' in needle or "\\" in needle:
            return True  # it may stand there in several ways
        return needle.encode() in self._line(index).lower()

    def texts(self, index: int) -> list[str]:
        """Prompt and completions of a group, to be searched; none of a broken line."""
        searched = _searched(self._line(index))
        return [] if searched is None else [searched.prompt, *(one.text for one in searched.completions)]

    def _begin_anew(self) -> None:
        self._forget()
        self.generation += 1

    def _index(self, descriptor: int) -> None:
        """Note where whole lines begin, from where the last look ended."""
        line_start, scanned, size = self._end, self._scanned.offset, os.fstat(descriptor).st_size
        stop = min(size, scanned + MAX_BYTES_A_REFRESH)
        num_lines = 0
        while scanned < stop and num_lines < MAX_LINES_A_REFRESH:
            block = os.pread(descriptor, min(BLOCK_BYTES, stop - scanned), scanned)
            if not block:
                break
            newline = block.find(b"\n")
            while newline >= 0:
                num_lines += 1
                end = scanned + newline + 1
                if end - line_start > 1:  # an empty line is no group
                    self._starts.append(line_start)
                line_start = end
                if num_lines == MAX_LINES_A_REFRESH:
                    block = block[: newline + 1]
                newline = block.find(b"\n", newline + 1)
            scanned += len(block)
        self._end = line_start
        self._scanned.move(descriptor, scanned)
        self.is_behind = scanned < size

    def _line(self, index: int) -> bytes:
        """The bytes of a line; none where they are gone, or more than any group has."""
        if not 0 <= index < len(self._starts):
            return b""
        start = self._starts[index]
        end = self._starts[index + 1] if index + 1 < len(self._starts) else self._end
        if end - start > MAX_LINE_BYTES:
            return b""
        try:
            with open_file(self._path) as file:
                return os.pread(file.fileno(), end - start, start)
        except OSError:
            return b""


def _number(value: object) -> float:
    """A number of a completion; NaN where a line has none, or one that no float holds."""
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.nan


class _SearchedCompletion(Message):
    """What a list and a search need of a `SampledCompletion`."""

    text: str
    reward: Annotated[float, BeforeValidator(_number)] = math.nan
    policy_versions: Annotated[
        list[Whole], FailFast(), BeforeValidator(lambda value: [] if value is None else value)
    ] = []


class _SearchedLine(Message):
    """What a list and a search need of a `RolloutLine`, also where its other parts are damaged."""

    time: Time
    step: Whole
    environment: ShortText | None = None
    prompt: str
    completions: Annotated[list[_SearchedCompletion], FailFast()]

    def head(self, index: int) -> GroupHead:
        """As the group of this number."""
        versions = [one.policy_versions for one in self.completions if one.policy_versions]
        return GroupHead(
            index=index,
            time=self.time,
            step=self.step,
            environment=self.environment,
            prompt_start=user_part(self.prompt)[:PROMPT_START_CHARACTERS],
            prompt_key=hash(self.prompt),
            rewards=tuple(one.reward for one in self.completions),
            policy_versions=(min(map(min, versions)), max(map(max, versions))) if versions else None,
        )


class _ReadLine(RolloutLine):
    """A `RolloutLine` that stops at its first damaged completion: each fault of a million takes 2 kB."""

    environment: ShortText | None
    completions: Annotated[list[SampledCompletion], FailFast()]


def _searched(line: bytes) -> _SearchedLine | None:
    """None for a damaged line."""
    try:
        return _SearchedLine.model_validate(_record(line))
    except ValueError:
        return None


def _group_of(line: bytes) -> RolloutLine | None:
    try:
        record = _record(line)
    except ValueError:
        return None
    try:
        return _ReadLine.model_validate(record)
    except ValidationError:  # maybe for numbers alone that JSON does not have
        pass
    try:
        return _ReadLine.model_validate({**record, "completions": [_with_nan(one) for one in record["completions"]]})
    except (ValueError, TypeError, AttributeError):
        return None


def _record(line: bytes) -> dict[str, Any]:
    """The object of a line, not validated yet.

    Raises:
        ValueError: it is not JSON, no object, or has more completions or values than any group.
    """
    if num_marks(line) + line.count(b",") > MAX_VALUES:
        raise ValueError("not a group")
    record: dict[str, Any] = from_json(line)
    completions = record.get("completions") if isinstance(record, dict) else None
    if not isinstance(completions, list) or len(completions) > MAX_COMPLETIONS:
        raise ValueError("not a group")
    for one in completions:
        texts = one.get("read_before") if isinstance(one, dict) else None
        if isinstance(texts, dict) and len(texts) > MAX_TEXTS_BETWEEN:
            raise ValueError("not a group")
    return record


def _with_nan(completion: dict[str, object]) -> dict[str, object]:
    """A completion with NaN for the numbers of which it says nothing."""
    numbers: dict[str, float] = {
        name: _number(completion[name]) for name in ("reward", "advantage") if name in completion
    }
    lists = {
        name: [_number(value) for value in values]
        for name in NUMBER_LISTS
        if isinstance(values := completion.get(name), list)
    }
    return {**completion, **numbers, **lists}
