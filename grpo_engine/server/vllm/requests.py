"""Conversion of requests to vLLM's sampling parameters, and of its outputs to `Generation`.

Imports vLLM only inside functions; outputs are read by attribute, so that tests can pass plain objects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from grpo_engine.errors import DataError
from grpo_engine.server.engine import LOWEST_LOGPROB, Completion, EngineUnavailable, FinishReason, Generation
from grpo_engine.server.vllm.running import TokenVersions
from grpo_engine.wire.inference import GenerateRequest

PROMPT_TAIL = 8
"""Tokens of a prompt before which nothing changes how the next ones are decoded."""
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""At the end of a text: bytes of a character whose others were not sampled."""
_INDICES = ("stop_token_ids", "allowed_token_ids", "logit_bias")
"""Parameters whose tokens vLLM's workers use as indices into the logits."""
_MAX_TOKENS_IN_WORKER = {"allowed_token_ids": 1024, "logit_bias": 1024, "logprob_token_ids": 128}
_MAX_STOP_TOKENS_IN_WORKER = 127
"""Without the end token of the model, which counts as one more; they matter with `min_tokens`."""
_MAX_BAD_WORDS_IN_WORKER = 128
_MAX_BAD_WORD_TOKENS_IN_WORKER = 1024
"""Of vLLM's second model runner (`v1/worker/gpu/sample`), the default on GPUs."""
_FINISH_REASONS: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


def sampling_params(params: GenerateRequest, max_tokens: int) -> Any:
    """vLLM's `SamplingParams`; the output comes once, complete.

    Raises:
        DataError: vLLM refuses the combination.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    try:
        return SamplingParams(
            n=params.n,
            max_tokens=max_tokens,
            min_tokens=min(params.min_tokens, max_tokens),
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            seed=params.seed,
            stop=params.stop,
            stop_token_ids=params.stop_token_ids,
            ignore_eos=params.ignore_eos,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            logprobs=params.logprobs or 0,
            prompt_logprobs=params.prompt_logprobs,
            skip_special_tokens=params.skip_special_tokens,
            output_kind=RequestOutputKind.FINAL_ONLY,
            # These two save most of the time that vLLM's main process takes for a token: nothing is decoded until the
            # answer is complete, unless a stop string is looked for, and no objects are made for log-probabilities.
            detokenize=bool(params.stop),
            flat_logprobs=True,
        )
    except refusals() as error:
        raise DataError(f"vLLM refuses the request: {error}") from None


def check_worker_limits(sampling: Any, vocabulary: int, *, tokenizer: Any, is_second_runner: bool) -> None:
    """Refuse parameters at which a worker of vLLM fails, and with it the engine core, whoever sent them.

    vLLM 0.26 and 0.27 do not look for stop tokens in the vocabulary: one of a million with `min_tokens` ended 0.27. The
    second model runner checks the lengths of lists in the worker only.

    Args:
        tokenizer: vLLM's, by which it splits `bad_words`.

    Raises:
        DataError: a token is not in the vocabulary, or a list is too long.
    """
    values = {name: getattr(sampling, name, None) or () for name in (*_INDICES, *_MAX_TOKENS_IN_WORKER)}
    for name in _INDICES:
        if (foreign := next((token for token in values[name] if not 0 <= token < vocabulary), None)) is not None:
            raise DataError(f"{name}: {foreign} is not in the vocabulary of {vocabulary}")
    if not is_second_runner:
        return
    limits = dict(_MAX_TOKENS_IN_WORKER)
    if getattr(sampling, "min_tokens", 0):
        limits["stop_token_ids"] = _MAX_STOP_TOKENS_IN_WORKER
    for name, most in limits.items():
        if len(values[name]) > most:
            raise DataError(f"{name}: {len(values[name])} tokens; vLLM takes at most {most}: send fewer")
    if getattr(sampling, "bad_words", None):
        try:
            sampling.update_from_tokenizer(tokenizer)
        except refusals() as error:
            raise DataError(f"vLLM refuses the request: {error}") from None
        split = sampling.bad_words_token_ids
        if len(split) > _MAX_BAD_WORDS_IN_WORKER or sum(map(len, split)) > _MAX_BAD_WORD_TOKENS_IN_WORKER:
            raise DataError(
                f"bad_words: {len(split)} words of {sum(map(len, split))} tokens, with and without a blank before; "
                f"vLLM takes at most {_MAX_BAD_WORDS_IN_WORKER} of {_MAX_BAD_WORD_TOKENS_IN_WORKER}: send fewer"
            )


def refusals() -> tuple[type[Exception], ...]:
    """What vLLM raises for a request that it refuses: ValueError up to 0.26, also its `VLLMClientError` since."""
    from vllm import exceptions

    own = getattr(exceptions, "VLLMClientError", None)
    return (ValueError,) if own is None else (ValueError, own)


def generation(
    output: Any, prompt: list[int], params: GenerateRequest, versions: TokenVersions, tokenizer: Any
) -> Generation:
    """vLLM's final `RequestOutput` for `sampling_params`."""
    completions = sorted(output.outputs, key=lambda completion: completion.index)
    return Generation(
        prompt_token_ids=prompt,
        prompt_logprobs=None if params.prompt_logprobs is None else _prompt_logprobs(output, params),
        completions=[
            _completion(each, params, versions, each.text if params.stop else _text(each, prompt, params, tokenizer))
            for each in completions
        ],
    )


