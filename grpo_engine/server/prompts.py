"""Prompts, alike for every engine: text to tokens and back, chat templates, and what a request may ask for."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jinja2 import TemplateError

from grpo_engine.errors import DataError
from grpo_engine.serving.access import Token, caller
from grpo_engine.wire.inference import GenerateRequest

MAX_COMPLETIONS = 4096
"""Of one prompt; several times the largest groups that are trained on."""
MAX_LOGPROBS = 20
"""At each token, as vLLM's default of this name: those of a whole vocabulary are megabytes."""
MAX_LOGPROBS_WITHOUT_TOKEN = 1 << 19
"""Of all tokens that one request may have sampled, where the server has a token and the request has not. One of 5
million, in 150 bytes, took 1.2 GB, and held the event loop for 6 s while its answer was made."""

MAX_VALUES_WITHOUT_TOKEN, MAX_CHARS_WITHOUT_TOKEN = 1024, 1 << 16
"""Of a list in a request's sampling parameters, and characters of its texts: vLLM encodes words that an answer must not
have on the event loop, and one of 4 MB held it for 8 s."""


class PromptCodec:
    """A model's tokenizer as the routes use it.

    It encodes in a thread of its own: a text of the length that is accepted may take half a second. Requests without
    the token, where the server has one, have another thread, so that those with it do not wait for theirs.
    """

    def __init__(self, model_name: str, tokenizer: Any, *, max_model_len: int) -> None:
        self._model_name = model_name
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._max_chars = max_model_len * max(map(len, tokenizer.get_vocab()))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._thread_without_token = ThreadPoolExecutor(1, thread_name_prefix="tokenizer-without-token")
        self._copy: asyncio.Future[Any] | None = None
        """The tokenizer of that thread, because fast ones must not be used from two at once."""

    async def encode(self, text: str) -> list[int]:
        """Tokens of a text prompt, with the model's own opening token.

        Raises:
            DataError: it is longer than the longest tokens that fit.
        """
        self._check_length(len(text))
        return await self._in_thread(lambda tokenizer: list(tokenizer.encode(text)))

    def decode(self, token_ids: list[int]) -> str:
        """Text of tokens, special tokens included."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))

    async def render_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Tokens of a conversation up to where the assistant's answer begins.

        Raises:
            DataError: the model has no chat template, or one that refuses the conversation, or that is longer than the
                longest tokens that fit.
        """
        if not getattr(self._tokenizer, "chat_template", None):
            raise DataError(f"{self._model_name} has no chat template: use /v1/completions or /generate")
        # Templates add a few characters to each message, and an empty one costs the template time as well.
        self._check_length(sum(1 + len(part) for message in messages for part in message.values()))

        def render(tokenizer: Any) -> list[int]:
            try:
                text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            except TemplateError as error:  # as that of a model without system messages
                raise DataError(f"messages: the chat template of {self._model_name} refuses them: {error}") from None
            return list(tokenizer.encode(text, add_special_tokens=False))

        return await self._in_thread(render)

    def _check_length(self, num_chars: int) -> None:
        if num_chars > self._max_chars:
            raise DataError(
                f"prompt: {num_chars} characters; with --max-model-len {self._max_model_len} at most {self._max_chars} "
                "fit, all in the longest token: shorten the prompt"
            )

    async def _in_thread(self, work: Callable[[Any], list[int]]) -> list[int]:
        loop = asyncio.get_running_loop()
        if caller().token is not Token.WRONG:
            return await loop.run_in_executor(self._thread, work, self._tokenizer)
        if self._copy is None:
            self._copy = loop.run_in_executor(self._thread, copy.deepcopy, self._tokenizer)
        tokenizer = await asyncio.shield(self._copy)
        return await loop.run_in_executor(self._thread_without_token, work, tokenizer)


def check_num_completions(n: int, *, num_prompts: int = 1) -> None:
    """Refuse a request for more completions than could ever be a group.

    Raises:
        DataError: there are too many.
    """
    if n > MAX_COMPLETIONS:
        raise DataError(f"n: {n} completions of one prompt; at most {MAX_COMPLETIONS} are made: send several requests")
    if n * num_prompts > MAX_COMPLETIONS:
        raise DataError(
            f"prompt: {num_prompts} prompts with {n} completions each; at most {MAX_COMPLETIONS} completions are made: "
            "send several requests"
        )


