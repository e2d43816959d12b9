"""The trainer's side of `/bridge/*` and `/lora/*`: synchronous, patient with a server that restarts, typed errors."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from grpo_engine.bridges.protocol import never
from grpo_engine.errors import BridgeError, PeerError, PeerUnavailable
from grpo_engine.wire.codec import Message, first_fault
from grpo_engine.wire.inference import (
    BridgeInfo,
    LoraLoadRequest,
    LoraStatus,
    PauseRequest,
    ReloadRequest,
    ResumeRequest,
)

_INFO = "/bridge/info"
_RETRY_INTERVAL_S = 0.25
_ANSWER_WITHIN_S = 600.0
"""A pause waits for the batch that runs, a reload for a checkpoint from a slow disk."""
_BUSY, _UNAVAILABLE = 409, 503
"""Somebody else has paused it, or it is not there yet: both pass."""

AnswerT = TypeVar("AnswerT", bound=BaseModel)

logger = logging.getLogger(__name__)


class PauseAnswer(Message):
    """What pause and resume say."""

    status: str
    instance: str
    policy_version: int


class HandoverAnswer(Message):
    """What a reload and an adapter say."""

    status: str
    policy_version: int
    paths_in_use: list[str] = []
    """Of adapters that were loaded earlier and that requests still run on."""


class ServerClient:
    """One inference server, asked over HTTP."""

    def __init__(self, url: str, *, patience_s: float, is_stopping: Callable[[], bool] = never) -> None:
        self.url = url.rstrip("/")
        self._patience_s = patience_s
        self._is_stopping = is_stopping
        self._http = httpx.Client(
            base_url=self.url, timeout=httpx.Timeout(_ANSWER_WITHIN_S, connect=5), trust_env=False
        )

    def info(self) -> BridgeInfo:
        """Where the server stands."""
        return self.ask("GET", _INFO, None, BridgeInfo)

    def pause(self, timeout_s: float) -> PauseAnswer:
        """Stop the server between two batches, for as long as this process lives and no longer than `timeout_s`."""
        return self.ask("POST", "/bridge/pause", PauseRequest(owner_pid=os.getpid(), timeout_s=timeout_s), PauseAnswer)

    def resume(self, policy_version: int | None = None) -> PauseAnswer:
        """Let the server go on."""
        return self.ask("POST", "/bridge/resume", ResumeRequest(policy_version=policy_version), PauseAnswer)

    def reload(self, path: Path, policy_version: int) -> None:
        """Have the server read a checkpoint in place of what it serves."""
        body = ReloadRequest(path=str(path.absolute()), policy_version=policy_version)
        self._check_version(self.ask("POST", "/bridge/reload", body, HandoverAnswer), policy_version, path)

    def load_adapter(self, path: Path, name: str, policy_version: int) -> list[str]:
        """Have the server serve an adapter; returns the paths of earlier ones that requests still run on."""
        body = LoraLoadRequest(adapter_path=str(path.absolute()), adapter_name=name, policy_version=policy_version)
        answer = self.ask("POST", "/lora/load", body, HandoverAnswer)
        self._check_version(answer, policy_version, path)
        return answer.paths_in_use

    def lora_status(self) -> LoraStatus:
        """Whether the server takes adapters, and which."""
        return self.ask("GET", "/lora/status", None, LoraStatus)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def ask(self, method: str, path: str, body: Message | None, answer: type[AnswerT]) -> AnswerT:
        """One call; a server that is away, loading or paused by somebody else is asked again until the patience ends.

        Args:
            body: what was set of it is sent, since a stock server takes every key of a request for vLLM's.

        Raises:
            PeerUnavailable: it stayed away.
            BridgeError: it refused (4xx).
            PeerError: it failed (5xx), or answered something else.
        """
        content = None if body is None else body.model_dump_json(exclude_unset=True, exclude_none=True).encode()
        headers = {"content-type": "application/json"} if content else {}
        until = time.monotonic() + self._patience_s
        has_complained = False
        while True:
            response = None
            try:
                response = self._http.request(method, path, content=content, headers=headers)
            except httpx.TransportError as error:
                why = f"{type(error).__name__}: {error}"
            is_over = time.monotonic() >= until
            if response is not None:
                passing = (_UNAVAILABLE,) if is_over else (_UNAVAILABLE, _BUSY)
                if response.status_code not in passing:
                    return self._read(method, path, response, answer)
                why = _detail(response)
            if self._is_stopping():
                raise PeerUnavailable(
                    f"{method} {self.url}{path}: {why}; not awaited, since training is to stop or it has ended"
                )
            if is_over:
                raise PeerUnavailable(
                    f"{method} {self.url}{path}: no answer for {self._patience_s:g} s ({why}); "
                    "is the inference server up? Look at its log"
                )
            if not has_complained:
                logger.warning("%s %s%s: %s; trying for %g s", method, self.url, path, why, self._patience_s)
                has_complained = True
            time.sleep(_RETRY_INTERVAL_S)

    def _read(self, method: str, path: str, response: httpx.Response, answer: type[AnswerT]) -> AnswerT:
        where = f"{method} {self.url}{path}"
        if response.status_code == httpx.codes.NOT_FOUND and path == _INFO:
            raise BridgeError(
                f"{where}: what answers there is no inference server of grpo-engine: correct --vllm-port, or start one "
                "(grpo-engine server)"
            )
        if response.is_client_error:
            raise BridgeError(f"{where}: refused with {response.status_code}: {_detail(response)}")
        if not response.is_success:
            raise PeerError(
                f"{where}: failed with {response.status_code}: {_detail(response)}; look at the server's log"
            )
        try:
            return answer.model_validate_json(response.content)
        except ValidationError as error:
            raise PeerError(
                f"{where}: not a {answer.__name__}: {first_fault(error)}; is this our inference server?"
            ) from None

    def _check_version(self, answer: HandoverAnswer, wanted: int, path: Path) -> None:
        if answer.policy_version != wanted:
            raise PeerError(
                f"{self.url}: serves version {answer.policy_version} after {path} was handed over as {wanted}; "
                "is another trainer using the same server?"
            )


def _detail(response: httpx.Response) -> str:
    try:
        detail = response.json()["detail"]
    except (ValueError, KeyError, TypeError):
        return response.text[:200]
    return str(detail)
