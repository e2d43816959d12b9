"""The check's client of the inference server: its facts, completions, tokens, and log-probabilities of given tokens.

Uses the routes of environments and bridges on our server, and those that exist on a stock Atropos server or vLLM. Only
`restore_adapter` changes the server.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import Field

from grpo_engine.bridges.transport.server_client import ServerClient
from grpo_engine.environments.sampling.groups import Completions, tokens_and_logprobs
from grpo_engine.errors import BridgeError, PeerError, PeerUnavailable
from grpo_engine.wire.codec import Message, shortened
from grpo_engine.wire.inference import GenerateRequest, LogprobsMode, TokenPrompt
from grpo_engine.wire.rollouts import TOKEN_BOUND

_TOKEN_ID = "token_id:"
"""Prefix of tokens in vLLM's answers with `return_tokens_as_token_ids`."""
_MOST_DIGITS = 9
"""Of a token id."""


class ServerKind(StrEnum):
    """Which implementation the server is, which decides its routes."""

    OURS = "ours"
    ATROPOS = "stock Atropos"
    VLLM = "stock vLLM"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What the server declares."""

    kind: ServerKind
    engine: str
    model_name: str
    logprobs_mode: LogprobsMode
    declares_mode: bool
    """Whether the server declares the mode; stock servers do not, and theirs is `raw`."""
    dtype: str | None = None
    device: str | None = None
    policy_version: int | None = None
    """None where the server has no versions."""
    takes_adapters: bool = False
    adapter: tuple[str, str] | None = None
    """(name, path) of the adapter that is served."""

    @property
    def serves_the_start(self) -> bool:
        """Whether no weights were published to it yet."""
        return self.policy_version == 0 and self.adapter is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One completion."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of the tokens, as the server reported them."""
    finish_reason: str
    policy_version: int | None = None


