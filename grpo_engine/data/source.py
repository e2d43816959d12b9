"""The trainer's client of the rollout API.

Fetches one batch at a time, so that none goes stale here, and acknowledges it with the request for the next: a batch
whose step was not finished is offered again to the next trainer. Retries while the API is down, and registers again
with one that was reset. The loop decides how old a group may be.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from statistics import fmean
from types import TracebackType
from typing import Any

import httpx
from pydantic import ValidationError

from grpo_engine.errors import GrpoError, PeerError, PeerUnavailable
from grpo_engine.retrying import RetryPolicy, Stopped, never, retry
from grpo_engine.wire.access_token import find_token
from grpo_engine.wire.bounded_answers import allowing
from grpo_engine.wire.codec import first_fault, shortened
from grpo_engine.wire.metrics import BATCHES_AHEAD, SAMPLING_SPEED, SERVERS_FULL, STALE_GROUPS, WORKERS_FULL
from grpo_engine.wire.rollouts import (
    BatchesAhead,
    BatchResponse,
    EvaluationOrder,
    EvaluationState,
    IdleTimes,
    RegisterRequest,
    RegisterResponse,
    SamplingLimit,
    ScoredGroup,
)
from grpo_engine.wire.token_clients import open_client

log = logging.getLogger(__name__)

_MIN_POLL_S = 0.02
_MAX_POLL_S = 0.25
"""Between two requests to an API without long-polling."""
_HOLD_S = 1.0
"""Long-poll time of the API; a stop request is seen after at most this time."""
_REQUEST_TIMEOUT_S = 60.0
"""A batch may be hundreds of megabytes; a refused connection fails at once."""
_MAX_BATCH_BYTES = 256 << 20
_MAX_BATCH_MARKS = 4 << 20
_TOKEN_MARKS = 4
"""With lists for distillation a token has two brackets, and its text some quotes."""
_TOKEN_BYTES = 128
"""Generous: with id, label, log-prob and policy version a token has about 40 bytes in JSON, and its text has some."""
_MOST_TIMES_ASKED = 4
"""Sequences of a batch, of those that were asked for: each takes the memory of the longest, and a batch may have been
made for an earlier trainer that asked for more."""
_SAY_AGAIN_S = 60.0
"""Between two log lines with the same message, and before the first that there is no batch."""


class _NoBatchYet(PeerUnavailable):
    """The API answers, but has no batch."""


def batch_limits(num_tokens: int) -> tuple[int, int]:
    """Bytes, and brackets, braces and quotes, of the longest JSON of a batch of so many tokens."""
    return max(_MAX_BATCH_BYTES, num_tokens * _TOKEN_BYTES), _MAX_BATCH_MARKS + num_tokens * _TOKEN_MARKS


class RolloutApiSource:
    """A trainer's connection to a rollout API."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        reach_timeout_s: float = 30.0,
        register_timeout_s: float = 3600.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Send no request yet.

        Args:
            token: that of the API; absent: as `find_token` finds it.
            reach_timeout_s: how long to wait for the API at the start.
            register_timeout_s: how long to repeat a registration that the API cannot store, since its disk is full.
        """
        self.url = url.rstrip("/")
        self._http = open_client(
            token or find_token(os.environ),
            base_url=self.url,
            timeout=_REQUEST_TIMEOUT_S,
            transport=transport,
        )
        self._reach_timeout_s, self._register_timeout_s = reach_timeout_s, register_timeout_s
        self._registration: RegisterRequest | None = None
        self._uuid: int | None = None
        self._lease = ""
        self._environments: dict[int, str] = {}
        self._idle: IdleTimes | None = None
        self._num_dropped: int | None = None
        """Groups that were too old, where staleness is bounded."""
        self._tokens_per_second: float | None = None
        self._ahead: BatchesAhead | None = None
        self._is_used = False
        self._why_none = ""
        """Why there was no batch the last time, as the API said it."""
        self._said: tuple[str, float] = ("", 0.0)

    def __enter__(self) -> RolloutApiSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_used and (kind is None or issubclass(kind, GrpoError)):  # after another error the step may be lost
            self.acknowledge()
        self.close()

    def close(self) -> None:
        """Close the connection; a batch that was not acknowledged is offered again."""
        self._http.close()

    def wait_until_reachable(self, timeout_s: float | None = None, *, stop: Callable[[], bool] = never) -> None:
        """Wait for the API to answer.

        Raises:
            PeerUnavailable: it did not, within `timeout_s` (absent: `reach_timeout_s`), or before `stop()` became true.
        """
        limit = self._reach_timeout_s if timeout_s is None else timeout_s

        def ask_info() -> None:
            try:
                answer = self._http.get("/info", timeout=2.0)
            except httpx.TransportError as error:
                raise PeerUnavailable(str(error) or type(error).__name__) from None
            if answer.status_code != httpx.codes.OK:
                raise PeerUnavailable(f"/info answers {answer.status_code}, so it is not a rollout API")

        try:
            retry(ask_info, self._retry_policy(limit, stop))
        except Stopped as why:
            raise PeerUnavailable(f"{self.url}: {why}; not retried, since training is stopping") from None
        except PeerUnavailable as why:
            log.warning("[Trainer] ⚠ Warning: Atropos API server not reachable at %s", self.url)
            raise PeerUnavailable(
                f"Atropos API not reachable at {self.url} within {limit:g} s ({why}): "
                "start it first (grpo-engine api), or correct --atropos-url"
            ) from None
        log.info("[Trainer] ✓ Atropos API server is reachable at %s", self.url)

    def register(
        self,
        *,
        batch_size: int,
        max_token_len: int,
        checkpoint_dir: str,
        save_checkpoint_interval: int,
        starting_step: int,
        num_steps: int,
        eval_every: int = 0,
        max_staleness: int | None = None,
        is_served: bool = False,
        wandb_group: str = "",
        wandb_project: str = "",
        stop: Callable[[], bool] = never,
    ) -> None:
        """Register the run once the API answers and can store it; `stop()` ends the wait.

        Raises:
            PeerUnavailable: the API does not answer, or could not store the registration.
            PeerError: the API refuses the registration.
        """
        registration = self._registration = RegisterRequest(
            wandb_group=wandb_group,
            wandb_project=wandb_project,
            batch_size=batch_size,
            max_token_len=max_token_len,
            checkpoint_dir=checkpoint_dir,
            save_checkpoint_interval=save_checkpoint_interval,
            starting_step=starting_step,
            num_steps=num_steps,
            eval_every=eval_every,
            max_staleness=max_staleness,
            is_served=is_served,
        )
        self.wait_until_reachable(stop=stop)

        def send() -> None:
            try:
                self._send_registration(registration)
            except PeerUnavailable as error:
                self._say(f"{error}; repeated until it is taken")
                raise

        try:
            retry(send, self._retry_policy(self._register_timeout_s, stop))
        except Stopped as why:
            raise PeerUnavailable(f"{why}; not repeated, since training is stopping") from None

    def poll(self, wait_s: float = 0.0, *, policy_version: int | None = None) -> list[ScoredGroup] | None:
        """Ask once for the next batch, which acknowledges the one before; None while there is none.

        Args:
            wait_s: how long the API may hold its answer until there is one; stock servers answer at once.
            policy_version: the version that inference serves now; the API drops groups that are too old for it.

        Raises:
            PeerUnavailable: the API does not answer; asking again later is safe.
            PeerError: the answer is not a batch, or another trainer has registered.
        """
        told: dict[str, str | float] = {"ack": self._lease, "wait_s": wait_s}
        told |= {} if policy_version is None else {"policy_version": policy_version}
        told |= {} if self._uuid is None else {"uuid": self._uuid}
        try:
            answer = self._http.get("/batch", params=told, extensions=self._allowed_batch())
        except httpx.TransportError as error:
            raise PeerUnavailable(f"{self.url}/batch: {str(error) or type(error).__name__}") from None
        if answer.status_code >= 500:
            raise PeerUnavailable(f"{self.url}/batch: {answer.status_code} {answer.text[:200]}")
        if answer.status_code != httpx.codes.OK:
            raise PeerError(f"{self.url}/batch: refused with {answer.status_code} {answer.text[:200]}")
        try:
            response = BatchResponse.model_validate_json(answer.content)
        except ValidationError as error:
            raise PeerError(f"{self.url}/batch: not a batch: {first_fault(error)}") from None
        if response.status == "error":
            self._register_again(response.message or "no reason given")
            return None
        self._why_none = f"{self.url}: {response.message}" if response.message else ""
        if self._why_none:
            self._say(self._why_none)
        if not response.batch:
            return None
        self._check_size(response.batch)
        self._lease, self._is_used = response.lease or "", False
        self._environments, self._idle, self._ahead = response.environments, response.idle, response.ahead
        is_bounded = self._registration is not None and self._registration.max_staleness is not None
        self._num_dropped = response.num_dropped if is_bounded else None
        self._tokens_per_second = response.tokens_per_second
        return response.batch

    @property
    def lease(self) -> str:
        """The API's name for the last batch; empty where there is none."""
        return self._lease

    @property
    def environments(self) -> dict[int, str]:
        """Names of the last batch's environments, by the ids in its groups; a stock API sends none."""
        return self._environments

    def time_metrics(self) -> dict[str, float]:
        """Before the last batch: how long environments waited, where they say it, how fast they sampled, and how many
        groups were dropped."""
        dropped = {} if self._num_dropped is None else {STALE_GROUPS: float(self._num_dropped)}
        idle = {} if self._idle is None else idle_metrics(self._idle)
        speed = {} if self._tokens_per_second is None else {SAMPLING_SPEED: self._tokens_per_second}
        return {**dropped, **speed, **idle, **({} if self._ahead is None else ahead_metrics(self._ahead))}

    def resume_after(self, lease: str) -> None:
        """Acknowledge this lease of a killed trainer with the next request, so that its batch is not offered again."""
        self._lease, self._is_used = lease, True

    def mark_used(self) -> None:
        """Mark the last batch as trained on; closing then acknowledges it too."""
        self._is_used = True

    def next_batch(
        self,
        timeout_s: float,
        *,
        policy_version: int | None = None,
        stop: Callable[[], bool] = never,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> list[ScoredGroup] | None:
        """Wait for the next batch; None when `stop()` became true first.

        Args:
            policy_version: as for `poll`.
            meanwhile: called at the start and then about once a second.

        Raises:
            PeerUnavailable: no batch within `timeout_s`, also if the API was down.
            PeerError: the API answers something outside the protocol.
        """
        began = time.monotonic()
        deadline = began + timeout_s
        since = time.strftime("%H:%M:%S")
        lost_at: float | None = None

        def poll() -> list[ScoredGroup]:
            nonlocal lost_at
            meanwhile()
            now = time.monotonic()
            try:
                batch = self.poll(min(_HOLD_S, max(0.0, deadline - now)), policy_version=policy_version)
            except PeerUnavailable as error:
                lost_at = lost_at or now
                self._say(f"{error}; waiting for the rollout API to come back")
                raise
            if lost_at is not None:
                log.info("%s answers again after %.1f s", self.url, now - lost_at)
                lost_at, self._said = None, ("", 0.0)
            if batch is None:
                if now - began > _SAY_AGAIN_S:
                    self._say(self._why_none or f"no batch from {self.url} since {since}: check the environments' logs")
                raise _NoBatchYet(
                    f"no batch from {self.url} within {timeout_s:g} s: check the environments' logs, and "
                    f"{self.url}/status for queued groups"
                )
            return batch

        if stop():
            return None
        try:
            return retry(poll, self._retry_policy(timeout_s, stop))
        except Stopped:
            return None

    def _retry_policy(self, limit_s: float, stop: Callable[[], bool]) -> RetryPolicy:
        return RetryPolicy(
            retried=PeerUnavailable,
            first_pause_s=_MIN_POLL_S,
            longest_pause_s=_MAX_POLL_S,
            limit_s=limit_s,
            is_stopping=stop,
        )

    def evaluation(self, order: EvaluationOrder, wait_s: float = 0.0) -> EvaluationState:
        """Fetch the state of an evaluation; orders it first where the API does not know it.

        Args:
            wait_s: how long the API may hold its answer until the evaluation is over.

        Raises:
            PeerUnavailable: the API does not answer; asking again later is safe.
            PeerError: a stock API without evaluations, or the order is refused.
        """
        state = self._ask("GET", f"/evaluations/{order.id}", params={"wait_s": wait_s})
        if state.status_code == httpx.codes.NOT_FOUND:
            state = self._ask("POST", "/evaluations", json=order.model_dump())
            if state.status_code == httpx.codes.CONFLICT:
                self._register_again(state.text[:200])
                state = self._ask("POST", "/evaluations", json=order.model_dump())
        if state.status_code == httpx.codes.NOT_FOUND:
            raise PeerError(
                f"{self.url} has no evaluations (a stock rollout API): use grpo-engine api, or set eval_every 0"
            )
        if state.status_code != httpx.codes.OK:
            raise PeerError(f"{self.url}/evaluations: refused with {state.status_code} {state.text[:200]}")
        try:
            return EvaluationState.model_validate_json(state.content)
        except ValidationError as error:
            raise PeerError(f"{self.url}/evaluations: not an evaluation: {first_fault(error)}") from None

    def close_evaluation(self, order: EvaluationOrder) -> None:
        """Tell the API that an evaluation is over; errors are only logged."""
        try:
            self._http.delete(f"/evaluations/{order.id}", timeout=2.0)
        except (httpx.TransportError, PeerError) as error:
            log.warning("%s: evaluation of step %d not closed: %s", self.url, order.step, error)

    def report_served(self, lease: str, policy_version: int) -> None:
        """Tell the API that the batch of this lease was trained, and that inference serves the new version now.

        Where staleness is bounded, environments may then start the next groups, before the trainer asks for a batch. An
        error is only logged: the next request for a batch says the same.
        """
        if not lease or lease != self._lease or self._registration is None or self._registration.max_staleness is None:
            return
        told: dict[str, str | int] = {"lease": lease, "policy_version": policy_version}
        told |= {} if self._uuid is None else {"uuid": self._uuid}
        try:
            self._http.post("/served", params=told, timeout=2.0)
        except (httpx.TransportError, PeerError) as error:
            log.info("%s: not told that version %d is served: %s", self.url, policy_version, error)

    def acknowledge(self) -> None:
        """Acknowledge the last batch without a request for another; errors are only logged."""
        if not self._lease:
            return
        try:
            self._http.post("/acknowledge", params={"lease": self._lease}, timeout=2.0)
        except (httpx.TransportError, PeerError) as error:
            log.warning("%s: last batch not acknowledged: %s", self.url, error)
        self._lease = ""

    def _allowed_batch(self) -> dict[str, Any]:
        """Longest batch that is read; longer where the sequences that the trainer asked for may need it."""
        asked = self._registration
        num_tokens = 0 if asked is None else asked.batch_size * max(asked.max_token_len, 0)
        return allowing(*batch_limits(num_tokens))

    def _check_size(self, batch: list[ScoredGroup]) -> None:
        if (asked := self._registration) is None:
            return
        num_sequences = sum(len(group.tokens) for group in batch)
        if num_sequences > _MOST_TIMES_ASKED * asked.batch_size:
            raise PeerError(
                f"{self.url}/batch: {num_sequences} sequences where {asked.batch_size} were asked for: is another run "
                "using this rollout API? Restart it without what it has queued"
            )

    def _ask(self, method: str, path: str, **parts: Any) -> httpx.Response:
        try:
            answer = self._http.request(method, path, **parts)
        except httpx.TransportError as error:
            raise PeerUnavailable(f"{self.url}{path}: {str(error) or type(error).__name__}") from None
        if answer.status_code >= 500:
            raise PeerUnavailable(f"{self.url}{path}: {answer.status_code} {answer.text[:200]}")
        return answer

    def _send_registration(self, registration: RegisterRequest) -> None:
        try:
            answer = self._http.post("/register", json=registration.model_dump())
        except httpx.TransportError as error:
            raise PeerUnavailable(f"{self.url}/register: {str(error) or type(error).__name__}") from None
        if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            raise PeerUnavailable(f"{self.url}/register: {answer.status_code} {answer.text[:200]}")
        if answer.status_code != httpx.codes.OK:
            raise PeerError(f"{self.url}/register: refused with {answer.status_code} {answer.text[:500]}")
        try:
            body = RegisterResponse.model_validate_json(answer.content)
        except ValidationError as error:
            raise PeerError(
                f"{self.url}/register: answers without a uuid: {first_fault(error)}: {answer.text[:200]}"
            ) from None
        self._uuid = body.uuid if isinstance(body.uuid, int) else None
        log.info("[Trainer] ✓ Registered with Atropos API at %s (uuid: %s)", self.url, shortened(str(body.uuid)))
        if body.changes:
            log.info("%s: %s", self.url, shortened(body.changes))

    def _register_again(self, reason: str) -> None:
        """Register again with an API that was reset, or restarted without its database."""
        if self._registration is None:
            raise PeerError(f"{self.url}/batch: {reason}: call register() first")
        log.warning("%s: %s; registering again", self.url, reason)
        self._lease = ""
        self._send_registration(self._registration)

    def _say(self, text: str) -> None:
        said, when = self._said
        now = time.monotonic()
        if text != said or now - when > _SAY_AGAIN_S:
            log.warning("%s", text)
            self._said = (text, now)


def ahead_metrics(ahead: BatchesAhead) -> dict[str, float]:
    """`rollout/batches_ahead`, and whether inference servers are the limit, or the workers of environments.

    >>> ahead_metrics(BatchesAhead(batches=4, limit=SamplingLimit.SERVERS))
    {'rollout/batches_ahead': 4.0, 'rollout/servers_full': 1.0, 'rollout/workers_full': 0.0}
    """
    return {
        BATCHES_AHEAD: float(ahead.batches),
        SERVERS_FULL: float(ahead.limit is SamplingLimit.SERVERS),
        WORKERS_FULL: float(ahead.limit is SamplingLimit.WORKERS),
    }


def idle_metrics(idle: IdleTimes) -> dict[str, float]:
    """`rollout/admission_wait_time` and `rollout/busy_fraction`: means over environments.

    >>> idle_metrics(IdleTimes(since_s=4.0, idle_s={0: 1.0, 1: 3.0}))
    {'rollout/admission_wait_time': 2.0, 'rollout/busy_fraction': 0.5}
    """
    if not idle.idle_s or idle.since_s <= 0:
        return {}
    waited_s = fmean(idle.idle_s.values())
    return {
        "rollout/admission_wait_time": waited_s,
        "rollout/busy_fraction": max(0.0, 1 - waited_s / idle.since_s),
    }
