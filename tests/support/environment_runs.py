"""Environments that run against the real rollout API and a fake inference server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

from fastapi import FastAPI
from rollout_fakes import FakeTokenizer, served, served_api

from grpo_engine.data.source import RolloutApiSource
from grpo_engine.environments.config import EnvironmentConfig
from grpo_engine.environments.main import work
from grpo_engine.environments.sampling.prompts import Tokenizer

RUN: dict[str, Any] = {
    "batch_size": 8,
    "max_token_len": 64,
    "checkpoint_dir": "checkpoints",
    "save_checkpoint_interval": 3,
    "starting_step": 0,
    "num_steps": 3,
}


def settings(api: str, inference: str, **changes: Any) -> EnvironmentConfig:
    """An environment of `sort` prompts in groups of four."""
    table = {"task": "sort6", "model_name": "unused", "group_size": 4, "max_tokens": 16, **changes}
    return EnvironmentConfig.model_validate({"rollout_server_url": api, "inference_url": inference + "/v1", **table})


@contextlib.contextmanager
def served_run(fake: FastAPI, **run: Any) -> Iterator[tuple[str, str, RolloutApiSource]]:
    """A rollout API and an inference server, their URLs, and a trainer that has asked for its first batch."""
    with served_api() as api, served(fake) as inference, RolloutApiSource(api) as source:
        source.register(**{**RUN, **run})
        source.poll()
        yield api, inference, source


@contextlib.asynccontextmanager
async def at_work(config: EnvironmentConfig, tokenizer: Tokenizer | None = None) -> AsyncIterator[None]:
    """Run an environment until the block is left; it must not end sooner, and ends with exit code 0."""
    working = asyncio.create_task(work(config, tokenizer or FakeTokenizer()))
    try:
        yield
        assert not working.done()
    finally:
        working.cancel()
        assert await working == 0
