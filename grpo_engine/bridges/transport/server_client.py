"""Synchronous client of `/bridge/*` and `/lora/*`: retries while a server restarts, and raises typed errors."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from grpo_engine.errors import BridgeError, PeerError, PeerUnavailable
from grpo_engine.retrying import RetryPolicy, Stopped, never, retry
from grpo_engine.wire.access_token import authorization, find_token
from grpo_engine.wire.codec import Message, first_fault
from grpo_engine.wire.inference import (
    BridgeInfo,
    LoraLoadRequest,
    LoraStatus,
    PauseRequest,
    ReloadRequest,
    ResumeRequest,
)
from grpo_engine.wire.log_lines import WAITING_FOR_PEER

_INFO = "/bridge/info"
_RETRY_INTERVAL_S = 0.25
_ANSWER_WITHIN_S = 600.0
"""A pause waits for the batch that runs, a reload for a checkpoint from a slow disk."""
_BUSY, _UNAVAILABLE = 409, 503
"""Paused by another process, or not loaded yet: both are temporary."""

AnswerT = TypeVar("AnswerT", bound=BaseModel)

logger = logging.getLogger(__name__)


class PauseAnswer(Message):
    """Answer of pause and resume."""

    status: str
    instance: str
    policy_version: int


class HandoverAnswer(Message):
    """Answer of a reload and of an adapter load."""

    status: str
    policy_version: int
    paths_in_use: list[str] = []
    """Of earlier adapters that running requests still use."""


class _NoAnswer(Exception):
    """The server cannot answer now."""

    def __init__(self, why: str, response: httpx.Response | None = None) -> None:
        super().__init__(why)
        self.response = response


class ServerClient:
    """HTTP client of one inference server."""

    def __init__(self, url: str, *, patience_s: float, is_stopping: Callable[[], bool] = never) -> None:
        self.url = url.rstrip("/")
        self._patience_s = patience_s
        self._is_stopping = is_stopping
        self._http = httpx.Client(
            base_url=self.url,
            headers=authorization(find_token(os.environ)),
            timeout=httpx.Timeout(_ANSWER_WITHIN_S, connect=5),
            trust_env=False,
        )

    def info(self) -> BridgeInfo:
        """The server's state."""
        return self.ask("GET", _INFO, None, BridgeInfo)

    def pause(self, timeout_s: float) -> PauseAnswer:
        """Pause the server, until this process resumes it, exits, or `timeout_s` have passed."""
        return self.ask("POST", "/bridge/pause", PauseRequest(owner_pid=os.getpid(), timeout_s=timeout_s), PauseAnswer)

    def resume(self, policy_version: int | None = None) -> PauseAnswer:
        """End the pause."""
        return self.ask("POST", "/bridge/resume", ResumeRequest(policy_version=policy_version), PauseAnswer)

    def reload(self, path: Path, policy_version: int) -> None:
        """Have the server load a checkpoint in place of its current weights."""
        body = ReloadRequest(path=str(path.absolute()), policy_version=policy_version)
        self._check_version(self.ask("POST", "/bridge/reload", body, HandoverAnswer), policy_version, path)

    def load_adapter(self, path: Path, name: str, policy_version: int) -> list[str]:
        """Have the server serve an adapter; returns the paths of earlier ones that running requests still use."""
        body = LoraLoadRequest(adapter_path=str(path.absolute()), adapter_name=name, policy_version=policy_version)
        answer = self.ask("POST", "/lora/load", body, HandoverAnswer)
        self._check_version(answer, policy_version, path)
        return answer.paths_in_use

    def lora_status(self) -> LoraStatus:
        """Whether the server accepts adapters, and of which rank and dtype."""
        return self.ask("GET", "/lora/status", None, LoraStatus)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def ask(self, method: str, path: str, body: Message | None, answer: type[AnswerT]) -> AnswerT:
        """Send a request; retried while the server is unreachable, loading or paused by another process.

        Args:
            body: only fields that were set are sent, since a stock server passes every key on to vLLM.

        Raises:
            PeerUnavailable: no answer within `patience_s`.
            BridgeError: the server refused (4xx).
            PeerError: it failed (5xx), requires another token, or its answer does not fit.
        """
        content = None if body is None else body.model_dump_json(exclude_unset=True, exclude_none=True).encode()
        headers = {"content-type": "application/json"} if content else {}
        where = f"{method} {self.url}{path}"
        num_failures = 0

        def attempt() -> httpx.Response:
            try:
                response = self._http.request(method, path, content=content, headers=headers)
            except httpx.TransportError as error:
                raise _NoAnswer(f"{type(error).__name__}: {error}") from None
            if response.status_code in (_BUSY, _UNAVAILABLE):
                raise _NoAnswer(_detail(response), response)
            return response

        def log_first(error: Exception) -> None:
            nonlocal num_failures
            num_failures += 1
            if num_failures == 1:
                logger.warning(WAITING_FOR_PEER.text, method, self.url, path, error, self._patience_s)

        policy = RetryPolicy(
            retried=_NoAnswer,
            first_pause_s=_RETRY_INTERVAL_S,
            longest_pause_s=_RETRY_INTERVAL_S,
            limit_s=self._patience_s,
            is_stopping=self._is_stopping,
            on_failure=log_first,
        )
        try:
            response = retry(attempt, policy)
        except Stopped as why:
            raise PeerUnavailable(
                f"{where}: {why}; not retried, since training is stopping or the server has exited"
            ) from None
        except _NoAnswer as error:
            if error.response is None or error.response.status_code == _UNAVAILABLE:
                raise PeerUnavailable(
                    f"{where}: no answer for {self._patience_s:g} s ({error}); check the inference server's log"
                ) from None
            response = error.response
        return self._read(method, path, response, answer)

    def _read(self, method: str, path: str, response: httpx.Response, answer: type[AnswerT]) -> AnswerT:
        where = f"{method} {self.url}{path}"
        if response.status_code == httpx.codes.NOT_FOUND and path == _INFO:
            raise BridgeError(
                f"{where}: not an inference server of grpo-engine: correct --vllm-port, or start one (grpo-engine "
                "server)"
            )
        if response.status_code == httpx.codes.UNAUTHORIZED:
            raise PeerError(f"{where}: refused: {_detail(response)}")
        if response.is_client_error:
            raise BridgeError(f"{where}: refused with {response.status_code}: {_detail(response)}")
        if not response.is_success:
            raise PeerError(f"{where}: failed with {response.status_code}: {_detail(response)}; check the server's log")
        try:
            return answer.model_validate_json(response.content)
        except ValidationError as error:
            raise PeerError(
                f"{where}: not a {answer.__name__}: {first_fault(error)}; is this a grpo-engine server?"
            ) from None

    def _check_version(self, answer: HandoverAnswer, wanted: int, path: Path) -> None:
        if answer.policy_version != wanted:
            raise PeerError(
                f"{self.url}: serves version {answer.policy_version} after loading {path} as {wanted}; "
                "is another trainer using the same server?"
            )


def _detail(response: httpx.Response) -> str:
    try:
        detail = response.json()["detail"]
    except (ValueError, KeyError, TypeError):
        return response.text[:200]
    return str(detail)
