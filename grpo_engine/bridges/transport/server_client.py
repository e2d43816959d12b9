"""Synchronous client of `/bridge/*` and `/lora/*`: retries while a server restarts, and raises typed errors."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from grpo_engine.errors import BridgeError, PeerError, PeerUnavailable
from grpo_engine.retrying import RetryPolicy, Stopped, never, retry
from grpo_engine.wire.access_token import find_token
from grpo_engine.wire.bounded_answers import at_most
from grpo_engine.wire.codec import Message, Whole, first_fault
from grpo_engine.wire.inference import (
    BridgeInfo,
    JoinAnswer,
    JoinRequest,
    LoraLoadRequest,
    LoraStatus,
    PauseRequest,
    ReceiveAnswer,
    ReceiveRequest,
    ReloadRequest,
    ResumeRequest,
    ShortText,
    SleepAnswer,
    SleepRequest,
    StagedWeights,
    TakeRequest,
    WakeRequest,
    WokenRequest,
    wrong_server,
)
from grpo_engine.wire.log_lines import WAITING_FOR_PEER
from grpo_engine.wire.token_clients import open_client

_INFO = "/bridge/info"
_RETRY_INTERVAL_S = 0.25
_ANSWER_WITHIN_S = 600.0
"""A pause waits for the batch that runs, a reload for a checkpoint from a slow disk."""
_STATE_WITHIN_S = 60.0
"""What GET asks for waits for nothing; a server that takes longer does not answer."""
_BUSY, _UNAVAILABLE = 409, 503
"""Paused by another process, or not loaded yet: both are temporary."""
_MOST_BYTES, _MOST_INFO_BYTES = 1 << 20, 1 << 16
"""Of an answer, and of a server's state. While one comes, however slowly, other servers are not asked."""
_DETAIL_CHARACTERS = 1000
"""Of what a server says on a refusal, in messages."""
_MOST_PARSED = 1 << 20
"""Characters of it that are read as JSON, which takes twenty times as much memory."""

AnswerT = TypeVar("AnswerT", bound=BaseModel)

logger = logging.getLogger(__name__)


class PauseAnswer(Message):
    """Answer of pause and resume."""

    status: ShortText
    instance: ShortText
    policy_version: Whole


