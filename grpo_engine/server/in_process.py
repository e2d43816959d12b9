"""An engine without a server: requests are lists, answers are those of `/generate`, and weights are handed in.

For a trainer that samples in its own processes. Types and functions that both engines share; imports neither torch nor
vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from grpo_engine.bridges.engine import InProcessEngine
from grpo_engine.server.engine import Generation
from grpo_engine.wire.inference import GenerateRequest, TokenPrompt


class SamplingEngine(InProcessEngine, Protocol):
    """An engine in a rank of the trainer, which samples what it is given."""

    def generate(self, requests: Sequence[GenerateRequest], policy_version: int) -> list[Generation]:
        """Complete all prompts, which are tokens; returns when the last one is complete.

        Args:
            policy_version: of the weights, noted on every token.

        Raises:
            DataError: a request is invalid.
            NotANumber: the model computes NaN.
        """


def prompt_of(request: GenerateRequest) -> list[int]:
    """The tokens of a request in a process that has no text prompts."""
    assert isinstance(request.prompt, TokenPrompt)
    return request.prompt.prompt_token_ids