def _completion(output: Any, params: GenerateRequest, versions: TokenVersions, text: str) -> Completion:
    if output.finish_reason not in _FINISH_REASONS:
        raise EngineUnavailable(f"vLLM finished a completion with {output.finish_reason!r}; see the server's log")
    token_ids, flat = list(output.token_ids), output.logprobs
    return Completion(
        token_ids=token_ids,
        logprobs=[_finite(flat.logprobs[at]) for _, at in zip(token_ids, flat.start_indices, strict=True)],
        top_logprobs=[_most_probable(each, params.logprobs) for each in _positions(flat)] if params.logprobs else None,
        finish_reason=_FINISH_REASONS[output.finish_reason],
        policy_versions=versions.of(output.index, len(token_ids)),
        text=text,
    )


def _text(output: Any, prompt: list[int], params: GenerateRequest, tokenizer: Any) -> str:
    """What vLLM's detokenizer makes of the tokens: without the one that ended them, and decoded after the prompt, since
    some tokenizers drop the blank before a first word."""
    token_ids = list(output.token_ids)[: -1 if output.finish_reason == "stop" else None]
    decode = partial(tokenizer.decode, skip_special_tokens=params.skip_special_tokens)
    before: str = decode(tail := prompt[-PROMPT_TAIL:])
    both: str = decode([*tail, *token_ids])
    text = both[len(before) :] if both.startswith(before) else decode(token_ids)
    return text.rstrip(UNFINISHED)


def _prompt_logprobs(output: Any, params: GenerateRequest) -> list[list[tuple[int, float]] | None]:
    num_top = params.prompt_logprobs or 0
    entries: list[list[tuple[int, float]] | None] = []
    for position in _positions(output.prompt_logprobs):
        others = [pair for pair in _most_probable(position, num_top) if pair[0] != position[0][0]]
        entries.append([position[0], *others] if position else None)
    return entries


def _positions(flat: Any) -> list[list[tuple[int, float]]]:
    """Tokens and log-probabilities of each position of vLLM's `FlatLogprobs`; first the token that was sampled, or that
    the prompt has there. Nothing is known of the first position of a prompt."""
    pairs = list(zip(flat.token_ids, map(_finite, flat.logprobs), strict=True))
    return [pairs[start:end] for start, end in zip(flat.start_indices, flat.end_indices, strict=True)]


def _most_probable(position: Sequence[tuple[int, float]], num_top: int) -> list[tuple[int, float]]:
    """The `num_top` most probable tokens of a position, which also has the sampled token whatever its rank."""
    return sorted(dict(position).items(), key=lambda pair: -pair[1])[:num_top]


def _finite(logprob: float) -> float:
    """The log-probability, at least `LOWEST_LOGPROB`. NaN stays NaN, which `Completion` refuses."""
    return max(float(logprob), LOWEST_LOGPROB)
