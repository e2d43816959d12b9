"""Run the inference server: settings, engine, HTTP, signals.

The port opens at once and `/health` tells when the model is there; a model that cannot be loaded ends the process with
code 1 (2 where a setting is to blame), and so does an engine that dies later. Why is the last line of the log.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import logging
import os
import signal
import socket
import uuid
from collections.abc import Mapping
from types import FrameType

import uvicorn

from grpo_engine.errors import ConfigError, GrpoError
from grpo_engine.server.app import Service, create_app
from grpo_engine.server.config import ServerConfig
from grpo_engine.server.engine import StartableEngine
from grpo_engine.server.standby import Standby, die_with_standby
from grpo_engine.server.vllm_sockets import sockets_of_a_server

_VLLM_ENGINE = "grpo_engine.server.vllm_engine"

logger = logging.getLogger(__name__)


def run(config: ServerConfig) -> int:
    """Serve until SIGTERM or SIGINT; the exit code is 0, or 1 when the engine could not start or died.

    Raises:
        ConfigError: the engine is not to be had here.
        GrpoError: it could not start or died, for a reason that a person understands.
    """
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    config = with_environment(config, os.environ)
    check_engine(config)
    if config.has_standby:
        return Standby(config, serve).run()
    die_with_standby(os.environ)
    with sockets_of_a_server(config, os.environ):
        return serve(config)


def serve(config: ServerConfig) -> int:
    """Serve in this process."""
    instance = uuid.uuid4().hex[:12]
    engine = make_engine(config, instance=instance)
    app = create_app(Service(engine=engine, config=config, instance=instance))
    return _Server(app, config, engine).run_to_end()


def with_environment(config: ServerConfig, environment: Mapping[str, str]) -> ServerConfig:
    """The settings, with the stock server's environment variables that ask for shared weights."""
    nodes = environment.get("NUM_INFERENCE_NODES", "")
    asks = environment.get("VLLM_ENABLE_SHARED_WEIGHTS") == "1" or nodes.isdigit()
    return config.model_copy(update={"shared_weights": True}) if asks else config


def check_engine(config: ServerConfig) -> None:
    """See whether the engine that the settings name is to be had, before anything heavy is imported.

    Raises:
        ConfigError: it is not.
    """
    if config.engine == "torch" and config.tensor_parallel_size != 1:
        raise ConfigError(f"--tensor-parallel-size {config.tensor_parallel_size}: the torch engine runs on one device")
    if config.engine == "vllm":
        from grpo_engine.server.vllm_requirements import check_vllm

        check_vllm(config, os.environ)


def make_engine(config: ServerConfig, *, instance: str) -> StartableEngine:
    """The engine that the settings name."""
    if config.engine == "torch":
        from grpo_engine.server.torch_engine import TorchEngine

        return TorchEngine(config, instance=instance, environment=os.environ)
    return importlib.import_module(_VLLM_ENGINE).VllmEngine(  # type: ignore[no-any-return]
        config, instance=instance, environment=os.environ
    )


class _Server(uvicorn.Server):
    """uvicorn around an engine: starts it first, ends it first, and exits when it cannot start."""

    def __init__(self, app: object, config: ServerConfig, engine: StartableEngine) -> None:
        super().__init__(
            uvicorn.Config(
                app,  # type: ignore[arg-type]
                host=config.host,
                port=config.port,
                log_level=config.log_level,
                access_log=config.log_level == "debug",
                lifespan="off",
                timeout_graceful_shutdown=1,
                ssl_keyfile=config.ssl_keyfile,
                ssl_certfile=config.ssl_certfile,
                ssl_ca_certs=None if config.ssl_ca_certs is None else str(config.ssl_ca_certs),
                ssl_cert_reqs=config.ssl_cert_reqs,
            )
        )
        self._engine = engine
        self._failure: Exception | None = None

    def run_to_end(self) -> int:
        # uvicorn raises the signal again once it has shut down; these handlers then do nothing, so the code is ours.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        self.run()
        if isinstance(self._failure, GrpoError):
            raise self._failure
        if self._failure is not None:
            logger.error("Cannot serve: %s", self._failure)
            return 1
        # Nothing is left to clean up, and looking through all of torch and transformers for it takes a second.
        gc.freeze()
        return 0 if self.started else 1

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.should_exit:
            self._engine.start()
            self._watcher = asyncio.get_running_loop().create_task(self._watch_start())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._engine.close()
        await super().shutdown(sockets)

    async def _watch_start(self) -> None:
        try:
            await asyncio.to_thread(self._engine.wait_loaded)
            logger.info("Ready: %s", self._engine.info())
            await self._engine.wait_failed()
        except Exception as error:  # whatever keeps the engine from serving ends the process
            if self.should_exit:  # asked to end before it was there
                return
            self._failure = error
            self.should_exit = True

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.should_exit = True
