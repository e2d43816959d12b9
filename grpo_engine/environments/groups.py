"""From an answer of the inference server and its rewards to the group that is trained on. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_engine.errors import PeerError
from grpo_engine.wire.inference import GenerateResponse, LogprobsMode
from grpo_engine.wire.rollouts import MASKED_LABEL, MASKED_LOGPROB, ScoredGroup


class Completions(GenerateResponse):
    """Answer of `/generate`; stock servers name neither version nor convention, and theirs is `raw`."""

    policy_version: int | None = None  # type: ignore[assignment]
    logprobs_mode: LogprobsMode = "raw"


def scored_group(
    prompt: Sequence[int], completions: Completions, scores: Sequence[float], *, temperature: float
) -> ScoredGroup:
    """The group of one prompt: prompts masked, completions trained up to and including their end token.

    Raises:
        PeerError: the answer lacks log-probabilities, or they do not fit the tokens.
    """
    sampled = [sampled_tokens(completions, index) for index in range(len(scores))]
    versions = completions.policy_versions
    num_masked = len(prompt)
    return ScoredGroup(
        tokens=[[*prompt, *tokens] for tokens, _ in sampled],
        masks=[[*[MASKED_LABEL] * num_masked, *tokens] for tokens, _ in sampled],
        scores=list(scores),
        inference_logprobs=[[*[MASKED_LOGPROB] * num_masked, *logprobs] for _, logprobs in sampled],
        policy_versions=None if versions is None else [[*[0] * num_masked, *row] for row in versions],
        truncated=[reason == "length" for reason in completions.finish_reasons],
        generation_params={"temperature": temperature, "logprobs_mode": completions.logprobs_mode},
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
