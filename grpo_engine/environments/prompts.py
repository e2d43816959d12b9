"""From what the environment says to the tokens that the model reads: a first question, and what follows its answers.

A conversation is never turned into tokens anew: the tokens that were sampled stay, and what comes next is appended. So
only the text that a chat template puts after an answer is needed, and `following_tokens` cuts it out of a conversation
with a made-up answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from grpo_engine.environments.config import EnvironmentConfig
from grpo_engine.environments.tasks.multi_turn import MultiTurnTask
from grpo_engine.errors import ConfigError

_QUESTION, _ANSWER = "question", "answer-of-the-model"
"""Stand for any in a conversation of which only what follows the answer is wanted."""


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that prompts need."""

    chat_template: Any

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> Any:
        """Tokens of a conversation, or its text."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokens of a plain text."""


def check_template(config: EnvironmentConfig, tokenizer: Tokenizer) -> None:
    """Refuse to ask a model in a form that it does not have.

    Raises:
        ConfigError: a chat is wanted, and the tokenizer has no template for one, or not for the several turns of the
            task; or a system prompt without a chat.
    """
    if config.chat_template and not tokenizer.chat_template:
        raise ConfigError(
            f"model_name: the tokenizer of {config.model_name!r} has no chat template: "
            "set chat_template = false (--no-chat-template) to ask in plain text"
        )
    if config.system_prompt and not config.chat_template:
        raise ConfigError("system_prompt: has no place in plain text: set chat_template = true, or leave it out")
    if config.chat_template and isinstance(config.task, MultiTurnTask):
        _check_turns(config, tokenizer)


def prompt_tokens(config: EnvironmentConfig, tokenizer: Tokenizer, question: str) -> list[int]:
    """Tokens of a question, up to where the completion begins."""
    if not config.chat_template:
        return [int(token) for token in tokenizer.encode(question)]
    return chat_tokens(tokenizer, _conversation(config, question))


def following_tokens(config: EnvironmentConfig, tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of what the environment says to an answer, from the end of that answer to where the next one begins.

    In ChatML they are `<|im_end|>\\n<|im_start|>user\\n⟨text⟩<|im_end|>\\n<|im_start|>assistant\\n`. The end token is
    among them, though most answers have sampled theirs: leave it out there.
    """
    if not config.chat_template:
        return [int(token) for token in tokenizer.encode("\n" + text, add_special_tokens=False)]
    rendered = _rendered(tokenizer, _conversation(config, _QUESTION, _ANSWER, text))
    return [int(token) for token in tokenizer.encode(rendered.partition(_ANSWER)[2], add_special_tokens=False)]


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


def _conversation(config: EnvironmentConfig, *turns: str) -> list[dict[str, str]]:
    """Messages of user and assistant in turn, after the system prompt if there is one."""
    messages = [{"role": "system", "content": config.system_prompt}] if config.system_prompt else []
    for number, text in enumerate(turns):
        messages.append({"role": "assistant" if number % 2 else "user", "content": text})
    return messages


def _rendered(tokenizer: Tokenizer, messages: list[dict[str, str]], *, opens_answer: bool = True) -> str:
    return str(tokenizer.apply_chat_template(messages, add_generation_prompt=opens_answer, tokenize=False))


def _check_turns(config: EnvironmentConfig, tokenizer: Tokenizer) -> None:
    """Try the chat template on a conversation that grows: what is there already must stay as it is.

    Raises:
        ConfigError: it refuses several turns, leaves something out, or renders earlier turns differently later on.
    """
    where = f"task {config.task.label()} has several turns, but the chat template of {config.model_name!r}"
    instead = "give another model, or chat_template = false (--no-chat-template)"
    more = "another-question"
    try:
        opening = _rendered(tokenizer, _conversation(config, _QUESTION), opens_answer=False)
        two = _rendered(tokenizer, _conversation(config, _QUESTION, _ANSWER, more))
        three = _rendered(tokenizer, _conversation(config, _QUESTION, _ANSWER, more, _ANSWER, more))
    # Templates are programs: they raise Jinja's errors, and whatever else they stumble over.
    except Exception as error:
        raise ConfigError(f"{where} refuses them ({error}): {instead}") from error
    after_one, after_two = two.partition(_ANSWER)[2], three.rpartition(_ANSWER)[2]
    if more not in after_one:
        raise ConfigError(f"{where} leaves out what is said after an answer: {instead}")
    if not two.startswith(opening) or after_one != after_two:
        raise ConfigError(
            f"{where} changes earlier turns when another comes, so that tokens which were sampled would have to "
            f"change: {instead}"
        )
