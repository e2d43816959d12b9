"""`/bridge/sleep` … `/bridge/woken`: a trainer that uses the memory of the same device in turn with this server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from grpo_engine.errors import BridgeError
from grpo_engine.server.config import ServerConfig
from grpo_engine.server.engine import Engine
from grpo_engine.wire.inference import SleepAnswer, SleepRequest, TakeRequest, WakeRequest, WokenRequest


def sleep_routes(engine: Engine, config: ServerConfig, instance: str) -> APIRouter:
    """The routes below `/bridge`; those of a stock server are answered with 501 without sleep mode."""
    router = APIRouter()

    @router.get("/is_sleeping")
    async def is_sleeping() -> dict[str, bool]:
        return {"sleeping": engine.info().sleep_state != "awake"}

    if not config.enable_sleep_mode:

        @router.post("/sleep")
        @router.post("/wake_up")
        async def not_supported() -> JSONResponse:
            words = "this server keeps its weights in memory: start it with --enable-sleep-mode"
            return JSONResponse({"status": "not_supported", "detail": words}, 501)

        return router

    async def answer(action: Callable[[], Awaitable[int | None]]) -> SleepAnswer:
        problem = checksum = None
        try:
            checksum = await action()
        except BridgeError as error:  # not 409, which clients repeat
            problem = str(error)
        now = engine.info()
        return SleepAnswer(
            instance=instance,
            policy_version=now.policy_version,
            state=now.sleep_state,
            problem=problem,
            checksum=checksum,
        )

    @router.post("/sleep")
    async def sleep(body: SleepRequest) -> SleepAnswer:
        return await answer(lambda: engine.sleep(body.owner_pid))

    @router.post("/wake_up")
    async def wake_up(body: WakeRequest) -> SleepAnswer:
        return await answer(lambda: engine.wake_up(body))

    @router.post("/take")
    async def take(body: TakeRequest) -> SleepAnswer:
        return await answer(lambda: engine.take(body))

    @router.post("/woken")
    async def woken(body: WokenRequest) -> SleepAnswer:
        return await answer(lambda: engine.woken(body))

    return router
