"""From what was read and said, token by token, to the group that is trained on. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from grpo_engine.errors import PeerError
from grpo_engine.wire.inference import GenerateResponse, LogprobsMode
from grpo_engine.wire.rollouts import MASKED_LABEL, MASKED_LOGPROB, ScoredGroup


class Completions(GenerateResponse):
    """Answer of `/generate`; stock servers name neither version nor convention, and theirs is `raw`."""

    policy_version: int | None = None  # type: ignore[assignment]
    logprobs_mode: LogprobsMode = "raw"


@dataclass(slots=True, kw_only=True)
class Conversation:
    """One sequence: what the policy read and what it said, in turns, in exactly the tokens that went to and fro.

    Example, one turn: `read([5, 9])`, then a completion of `7` and the end token 2, become `tokens [5, 9, 7, 2]`,
    `labels [-100, -100, 7, 2]`, `logprobs [1.0, 1.0, -0.3, -0.01]`, `versions [0, 0, 4, 4]`. T tokens in all.
    """

    tokens: list[int] = field(default_factory=list)
    """(T,)"""
    labels: list[int] = field(default_factory=list)
    """(T,) the token itself where it was sampled, and so is trained; -100 where it was read."""
    logprobs: list[float] = field(default_factory=list)
    """(T,) 1.0 where read."""
    versions: list[int] = field(default_factory=list)
    """(T,) of the policy that sampled each token; 0 where read."""
    has_versions: bool = True
    """Whether the server has said every version."""
    is_truncated: bool = False
    """Whether the last completion ended at its length limit, or none could follow for want of room."""
    logprobs_mode: LogprobsMode = "raw"

    @property
    def num_sampled(self) -> int:
        """Tokens that are trained."""
        return len(self.labels) - self.labels.count(MASKED_LABEL)

    @property
    def sampled_versions(self) -> list[int]:
        """(T',) of the trained tokens."""
        return [version for version, label in zip(self.versions, self.labels, strict=True) if label != MASKED_LABEL]

    def read(self, tokens: Sequence[int]) -> None:
        """Append what the policy is told."""
        self.tokens += tokens
        self.labels += [MASKED_LABEL] * len(tokens)
        self.logprobs += [MASKED_LOGPROB] * len(tokens)
        self.versions += [0] * len(tokens)

    def say(self, completions: Completions, index: int = 0) -> None:
        """Append what the policy says to that: one completion of an answer, its end token included.

        Raises:
            PeerError: the answer lacks log-probabilities, or they do not fit the tokens.
        """
        tokens, logprobs = sampled_tokens(completions, index)
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
    """The group of conversations that began alike: what was read is masked, what was said is trained."""
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


def sampled_tokens(completions: Completions, index: int) -> tuple[list[int], list[float]]:
    """Tokens of one completion and the log-probability of each.

    Raises:
        PeerError: there are no log-probabilities, or not one for each token.
    """
    if completions.logprobs is None or index >= len(completions.logprobs):
        raise PeerError("inference server: /generate answered without logprobs, though logprobs: 0 was asked for")
    tokens: list[int] = []
    logprobs: list[float] = []
    for position in completions.logprobs[index]:
        token, logprob = next(iter(position[0].items()))
        tokens.append(int(token))
        logprobs.append(logprob)
    if completions.token_ids is not None and completions.token_ids[index] != tokens:
        raise PeerError(
            f"inference server: completion {index} has {len(completions.token_ids[index])} tokens, but the first "
            f"log-probability of each of its {len(tokens)} positions belongs to others"
        )
    if not tokens:
        raise PeerError(f"inference server: completion {index} is empty")
    return tokens, logprobs
