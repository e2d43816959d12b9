"""The rollout API over HTTP: the Atropos trajectory API as stock clients speak it, and what it leaves out.

Beyond the stock routes: `/batch?ack=` and `POST /acknowledge` for clients that say what arrived, `wait_s` for those
that would rather wait than ask again, `/evaluations`, `/metrics`, and reasons in words. Bodies of groups pass through
as bytes: read once at entry, joined at exit.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel, Field
from starlette.requests import ClientDisconnect

from grpo_engine.rollouts import bodies
from grpo_engine.rollouts.config import ApiConfig
from grpo_engine.rollouts.counters import as_text
from grpo_engine.rollouts.entry import CheckedGroup, Refusal, read_group, read_groups
from grpo_engine.rollouts.exchange import Exchange
from grpo_engine.rollouts.guard import Guard
from grpo_engine.rollouts.store import Store
from grpo_engine.wire.rollouts import (
    POST_HEADER,
    EnvironmentStatus,
    EvaluationAnswer,
    EvaluationOrder,
    EvaluationState,
    RegisterEnvironmentRequest,
    RegisterRequest,
    ScoredGroup,
    Whole,
)

EMPTY_EXAMPLE: dict[str, list[object]] = {
    "tokens": [],
    "masks": [],
    "scores": [],
    "advantages": [],
    "ref_logprobs": [],
    "generation_params": [],
    "inference_logprobs": [],
    "messages": [],
    "images": [],
}
"""What `/latest_example` answers before there is one."""


MAX_WAIT_S = 20.0
"""Longest that a question is held for an answer that is not there yet."""


class EnvironmentId(BaseModel):
    """Body of the routes that are about one environment."""

    env_id: Whole


class StatusQuestion(EnvironmentId):
    """Body of `/status-env`; stock environments send the id alone and are answered at once."""

    wait_s: float = Field(0.0, ge=0, le=MAX_WAIT_S)
    """Hold the answer for so long while step and evaluation are as said below, and the queue has not become shorter."""
    current_step: Whole | None = None
    queue_size: Whole | None = None
    evaluation: str | None = None
    """Id of the evaluation that the asker knows it has yet to answer."""


def make_app(config: ApiConfig, store: Store) -> FastAPI:
    """The application; it owns `store` from its start to its end."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        exchange = app.state.exchange = Exchange(config, store, store.load())
        yield
        await exchange.close_store()

    app = FastAPI(title="Rollout API", lifespan=lifespan, responses=bodies.REFUSALS)
    app.add_middleware(Guard, token=config.token, host=config.host)

    @app.exception_handler(RequestValidationError)
    async def refuse_question(request: Request, error: RequestValidationError) -> JSONResponse:
        """As FastAPI, without the input: that may hold what JSON or UTF-8 cannot say."""
        faults = [{"type": fault["type"], "loc": fault["loc"], "msg": fault["msg"]} for fault in error.errors()]
        return JSONResponse({"detail": faults}, 422)

    @app.exception_handler(Refusal)
    async def refuse(request: Request, refusal: Refusal) -> JSONResponse:
        _exchange(request).counters.refused[refusal.reason] += 1
        headers = {"Retry-After": "5"} if refusal.status == 503 else None
        return JSONResponse({"detail": refusal.detail}, refusal.status, headers)

    @app.exception_handler(ClientDisconnect)
    async def nobody_is_there(request: Request, hung_up: ClientDisconnect) -> Response:
        _exchange(request).counters.refused["hung_up"] += 1
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
    @app.post("/register", openapi_extra=bodies.takes(RegisterRequest.model_json_schema()))
    async def register(request: Request) -> dict[str, Any]:
        body = await bodies.message(request, RegisterRequest, max_bytes=config.max_body_bytes)
        # Below 2^53, so that readers with double-precision numbers keep it whole.
        uuid = random.getrandbits(52)
        registered = await _exchange(request).register(body, uuid)
        return {"uuid": uuid, "changes": registered.changes}

    @app.get("/info")
    async def info(request: Request) -> dict[str, int]:
        run = _exchange(request).ledger.run
        return {
            "batch_size": run.request.batch_size if run else -1,
            "max_token_len": run.request.max_token_len if run else -1,
        }

    @app.get("/wandb_info")
    async def wandb_info(request: Request) -> dict[str, str | None]:
        run = _exchange(request).ledger.run
        return {
            "group": run.request.wandb_group if run else None,
            "project": run.request.wandb_project if run else None,
        }

    @app.get("/batch")
    async def batch(
        request: Request,
        ack: str | None = None,
        wait_s: Annotated[float, Query(ge=0, le=MAX_WAIT_S)] = 0.0,
        policy_version: Annotated[int | None, Query(ge=0)] = None,
        uuid: int | None = None,
    ) -> Response:
        exchange = _exchange(request)
        if exchange.ledger.run is None:
            message = "Trainer not registered: POST /register first"
            return JSONResponse({"status": "error", "message": message, "batch": []})
        _refuse_unless_ruling(exchange, uuid)
        peer = request.client.host if request.client else "unknown"
        client = f"{peer} {request.headers.get('user-agent', '')}".strip()
        delivery = await exchange.next_batch(client=client, ack=ack, wait_s=wait_s, policy_version=policy_version)
        if delivery is None:
            _refuse_unless_ruling(exchange, uuid)
            problem = exchange.problem()
            return JSONResponse({"batch": None, **({"message": problem} if problem else {})})
        beside = json.dumps({"lease": delivery.lease.id, "environments": delivery.environments}).encode()
        content = b'{"batch":[' + b",".join(delivery.bodies) + b"]," + beside[1:]
        answer = await bodies.json_answer(request, content)
        if await request.is_disconnected():
            await exchange.take_back(delivery.lease)
        else:
            exchange.sends(delivery.lease, connection=request.scope.get("client"))
        return answer

    @app.post("/acknowledge")
    async def acknowledge(request: Request, lease: Annotated[str, Query()]) -> dict[str, str]:
        await _exchange(request).acknowledge(lease)
        return {"status": "success"}


