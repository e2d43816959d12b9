"""Requests to the policy with the environment's sampling settings: several completions of a prompt, or turn by turn."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from grpo_engine.environments.config import EnvironmentConfig
from grpo_engine.environments.inference_servers import InferenceServers, Session
from grpo_engine.environments.sampling.groups import Completions, Conversation
from grpo_engine.environments.sampling.prompts import Tokenizer, following_tokens, least_tokens, prompt_tokens
from grpo_engine.errors import DataError
from grpo_engine.wire.inference import GenerateRequest, TokenPrompt

_MAX_SKIPPED_TURNS = 1000
"""Skipped turns of a seat without room, after which the task counts as endless."""


class PromptTooLong(DataError):
    """The first prompt leaves no room for a completion; its item is skipped."""

    def __init__(self, num_tokens: int) -> None:
        """
        Args:
            num_tokens: of the prompt; of one that is not encoded, fewer than it has.
        """
        super().__init__(f"a prompt of at least {num_tokens} tokens leaves no room for a completion")
        self.num_tokens = num_tokens


class Inference(Protocol):
    """What samples from a policy: inference servers, or engines in this process."""

    async def generate(self, request: GenerateRequest, session: Session | None = None) -> Completions:
        """Sample completions of one prompt.

        Args:
            session: of the conversation that the prompt goes on with.

        Raises:
            GrpoError: the request is refused.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The model behind an `Inference`, with sampling settings."""

    config: EnvironmentConfig
    tokenizer: Tokenizer
    inference: Inference
    temperature: float
    longest: int
    """Longest sequence in tokens."""
    seeds: str | None = None
    """What seeds of requests are made from, besides the place of each; None: they have none."""

    def first_prompt(self, text: str, before: Sequence[tuple[str, str]] = ()) -> list[int]:
        """Tokens of the first question of a conversation, after the messages `before` it.

        Raises:
            PromptTooLong: it is longer than the longest tokens that fit.
        """
        texts = (text, *(content for _, content in before))
        num_tokens = len(before) + sum(least_tokens(self.tokenizer, each) for each in texts)  # a role has one too
        if num_tokens >= self.longest:
            raise PromptTooLong(num_tokens)
        return prompt_tokens(self.config, self.tokenizer, text, before)

    async def complete(
        self, prompt: list[int], count: int, session: Session | None = None, *, place: str = ""
    ) -> Completions:
        """`count` completions of a prompt, each of at most `max_tokens` and within `longest`.

        Args:
            session: of the conversation that the prompt goes on with.
            place: game, seat and turn, if it is a turn of a game.

        Raises:
            PromptTooLong: there is no room for a completion.
        """
        config, room = self.config, self.longest - len(prompt)
        if room < 1:
            raise PromptTooLong(len(prompt))
        request = GenerateRequest(
            prompt=TokenPrompt(prompt_token_ids=prompt),
            n=count,
            max_tokens=min(config.max_tokens, room),
            temperature=self.temperature,
            top_p=config.top_p,
            stop=list(config.stop) or None,
            logprobs=0,
        )
        if self.seeds is not None:
            request = request.model_copy(update={"seed": random.Random(f"{self.seeds}/{place}").getrandbits(62)})
        if config.interrupt:  # only where it is set, because stock servers do not know it
            request = request.model_copy(update={"interrupt": True})
        return await self.inference.generate(request, session)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opponent:
    """Another policy, which plays the other seats of a game."""

    tokenizer: Tokenizer
    inference: InferenceServers

    def as_policy(
        self, config: EnvironmentConfig, temperature: float, longest: int, seeds: str | None = None
    ) -> Policy:
        """It with the sampling settings of the trained policy."""
        return Policy(
            config=config,
            tokenizer=self.tokenizer,
            inference=self.inference,
            temperature=temperature,
            longest=longest,
            seeds=None if seeds is None else f"{seeds}/opponent",
        )


class PolicySeat:
    """A seat that the policy plays; its conversation only grows, so that the server's prefix cache applies."""

    def __init__(self, policy: Policy, place: str = "") -> None:
        """
        Args:
            place: game and seat, if there are several.
        """
        self._policy = policy
        self._place = place
        self._num_turns = 0
        self._session = Session()
        self.conversation = Conversation()
        self.has_room = True
        self._num_skipped = 0

    async def ask(self, text: str) -> str:
        """See `Seat`; one call at a time.

        Raises:
            PromptTooLong: the first text leaves no room for an answer.
            DataError: the game keeps asking a seat that has no room.
        """
        config, tokenizer, previous = self._policy.config, self._policy.tokenizer, self.conversation.tokens
        if not previous:
            new = self._policy.first_prompt(text)
        else:
            self.has_room = self.has_room and least_tokens(tokenizer, text) < self._policy.longest
            new = following_tokens(config, tokenizer, text if self.has_room else "")
            new = new[1:] if previous[-1] == new[0] else new  # the end token, if the answer sampled it
            self.has_room = self.has_room and len(previous) + len(new) < self._policy.longest
        if not self.has_room:
            self._skip_turn()
            return ""
        place = f"{self._place}/{self._num_turns}"
        answer = await self._policy.complete([*previous, *new], 1, self._session, place=place)
        self._num_turns += 1
        self.conversation.add_prompt(new)
        self.conversation.add_completion(answer)
        return answer.text[0]

    def _skip_turn(self) -> None:
        self.conversation.is_truncated = True
        self._num_skipped += 1
        if self._num_skipped > _MAX_SKIPPED_TURNS:
            raise DataError(
                f"task {self._policy.config.task.label()}: asked a seat {_MAX_SKIPPED_TURNS} times that has no room "
                f"within {self._policy.longest} tokens: let play() end when no seat has_room"
            )
