"""Prompts of a check as tokens, and the special tokens in a model's files."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import GenerationConfig

from grpo_engine.check.config import CheckConfig
from grpo_engine.check.tokens import SpecialTokens, template_end
from grpo_engine.environments.sampling.prompts import chat_tokens
from grpo_engine.errors import ConfigError
from grpo_engine.models.loading import load_config, resolve_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

QUESTIONS = (
    "What is 17 + 25?",
    "Write one sentence about the sea.",
    "Sort these digits: 402915",
    "Name three colours and why you like them.",
    "Why is the sky blue? Answer in one sentence.",
    "Tell me a word that rhymes with light.",
)
_ANSWER = "Blueberry"
"""Placeholder of an answer, to see what a chat template appends to one."""
_LEAST_ROOM = 8
"""Tokens of an answer that must fit behind a prompt."""

Messages = list[dict[str, str]]

log = logging.getLogger(__name__)


def prompt_tokens(config: CheckConfig, tokenizer: PreTrainedTokenizerBase) -> list[tuple[int, ...]]:
    """Tokens of the questions, as environments would send them, without those that leave no room for an answer.

    Raises:
        ConfigError: the file cannot be read, or none of its questions fits.
    """
    conversations = _conversations(config.prompts_file) if config.prompts_file else [asked(q) for q in QUESTIONS]
    prompts = [
        tuple(chat_tokens(tokenizer, messages))
        if tokenizer.chat_template
        else tuple(tokenizer.encode("\n".join(message["content"] for message in messages)))
        for messages in conversations
    ]
    fitting = [prompt for prompt in dict.fromkeys(prompts) if prompt and len(prompt) + _LEAST_ROOM <= config.seq_len]
    if not fitting:
        shortest = min(map(len, prompts), default=0)
        raise ConfigError(
            f"seq_len: none of {len(prompts)} prompts (the shortest has {shortest} tokens) leaves room for "
            f"{_LEAST_ROOM} more within {config.seq_len}: raise --seq-len, or give shorter --prompts"
        )
    return fitting


def asked(question: str) -> Messages:
    """A conversation of one question."""
    return [{"role": "user", "content": question}]


def special_tokens(model_name: str, tokenizer: PreTrainedTokenizerBase) -> SpecialTokens:
    """The special tokens in a model's files."""
    configured = [load_config(model_name).get_text_config().eos_token_id]
    try:
        configured.append(GenerationConfig.from_pretrained(resolve_model(model_name)).eos_token_id)
    except OSError:
        log.info("%s has no generation_config.json", model_name)
    eos = {int(i) for each in configured for i in (each if isinstance(each, list | tuple) else [each]) if i is not None}
    question = asked(QUESTIONS[0])
    chat: tuple[int, ...] = ()
    text: tuple[int, ...] = ()
    end = None
    if tokenizer.chat_template:
        chat = tuple(chat_tokens(tokenizer, question))
        rendered = str(tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True))
        text = tuple(tokenizer.encode(rendered))
        answered = [*question, {"role": "assistant", "content": _ANSWER}]
        tail = str(tokenizer.apply_chat_template(answered, tokenize=False)).rpartition(_ANSWER)[2]
        added = (token for token, content in tokenizer.added_tokens_decoder.items() if content.special)
        end = template_end(
            tokenizer.encode(tail, add_special_tokens=False), frozenset({*tokenizer.all_special_ids, *added})
        )
    return SpecialTokens(
        tokenizer_eos=tokenizer.eos_token_id,
        generation_eos=tuple(sorted(eos)),
        template_end=end,
        pad=tokenizer.pad_token_id,
        bos=tokenizer.bos_token_id,
        has_template=bool(tokenizer.chat_template),
        chat_prompt=chat,
        text_prompt=text,
    )


def _conversations(path: Path) -> list[Messages]:
    """One a line: plain text, or JSON with `messages`, `prompt` or `question`."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {path}: cannot be read: {error}") from None
    if not lines:
        raise ConfigError(f"--prompts {path}: has no line: write one question a line")
    return [_conversation(line, f"--prompts {path}: line {number}") for number, line in enumerate(lines, start=1)]


def _conversation(line: str, where: str) -> Messages:
    if not line.startswith("{"):
        return asked(line)
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    match row:
        case {"messages": [{"role": str(), "content": str()}, *_] as messages}:
            return [{"role": str(message["role"]), "content": str(message["content"])} for message in messages]
        case {"prompt": str(text)} | {"question": str(text)}:
            return asked(text)
        case _:
            raise ConfigError(f"{where}: has {', '.join(row)}, none of messages, prompt, question")