class CheckedServer:
    """One inference server."""

    def __init__(self, url: str, *, patience_s: float, vocab_size: int) -> None:
        """
        Args:
            vocab_size: of the trained model, which has no other tokens.
        """
        self.url = url
        self._vocab_size = vocab_size
        self._client = ServerClient(url, patience_s=patience_s)
        self._kind = ServerKind.OURS
        self._model = ""

    def facts(self) -> ServerFacts:
        """The server's facts; must be called first.

        Raises:
            PeerUnavailable: no answer, or the model is still loading.
            PeerError: not a known kind of inference server.
        """
        try:
            info = self._client.ask("GET", "/bridge/info", None, _Info)
        except BridgeError:  # no such route
            return self._stock_vllm()
        state = self._client.ask("GET", "/bridge/state_dict_info", None, _StateDictInfo)
        debug = self._client.ask("GET", "/bridge/debug", None, _Debug)
        lora = self._client.ask("GET", "/lora/status", None, _LoraStatus)
        self._kind = ServerKind.ATROPOS if info.instance is None else ServerKind.OURS
        has_adapter = lora.active_adapter_path is not None
        return ServerFacts(
            kind=self._kind,
            engine=debug.engine_type,
            model_name=info.model_name,
            dtype=state.dtype.removeprefix("torch.") if state.dtype else None,
            device=info.device,
            logprobs_mode=info.logprobs_mode or "raw",
            declares_mode=info.logprobs_mode is not None,
            policy_version=info.policy_version,
            takes_adapters=lora.lora_available,
            adapter=(lora.active_adapter_name or "", lora.active_adapter_path or "") if has_adapter else None,
        )

    def sample(
        self, prompt: Sequence[int], *, n: int, max_tokens: int, temperature: float, seed: int | None = None
    ) -> list[Sample]:
        """Completions of one prompt, requested as an environment does.

        Raises:
            PeerError: it answers with another number of completions, tokens and log-probabilities do not fit each
                other, there are none, or the model has no such token.
        """
        ask = self._sample_from_vllm if self._kind is ServerKind.VLLM else self._sample_from_ours
        samples = ask(prompt, n=n, max_tokens=max_tokens, temperature=temperature, seed=seed)
        if len(samples) != n:
            raise PeerError(f"{self.url}: answered with {len(samples)} completions, not {n}")
        for sample in samples:
            if not len(sample.tokens) == len(sample.logprobs) <= max_tokens:
                words = f"{len(sample.tokens)} tokens and {len(sample.logprobs)} log-probabilities, not {max_tokens}"
                raise PeerError(f"{self.url}: answered with a completion of {words} at most of both")
            if unknown := [token for token in sample.tokens if not 0 <= token < self._vocab_size]:
                raise PeerError(
                    f"{self.url}: sampled token {unknown[0]}, which is outside the model's vocabulary "
                    f"({self._vocab_size}): does it serve the model that is trained?"
                )
        return samples

    def _sample_from_ours(
        self, prompt: Sequence[int], *, n: int, max_tokens: int, temperature: float, seed: int | None
    ) -> list[Sample]:
        request = GenerateRequest(
            prompt=TokenPrompt(prompt_token_ids=list(prompt)),
            n=n,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=1.0,
            logprobs=0,
            seed=seed,
        )
        answer = self._client.ask("POST", "/generate", request, _Generated)
        lists = (answer.finish_reasons, answer.logprobs, answer.token_ids)
        if any(entries is not None and len(entries) != n for entries in lists):
            raise PeerError(f"{self.url}: /generate answered with lists of other than {n} completions")
        sampled = [tokens_and_logprobs(answer, index) for index in range(n)]
        return [
            Sample(
                prompt=tuple(prompt),
                tokens=tuple(tokens),
                logprobs=tuple(logprobs),
                finish_reason=reason,
                policy_version=answer.policy_version,
            )
            for (tokens, logprobs), reason in zip(sampled, answer.finish_reasons, strict=True)
        ]

    def prompt_logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Log-probabilities of every token but the first, before any temperature; on our server only.

        Raises:
            PeerError: the answer has none.
        """
        request = GenerateRequest(
            prompt=TokenPrompt(prompt_token_ids=list(tokens)), max_tokens=1, temperature=0.0, prompt_logprobs=0
        )
        answer = self._client.ask("POST", "/generate", request, _Generated)
        if answer.prompt_logprobs is None or len(answer.prompt_logprobs) != len(tokens):
            raise PeerError(
                f"{self.url}: /generate answered without prompt_logprobs of the {len(tokens)} tokens asked for"
            )
        entries = zip(tokens[1:], answer.prompt_logprobs[1:], strict=True)
        try:
            return [(entry or {})[str(token)] for token, entry in entries]
        except KeyError as error:
            raise PeerError(f"{self.url}: /generate answered without the log-probability of token {error}") from None

    def encode(self, text: str) -> tuple[int, ...] | None:
        """Tokens of a text; None where no route returns them."""
        if self._kind is ServerKind.VLLM:
            return self._tokenized(_TokenizeRequest(model=self._model, prompt=text))
        request = GenerateRequest(prompt=text, max_tokens=1, logprobs=0)
        answer = self._client.ask("POST", "/generate", request, _Generated)
        return None if answer.prompt_token_ids is None else tuple(answer.prompt_token_ids)

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> tuple[int, ...] | None:
        """Tokens of a conversation up to where the assistant begins; None where no route returns them."""
        match self._kind:
            case ServerKind.ATROPOS:
                return None
            case ServerKind.VLLM:
                return self._tokenized(_TokenizeRequest(model=self._model, messages=list(messages)))
            case ServerKind.OURS:
                body = _ChatRequest(messages=list(messages), max_tokens=1, return_token_ids=True)
                answer = self._client.ask("POST", "/v1/chat/completions", body, _ChatTokens)
                return tuple(answer.prompt_token_ids)

    def takes_token(self, token: int) -> bool:
        """Whether a prompt may hold this token."""
        try:
            self.sample([token], n=1, max_tokens=1, temperature=1.0)
        except PeerUnavailable:
            raise
        except (BridgeError, PeerError):  # ours refuses with 400, stock servers with 400 or 500
            return False
        return True

    def policy_version(self) -> int:
        """The version that is served; on our server only."""
        return self._client.info().policy_version

    def restore_adapter(self, adapter: tuple[str, str] | None) -> bool:
        """Serve an adapter, or the base model; False where the adapter's folder no longer exists."""
        if adapter is None:
            self._client.ask("POST", "/lora/unload", None, Message)
            return True
        name, path = adapter
        if not Path(path).is_dir():
            return False
        self._client.load_adapter(Path(path), name, self.policy_version() + 1)
        return True

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _stock_vllm(self) -> ServerFacts:
        models = self._client.ask("GET", "/v1/models", None, _Models)
        version = "unknown version"
        with suppress(BridgeError, PeerError):
            version = self._client.ask("GET", "/version", None, _Version).version
        self._kind, self._model = ServerKind.VLLM, models.data[0].id
        return ServerFacts(
            kind=self._kind,
            engine=f"vllm {version}",
            model_name=models.data[0].root or self._model,
            logprobs_mode="raw",
            declares_mode=False,
        )

    def _sample_from_vllm(
        self, prompt: Sequence[int], *, n: int, max_tokens: int, temperature: float, seed: int | None
    ) -> list[Sample]:
        body = _CompletionRequest(
            model=self._model,
            prompt=list(prompt),
            n=n,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            top_p=1.0,
            logprobs=1,
            return_tokens_as_token_ids=True,
        )
        answer = self._client.ask("POST", "/v1/completions", body, _Completions)
        return [
            Sample(
                prompt=tuple(prompt),
                tokens=tuple(map(self._token, choice.logprobs.tokens)),
                logprobs=tuple(choice.logprobs.token_logprobs),
                finish_reason=choice.finish_reason,
            )
            for choice in sorted(answer.choices, key=lambda choice: choice.index)
        ]

    def _token(self, text: str) -> int:
        digits = text.removeprefix(_TOKEN_ID)
        if not (digits.isascii() and digits.isdigit() and len(digits) <= _MOST_DIGITS):
            raise PeerError(f"{self.url}: /v1/completions answered with token {shortened(repr(text))}, which is no id")
        return int(digits)

    def _tokenized(self, body: _TokenizeRequest) -> tuple[int, ...] | None:
        try:
            return tuple(self._client.ask("POST", "/tokenize", body, _Tokenized).tokens)
        except (BridgeError, PeerError):
            return None


