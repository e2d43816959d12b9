"""Bodies of `/generate` answers, in the stock server's shape.

Plain dictionaries rather than `wire.inference.GenerateResponse`: a batch has thousands of one-entry dictionaries, and
validating each costs more than sampling it. The tests hold every answer against the wire type.
"""

from __future__ import annotations

import json
from typing import Any

from grpo_engine.server.engine import Completion, Generation
from grpo_engine.wire.inference import GenerateRequest, LogprobsMode


def generate_answer(
    generation: Generation, params: GenerateRequest, *, prompt_text: str, logprobs_mode: LogprobsMode, version: int
) -> bytes:
    """The body of one answer as JSON; `version` stands where nothing was generated."""
    completions = generation.completions
    body: dict[str, Any] = {
        "text": [completion.text for completion in completions],
        "prompt": prompt_text,
        "finish_reasons": [completion.finish_reason for completion in completions],
        "policy_version": max((c.policy_versions[-1] for c in completions if c.policy_versions), default=version),
        "logprobs_mode": logprobs_mode,
    }
    if params.logprobs is not None:
        body["logprobs"] = [logprob_entries(completion) for completion in completions]
        body["prompt_token_ids"] = generation.prompt_token_ids
        body["token_ids"] = [completion.token_ids for completion in completions]
        body["policy_versions"] = [completion.policy_versions for completion in completions]
    if generation.prompt_logprobs is not None:
        body["prompt_logprobs"] = [
            None if entry is None else {str(token): value for token, value in entry}
            for entry in generation.prompt_logprobs
        ]
    return json.dumps(body, allow_nan=False).encode()


def logprob_entries(completion: Completion) -> list[list[dict[str, float]]]:
    """`[position] -> [{"token id": logprob}]`; the sampled token is the first key, whatever its rank."""
    own = zip(completion.token_ids, completion.logprobs, strict=True)
    if completion.top_logprobs is None:
        return [[{str(token): value}] for token, value in own]
    return [
        [{str(token): value} | {str(i): v for i, v in top if i != token}]
        for (token, value), top in zip(own, completion.top_logprobs, strict=True)
    ]
