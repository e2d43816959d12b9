"""The policy, as the environment's settings ask it: one question at once for several completions, or turn by turn."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_engine.environments.config import EnvironmentConfig
from grpo_engine.environments.groups import Completions, Conversation
from grpo_engine.environments.peers import InferenceServer
from grpo_engine.environments.prompts import Tokenizer, following_tokens, prompt_tokens
from grpo_engine.errors import DataError
from grpo_engine.wire.inference import GenerateRequest, TokenPrompt

_MAX_ASKED_IN_VAIN = 1000
"""Turns of a seat without room, after which the task is taken for one that never ends."""


class PromptTooLong(DataError):
    """A first prompt leaves no room for a completion: its item is left out."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(f"a prompt of {num_tokens} tokens leaves no room for a completion")
        self.num_tokens = num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The model behind the inference server, and the way to ask it."""

    config: EnvironmentConfig
    tokenizer: Tokenizer
    inference: InferenceServer
    temperature: float
    longest: int
    """Tokens of a whole sequence at most."""

    async def complete(self, prompt: list[int], count: int) -> Completions:
        """`count` completions of a prompt, each of at most `max_tokens` and within `longest`.

        Raises:
            PromptTooLong: there is no room for any.
        """
        config, room = self.config, self.longest - len(prompt)
        if room < 1:
            raise PromptTooLong(len(prompt))
        return await self.inference.generate(
            GenerateRequest(
                prompt=TokenPrompt(prompt_token_ids=prompt),
                n=count,
                max_tokens=min(config.max_tokens, room),
                temperature=self.temperature,
                top_p=config.top_p,
                stop=list(config.stop) or None,
                logprobs=0,
            )
        )


class PolicySeat:
    """A seat at which the policy plays; its conversation only ever grows, so that servers find its start in a cache."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.conversation = Conversation()
        self.has_room = True
        self._num_in_vain = 0

    async def ask(self, text: str) -> str:
        """See `Seat`; one question at a time.

        Raises:
            PromptTooLong: not even the first question leaves room for an answer.
            DataError: the game goes on and on without anything that this seat could say.
        """
        config, tokenizer, said = self._policy.config, self._policy.tokenizer, self.conversation.tokens
        if not said:
            told = prompt_tokens(config, tokenizer, text)
        else:
            told = following_tokens(config, tokenizer, text)
            told = told[1:] if said[-1] == told[0] else told  # the end token, where the answer has sampled it
            self.has_room = self.has_room and len(said) + len(told) < self._policy.longest
        if not self.has_room:
            self._be_silent()
            return ""
        answer = await self._policy.complete([*said, *told], 1)
        self.conversation.read(told)
        self.conversation.say(answer)
        return answer.text[0]

    def _be_silent(self) -> None:
        self.conversation.is_truncated = True
        self._num_in_vain += 1
        if self._num_in_vain > _MAX_ASKED_IN_VAIN:
            raise DataError(
                f"task {self._policy.config.task.label()}: asked a seat {_MAX_ASKED_IN_VAIN} times that has no room "
                f"within {self._policy.longest} tokens: let play() end when no seat has_room"
            )