class _Info(Message):
    model_name: str = ""
    device: str | None = None
    logprobs_mode: LogprobsMode | None = None
    policy_version: int | None = None
    instance: str | None = None


class _StateDictInfo(Message):
    dtype: str | None = None


class _Debug(Message):
    engine_type: str = "unknown engine"


class _LoraStatus(Message):
    lora_available: bool = False
    active_adapter_path: str | None = None
    active_adapter_name: str | None = None


_Token = Annotated[int, Field(ge=0, lt=TOKEN_BOUND)]
"""As a tokenizer decodes it, whether or not the model has it."""


class _Generated(Completions):
    prompt_token_ids: list[_Token] | None = None
    logprobs: list[list[list[dict[str, float]]]] | None = None
    """Unchecked, since the check reports invalid values."""


class _ChatRequest(Message):
    messages: list[dict[str, str]]
    max_tokens: int
    return_token_ids: bool
    """vLLM gives the tokens of the prompt only then."""


class _ChatTokens(Message):
    prompt_token_ids: list[_Token]


class _Version(Message):
    version: str


class _Model(Message):
    id: str
    root: str | None = None


class _Models(Message):
    data: list[_Model] = Field(min_length=1)


class _CompletionRequest(Message):
    model: str
    prompt: list[int]
    n: int
    max_tokens: int
    temperature: float
    seed: int | None
    top_p: float
    logprobs: int
    return_tokens_as_token_ids: bool


class _ChoiceLogprobs(Message):
    tokens: list[str]
    token_logprobs: list[float]


class _Choice(Message):
    index: int
    finish_reason: str
    logprobs: _ChoiceLogprobs


class _Completions(Message):
    choices: list[_Choice] = Field(min_length=1)


class _TokenizeRequest(Message):
    model: str
    prompt: str | None = None
    messages: list[dict[str, str]] | None = None


class _Tokenized(Message):
    tokens: list[_Token]