def _add_environment_routes(app: FastAPI, config: ApiConfig) -> None:
    @app.post("/register-env", openapi_extra=bodies.takes(RegisterEnvironmentRequest.model_json_schema()))
    async def register_env(request: Request) -> dict[str, Any]:
        body = await bodies.message(request, RegisterEnvironmentRequest, max_bytes=config.max_body_bytes)
        exchange = _exchange(request)
        record = await exchange.register_environment(body)
        run = exchange.ledger.run
        if record is None or run is None:
            return {"status": "wait for trainer to start"}
        return {
            "status": "success",
            "env_id": record.id,
            "wandb_name": record.name,
            "checkpoint_dir": run.request.checkpoint_dir,
            "starting_step": run.step,
            "checkpoint_interval": run.request.save_checkpoint_interval,
            "num_steps": run.request.num_steps,
        }

    @app.get(
        "/status-env",
        response_model=EnvironmentStatus,
        openapi_extra=bodies.takes(StatusQuestion.model_json_schema()),
    )
    async def status_env(request: Request) -> Response:
        body = await bodies.body(request, max_bytes=config.max_body_bytes)
        body = body or json.dumps({"env_id": request.query_params.get("env_id")}).encode()
        try:
            question = StatusQuestion.model_validate_json(body)
        except ValueError:
            raise Refusal(422, 'the body must be {"env_id": <integer>}, also with GET', "malformed") from None
        known = None
        if question.current_step is not None and question.queue_size is not None:
            known = (question.current_step, question.queue_size, question.evaluation)
        status = await _exchange(request).environment_status(question.env_id, wait_s=question.wait_s, known=known)
        if status is None:
            raise Refusal(
                404, f"environment {question.env_id} is not registered here: POST /register-env", "unknown_id"
            )
        # Only an environment that evaluates ever sees more than the six stock keys.
        return Response(status.model_dump_json(exclude_none=True), media_type="application/json")

    group_schema = ScoredGroup.model_json_schema()

    @app.post("/scored_data", openapi_extra=bodies.takes(group_schema))
    async def scored_data(request: Request) -> dict[str, Any]:
        exchange = _exchange(request)
        body = await bodies.body(request, max_bytes=config.max_body_bytes)
        names = exchange.environment_names
        group = await bodies.worked(len(body), lambda: read_group(body, names))
        placed = await exchange.add([group], _post(request), request.is_disconnected)
        if placed and _is_odd(exchange, group):
            return {"status": "buffered", "buffer_size": placed[0].num_buffered}
        return {"status": "received"}

    @app.post("/scored_data_list", openapi_extra=bodies.takes({"type": "array", "items": group_schema}))
    async def scored_data_list(request: Request) -> dict[str, Any]:
        exchange = _exchange(request)
        body = await bodies.body(request, max_bytes=config.max_body_bytes)
        names = exchange.environment_names
        groups = await bodies.worked(len(body), lambda: read_groups(body, names))
        placed = await exchange.add(groups, _post(request), request.is_disconnected)
        odd = [p.num_buffered for p, group in zip(placed, groups, strict=bool(placed)) if _is_odd(exchange, group)]
        buffered = {"buffered": len(odd), "last_buffer_size": odd[-1]} if odd else {}
        return {"status": "received", "groups_processed": len(groups), **buffered}

    @app.post("/disconnect-env", openapi_extra=bodies.takes(EnvironmentId.model_json_schema()))
    async def disconnect_env(request: Request) -> dict[str, str]:
        body = await bodies.message(request, EnvironmentId, max_bytes=config.max_body_bytes)
        if await _exchange(request).disconnect(body.env_id) is None:
            return {"status": "failure", "error": f"environment {body.env_id} is not registered here"}
        return {"status": "success"}


