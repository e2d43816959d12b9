"""Prompts, alike for every engine: text to tokens and back, chat templates, and what a request may ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_engine.errors import DataError
from grpo_engine.wire.inference import GenerateRequest

MAX_COMPLETIONS = 4096
"""Of one prompt; several times the largest groups that are trained on."""


class PromptCodec:
    """A model's tokenizer as the routes use it."""

    def __init__(self, model_name: str, tokenizer: Any) -> None:
        self._model_name = model_name
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """Tokens of a text prompt, with the model's own opening token."""
        return list(self._tokenizer.encode(text))

    def decode(self, token_ids: list[int]) -> str:
        """Text of tokens, special tokens included."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))

    def render_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Tokens of a conversation up to where the assistant's answer begins.

        Raises:
            DataError: the model has no chat template.
        """
        if not getattr(self._tokenizer, "chat_template", None):
            raise DataError(f"{self._model_name} has no chat template: use /v1/completions or /generate")
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def check_num_completions(n: int) -> None:
    """Refuse a request for more completions than could ever be a group.

    Raises:
        DataError: `n` is too large.
    """
    if n > MAX_COMPLETIONS:
        raise DataError(f"n: {n} completions of one prompt; at most {MAX_COMPLETIONS} are made: send several requests")


def max_new_tokens(prompt: Sequence[int], params: GenerateRequest, *, max_model_len: int, vocabulary: int) -> int:
    """How many tokens may follow the prompt.

    Raises:
        DataError: the prompt leaves no room, or the request names tokens that the model does not have.
    """
    check_num_completions(params.n)
    if not prompt:
        raise DataError("prompt: no tokens; a model needs at least one")
    if len(prompt) >= max_model_len:
        raise DataError(
            f"prompt: {len(prompt)} tokens leave no room below --max-model-len {max_model_len}; shorten the prompt"
        )
    if (foreign := next((t for t in prompt if not 0 <= t < vocabulary), None)) is not None:
        raise DataError(f"prompt: token {foreign} is not in the vocabulary of {vocabulary}: another tokenizer?")
    if max(params.logprobs or 0, params.prompt_logprobs or 0) > vocabulary:
        raise DataError(f"logprobs: more than the vocabulary of {vocabulary}")
    if (foreign := next((t for t in params.stop_token_ids or () if not 0 <= t < vocabulary), None)) is not None:
        raise DataError(f"stop_token_ids: {foreign} is not in the vocabulary of {vocabulary}")
    return min(params.max_tokens, max_model_len - len(prompt))