class HandoverAnswer(Message):
    """Answer of a reload and of an adapter load."""

    status: ShortText
    policy_version: Whole
    instance: ShortText = ""
    """The start of the server that loaded it; empty from earlier versions."""
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
        self._http = open_client(find_token(os.environ), base_url=self.url)

    def info(self, *, patience_s: float | None = None, within_s: float | None = None) -> BridgeInfo:
        """The server's state."""
        return self.ask(
            "GET", _INFO, None, BridgeInfo, patience_s=patience_s, within_s=within_s, most_bytes=_MOST_INFO_BYTES
        )

    def pause(self, timeout_s: float) -> PauseAnswer:
        """Pause the server, until this process resumes it, exits, or `timeout_s` have passed."""
        return self.ask("POST", "/bridge/pause", PauseRequest(owner_pid=os.getpid(), timeout_s=timeout_s), PauseAnswer)

    def resume(self, policy_version: int | None = None) -> PauseAnswer:
        """End the pause."""
        return self.ask("POST", "/bridge/resume", ResumeRequest(policy_version=policy_version), PauseAnswer)

    def join(self, request: JoinRequest, *, patience_s: float, within_s: float | None) -> JoinAnswer:
        """Have the server take its places in a weight group."""
        return self.ask("POST", "/bridge/join", request, JoinAnswer, patience_s=patience_s, within_s=within_s)

    def receive(self, request: ReceiveRequest, *, within_s: float) -> ReceiveAnswer:
        """Have the server take the weights that are sent now; answered when it serves them."""
        return self.ask("POST", "/bridge/receive", request, ReceiveAnswer, patience_s=0.0, within_s=within_s)

    def sleep(self, *, patience_s: float) -> SleepAnswer:
        """Have the server free its weights and cache; requests wait until it is woken."""
        body = SleepRequest(owner_pid=os.getpid())
        return self.ask("POST", "/bridge/sleep", body, SleepAnswer, patience_s=patience_s)

    def wake_up(self, staged: StagedWeights) -> SleepAnswer:
        """Have a server that sleeps allocate its weights."""
        body = WakeRequest(owner_pid=os.getpid(), staged=staged)
        return self.ask("POST", "/bridge/wake_up", body, SleepAnswer, patience_s=0.0)

    def take(self, number: int) -> SleepAnswer:
        """Have the server copy what the staging memory holds."""
        return self.ask("POST", "/bridge/take", TakeRequest(number=number), SleepAnswer, patience_s=0.0)

    def woken(self, policy_version: int, *, with_checksum: bool) -> SleepAnswer:
        """Have the server answer requests by the weights that it took."""
        body = WokenRequest(policy_version=policy_version, with_checksum=with_checksum)
        return self.ask("POST", "/bridge/woken", body, SleepAnswer, patience_s=0.0)

    def reload(self, path: Path, policy_version: int, *, patience_s: float | None = None) -> HandoverAnswer:
        """Have the server load a checkpoint in place of its current weights."""
        body = ReloadRequest(path=str(path.absolute()), policy_version=policy_version)
        answer = self.ask("POST", "/bridge/reload", body, HandoverAnswer, patience_s=patience_s)
        self._check_version(answer, policy_version, path)
        return answer

    def load_adapter(
        self, path: Path, name: str, policy_version: int, *, patience_s: float | None = None
    ) -> HandoverAnswer:
        """Have the server serve an adapter."""
        body = LoraLoadRequest(adapter_path=str(path.absolute()), adapter_name=name, policy_version=policy_version)
        answer = self.ask("POST", "/lora/load", body, HandoverAnswer, patience_s=patience_s)
        self._check_version(answer, policy_version, path)
        return answer

    def lora_status(self) -> LoraStatus:
        """Whether the server accepts adapters, and of which rank and dtype."""
        return self.ask("GET", "/lora/status", None, LoraStatus)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def ask(
        self,
        method: str,
        path: str,
        body: Message | None,
        answer: type[AnswerT],
        *,
        patience_s: float | None = None,
        within_s: float | None = None,
        most_bytes: int = _MOST_BYTES,
    ) -> AnswerT:
        """Send a request; retried while the server is unreachable, loading or paused by another process.

        Args:
            body: only fields that were set are sent, since a stock server passes every key on to vLLM.
            patience_s: how long to retry; default: the client's own.
            within_s: longest time for one answer; default: ten minutes, or one where a state is asked for (GET).
            most_bytes: longest answer.

        Raises:
            PeerUnavailable: no answer within `patience_s`.
            BridgeError: the server refused (4xx).
            PeerError: it failed (5xx), requires another token, or its answer does not fit.
        """
        content = None if body is None else body.model_dump_json(exclude_unset=True, exclude_none=True).encode()
        headers = {"content-type": "application/json"} if content else {}
        where = f"{method} {self.url}{path}"
        num_failures = 0
        limit_s = self._patience_s if patience_s is None else patience_s
        if within_s is None:
            within_s = _STATE_WITHIN_S if method == "GET" else _ANSWER_WITHIN_S
        timeout = httpx.Timeout(within_s, connect=5)

        def attempt() -> httpx.Response:
            try:
                response = self._http.request(
                    method, path, content=content, headers=headers, timeout=timeout, extensions=at_most(most_bytes)
                )
            except httpx.TransportError as error:
                raise _NoAnswer(f"{type(error).__name__}: {error}") from None
            if response.status_code in (_BUSY, _UNAVAILABLE):
                raise _NoAnswer(_detail(response), response)
            return response

        def log_first(error: Exception) -> None:
            nonlocal num_failures
            num_failures += 1
            if num_failures == 1 and limit_s > 0:
                logger.warning(WAITING_FOR_PEER.text, method, self.url, path, error, limit_s)

        policy = RetryPolicy(
            retried=_NoAnswer,
            first_pause_s=_RETRY_INTERVAL_S,
            longest_pause_s=_RETRY_INTERVAL_S,
            limit_s=limit_s,
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
                    f"{where}: no answer for {limit_s:g} s ({error}); check the inference server's log"
                ) from None
            response = error.response
        return self._read(method, path, response, answer)

    def _read(self, method: str, path: str, response: httpx.Response, answer: type[AnswerT]) -> AnswerT:
        where = f"{method} {self.url}{path}"
        if response.status_code == httpx.codes.NOT_FOUND and path == _INFO:
            raise BridgeError(f"{where}: answered 404: {wrong_server(self.url)} (--vllm-port)")
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
    words = response.text
    if len(words) <= _MOST_PARSED:
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            words = str(response.json()["detail"])
    return words if len(words) <= _DETAIL_CHARACTERS else f"{words[:_DETAIL_CHARACTERS]}…"
