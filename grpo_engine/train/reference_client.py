"""The reference policy of a trainer that leaves it to reference services: asked while the trainer computes.

Requests of a batch are sent at once, by one thread for each service; the log-probabilities of a micro-batch are waited
for when its loss needs them. A service that does not answer is asked again, and so are the others; a value that is not
the answer to the very request, by the model that was asked for, is an error.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import cache, partial
from itertools import count
from queue import SimpleQueue

import httpx
import torch
from pydantic import ValidationError
from torch import Tensor

from grpo_engine.data.batching import Batch
from grpo_engine.data.scoring_rows import decode_scores, encode_rows
from grpo_engine.errors import ConfigError, DataError, PeerError, PeerUnavailable
from grpo_engine.models.same_model import is_same_model
from grpo_engine.retrying import RetryPolicy, retry
from grpo_engine.wire.access_token import find_token
from grpo_engine.wire.bounded_answers import allowing
from grpo_engine.wire.codec import first_fault
from grpo_engine.wire.log_lines import WAITING_FOR_PEER
from grpo_engine.wire.reference import MODEL_ROUTE, MOST_BODY_BYTES, SCORE_ROUTE, ReferenceModel, ReferenceRefusal
from grpo_engine.wire.token_clients import open_client

ANSWER_WITHIN_S = 600.0
"""For one micro-batch, behind those of other ranks."""
_CONNECT_WITHIN_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
_DETAIL_CHARACTERS = 500
_MOST_PARSED = 1 << 20
"""Characters of a refusal that are read as JSON, which takes thirty times as much memory."""

log = logging.getLogger(__name__)


class RemoteReference:
    """A reference model that reference services hold."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        model_name: str,
        vocabulary: str,
        num_tokens: int,
        seq_len: int,
        patience_s: float,
        device: torch.device | str = "cpu",
    ) -> None:
        """Wait until one of the services answers, and check its model.

        Args:
            model_name: the reference, as the trainer names it.
            vocabulary: digest of the trained model's vocabulary; `num_tokens`: rows of its output layer.
            seq_len: longest sequence.
            patience_s: how long services may all be away.
            device: where log-probabilities are wanted.

        Raises:
            ConfigError: they hold another model, with another vocabulary, or take shorter sequences.
            PeerUnavailable: none answered.
        """
        self._urls = tuple(url.rstrip("/") for url in urls)
        self._model_name, self._vocabulary = model_name, vocabulary
        self._patience_s, self._device = patience_s, device
        self._http = open_client(
            find_token(os.environ), timeout=httpx.Timeout(ANSWER_WITHIN_S, connect=_CONNECT_WITHIN_S)
        )
        self._work: SimpleQueue[tuple[Batch, Future[Tensor]] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        try:
            model = self._find_model(num_tokens, seq_len)
        except BaseException:
            self._http.close()
            raise
        for first in range(len(self._urls)):
            self._threads.append(threading.Thread(target=self._serve, args=(first,), daemon=True))
            self._threads[-1].start()
        log.info("reference: %s at %s, in %s", model.model_name, ", ".join(self._urls), model.dtype)

    def start(self, batches: Sequence[Batch]) -> list[Callable[[], Tensor]]:
        """Have the log-probabilities of batches computed; each function waits for those of its batch.

        They are (B, T) fp32 of the labels, 0 where not trained. A function raises PeerUnavailable where no service
        answered, and PeerError or ConfigError where one answered what it should not.
        """
        futures: list[Future[Tensor]] = []
        for batch in batches:
            futures.append(Future())
            self._work.put((batch.to("cpu"), futures[-1]))
        return [cache(partial(self._result, future)) for future in futures]

    def close(self) -> None:
        """End the threads and connections, after what they were asked for."""
        for _ in self._urls:
            self._work.put(None)
        for thread in self._threads:
            thread.join()
        self._http.close()

    def _find_model(self, num_tokens: int, seq_len: int) -> ReferenceModel:
        url, response = self._ask(0, "GET", MODEL_ROUTE, None)
        try:
            model = ReferenceModel.model_validate_json(response.content)
        except ValidationError as error:
            raise PeerError(f"{url}{MODEL_ROUTE}: {first_fault(error)}; is this a reference service?") from None
        self._check_model(url, model.model_name, model.vocabulary)
        if model.num_tokens < num_tokens:
            raise ConfigError(
                f"{url}: the reference {model.model_name} knows {model.num_tokens} tokens and the trained model "
                f"{num_tokens}: choose a reference with the same tokenizer"
            )
        if model.max_tokens < seq_len:
            raise ConfigError(
                f"{url}: scores sequences of up to {model.max_tokens} tokens, and seq_len is {seq_len}: raise "
                "max_model_len of the reference service"
            )
        return model

    def _result(self, future: Future[Tensor]) -> Tensor:
        return future.result().to(self._device)

    def _serve(self, first: int) -> None:
        """Work of a thread: ask one service, and others only where it does not answer."""
        while (work := self._work.get()) is not None:
            batch, future = work
            try:
                future.set_result(self._logprobs(first, batch))
            except BaseException as error:  # for the trainer, which waits for it
                future.set_exception(error)

    def _logprobs(self, first: int, batch: Batch) -> Tensor:
        body = encode_rows(batch)
        url, response = self._ask(first, "POST", SCORE_ROUTE, body)
        try:
            head, logprobs = decode_scores(response.content, body, batch.mask)
        except DataError as error:
            raise PeerError(f"{url}{SCORE_ROUTE}: {error}; is this a reference service?") from None
        self._check_model(url, head.model_name, head.vocabulary)
        return logprobs

    def _check_model(self, url: str, name: str, vocabulary: str) -> None:
        """One that was restarted may be another."""
        if not is_same_model(name, self._model_name):
            raise ConfigError(
                f"{url}: holds {name}, and the reference of this trainer is {self._model_name}: give both the same "
                "model (reference_model of the trainer, model_name of the reference service)"
            )
        if vocabulary != self._vocabulary:
            raise ConfigError(
                f"{url}: the vocabulary of {name} is not that of the trained model, so that token ids mean other "
                "texts: choose a reference with the same tokenizer"
            )

    def _ask(self, first: int, method: str, route: str, body: bytes | None) -> tuple[str, httpx.Response]:
        """The URL and answer of the first service that answers, beginning with number `first`."""
        numbers = count(first)
        has_failed = False

        def attempt() -> tuple[str, httpx.Response]:
            url = self._urls[next(numbers) % len(self._urls)]
            try:
                # Scores are no JSON, and the description of a model is short.
                bounds = {} if body is None else allowing(MOST_BODY_BYTES)
                response = self._http.request(method, f"{url}{route}", content=body, extensions=bounds)
            except httpx.TransportError as error:
                raise PeerUnavailable(f"{url}{route}: {type(error).__name__}: {error}") from None
            if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
                raise PeerUnavailable(f"{url}{route}: {_detail(response)}")
            return url, response

        def log_first(error: Exception) -> None:
            nonlocal has_failed
            if not has_failed:
                log.warning(WAITING_FOR_PEER.text, method, "the reference service", route, error, self._patience_s)
            has_failed = True

        try:
            url, response = retry(
                attempt,
                RetryPolicy(
                    retried=PeerUnavailable,
                    first_pause_s=_FIRST_PAUSE_S,
                    longest_pause_s=_LONGEST_PAUSE_S,
                    limit_s=self._patience_s,
                    on_failure=log_first,
                ),
            )
        except PeerUnavailable as error:
            raise PeerUnavailable(
                f"no reference service answered for {self._patience_s:g} s: {error}; look at its log"
            ) from None
        if not response.is_success:
            raise PeerError(f"{url}{route}: refused with {response.status_code}: {_detail(response)}")
        return url, response


def _detail(response: httpx.Response) -> str:
    words = response.text
    if len(words) <= _MOST_PARSED:
        with suppress(ValidationError):
            words = ReferenceRefusal.model_validate_json(response.content).detail
    return words if len(words) <= _DETAIL_CHARACTERS else f"{words[:_DETAIL_CHARACTERS]}…"
