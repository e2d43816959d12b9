"""Run an environment until its steps are done, or until SIGTERM or SIGINT, on which it exits at once with code 0."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from types import FrameType
from typing import NoReturn

import httpx

from grpo_engine.environments.clients import InferenceServer, RolloutApi
from grpo_engine.environments.config import EnvironmentConfig
from grpo_engine.environments.runner import Runner
from grpo_engine.environments.sampling.prompts import Tokenizer, check_template
from grpo_engine.environments.tasks.multi_turn import MultiTurnTask
from grpo_engine.wire.access_token import authorization, find_token

log = logging.getLogger(__name__)


def run(config: EnvironmentConfig) -> int:
    """Run until the end; returns the exit code.

    Raises:
        GrpoError: the task or the model is missing, or a server refuses a request.
    """
    began = time.monotonic()
    signal.signal(signal.SIGTERM, _exit)
    config.task.check()
    # Imported late: transformers takes seconds to load, and errors of the task should come first.
    from grpo_engine.models.loading import load_tokenizer

    tokenizer: Tokenizer = load_tokenizer(config.model_name)
    check_template(config, tokenizer)
    log.info("task and tokenizer loaded in %.1f s", time.monotonic() - began)
    return asyncio.run(work(config, tokenizer))


async def work(config: EnvironmentConfig, tokenizer: Tokenizer) -> int:
    """Run until the end or a signal; returns the exit code."""
    # Uncompressed answers: on loopback decompression costs more than sending. At most one connection per group, or per
    # sequence in multi-turn tasks, and as many again for an evaluation.
    plain = {"Accept-Encoding": "identity"}
    requests_a_group = config.group_size if isinstance(config.task, MultiTurnTask) else 1
    num_connections = 2 * config.max_workers * requests_a_group + 8
    limits = httpx.Limits(max_connections=num_connections, max_keepalive_connections=num_connections)
    with_token = {**plain, **authorization(config.api_token or find_token(os.environ))}
    async with (
        httpx.AsyncClient(base_url=config.rollout_server_url, headers=with_token, trust_env=False) as api,
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


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    """Exit before the event loop runs: there is nothing to clean up yet."""
    raise SystemExit(0)
