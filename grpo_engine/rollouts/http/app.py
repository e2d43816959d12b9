"""HTTP routes of the rollout API: the Atropos trajectory API as stock clients use it, and extensions.

Extensions: `/batch?ack=` and `POST /acknowledge` for explicit acknowledgement, `wait_s` for long polling,
`/evaluations`, `/metrics`, and errors with a reason. Bodies of groups are validated once, stored as bytes, and joined
when a batch is delivered.
"""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.requests import ClientDisconnect

from grpo_engine.rollouts.config import ApiConfig
from grpo_engine.rollouts.coordinator import Coordinator
from grpo_engine.rollouts.http import bodies
from grpo_engine.rollouts.metrics import metrics_text
from grpo_engine.rollouts.state.outcomes import Placed
from grpo_engine.rollouts.stock import responses
from grpo_engine.rollouts.storage.store import Store
from grpo_engine.rollouts.validation import CheckedGroup, Refusal, read_group, read_groups
from grpo_engine.serving.access import AccessControl
from grpo_engine.serving.bodies import BodyLimits
from grpo_engine.serving.reporting import Reporter
from grpo_engine.wire.codec import Message
from grpo_engine.wire.inference import PolicyVersion
from grpo_engine.wire.rollouts import (
    MAX_WAIT_S,
    POST_HEADER,
    EnvironmentStatus,
    EvaluationAnswer,
    EvaluationOrder,
    EvaluationState,
    RegisterEnvironmentRequest,
    RegisterRequest,
    ScoredGroup,
    StatusList,
    StatusListRequest,
    StatusRequest,
    Whole,
)

BODIES_AT_ONCE = 2
"""Of the longest that are accepted; more wait, so that unfinished ones do not add up in memory."""
MAX_NAMES = 100
"""Of live environments in `/status`, the newest; it is answered without the token, and there may be 20,000."""
MAX_POST_KEY = 256
"""Characters of the sender and number of a post; the last one of each sender is kept."""
OPEN_PATHS = frozenset({"/", "/info", "/health", "/status", "/metrics"})
"""Answered without the token, for probes and observers: they neither change anything nor show data."""


class EnvironmentId(Message):
    """Body of routes for one environment."""

    env_id: Whole


def make_app(config: ApiConfig, store: Store, reporter: Reporter | None = None) -> FastAPI:
    """The ASGI application; it owns `store` from startup to shutdown."""
    reporter = reporter or Reporter()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        coordinator = app.state.coordinator = Coordinator(config, store, store.load(), reporter)
        with reporter:
            yield
        await coordinator.close_store()

    app = FastAPI(title="Rollout API", lifespan=lifespan, responses=bodies.REFUSALS)
    app.state.body_turns = bodies.BodyTurns()
    app.add_middleware(BodyLimits, longest_bytes=config.max_body_bytes, num_at_once=BODIES_AT_ONCE)
    app.add_middleware(
        AccessControl, host=config.host, token=config.token, needs_token=lambda path: path not in OPEN_PATHS
    )

    @app.exception_handler(RequestValidationError)
    async def refuse_query(request: Request, error: RequestValidationError) -> JSONResponse:
        """FastAPI's answer without the input, which may not be representable in JSON or UTF-8."""
        faults = [{"type": fault["type"], "loc": fault["loc"], "msg": fault["msg"]} for fault in error.errors()]
        return JSONResponse({"detail": faults}, 422)

    @app.exception_handler(Refusal)
    async def refuse(request: Request, refusal: Refusal) -> JSONResponse:
        _coordinator(request).counters.refused[refusal.reason] += 1
        headers = {"Retry-After": "5"} if refusal.status == 503 else None
        return JSONResponse({"detail": refusal.detail}, refusal.status, headers)

    @app.exception_handler(ClientDisconnect)
    async def client_gone(request: Request, disconnect: ClientDisconnect) -> Response:
        _coordinator(request).counters.refused["hung_up"] += 1
        return Response(status_code=400)

    @app.get("/")
    async def root() -> dict[str, str]:
        return {"message": "GRPO rollout API"}

    _add_trainer_routes(app, config)
    _add_environment_routes(app, config)
    _add_evaluation_routes(app, config)
    _add_observer_routes(app)
    return app


