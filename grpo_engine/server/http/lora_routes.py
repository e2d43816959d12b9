"""`/lora/*`: the adapter of all requests, loaded and checked before it is served. Only for the run's owner."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastapi import APIRouter, HTTPException

from grpo_engine.errors import DataError
from grpo_engine.server.adapter_files import read_config
from grpo_engine.server.config import ServerConfig
from grpo_engine.server.engine import Engine
from grpo_engine.server.http.requests import read_path
from grpo_engine.wire.checkpoints import ADAPTER_CONFIG
from grpo_engine.wire.environment_variables import LOG_FOLDER_VARIABLE
from grpo_engine.wire.inference import LoraLoadRequest, LoraStatus


def lora_routes(engine: Engine, config: ServerConfig, instance: str) -> APIRouter:
    """The routes below `/lora`."""
    router = APIRouter()

    def checked_adapter(text: str) -> Path:
        path = read_path(text)
        if not read_path(f"{path}/{ADAPTER_CONFIG}").is_file():
            raise HTTPException(404, f"Adapter not found: {text}")  # stock clients expect exactly this text
        return path

    @router.post("/load")
    async def load(body: LoraLoadRequest) -> dict[str, Any]:
        if not config.enable_lora:
            raise DataError("adapters are disabled: start the server with --enable-lora")
        path = checked_adapter(body.adapter_path)
        described = _described(await asyncio.to_thread(read_config, path))
        adapter = await engine.load_adapter(path, body.adapter_name, body.policy_version)
        return {
            "status": "ok",
            "adapter_path": adapter.path,
            "adapter_name": adapter.name,
            "adapter_id": adapter.number,
            "load_count": adapter.number,
            "adapter_config": described,
            "policy_version": engine.info().policy_version,
            "instance": instance,
            "paths_in_use": adapter.paths_in_use,
        }

    @router.post("/unload")
    async def unload() -> dict[str, str | None]:
        previous = await engine.unload_adapter()
        return {
            "status": "ok",
            "previous_adapter": previous.path if previous else None,
            "previous_name": previous.name if previous else None,
        }

    @router.get("/status")
    def status() -> LoraStatus:
        adapter, now = engine.adapter(), engine.info()
        folder = Path(os.environ.get(LOG_FOLDER_VARIABLE) or ".")
        return LoraStatus(
            lora_available=config.enable_lora,
            max_lora_rank=config.max_lora_rank,
            adapter_dtype=now.dtype if now.engine.startswith("vllm") else None,
            active_adapter_path=adapter.path if adapter else None,
            active_adapter_name=adapter.name if adapter else None,
            active_adapter_id=adapter.number if adapter else None,
            load_count=adapter.number if adapter else 0,
            available_adapters=sorted(str(found.parent) for found in folder.glob(f"*/{ADAPTER_CONFIG}")),
        )

    return router


def _described(config: Mapping[str, Any]) -> dict[str, Any]:
    """The adapter's configuration as stock clients expect it."""
    return {
        "r": config.get("r"),
        "lora_alpha": config.get("lora_alpha"),
        "target_modules": config.get("target_modules"),
        "base_model": config.get("base_model_name_or_path"),
    }
