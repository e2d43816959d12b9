"""The HTTP application of a reference service: which model it holds, and log-probabilities of rows."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from torch import Tensor

from grpo_engine.data.batching import Batch
from grpo_engine.data.scoring_rows import decode_rows, encode_scores
from grpo_engine.errors import DataError
from grpo_engine.serving.access import AccessControl
from grpo_engine.serving.bodies import BodyLimits
from grpo_engine.wire.reference import HEALTH_ROUTE, MODEL_ROUTE, MOST_BODY_BYTES, SCORE_ROUTE, ReferenceModel

BODIES_AT_ONCE = 4
"""Of the longest that are accepted."""

log = logging.getLogger(__name__)


class ScoringModel(Protocol):
    """What the routes use."""

    @property
    def description(self) -> ReferenceModel:
        """Which model it is."""

    def logprobs(self, batch: Batch) -> Tensor:
        """(N,) of the batch's trained labels."""


def create_app(
    model: ScoringModel, *, host: str, token: str | None, fail: Callable[[BaseException], None]
) -> Starlette:
    """All routes; requests are scored one after the other.

    Args:
        fail: ends the service after an error with which the device may be unusable.
    """
    one_at_a_time = asyncio.Lock()

    async def health(_request: Request) -> Response:
        return Response()

    async def description(_request: Request) -> Response:
        return JSONResponse(model.description.model_dump())

    async def score(request: Request) -> Response:
        parts = bytearray()
        async for part in request.stream():
            parts += part
            if len(parts) > MOST_BODY_BYTES:
                return _refused(413, f"the body is longer than {MOST_BODY_BYTES:,} bytes: send fewer rows at once")
        body, about = bytes(parts), model.description
        try:
            async with one_at_a_time:
                return Response(await asyncio.to_thread(_scores, body, about), media_type="application/octet-stream")
        except DataError as error:
            return _refused(422, str(error))
        except torch.OutOfMemoryError:
            log.exception("the GPU's memory ran out")
            return _refused(507, "the GPU's memory ran out: lower micro_batch_tokens of the reference service")
        except Exception as error:  # a CUDA error leaves the process unusable; the client waits for the next one
            log.exception("scoring failed")
            fail(error)
            return _refused(503, f"{type(error).__name__}: {error}; the service ends")

    def _scores(body: bytes, about: ReferenceModel) -> bytes:
        rows = decode_rows(body, num_tokens=about.num_tokens, max_tokens=about.max_tokens)
        scores = rows.scored_by(model.logprobs)
        return encode_scores(scores, body, model_name=about.model_name, vocabulary=about.vocabulary)

    app = Starlette(
        routes=[
            Route(HEALTH_ROUTE, health),
            Route(MODEL_ROUTE, description),
            Route(SCORE_ROUTE, score, methods=["POST"]),
        ]
    )
    app.add_middleware(BodyLimits, longest_bytes=MOST_BODY_BYTES, num_at_once=BODIES_AT_ONCE)
    app.add_middleware(AccessControl, host=host, token=token, needs_token=lambda path: path != HEALTH_ROUTE)
    return app


def _refused(status: int, detail: str) -> Response:
    return JSONResponse({"detail": detail}, status)