def _add_trainer_routes(app: FastAPI, config: ApiConfig) -> None:
    @app.post("/register", openapi_extra=bodies.described(RegisterRequest.model_json_schema()))
    async def register(request: Request) -> dict[str, Any]:
        body = await bodies.message(request, RegisterRequest, max_bytes=config.max_body_bytes)
        # Below 2^53, so that readers with double-precision numbers keep it whole.
        uuid = random.getrandbits(52)
        registered = await _coordinator(request).register(body, uuid)
        return {"uuid": uuid, "changes": registered.changes}

    @app.get("/info")
    async def info(request: Request) -> dict[str, int]:
        return responses.info(_coordinator(request).state.run)

    @app.get("/wandb_info")
    async def wandb_info(request: Request) -> dict[str, str | None]:
        return responses.wandb_info(_coordinator(request).state.run)

    @app.get("/batch")
    async def batch(
        request: Request,
        ack: str | None = None,
        wait_s: Annotated[float, Query(ge=0, le=MAX_WAIT_S)] = 0.0,
        policy_version: Annotated[PolicyVersion | None, Query()] = None,
        uuid: int | None = None,
    ) -> Response:
        coordinator = _coordinator(request)
        if coordinator.state.run is None:
            return JSONResponse(responses.NOT_REGISTERED)
        _refuse_superseded(coordinator, uuid)
        peer = request.client.host if request.client else "unknown"
        client = f"{peer} {request.headers.get('user-agent', '')}".strip()
        delivery = await coordinator.next_batch(client=client, ack=ack, wait_s=wait_s, policy_version=policy_version)
        if delivery is None:
            _refuse_superseded(coordinator, uuid)
            problem = coordinator.why_no_batch()
            return JSONResponse({"batch": None, **({"message": problem} if problem else {})})
        more: dict[str, Any] = {"lease": delivery.lease.id, "environments": delivery.environments}
        more |= {"idle": delivery.idle.model_dump()} if delivery.idle else {}
        more |= {"num_dropped": delivery.num_dropped} if delivery.num_dropped else {}
        speed = delivery.tokens_per_second
        more |= {} if speed is None else {"tokens_per_second": speed}
        more |= {"ahead": delivery.ahead.model_dump(mode="json")} if delivery.ahead else {}
        extra = json.dumps(more).encode()
        content = b'{"batch":[' + b",".join(delivery.bodies) + b"]," + extra[1:]
        answer = await bodies.json_answer(request, content)
        if await request.is_disconnected():
            await coordinator.reclaim(delivery.lease)
        else:
            coordinator.record_sent(delivery.lease, connection=request.scope.get("client"))
        return answer

    @app.post("/acknowledge")
    async def acknowledge(request: Request, lease: Annotated[str, Query()]) -> dict[str, str]:
        await _coordinator(request).acknowledge(lease)
        return {"status": "success"}

    @app.post("/served")
    async def served(
        request: Request,
        lease: Annotated[str, Query()],
        policy_version: Annotated[PolicyVersion, Query()],
        uuid: int | None = None,
    ) -> dict[str, str]:
        _refuse_superseded(_coordinator(request), uuid)
        await _coordinator(request).record_served(lease, policy_version)
        return {"status": "success"}


