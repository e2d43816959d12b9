"""`/bridge/*`: requests of a trainer before, during and after a weight update. Only for the run's owner."""

from __future__ import annotations

import os
import time

from fastapi import APIRouter

from grpo_engine.errors import BridgeError, ModelError
from grpo_engine.server.config import ServerConfig
from grpo_engine.server.engine import Engine
from grpo_engine.server.http.requests import read_path
from grpo_engine.wire.environment_variables import LOG_FOLDER_VARIABLE
from grpo_engine.wire.inference import (
    BridgeInfo,
    JoinAnswer,
    JoinRequest,
    PauseRequest,
    ReceiveAnswer,
    ReceiveRequest,
    ReloadRequest,
    ResumeRequest,
)


def bridge_routes(engine: Engine, config: ServerConfig, instance: str) -> APIRouter:
    """The routes below `/bridge`."""
    router = APIRouter()

    def version_info() -> dict[str, str | int]:
        return {"instance": instance, "policy_version": engine.info().policy_version}

    @router.get("/info")
    async def info() -> BridgeInfo:
        now = engine.info()
        return BridgeInfo(
            enabled=now.is_sharing,
            shared_weights=now.is_sharing,
            update_count=now.update_count,
            last_update_time=now.last_update_time,
            model_name=config.model_name,
            device=now.device,
            policy_version=now.policy_version,
            logprobs_mode=engine.logprobs_mode,
            paused=now.is_paused,
            instance=instance,
            receives_weights=config.receives_weights,
            num_ranks=now.num_ranks,
            dtype=now.dtype,
            can_sleep=config.enable_sleep_mode,
            sleep_state=now.sleep_state,
        )

    @router.get("/state_dict_info")
    async def state_dict_info() -> dict[str, str | bool]:
        now = engine.info()
        return {"model": config.model_name, "dtype": now.dtype, "shared_weights_enabled": now.is_sharing}

    @router.post("/pause")
    async def pause(body: PauseRequest | None = None) -> dict[str, str | int]:
        request = body or PauseRequest()
        await engine.pause(request.owner_pid, request.timeout_s)
        return {"status": "paused"} | version_info()

    @router.post("/resume")
    async def resume(body: ResumeRequest | None = None) -> dict[str, str | int]:
        await engine.resume(body.policy_version if body else None)
        return {"status": "resumed"} | version_info()

    @router.get("/is_paused")
    async def is_paused() -> dict[str, bool]:
        return {"paused": engine.info().is_paused}

    @router.post("/reload")
    async def reload(body: ReloadRequest) -> dict[str, str | int]:
        path = read_path(body.path)
        if not os.path.isabs(body.path):
            raise ModelError(
                f"{body.path}: a relative path; send an absolute one, because the server's folder is another"
            )
        await engine.reload(path, body.policy_version)
        return {"status": "reloaded"} | version_info()

    @router.post("/join")
    async def join(body: JoinRequest) -> JoinAnswer:
        try:
            await engine.join(body)
        except BridgeError as error:
            return JoinAnswer(instance=instance, problem=str(error))
        return JoinAnswer(instance=instance)

    @router.post("/receive")
    async def receive(body: ReceiveRequest) -> ReceiveAnswer:
        began = time.perf_counter()
        try:
            checksums = await engine.receive(body)
        except BridgeError as error:  # not 409, which clients repeat
            return ReceiveAnswer(instance=instance, policy_version=engine.info().policy_version, problem=str(error))
        return ReceiveAnswer(
            instance=instance,
            policy_version=engine.info().policy_version,
            checksums=checksums,
            paused_s=time.perf_counter() - began,
        )

    @router.get("/debug")
    async def debug() -> dict[str, str | dict[str, bool] | None]:
        now = engine.info()
        return {
            "engine_type": now.engine,
            "vllm_version": now.engine.removeprefix("vllm ") if now.engine.startswith("vllm ") else None,
            "patches_applied": dict(now.patches),
            "shared_weights_env": os.environ.get("VLLM_ENABLE_SHARED_WEIGHTS"),
            "num_inference_nodes": os.environ.get("NUM_INFERENCE_NODES"),
            "logdir": os.environ.get(LOG_FOLDER_VARIABLE),
        }

    return router
