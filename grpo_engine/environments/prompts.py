"""From a question to the tokens that the model is asked with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from grpo_engine.environments.config import EnvironmentConfig
from grpo_engine.errors import ConfigError


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that prompts need."""

    chat_template: Any

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> Any:
        """Tokens of a conversation."""

    def encode(self, text: str) -> list[int]:
        """Tokens of a plain text."""


def check_template(config: EnvironmentConfig, tokenizer: Tokenizer) -> None:
    """Refuse to ask a model in a form that it does not have.

    Raises:
        ConfigError: a chat is wanted, and the tokenizer has no template for one; or a system prompt without a chat.
    """
    if config.chat_template and not tokenizer.chat_template:
        raise ConfigError(
            f"model_name: the tokenizer of {config.model_name!r} has no chat template: "
            "set chat_template = false (--no-chat-template) to ask in plain text"
        )
    if config.system_prompt and not config.chat_template:
        raise ConfigError("system_prompt: has no place in plain text: set chat_template = true, or leave it out")


def prompt_tokens(config: EnvironmentConfig, tokenizer: Tokenizer, question: str) -> list[int]:
    """Tokens of a question, up to where the completion begins."""
    if not config.chat_template:
        return [int(token) for token in tokenizer.encode(question)]
    messages = [{"role": "system", "content": config.system_prompt}] if config.system_prompt else []
    messages.append({"role": "user", "content": question})
    return chat_tokens(tokenizer, messages)


def chat_tokens(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> list[int]:
    """Tokens of a conversation, up to where the assistant begins."""
    # transformers 5 answers with a mapping unless told otherwise, and some remote tokenizers whatever they are told.
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    tokens: Sequence[int] = encoded["input_ids"] if isinstance(encoded, Mapping) else encoded
    return [int(token) for token in tokens]


def room_for_completion(config: EnvironmentConfig, trainer_limit: int) -> int:
    """Tokens that prompt and completion may have together; `trainer_limit` is the trainer's, or not above 0."""
    # Stock clients drop a sequence that is as long as the trainer's limit.
    return min(config.max_token_length, trainer_limit - 1) if trainer_limit > 0 else config.max_token_length
