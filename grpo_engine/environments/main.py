"""Run an environment until its steps are done, or until SIGTERM or SIGINT, answered at once with exit code 0."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from types import FrameType
from typing import NoReturn

import httpx

from grpo_engine.environments.config import EnvironmentConfig
from grpo_engine.environments.peers import InferenceServer, RolloutApi
from grpo_engine.environments.prompts import Tokenizer, check_template
from grpo_engine.environments.runner import Runner
from grpo_engine.environments.tasks.multi_turn import MultiTurnTask
from grpo_engine.wire.rollouts import TOKEN_VARIABLE

log = logging.getLogger(__name__)


def run(config: EnvironmentConfig) -> int:
    """Work until the end; returns the exit code.

    Raises:
        GrpoError: the task or the model is not there, or a server refuses.
    """
    began = time.monotonic()
    signal.signal(signal.SIGTERM, _leave)
    config.task.check()
    # Here, not above: transformers takes seconds to load, and a task that is not there should be told sooner.
    from grpo_engine.models.loading import load_tokenizer

    tokenizer: Tokenizer = load_tokenizer(config.model_name)
    check_template(config, tokenizer)
    log.info("task and tokenizer loaded in %.1f s", time.monotonic() - began)
    return asyncio.run(work(config, tokenizer))


async def work(config: EnvironmentConfig, tokenizer: Tokenizer) -> int:
    """Work until the end or a signal; returns the exit code."""
    token = config.api_token or os.environ.get(TOKEN_VARIABLE)
    # Uncompressed answers: on loopback unpacking costs more than sending. One connection a group at most, or one a
    # sequence where seats are asked turn by turn, and as many for an evaluation that begins meanwhile.
    plain = {"Accept-Encoding": "identity"}
    requests_a_group = config.group_size if isinstance(config.task, MultiTurnTask) else 1
    num_connections = 2 * config.max_workers * requests_a_group + 8
    limits = httpx.Limits(max_connections=num_connections, max_keepalive_connections=num_connections)
    authorization = {"Authorization": f"Bearer {token}"} if token else {}
    async with (
        httpx.AsyncClient(
            base_url=config.rollout_server_url, headers={**plain, **authorization}, trust_env=False
        ) as api,
        httpx.AsyncClient(base_url=config.inference_url, headers=plain, limits=limits, trust_env=False) as inference,
    ):
        runner = Runner(config, tokenizer, RolloutApi(api), InferenceServer(inference, timeout_s=config.worker_timeout))
        working = asyncio.create_task(runner.run())
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, working.cancel)
        try:
            await working
        except asyncio.CancelledError:
            log.info("stopped")
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
    return 0


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """End before the loop runs: there is nothing to clean up yet."""
    raise SystemExit(0)