def check_num_logprobs(
    *, n: int, max_tokens: int, logprobs: int | None, num_prompt: int = 0, prompt_logprobs: int | None = None
) -> None:
    """Refuse a request without the token whose answer could be very long.

    Args:
        num_prompt: tokens of the prompt.

    Raises:
        DataError: with its earlier prompts it asks for too many.
    """
    asking = caller()
    cost = 1 if logprobs is None else asking.logprob_cost
    asking.num_logprobs += cost * n * max_tokens * (1 + (logprobs or 0))
    if prompt_logprobs is not None:
        asking.num_logprobs += num_prompt * (1 + prompt_logprobs)
    if asking.token is Token.WRONG and asking.num_logprobs > MAX_LOGPROBS_WITHOUT_TOKEN:
        raise DataError(
            f"n × max_tokens × (1 + logprobs): up to {asking.num_logprobs // cost} log-probabilities; a request "
            f"without the token of the run may have {MAX_LOGPROBS_WITHOUT_TOKEN // cost}: set a smaller max_tokens, "
            "n or logprobs"
        )


def check_values(name: str, values: Collection[Any]) -> None:
    """Refuse a list of sampling parameters that takes vLLM long at each token, or that it cannot pass on.

    What no UTF-8 holds cannot be sent to vLLM's engine core, and its main process keeps such a request: 5,000 of 70 kB
    took 1.7 GB.

    Raises:
        DataError: they are too many or too long, or not all whole characters.
    """
    texts = [each for each in values if isinstance(each, str)]
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        raise DataError(f"{name}: half of a surrogate pair, which is no character: send whole ones") from None
    num_chars = sum(map(len, texts))
    is_long = len(values) > MAX_VALUES_WITHOUT_TOKEN or num_chars > MAX_CHARS_WITHOUT_TOKEN
    if caller().token is Token.WRONG and is_long:
        raise DataError(
            f"{name}: {len(values)} values of {num_chars} characters; a request without the token of the run may have "
            f"{MAX_VALUES_WITHOUT_TOKEN} of {MAX_CHARS_WITHOUT_TOKEN}: send fewer"
        )


def check_listed_prompts(body: Mapping[str, Any]) -> None:
    """The same for a body in OpenAI's shape, which may hold a list of prompts, before it is validated.

    Raises:
        DataError: there are too many.
    """
    n = body.get("n")
    for key, kinds in (("prompt", (str, list)), ("prompt_embeds", (str,)), ("messages", (list,))):
        prompts = body.get(key)
        if isinstance(prompts, list) and any(isinstance(each, kinds) for each in prompts):
            check_num_completions(n if isinstance(n, int) else 1, num_prompts=len(prompts))


def max_new_tokens(
    prompt: Sequence[int],
    params: GenerateRequest,
    *,
    max_model_len: int,
    vocabulary: int,
    max_logprobs: int = MAX_LOGPROBS,
) -> int:
    """How many tokens may follow the prompt.

    Args:
        max_logprobs: most that a request may ask for at each token; -1: those of the whole vocabulary.

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
    for name, asked in (("logprobs", params.logprobs or 0), ("prompt_logprobs", params.prompt_logprobs or 0)):
        most = vocabulary if max_logprobs == -1 else min(max_logprobs, vocabulary)
        if asked > most:
            raise DataError(f"{name}: {asked}, but this server has at most {most} at each token: ask for fewer")
    if (foreign := next((t for t in params.stop_token_ids or () if not 0 <= t < vocabulary), None)) is not None:
        raise DataError(f"stop_token_ids: {foreign} is not in the vocabulary of {vocabulary}")
    max_tokens = min(params.max_tokens, max_model_len - len(prompt))
    check_num_logprobs(
        n=params.n,
        max_tokens=max_tokens,
        logprobs=params.logprobs,
        num_prompt=len(prompt),
        prompt_logprobs=params.prompt_logprobs,
    )
    return max_tokens