def _add_environment_routes(app: FastAPI, config: ApiConfig) -> None:
    @app.post("/register-env", openapi_extra=bodies.described(RegisterEnvironmentRequest.model_json_schema()))
    async def register_env(request: Request) -> dict[str, Any]:
        body = await bodies.message(request, RegisterEnvironmentRequest, max_bytes=config.max_body_bytes)
        coordinator = _coordinator(request)
        return responses.environment_registered(await coordinator.register_environment(body), coordinator.state.run)

    @app.get(
        "/status-env",
        response_model=EnvironmentStatus,
        openapi_extra=bodies.described(StatusRequest.model_json_schema()),
    )
    async def status_env(request: Request) -> Response:
        asked = json.dumps({"env_id": request.query_params.get("env_id")}).encode()

        def read(body: bytes) -> StatusRequest:
            try:
                return StatusRequest.model_validate_json(body or asked)
            except ValueError:
                raise Refusal(422, 'the body must be {"env_id": <integer>}, also with GET', "malformed") from None

        query = await bodies.parsed(request, read, max_bytes=config.max_body_bytes)
        coordinator, says_idle = _coordinator(request), "wait_s" in query.model_fields_set
        (status,) = await coordinator.polling.statuses([query], wait_s=query.wait_s, says_idle=says_idle)
        if status is None:
            raise Refusal(404, f"environment {query.env_id} is not registered: POST /register-env", "unknown_id")
        # Only environments that evaluate or take slots receive more than the six stock keys.
        return Response(status.model_dump_json(exclude_none=True), media_type="application/json")

    @app.post(
        "/status-env-list",
        response_model=StatusList,
        openapi_extra=bodies.described(StatusListRequest.model_json_schema()),
    )
    async def status_env_list(request: Request) -> Response:
        body = await bodies.message(request, StatusListRequest, max_bytes=config.max_body_bytes)
        coordinator = _coordinator(request)
        statuses = await coordinator.polling.statuses(body.environments, wait_s=body.wait_s, says_idle=True)
        answer = StatusList(**responses.info(coordinator.state.run), environments=statuses)
        return Response(answer.model_dump_json(exclude_none=True), media_type="application/json")

    group_schema = ScoredGroup.model_json_schema()

    @app.post("/scored_data", openapi_extra=bodies.described(group_schema))
    async def scored_data(request: Request) -> dict[str, Any]:
        coordinator = _coordinator(request)
        names = coordinator.environment_names
        group = await bodies.parsed(
            request,
            lambda body: read_group(body, names),
            max_bytes=config.max_body_bytes,
            before_many=coordinator.written,
        )
        placed = await coordinator.add_groups([group], _post(request), request.is_disconnected)
        return responses.group_received(_small(coordinator, [group], placed))

    @app.post("/scored_data_list", openapi_extra=bodies.described({"type": "array", "items": group_schema}))
    async def scored_data_list(request: Request) -> dict[str, Any]:
        coordinator = _coordinator(request)
        names = coordinator.environment_names
        groups = await bodies.parsed(
            request,
            lambda body: read_groups(body, names),
            max_bytes=config.max_body_bytes,
            before_many=coordinator.written,
        )
        placed = await coordinator.add_groups(groups, _post(request), request.is_disconnected)
        return responses.groups_received(len(groups), _small(coordinator, groups, placed))

    @app.post("/disconnect-env", openapi_extra=bodies.described(EnvironmentId.model_json_schema()))
    async def disconnect_env(request: Request) -> dict[str, str]:
        body = await bodies.message(request, EnvironmentId, max_bytes=config.max_body_bytes)
        if await _coordinator(request).disconnect(body.env_id) is None:
            return {"status": "failure", "error": f"environment {body.env_id} is not registered"}
        return {"status": "success"}


def _add_evaluation_routes(app: FastAPI, config: ApiConfig) -> None:
    @app.post("/evaluations", openapi_extra=bodies.described(EvaluationOrder.model_json_schema()))
    async def order(request: Request) -> EvaluationState:
        body = await bodies.message(request, EvaluationOrder, max_bytes=config.max_body_bytes)
        coordinator = _coordinator(request)
        if coordinator.state.run is None:
            raise Refusal(409, "no trainer is registered: POST /register first", "unregistered")
        return await coordinator.order_evaluation(body)

    @app.get("/evaluations/{evaluation_id}")
    async def state(
        request: Request, evaluation_id: str, wait_s: Annotated[float, Query(ge=0, le=MAX_WAIT_S)] = 0.0
    ) -> EvaluationState:
        return await _coordinator(request).evaluation_state(evaluation_id, wait_s=wait_s)

    @app.post(
        "/evaluations/{evaluation_id}/answers", openapi_extra=bodies.described(EvaluationAnswer.model_json_schema())
    )
    async def answer(request: Request, evaluation_id: str) -> dict[str, str]:
        body = await bodies.message(request, EvaluationAnswer, max_bytes=config.max_body_bytes)
        await _coordinator(request).answer_evaluation(evaluation_id, body)
        return {"status": "received"}

    @app.delete("/evaluations/{evaluation_id}")
    async def close(request: Request, evaluation_id: str) -> dict[str, str]:
        await _coordinator(request).close_evaluation(evaluation_id)
        return {"status": "success"}


