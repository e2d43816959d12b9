"""Run an environment until its steps are done, or until SIGTERM or SIGINT, on which it exits at once with code 0."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import signal
import time
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from functools import partial
from types import FrameType
from typing import Any, NoReturn

import httpx

from grpo_engine.environments.clients import RolloutApi
from grpo_engine.environments.config import EnvironmentConfig
from grpo_engine.environments.inference_servers import InferenceServers
from grpo_engine.environments.runner import ASK_EVERY_S, Progress, Runner
from grpo_engine.environments.sampling.policy import Opponent
from grpo_engine.environments.sampling.prompts import Tokenizer, check_template
from grpo_engine.environments.sampling.scoring import end_scoring
from grpo_engine.environments.status_requests import StatusRequests
from grpo_engine.environments.tasks.concurrency import first_error, gather_all
from grpo_engine.environments.tasks.multi_turn import MultiTurnTask
from grpo_engine.environments.tracking import check_tracker
from grpo_engine.environments.trainer_link import Outbox
from grpo_engine.errors import GrpoError
from grpo_engine.importing import collecting_nothing
from grpo_engine.processes import raise_descriptor_limit
from grpo_engine.serving.access import token_for
from grpo_engine.serving.reporting import Reporter
from grpo_engine.serving.turn import begin_in_turn
from grpo_engine.wire.access_token import authorization, find_token
from grpo_engine.wire.environment_variables import INFERENCE_KEY_VARIABLE
from grpo_engine.wire.log_lines import STOPPED
from grpo_engine.wire.token_clients import open_async_client

_MOST_ASKED_PER_S = 25
"""Status requests of all environments of this process that only wait for what they sample."""
_LONGEST_ASK_S = 10.0
"""Below `liveness_s` of the API, after which an environment counts as gone."""

log = logging.getLogger(__name__)


def run(config: EnvironmentConfig) -> int:
    """Run until the end; returns the exit code.

    Raises:
        GrpoError: the task or the model is missing, or a server refuses a request.
    """
    began = time.monotonic()
    signal.signal(signal.SIGTERM, _exit)
    check_tracker(config)
    loaded = begin_in_turn(partial(prepare, config), os.environ)
    if loaded is None or config.task.has_user_code:
        config.task.check()
    with collecting_nothing():
        # Imported late: transformers takes a second to load, and errors of the task should come first.
        from grpo_engine.models.tokenizer import load_tokenizer

        tokenizer: Tokenizer = load_tokenizer(config.model_name) if loaded is None else loaded
    check_template(config, tokenizer)
    of_opponent: Tokenizer = tokenizer
    if config.opponent_model_name is not None:
        of_opponent = load_tokenizer(config.opponent_model_name)
        check_template(config, of_opponent)
    log.info("task and tokenizer loaded in %.1f s", time.monotonic() - began)
    # Modules and the tokenizer are 400,000 objects: a full collection over them stops all environments for 0.3 s.
    gc.freeze()
    return asyncio.run(work(config, tokenizer, of_opponent))


def prepare(config: EnvironmentConfig) -> Tokenizer | None:
    """The tokenizer, after a task of ours has loaded what it needs; one of the user may use a GPU or a server."""
    import httpcore  # noqa: F401 - httpx imports it with its first connection

    from grpo_engine.models.sources import is_at_hand
    from grpo_engine.models.tokenizer import load_tokenizer

    if not config.task.has_user_code:
        config.task.check()
    tokenizer: Tokenizer | None = load_tokenizer(config.model_name) if is_at_hand(config.model_name) else None
    return tokenizer


async def work(config: EnvironmentConfig, tokenizer: Tokenizer, of_opponent: Tokenizer | None = None) -> int:
    """Run until the end or a signal; returns the exit code.

    Args:
        of_opponent: tokenizer of the other policy of a game; None: the same.
    """
    # At most one connection per group, or per sequence in multi-turn tasks, and as many again for an evaluation.
    requests_a_group = config.group_size if isinstance(config.task, MultiTurnTask) else 1
    limits = _connections(max(2 * config.max_workers, 4 * config.copies) * requests_a_group + 8)
    raise_descriptor_limit()
    token = config.api_token or find_token(os.environ)
    key = config.api_key or os.environ.get(INFERENCE_KEY_VARIABLE)
    async with AsyncExitStack() as stack:
        stack.callback(end_scoring)
        to_api = _connections(max(100, 2 * config.copies + 8))
        api = await stack.enter_async_context(
            open_async_client(token, base_url=config.rollout_server_url, limits=to_api)
        )

        async def clients(urls: Sequence[str], key: str | None) -> InferenceServers:
            servers = [
                await stack.enter_async_context(
                    # With the token a server answers before strangers, and at any length; its own key goes first.
                    open_async_client(
                        token,
                        sends_token=False,
                        base_url=url,
                        limits=limits,
                        headers=authorization(key or token_for(url, token)),
                    )
                )
                for url in urls
            ]
            first = random.randrange(len(servers)) if servers else 0
            return await stack.enter_async_context(
                InferenceServers(servers, timeout_s=config.worker_timeout, first=first)
            )

        inference = await clients(config.inference_urls, key)
        opponent, opponent_http = None, None
        if config.opponent_urls:
            opponent = Opponent(tokenizer=of_opponent or tokenizer, inference=await clients(config.opponent_urls, None))
        if config.opponent_rollout_server_url is not None:
            opponent_http = await stack.enter_async_context(
                open_async_client(token, base_url=config.opponent_rollout_server_url, limits=to_api)
            )
        progress = Progress()
        outbox = Outbox(RolloutApi(api)) if config.copies > 1 else None
        statuses = StatusRequests(api) if config.copies > 1 else None
        runners = [
            Runner(
                each,
                tokenizer,
                RolloutApi(api, statuses=statuses),
                inference,
                opponent,
                None if opponent_http is None else RolloutApi(opponent_http),
                progress=progress,
                outbox=outbox,
                ask_every_s=min(max(ASK_EVERY_S, config.copies / _MOST_ASKED_PER_S), _LONGEST_ASK_S),
            )
            for each in config.of_copies()
        ]
        reporter = Reporter.from_environment(os.environ)
        reporter.ask_waiting = runners[0].waiting
        shared = [] if outbox is None else [outbox.post(progress.posted)]
        shared += [] if statuses is None else [statuses.run()]
        working = asyncio.create_task(_run_all(runners, shared))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, working.cancel)
        try:
            with reporter:
                await working
        except asyncio.CancelledError:
            log.info(STOPPED.text, "")
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
    return 0


async def _run_all(runners: Sequence[Runner], shared: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run several environments to their end.

    Args:
        shared: posts groups and requests statuses for all of them, until it is cancelled.

    Raises:
        GrpoError: of the first that fails, which ends the others.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            for_all = [tasks.create_task(each) for each in shared]
            await gather_all(runner.run() for runner in runners)
            for each in for_all:
                each.cancel()
    except* GrpoError as group:
        raise first_error(group) from None


def _connections(number: int) -> httpx.Limits:
    return httpx.Limits(max_connections=number, max_keepalive_connections=number)


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    """Exit before the event loop runs: there is nothing to clean up yet."""
    log.info(STOPPED.text, "")
    raise SystemExit(0)
