"""Conversion of requests to vLLM's sampling parameters, and of its outputs to `Generation`.

Imports vLLM only inside functions; outputs are read by attribute, so that tests can pass plain objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_engine.errors import DataError
from grpo_engine.server.engine import LOWEST_LOGPROB, Completion, EngineUnavailable, FinishReason, Generation
from grpo_engine.server.vllm.running import TokenVersions
from grpo_engine.wire.inference import GenerateRequest

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
        )
    except refusals() as error:
        raise DataError(f"vLLM refuses the request: {error}") from None


def refusals() -> tuple[type[Exception], ...]:
    """What vLLM raises for a request that it refuses: ValueError up to 0.26, also its `VLLMClientError` since."""
    from vllm import exceptions

    own = getattr(exceptions, "VLLMClientError", None)
    return (ValueError,) if own is None else (ValueError, own)


def generation(output: Any, prompt: list[int], params: GenerateRequest, versions: TokenVersions) -> Generation:
    """vLLM's final `RequestOutput`."""
    num_top = params.logprobs or 0
    completions = sorted(output.outputs, key=lambda completion: completion.index)
    return Generation(
        prompt_token_ids=prompt,
        prompt_logprobs=None if params.prompt_logprobs is None else _prompt_logprobs(output, prompt, params),
        completions=[_completion(each, num_top, versions) for each in completions],
    )


def _completion(output: Any, num_top: int, versions: TokenVersions) -> Completion:
    if output.finish_reason not in _FINISH_REASONS:
        raise EngineUnavailable(f"vLLM finished a completion with {output.finish_reason!r}; see the server's log")
    token_ids = list(output.token_ids)
    positions = list(output.logprobs or ())
    return Completion(
        token_ids=token_ids,
        logprobs=[_finite(entry[token].logprob) for token, entry in zip(token_ids, positions, strict=True)],
        top_logprobs=[_most_probable(entry, num_top) for entry in positions] if num_top else None,
        finish_reason=_FINISH_REASONS[output.finish_reason],
        policy_versions=versions.of(output.index, len(token_ids)),
        text=output.text,
    )


def _prompt_logprobs(output: Any, prompt: list[int], params: GenerateRequest) -> list[list[tuple[int, float]] | None]:
    num_top = params.prompt_logprobs or 0
    entries: list[list[tuple[int, float]] | None] = []
    for token, entry in zip(prompt, output.prompt_logprobs, strict=True):
        if entry is None:
            entries.append(None)
            continue
        others = [pair for pair in _most_probable(entry, num_top) if pair[0] != token]
        entries.append([(token, _finite(entry[token].logprob)), *others])
    return entries


def _most_probable(entry: Mapping[int, Any], num_top: int) -> list[tuple[int, float]]:
    """The `num_top` most probable tokens of an entry, which also has the sampled token whatever its rank."""
    ranked = sorted(((token, _finite(value.logprob)) for token, value in entry.items()), key=lambda pair: -pair[1])
    return ranked[:num_top]


def _finite(logprob: float) -> float:
    """The log-probability, at least `LOWEST_LOGPROB`. NaN stays NaN, which `Completion` refuses."""
    return max(float(logprob), LOWEST_LOGPROB)
