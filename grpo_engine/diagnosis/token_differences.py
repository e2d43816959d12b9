"""How far the trainer's log-probabilities are from inference's, token by token, over some recorded groups. Pure.

A *difference* is trainer minus inference, in nats; its exponential is the *ratio* that the loss clips. Only tokens for
which both sides said a finite number count. An *age* is how many policy versions the sampling weights were behind the
trained ones.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from grpo_engine.wire.metrics import RolloutLine, SampledCompletion
from grpo_engine.wire.rollouts import LARGEST_NUMBER

NUM_WORST = 40
"""Tokens that are told one by one."""
CONTEXT_CHARACTERS = 60
"""Of the text on each side of such a token."""
CONTEXT_TOKENS = 16
SURE = math.log(0.9)
"""A side that gave a token more than this was sure of it …"""
SURPRISED = math.log(0.05)
"""… and one that gave it less had hardly thought of it."""
NO_LOGPROB = 1e-3
"""A log-probability is never positive; what is, above rounding, is the mark of a token that has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorstToken:
    """A token on which both sides disagree, with the text around it."""

    step: int
    environment: str | None
    completion: int
    """Its number in the group, from 1."""
    position: int
    """In the completion, from 0."""
    length: int
    """Tokens of the completion."""
    token_id: int
    text: str
    """`#421` where the file has no texts of tokens."""
    before: str
    after: str
    inference: float
    training: float
    age: int | None
    num: int = 1
    """How many completions of its group have it after the same text; they are told once."""

    @property
    def difference(self) -> float:
        """Trainer minus inference, in nats."""
        return self.training - self.inference


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTokens:
    """The tokens of one group in columns of one length, completion after completion."""

    step: int
    environment: str | None
    training: array[float]
    inference: array[float]
    positions: array[int]
    ages: array[int] | None
    """None where nothing is known of them."""
    ends: tuple[int, ...]
    """Where each completion ends in the columns."""
    is_complete: tuple[bool, ...]
    """Of each completion, whether it came to its own end: its last token ends it."""
    num_without: int
    """Tokens that one side gave no log-probability."""
    num_untrained: int
    """Completions that the trainer has not scored."""
    worst: tuple[WorstToken, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The differences of some tokens."""

    num: int
    mean: float
    abs_mean: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PartAt:
    """The tokens at positions, ages or steps from `low` to `high`, both included."""

    low: int
    high: int
    part: Part


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The straight line nearest to the trainer's log-probabilities as a function of inference's."""

    num: int
    slope: float
    correlation: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """What the mean magnitude of the differences would be if one side's numbers stood one token further."""

    apart: float
    """As they stand."""
    later: float
    """With inference's moved one token towards the end."""
    earlier: float
    """With inference's moved one token towards the beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignmentNumbers:
    """What is known of the tokens of some groups."""

    num_groups: int
    num_completions: int
    num_untrained: int
    num_without: int
    first_step: int
    last_step: int
    all: Part
    differences: array[float]
    """In rising order."""
    magnitudes: array[float]
    """Of the differences, in rising order."""
    sequence_differences: array[float]
    """The mean difference of each completion, in rising order: the logarithm of the ratio that GSPO clips."""
    firsts: Part | None
    """The first token of each completion."""
    ends: Part | None
    """The last token of each that came to its end."""
    inner: Part | None
    """The tokens between."""
    by_position: tuple[PartAt, ...]
    by_age: tuple[PartAt, ...]
    """Empty where ages are not known."""
    age_last_steps: Mapping[int, int]
    """The last step that had tokens of an age: those of a run's first steps alone say nothing of its present."""
    by_step: tuple[PartAt, ...]
    fresh: Part | None
    """Tokens of age 0; where ages are not known, all."""
    line: Line | None
    """Of the fresh tokens where there are enough, else of all; None where inference's hardly vary."""
    shift: Shift | None
    num_contradicted: int
    """Tokens of which one side was sure and which the other had hardly thought of."""
    num_inference_certain: int
    """Tokens that inference gave exactly 0: it had no other to choose from."""
    worst: tuple[WorstToken, ...]

    def quantile(self, share: float) -> float:
        """The magnitude of a difference that `share` of the tokens do not exceed."""
        return quantile(self.magnitudes, share)


def group_tokens(group: RolloutLine, trained_version: int | None) -> GroupTokens:
    """The columns of a group.

    Args:
        trained_version: of the weights that the trainer scored it with; None where nothing is known of versions.
    """
    training, inference, positions, ages = array("d"), array("d"), array("l"), array("l")
    ends: list[int] = []
    is_complete: list[bool] = []
    num_without = num_untrained = 0
    candidates: list[tuple[float, int, int]] = []  # magnitude, completion, position
    for number, one in enumerate(group.completions):
        if not one.training_logprobs:
            num_untrained += 1
            continue
        found: list[tuple[float, int, int]] = []
        pairs = zip(one.training_logprobs, one.inference_logprobs, strict=False)
        for position, (ours, theirs) in enumerate(pairs):
            if not (_is_number(ours) and _is_number(theirs)) or theirs > NO_LOGPROB:
                num_without += 1
                continue
            training.append(ours)
            inference.append(theirs)
            positions.append(position)
            version = one.policy_versions[position] if position < len(one.policy_versions) else 0
            ages.append(max(0, trained_version - version) if trained_version is not None else 0)
            found.append((abs(ours - theirs), number, position))
        ends.append(len(training))
        is_complete.append(_has_ended(one))
        candidates += sorted(found, reverse=True)[:NUM_WORST]
    return GroupTokens(
        step=group.step,
        environment=group.environment,
        training=training,
        inference=inference,
        positions=positions,
        ages=ages if trained_version is not None else None,
        ends=tuple(ends),
        is_complete=tuple(is_complete),
        num_without=num_without,
        num_untrained=num_untrained,
        worst=_worst_tokens(group, sorted(candidates, reverse=True), trained_version),
    )


def _has_ended(one: SampledCompletion) -> bool:
    """Whether the last token that both sides scored is the one that ended the completion."""
    last = len(one.token_ids) - 1
    if one.is_truncated or not 0 <= last < min(len(one.training_logprobs), len(one.inference_logprobs)):
        return False
    return _is_number(one.training_logprobs[last]) and one.inference_logprobs[last] <= NO_LOGPROB


def _is_number(logprob: float) -> bool:
    return abs(logprob) <= LARGEST_NUMBER  # NaN is not; no float holds the square of any number


def _worst_tokens(
    group: RolloutLine, candidates: Sequence[tuple[float, int, int]], trained_version: int | None
) -> tuple[WorstToken, ...]:
    """The first of the candidates, those that stand after the same text as one."""
    worst: dict[tuple[int, ...], WorstToken] = {}
    for _, number, position in candidates:
        same = tuple(group.completions[number].token_ids[: position + 1])
        if same in worst:
            worst[same] = replace(worst[same], num=worst[same].num + 1)
        elif len(worst) < NUM_WORST:
            worst[same] = _worst_token(group, number, position, trained_version)
    return tuple(worst.values())


def _worst_token(group: RolloutLine, number: int, position: int, trained_version: int | None) -> WorstToken:
    one = group.completions[number]
    texts = one.token_texts if len(one.token_texts) == len(one.token_ids) else [f"#{token}" for token in one.token_ids]
    joint = "" if texts is one.token_texts else " "
    before = joint.join(texts[max(0, position - CONTEXT_TOKENS) : position])
    if position < CONTEXT_TOKENS:
        before = group.prompt[-CONTEXT_CHARACTERS:] + joint + before
    version = one.policy_versions[position] if position < len(one.policy_versions) else None
    is_aged = trained_version is not None and version is not None
    return WorstToken(
        step=group.step,
        environment=group.environment,
        completion=number + 1,
        position=position,
        length=len(one.token_ids),
        token_id=one.token_ids[position] if position < len(one.token_ids) else -1,
        text=texts[position] if position < len(texts) else "?",
        before=before[-CONTEXT_CHARACTERS:],
        after=joint.join(texts[position + 1 : position + 1 + CONTEXT_TOKENS])[:CONTEXT_CHARACTERS],
        inference=one.inference_logprobs[position],
        training=one.training_logprobs[position],
        age=max(0, (trained_version or 0) - (version or 0)) if is_aged else None,
    )


MIN_FRESH = 30
"""Tokens of age 0 from which they alone are judged."""


def alignment_numbers(groups: Sequence[GroupTokens]) -> AlignmentNumbers | None:
    """What these groups say together; None where no token of theirs has both log-probabilities."""
    tokens = _joined(groups)
    if not tokens.differences:
        return None
    has_ages = all(group.ages is not None for group in groups)
    fresh = [place for place, age in enumerate(tokens.ages) if age == 0] if has_ages else range(len(tokens.differences))
    judged = fresh if len(fresh) >= MIN_FRESH else range(len(tokens.differences))
    steps = [group.step for group in groups]
    by_step: dict[int, list[float]] = {}
    age_last_steps: dict[int, int] = {}
    for group in groups:
        for age in set(group.ages or ()):
            age_last_steps[age] = max(group.step, age_last_steps.get(age, group.step))
        by_step.setdefault(group.step, []).extend(map(_minus, group.training, group.inference))
    return AlignmentNumbers(
        num_groups=len(groups),
        num_completions=sum(len(group.ends) for group in groups),
        num_untrained=sum(group.num_untrained for group in groups),
        num_without=sum(group.num_without for group in groups),
        first_step=min(steps),
        last_step=max(steps),
        all=_certain_part(tokens.differences),
        differences=array("d", sorted(tokens.differences)),
        magnitudes=array("d", sorted(map(abs, tokens.differences))),
        sequence_differences=array("d", sorted(tokens.sequence_means)),
        firsts=_part(tokens.differences[place] for place in tokens.firsts),
        ends=_part(tokens.differences[place] for place in tokens.ends),
        inner=_part(
            difference
            for place, difference in enumerate(tokens.differences)
            if place not in tokens.firsts and place not in tokens.ends
        ),
        by_position=_by_position(tokens),
        by_age=_by_number(zip(tokens.ages, tokens.differences, strict=True)) if has_ages else (),
        age_last_steps=age_last_steps,
        by_step=tuple(
            PartAt(low=step, high=step, part=_certain_part(values))
            for step, values in sorted(by_step.items())
            if values
        ),
        fresh=_part(tokens.differences[place] for place in fresh),
        line=_line([tokens.inference[place] for place in judged], [tokens.training[place] for place in judged]),
        shift=_shift(groups),
        num_contradicted=sum(map(_is_contradicted, tokens.training, tokens.inference)),
        num_inference_certain=sum(1 for value in tokens.inference if value == 0),
        worst=tuple(
            sorted((one for group in groups for one in group.worst), key=lambda one: -abs(one.difference))[:NUM_WORST]
        ),
    )


def quantile(rising: Sequence[float], share: float) -> float:
    """The value that `share` of the values do not exceed; 0 of none."""
    if not rising:
        return 0.0
    return rising[min(len(rising) - 1, max(0, math.ceil(share * len(rising)) - 1))]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tokens:
    """The columns of several groups one after the other."""

    training: array[float]
    inference: array[float]
    differences: array[float]
    positions: array[int]
    ages: array[int]
    firsts: frozenset[int]
    ends: frozenset[int]
    sequence_means: list[float]


def _joined(groups: Sequence[GroupTokens]) -> _Tokens:
    training, inference, positions, ages = array("d"), array("d"), array("l"), array("l")
    firsts: set[int] = set()
    ends: set[int] = set()
    means: list[float] = []
    for group in groups:
        offset, start = len(training), 0
        for end, is_complete in zip(group.ends, group.is_complete, strict=True):
            if end == start:
                continue
            if group.positions[start] == 0:
                firsts.add(offset + start)
            if is_complete:
                ends.add(offset + end - 1)
            span = slice(start, end)
            means.append(math.fsum(map(_minus, group.training[span], group.inference[span])) / (end - start))
            start = end
        training += group.training
        inference += group.inference
        positions += group.positions
        ages += group.ages if group.ages is not None else array("l", bytes(8 * len(group.training)))
    return _Tokens(
        training=training,
        inference=inference,
        differences=array("d", map(_minus, training, inference)),
        positions=positions,
        ages=ages,
        firsts=frozenset(firsts),
        ends=frozenset(ends),
        sequence_means=means,
    )


def _by_position(tokens: _Tokens, num_buckets: int = 16) -> tuple[PartAt, ...]:
    """Equal stretches of positions, as many as there are up to `num_buckets`; ends of completions are left out.

    An end token stands at every position, and would be taken for an effect of where it stands.
    """
    longest = max(tokens.positions) + 1
    width = -(-longest // num_buckets)
    values: dict[int, list[float]] = {}
    for place, (position, difference) in enumerate(zip(tokens.positions, tokens.differences, strict=True)):
        if place not in tokens.ends:
            values.setdefault(position // width, []).append(difference)
    return tuple(
        PartAt(low=bucket * width, high=min(longest, (bucket + 1) * width) - 1, part=_certain_part(found))
        for bucket, found in sorted(values.items())
    )


def _by_number(pairs: Iterable[tuple[int, float]]) -> tuple[PartAt, ...]:
    values: dict[int, list[float]] = {}
    for number, difference in pairs:
        values.setdefault(number, []).append(difference)
    return tuple(PartAt(low=number, high=number, part=_certain_part(found)) for number, found in sorted(values.items()))


MIN_VARIANCE = 0.01
"""Of inference's log-probabilities, in nats²: below it no slope is measured, only noise."""


def _line(inference: Sequence[float], training: Sequence[float]) -> Line | None:
    """The reduced major axis: noise on either side does not flatten it, as it does a regression."""
    num = len(inference)
    if num < 2:
        return None
    middle_x, middle_y = math.fsum(inference) / num, math.fsum(training) / num
    variance_x = math.fsum((x - middle_x) ** 2 for x in inference) / num
    variance_y = math.fsum((y - middle_y) ** 2 for y in training) / num
    if variance_x < MIN_VARIANCE or variance_y == 0:
        return None
    both = math.fsum((x - middle_x) * (y - middle_y) for x, y in zip(inference, training, strict=True)) / num
    return Line(
        num=num, slope=math.sqrt(variance_y / variance_x), correlation=both / math.sqrt(variance_x * variance_y)
    )


def _shift(groups: Sequence[GroupTokens]) -> Shift | None:
    apart: list[float] = []
    later: list[float] = []
    earlier: list[float] = []
    for group in groups:
        start = 0
        for end in group.ends:
            for place in range(start, end - 1):
                apart.append(abs(group.training[place] - group.inference[place]))
                later.append(abs(group.training[place + 1] - group.inference[place]))
                earlier.append(abs(group.training[place] - group.inference[place + 1]))
            start = end
    if not apart:
        return None
    num = len(apart)
    return Shift(apart=math.fsum(apart) / num, later=math.fsum(later) / num, earlier=math.fsum(earlier) / num)


def _is_contradicted(training: float, inference: float) -> bool:
    return min(training, inference) < SURPRISED and max(training, inference) > SURE


def _minus(left: float, right: float) -> float:
    return left - right


def _certain_part(differences: Sequence[float]) -> Part:
    num = len(differences)
    return Part(num=num, mean=math.fsum(differences) / num, abs_mean=math.fsum(map(abs, differences)) / num)


def _part(differences: Iterable[float]) -> Part | None:
    values = list(differences)
    return _certain_part(values) if values else None