def _add_observer_routes(app: FastAPI) -> None:
    @app.get("/health", responses=bodies.REFUSALS)
    async def health(request: Request) -> JSONResponse:
        """200, or 503 while the store's file is missing and nothing can be written."""
        lost = _coordinator(request).store_lost
        return JSONResponse({"detail": lost or "well"}, 503 if lost else 200)

    @app.get("/status")
    async def status(request: Request) -> dict[str, Any]:
        coordinator = _coordinator(request)
        state = coordinator.state
        names = [record.name for record in state.environments.live(coordinator.now()).records]
        return {
            "current_step": state.run.step if state.run else 0,
            "num_steps": state.run.request.num_steps if state.run else None,
            "queue_size": len(state.queue),
            "queued_sequences": state.num_waiting_sequences(),
            "environments": names[-MAX_NAMES:],
            "environments_left_out": max(0, len(names) - MAX_NAMES),
            "problem": coordinator.why_no_batch(),
        }

    @app.get("/latest_example")
    async def latest_example(request: Request) -> Response:
        latest = _coordinator(request).latest_body
        return (
            await bodies.json_answer(request, latest) if latest is not None else JSONResponse(responses.EMPTY_EXAMPLE)
        )

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics(request: Request) -> PlainTextResponse:
        coordinator = _coordinator(request)
        text = metrics_text(coordinator.counters, coordinator.state, coordinator.admission, now=coordinator.now())
        return PlainTextResponse(text)

    @app.get("/reset_data", response_class=PlainTextResponse, responses={409: {"content": {"text/plain": {}}}})
    async def reset_data(request: Request, force: bool = False) -> PlainTextResponse:
        coordinator = _coordinator(request)
        run = coordinator.state.run
        if run is not None and coordinator.state.is_run_active(coordinator.now()) and not force:
            return PlainTextResponse(
                f"Not reset: a run is active at step {run.step} of {run.request.num_steps}. "
                "To delete it anyway: /reset_data?force=true\n",
                409,
            )
        await coordinator.reset()
        return PlainTextResponse("Reset successful")


def _coordinator(request: Request) -> Coordinator:
    coordinator: Coordinator = request.app.state.coordinator
    return coordinator


def _refuse_superseded(coordinator: Coordinator, uuid: int | None) -> None:
    run = coordinator.state.run
    if uuid is not None and run is not None and uuid != run.uuid:
        detail = "another trainer has registered since, and receives all batches: give each run its own rollout API"
        raise Refusal(409, detail, "superseded")


def _small(coordinator: Coordinator, groups: Sequence[CheckedGroup], placed: Sequence[Placed]) -> list[Placed]:
    """Where the groups went that pass through the buffer of their environment."""
    records = coordinator.state.environments.records
    return [
        each
        for each, group in zip(placed, groups, strict=bool(placed))
        if group.env_id in records and records[group.env_id].buffers(group.num_sequences)
    ]


def _post(request: Request) -> tuple[str, str] | None:
    """Sender and number of a post, if it carries them.

    Raises:
        Refusal: 400 when they are longer than any that is kept.
    """
    key = request.headers.get(POST_HEADER, "")
    if len(key) > MAX_POST_KEY:
        text = f"{POST_HEADER} has {len(key)} characters: send `sender:number` in at most {MAX_POST_KEY}"
        raise Refusal(400, text, "malformed")
    sender, colon, number = key.partition(":")
    return (sender, number) if colon else None