def _add_evaluation_routes(app: FastAPI, config: ApiConfig) -> None:
    @app.post("/evaluations", openapi_extra=bodies.takes(EvaluationOrder.model_json_schema()))
    async def order(request: Request) -> EvaluationState:
        body = await bodies.message(request, EvaluationOrder, max_bytes=config.max_body_bytes)
        exchange = _exchange(request)
        if exchange.ledger.run is None:
            raise Refusal(409, "no trainer is registered here: POST /register first", "unregistered")
        return await exchange.order_evaluation(body)

    @app.get("/evaluations/{evaluation_id}")
    async def state(
        request: Request, evaluation_id: str, wait_s: Annotated[float, Query(ge=0, le=MAX_WAIT_S)] = 0.0
    ) -> EvaluationState:
        return await _exchange(request).evaluation_state(evaluation_id, wait_s=wait_s)

    @app.post("/evaluations/{evaluation_id}/answers", openapi_extra=bodies.takes(EvaluationAnswer.model_json_schema()))
    async def answer(request: Request, evaluation_id: str) -> dict[str, str]:
        body = await bodies.message(request, EvaluationAnswer, max_bytes=config.max_body_bytes)
        await _exchange(request).answer_evaluation(evaluation_id, body)
        return {"status": "received"}

    @app.delete("/evaluations/{evaluation_id}")
    async def close(request: Request, evaluation_id: str) -> dict[str, str]:
        await _exchange(request).close_evaluation(evaluation_id)
        return {"status": "success"}


def _add_observer_routes(app: FastAPI) -> None:
    @app.get("/health", responses=bodies.REFUSALS)
    async def health(request: Request) -> JSONResponse:
        """200, or 503 where nothing can be written until somebody acts."""
        lost = _exchange(request).store_lost
        return JSONResponse({"detail": lost or "well"}, 503 if lost else 200)

    @app.get("/status")
    async def status(request: Request) -> dict[str, Any]:
        exchange = _exchange(request)
        ledger = exchange.ledger
        return {
            "current_step": ledger.run.step if ledger.run else 0,
            "num_steps": ledger.run.request.num_steps if ledger.run else None,
            "queue_size": len(ledger.queue),
            "queued_sequences": ledger.num_waiting_sequences(),
            "environments": [record.name for record in ledger.live_environments(time.time())],
            "problem": exchange.problem(),
        }

    @app.get("/latest_example")
    async def latest_example(request: Request) -> Response:
        latest = _exchange(request).latest_body
        return await bodies.json_answer(request, latest) if latest is not None else JSONResponse(EMPTY_EXAMPLE)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics(request: Request) -> PlainTextResponse:
        exchange = _exchange(request)
        return PlainTextResponse(
            as_text(exchange.counters, exchange.ledger, num_held=exchange.num_held, now=time.time())
        )

    @app.get("/reset_data", response_class=PlainTextResponse, responses={409: {"content": {"text/plain": {}}}})
    async def reset_data(request: Request, force: bool = False) -> PlainTextResponse:
        exchange = _exchange(request)
        run = exchange.ledger.run
        if run is not None and exchange.ledger.is_run_active(time.time()) and not force:
            return PlainTextResponse(
                f"Not reset: a run is active at step {run.step} of {run.request.num_steps}, and its trainer asked for "
                "a batch lately. To forget it all the same: /reset_data?force=true\n",
                409,
            )
        await exchange.reset()
        return PlainTextResponse("Reset successful")


def _exchange(request: Request) -> Exchange:
    exchange: Exchange = request.app.state.exchange
    return exchange


def _refuse_unless_ruling(exchange: Exchange, uuid: int | None) -> None:
    run = exchange.ledger.run
    if uuid is not None and run is not None and uuid != run.uuid:
        detail = "another trainer has registered since: batches go to it alone; give each run an API of its own"
        raise Refusal(409, detail, "superseded")


def _is_odd(exchange: Exchange, group: CheckedGroup) -> bool:
    """Whether a group went by way of its environment's buffer, being smaller than the others."""
    environment = exchange.ledger.environments.get(group.env_id) if group.env_id is not None else None
    return environment is not None and group.num_sequences < environment.group_size


def _post(request: Request) -> tuple[str, str] | None:
    """Sender and number of a post, where it says so."""
    sender, colon, number = request.headers.get(POST_HEADER, "").partition(":")
    return (sender, number) if colon else None
