"""Conversations as token sequences, and the scored group made of them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from grpo_engine.errors import PeerError
from grpo_engine.wire.inference import GenerateResponse, LogprobsMode
from grpo_engine.wire.rollouts import LARGEST_NUMBER, LARGEST_WHOLE, MASKED_LABEL, MASKED_LOGPROB, ScoredGroup, Whole


class NotFinite(PeerError):
    """A sampled token has no finite log-probability (float32), as of a model whose weights or activations overflow."""


class Completions(GenerateResponse):
    """Answer of `/generate`; stock servers send neither version nor logprobs_mode, and theirs is `raw`."""

    logprobs: list[list[list[dict[str, float]]]] | None = None
    """Finite where `check_completions` accepts them."""
    policy_version: Annotated[Whole, Field(ge=0)] | None = None  # type: ignore[assignment]
    logprobs_mode: LogprobsMode = "raw"


@dataclass(slots=True, kw_only=True)
class Conversation:
    """One sequence: prompt and sampled tokens in turn, exactly as they were sent and received.

    Example, one turn: `add_prompt([5, 9])`, then a completion of `7` and the end token 2, become `tokens [5, 9, 7, 2]`,
    `labels [-100, -100, 7, 2]`, `logprobs [1.0, 1.0, -0.3, -0.01]`, `versions [0, 0, 4, 4]`. T tokens in all.
    """

    tokens: list[int] = field(default_factory=list)
    """(T,)"""
    labels: list[int] = field(default_factory=list)
    """(T,) the token itself where it was sampled, and so is trained; -100 in prompts."""
    logprobs: list[float] = field(default_factory=list)
    """(T,) 1.0 in prompts."""
    versions: list[int] = field(default_factory=list)
    """(T,) policy version that sampled each token; 0 in prompts."""
    has_versions: bool = True
    """Whether the server sent a version for every completion."""
    is_truncated: bool = False
    """Whether the last completion ended at its length limit, or a turn was skipped because no room was left."""
    logprobs_mode: LogprobsMode = "raw"

    @property
    def num_sampled(self) -> int:
        """Number of trained tokens."""
        return len(self.labels) - self.labels.count(MASKED_LABEL)

    @property
    def sampled_tokens(self) -> list[int]:
        """(T',) the trained tokens."""
        return [label for label in self.labels if label != MASKED_LABEL]

    @property
    def sampled_versions(self) -> list[int]:
        """(T',) of the trained tokens."""
        return [version for version, label in zip(self.versions, self.labels, strict=True) if label != MASKED_LABEL]

    def add_prompt(self, tokens: Sequence[int]) -> None:
        """Append prompt tokens."""
        self.tokens += tokens
        self.labels += [MASKED_LABEL] * len(tokens)
        self.logprobs += [MASKED_LOGPROB] * len(tokens)
        self.versions += [0] * len(tokens)

    def add_completion(self, completions: Completions, index: int = 0) -> None:
        """Append one completion of an answer, its end token included; never one that was cut off.

        Raises:
            PeerError: the answer has no log-probabilities, or they do not match the tokens.
        """
        assert completions.finish_reasons[index] != ABORTED
        tokens, logprobs = tokens_and_logprobs(completions, index)
        versions = None if completions.policy_versions is None else completions.policy_versions[index]
        if versions is None and completions.policy_version is not None:
            versions = [completions.policy_version] * len(tokens)
        self.tokens += tokens
        self.labels += tokens
        self.logprobs += logprobs
        self.versions += [0] * len(tokens) if versions is None else versions
        self.has_versions &= versions is not None
        self.is_truncated = completions.finish_reasons[index] == "length"
        self.logprobs_mode = completions.logprobs_mode


def scored_group(conversations: Sequence[Conversation], rewards: Sequence[float], *, temperature: float) -> ScoredGroup:
    """The group of conversations with the same first prompt: prompts are masked, sampled tokens are trained."""
    return ScoredGroup(
        tokens=[each.tokens for each in conversations],
        masks=[each.labels for each in conversations],
        scores=list(rewards),
        inference_logprobs=[each.logprobs for each in conversations],
        policy_versions=(
            [each.versions for each in conversations] if all(each.has_versions for each in conversations) else None
        ),
        truncated=[each.is_truncated for each in conversations],
        generation_params={"temperature": temperature, "logprobs_mode": conversations[0].logprobs_mode},
    )


def check_completions(completions: Completions, count: int, server: str) -> None:
    """Check that an answer is complete: it is valid JSON of the right types, but its lists may not fit each other.

    Of completions that the server has cut off nothing is asked: they are not used.

    Raises:
        PeerError: it has another number of completions, or one of them is malformed; the message names the server.
        NotFinite: a log-probability is not finite.
    """
    lists = {name: getattr(completions, name) for name in _PER_COMPLETION}
    for name, entries in lists.items():
        if entries is not None and len(entries) != count:
            raise PeerError(f"{server}: /generate answered {len(entries)} {name} to a request for {count} completions")
    for index, reason in enumerate(completions.finish_reasons):
        if reason == ABORTED:
            continue
        tokens, _ = tokens_and_logprobs(completions, index, server)
        versions = None if completions.policy_versions is None else completions.policy_versions[index]
        if versions is not None and (
            len(versions) != len(tokens) or not all(0 <= each <= LARGEST_WHOLE for each in versions)
        ):
            raise PeerError(
                f"{server}: the {len(tokens)} tokens of completion {index} need a policy version each, from 0 up; it "
                f"has {len(versions)}"
            )


def finished(completions: Completions) -> Completions:
    """The completions of a checked answer that the server has not cut off; there may be none."""
    kept = [index for index, reason in enumerate(completions.finish_reasons) if reason != ABORTED]
    lists = _lists(completions)
    return completions.model_copy(
        update={name: each and [each[index] for index in kept] for name, each in lists.items()}
    )


def joined(one: Completions, other: Completions) -> Completions:
    """The completions of two checked answers to one prompt."""
    first, second = _lists(one), _lists(other)
    update = {
        name: None if entries is None or second[name] is None else [*entries, *second[name]]
        for name, entries in first.items()
    }
    return other.model_copy(update=update)


def _lists(completions: Completions) -> dict[str, Any]:
    """The lists of a checked answer; the version of an answer that has but one is that of each of its tokens."""
    lists = {name: getattr(completions, name) for name in _PER_COMPLETION}
    if completions.policy_versions is None and completions.policy_version is not None:
        lists["policy_versions"] = [[completions.policy_version] * len(each) for each in completions.logprobs or ()]
    return lists


ABORTED: Literal["abort"] = "abort"
"""Finish reason of what the server has cut off."""
_PER_COMPLETION = ("text", "finish_reasons", "logprobs", "token_ids", "policy_versions")
"""Lists of an answer with an entry for each completion; the last three may be absent."""


def tokens_and_logprobs(
    completions: Completions, index: int, server: str = "inference server"
) -> tuple[list[int], list[float]]:
    """Tokens of one completion and the log-probability of each.

    Raises:
        PeerError: there are no log-probabilities, not one per token, or one is of no token.
        NotFinite: one is not finite, or no float32: the rollout API would refuse the group.
    """
    if completions.logprobs is None or index >= len(completions.logprobs):
        raise PeerError(f"{server}: /generate answered without logprobs, though the request has logprobs: 0")
    tokens: list[int] = []
    logprobs: list[float] = []
    for position in completions.logprobs[index]:
        token, logprob = next(iter(position[0].items()), ("", 0.0)) if position else ("", 0.0)
        if not (token.isascii() and token.isdigit() and len(token) <= _MOST_DIGITS):
            raise PeerError(
                f"{server}: completion {index}, token {len(tokens)}: its log-probability is of {token[:20]!r}, which "
                "is no token id"
            )
        if not abs(logprob) <= LARGEST_NUMBER:  # nor is NaN
            raise NotFinite(
                f"{server}: completion {index}, token {len(tokens)}: its log-probability is {logprob}, so the model "
                "overflows: look at the trainer's loss, and at the dtype of the server"
            )
        tokens.append(int(token))
        logprobs.append(logprob)
    if completions.token_ids is not None and completions.token_ids[index] != tokens:
        raise PeerError(
            f"{server}: completion {index} has {len(completions.token_ids[index])} token_ids, which differ "
            f"from the tokens of its {len(tokens)} log-probabilities"
        )
    if not tokens:
        raise PeerError(f"{server}: completion {index} is empty")
    return tokens, logprobs


_MOST_DIGITS = 9
"""Of a token id."""
