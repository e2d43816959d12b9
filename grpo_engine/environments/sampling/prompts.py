"""Prompt tokens: of the first question, and of the text that follows an answer.

A conversation is never tokenized again: sampled tokens stay, and new ones are appended. So only the text that a chat
template puts after an answer is needed; `following_tokens` cuts it out of a conversation with a placeholder answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

from grpo_engine.environments.config import EnvironmentConfig
from grpo_engine.environments.tasks.multi_turn import MultiTurnTask
from grpo_engine.errors import ConfigError

_QUESTION, _ANSWER = "question", "answer-of-the-model"
"""Placeholders in a conversation of which only the part after the answer is used."""


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that prompts need."""

    chat_template: Any

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> Any:
        """Tokens of a conversation, or its text."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokens of a text."""

    def get_vocab(self) -> Mapping[str, int]:
        """The ids of all tokens by their texts."""

    def __hash__(self) -> int:
        """By identity."""


def check_template(config: EnvironmentConfig, tokenizer: Tokenizer) -> None:
    """Check that the tokenizer supports the configured prompts.

    Raises:
        ConfigError: chat_template is set and the tokenizer has none, or none for several turns; or a system prompt
            without chat_template.
    """
    if config.chat_template and not tokenizer.chat_template:
        raise ConfigError(
            f"model_name: the tokenizer of {config.model_name!r} has no chat template: "
            "set chat_template = false (--no-chat-template) for plain text"
        )
    if config.system_prompt and not config.chat_template:
        raise ConfigError("system_prompt: has no effect in plain text: set chat_template = true, or remove it")
    if config.chat_template and isinstance(config.task, MultiTurnTask):
        _check_turns(config, tokenizer)


def least_tokens(tokenizer: Tokenizer, text: str) -> int:
    """Fewer tokens than a text can have, without encoding it, which takes 400 bytes and some µs a character.

    Data sets are work of others: a question of 16 MB held its environment for a minute and took 6.8 GB.
    """
    return len(text) // _longest_token(tokenizer)


@lru_cache(maxsize=4)
def _longest_token(tokenizer: Tokenizer) -> int:
    return max(map(len, tokenizer.get_vocab()))


def prompt_tokens(
    config: EnvironmentConfig, tokenizer: Tokenizer, question: str, before: Sequence[tuple[str, str]] = ()
) -> list[int]:
    """Tokens of a question, up to the start of the completion, after the messages `before` it.

    Raises:
        ConfigError: there are such messages, and no chat template.
    """
    if config.chat_template:
        return chat_tokens(tokenizer, _conversation(config, question, before=before))
    if before:
        raise ConfigError(
            f"chat_template: is false, and a prompt has {len(before)} messages before its question: set it to true, or "
            "give prompts as text"
        )
    return [int(token) for token in tokenizer.encode(question)]


def following_tokens(config: EnvironmentConfig, tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of the environment's text after an answer, from the end of that answer to the start of the next.

    In ChatML they are `<|im_end|>\\n<|im_start|>user\\n⟨text⟩<|im_end|>\\n<|im_start|>assistant\\n`. They
    include the end token, which most answers have sampled already: drop it then.
    """
    if not config.chat_template:
        return [int(token) for token in tokenizer.encode("\n" + text, add_special_tokens=False)]
    rendered = _rendered(tokenizer, _conversation(config, _QUESTION, _ANSWER, text))
    return [int(token) for token in tokenizer.encode(rendered.partition(_ANSWER)[2], add_special_tokens=False)]


def chat_tokens(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> list[int]:
    """Tokens of a conversation, up to the start of the assistant's message."""
    # transformers 5 returns a mapping unless return_dict=False, and some remote tokenizers always do.
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    tokens: Sequence[int] = encoded["input_ids"] if isinstance(encoded, Mapping) else encoded
    return [int(token) for token in tokens]


def room_for_completion(config: EnvironmentConfig, trainer_limit: int) -> int:
    """Longest prompt and completion together, in tokens; `trainer_limit` is the trainer's, or at most 0 for none."""
    # Stock clients drop a sequence whose length equals the trainer's limit.
    return min(config.max_token_length, trainer_limit - 1) if trainer_limit > 0 else config.max_token_length


def _conversation(
    config: EnvironmentConfig, *turns: str, before: Sequence[tuple[str, str]] = ()
) -> list[dict[str, str]]:
    """Messages of user and assistant in turn, after those `before` and the system prompt, if any."""
    messages = [{"role": role, "content": content} for role, content in before]
    if config.system_prompt and not (before and before[0][0] == "system"):
        messages.insert(0, {"role": "system", "content": config.system_prompt})
    for number, text in enumerate(turns):
        messages.append({"role": "assistant" if number % 2 else "user", "content": text})
    return messages


def _rendered(tokenizer: Tokenizer, messages: list[dict[str, str]], *, opens_answer: bool = True) -> str:
    return str(tokenizer.apply_chat_template(messages, add_generation_prompt=opens_answer, tokenize=False))


def _check_turns(config: EnvironmentConfig, tokenizer: Tokenizer) -> None:
    """Check that the chat template renders earlier turns unchanged when a conversation grows.

    Raises:
        ConfigError: it refuses several turns, omits text, or changes earlier turns.
    """
    where = f"task {config.task.label()} has several turns, but the chat template of {config.model_name!r}"
    instead = "use another model, or chat_template = false (--no-chat-template)"
    more = "another-question"
    try:
        opening = _rendered(tokenizer, _conversation(config, _QUESTION), opens_answer=False)
        two = _rendered(tokenizer, _conversation(config, _QUESTION, _ANSWER, more))
        three = _rendered(tokenizer, _conversation(config, _QUESTION, _ANSWER, more, _ANSWER, more))
    # Templates are programs: they raise Jinja's errors and others.
    except Exception as error:
        raise ConfigError(f"{where} refuses them ({error}): {instead}") from error
    after_one, after_two = two.partition(_ANSWER)[2], three.rpartition(_ANSWER)[2]
    if more not in after_one:
        raise ConfigError(f"{where} omits the text after an answer: {instead}")
    if not two.startswith(opening) or after_one != after_two:
        raise ConfigError(
            f"{where} changes earlier turns when another is added, so sampled tokens would change: {instead}"
        )
