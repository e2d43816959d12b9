"""Run the inference server: settings, engine, HTTP, signals.

The port is taken at once, and open when the model is loaded: until then connections are refused, so that `curl /health`
fails. If the model cannot be loaded or the engine fails later, the process exits with code 1, or with 2 for what a
restart does not change (a wrong setting, a damaged model, a port that is taken), and the last line of the log says why.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import signal
import socket
import uuid
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import FrameType

import uvicorn

from grpo_engine.errors import ConfigError, GrpoError
from grpo_engine.server.config import ServerConfig
from grpo_engine.server.engine import StartableEngine
from grpo_engine.server.fork_server import ForkServer, die_with_fork_server
from grpo_engine.server.http.app import Service, create_app
from grpo_engine.server.preloading import preload
from grpo_engine.server.vllm.sockets import socket_folder
from grpo_engine.serving.connections import LimitedProtocol
from grpo_engine.serving.listening import ListeningServer, take_port
from grpo_engine.serving.reporting import Reporter, Waiting
from grpo_engine.serving.turn import begin_in_turn
from grpo_engine.wire.access_token import find_token
from grpo_engine.wire.environment_variables import (
    FORK_SERVER_VARIABLE,
    RUN_FOLDER_VARIABLE,
    TOKEN_FILE_VARIABLE,
    TOKEN_VARIABLE,
)
from grpo_engine.wire.log_lines import WAITING_FOR_WEIGHTS
from grpo_engine.wire.run_folder import HANDOVER_IN_STEP
from grpo_engine.wire.supervisor import WaitsFor

_VLLM_ENGINE = "grpo_engine.server.vllm.engine"
_POLL_S = 0.05
"""Between two looks for a signal while the model is loaded."""

logger = logging.getLogger(__name__)


def run(config: ServerConfig) -> int:
    """Serve until SIGTERM or SIGINT; the exit code is 0, or 1 if the engine could not start or failed.

    Raises:
        ConfigError: the engine is not available here.
        GrpoError: the port is taken, or the engine could not start, or failed, for a known reason.
    """
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    config = with_environment(config, os.environ)
    if config.awaits_handover and config.handover is None:
        raise ConfigError("--awaits-handover without --handover: name the folder of the parameter service")
    if config.sampling_needs_token and find_token(os.environ) is None:
        raise ConfigError(f"--sampling-needs-token, and there is none: set ${TOKEN_FILE_VARIABLE} or ${TOKEN_VARIABLE}")
    check_engine(config)
    begin_in_turn(partial(prepare, config), os.environ)
    listener = take_port(config.host, config.port, os.environ)
    if config.has_fork_server:
        return ForkServer(config, listener, serve).run()
    die_with_fork_server(os.environ)
    with socket_folder(config, os.environ):
        return serve(config, listener)


def prepare(config: ServerConfig) -> None:
    """Import what a server with these settings needs, and touch no GPU."""
    if config.has_fork_server or config.engine == "torch":
        preload(config)
    else:  # in this process the server itself imports vLLM's modules, in its own order
        importlib.import_module(_VLLM_ENGINE)


def serve(config: ServerConfig, listener: socket.socket) -> int:
    """Serve in this process, on a socket of `take_port`."""
    instance = uuid.uuid4().hex[:12]
    config = of_model(config)
    engine = make_engine(config, instance=instance)
    token = None if config.allow_without_token else find_token(os.environ)
    app = create_app(Service(engine=engine, config=config, instance=instance, token=token))
    return _Server(app, config, engine, listener).run_to_end()


def of_model(config: ServerConfig) -> ServerConfig:
    """The settings with a length for which the model has positions; vLLM's are compared with it where it starts."""
    if config.engine != "torch":
        return config
    from grpo_engine.models.loading import fitting_length, load_config

    length = fitting_length(load_config(config.model_name), config.max_model_len, "--max-model-len")
    return config.model_copy(update={"max_model_len": length})


def with_environment(config: ServerConfig, environment: Mapping[str, str]) -> ServerConfig:
    """The settings, with weights for a trainer if one of the stock server's environment variables asks for them: shared
    on one GPU, and received from another one.

    They may stand in a shell for hours, so flags that say otherwise win, and so does a profile.
    """
    nodes = environment.get("NUM_INFERENCE_NODES", "")
    asks = environment.get("VLLM_ENABLE_SHARED_WEIGHTS") == "1" or nodes.isdigit()
    decided = RUN_FOLDER_VARIABLE in environment or FORK_SERVER_VARIABLE in environment
    if not asks or config.shared_weights or decided:
        return config
    others = {
        "--no-shared-weights": "shared_weights" in config.model_fields_set,
        "--enable-lora": config.enable_lora,
        "--handover": config.handover is not None,
        "--receives-weights": config.receives_weights,
    }
    flag = next((flag for flag, is_given in others.items() if is_given), None)
    if flag is not None:
        logger.warning("VLLM_ENABLE_SHARED_WEIGHTS and NUM_INFERENCE_NODES have no effect with %s", flag)
        return config
    wanted = {"shared_weights": config.tensor_parallel_size == 1, "receives_weights": True}
    return ServerConfig.model_validate({**config.model_dump(exclude_unset=True), **wanted})


def check_engine(config: ServerConfig) -> None:
    """Check that the configured engine is available, before anything heavy is imported.

    Raises:
        ConfigError: it is not available.
    """
    if config.engine == "torch" and config.tensor_parallel_size != 1:
        raise ConfigError(f"--tensor-parallel-size {config.tensor_parallel_size}: the torch engine runs on one device")
    if config.engine == "vllm":
        from grpo_engine.server.vllm.requirements import check_vllm

        check_vllm(config, os.environ)


def make_engine(config: ServerConfig, *, instance: str) -> StartableEngine:
    """The configured engine."""
    if config.engine == "torch":
        from grpo_engine.server.torch.engine import TorchEngine

        return TorchEngine(config, instance=instance, environment=os.environ)
    return importlib.import_module(_VLLM_ENGINE).VllmEngine(  # type: ignore[no-any-return]
        config, instance=instance, environment=os.environ
    )


class _Server(ListeningServer):
    """A server with an engine, which is loaded first and closed first; exits when the engine fails."""

    def __init__(self, app: object, config: ServerConfig, engine: StartableEngine, listener: socket.socket) -> None:
        super().__init__(
            uvicorn.Config(
                app,  # type: ignore[arg-type]
                host=config.host,
                port=config.port,
                log_level=config.log_level,
                access_log=config.log_level == "debug",
                lifespan="off",
                http=LimitedProtocol,
                timeout_graceful_shutdown=1,
                ssl_keyfile=config.ssl_keyfile,
                ssl_certfile=config.ssl_certfile,
                ssl_ca_certs=None if config.ssl_ca_certs is None else str(config.ssl_ca_certs),
                ssl_cert_reqs=config.ssl_cert_reqs,
            ),
            listener,
        )
        self._engine = engine
        self._can_sleep = config.enable_sleep_mode
        self._failure: BaseException | None = None
        self._in_step: Path | None = None
        if config.awaits_handover and config.handover is not None:
            self._in_step = config.handover / HANDOVER_IN_STEP

    def run_to_end(self) -> int:
        # uvicorn raises the signal again after its shutdown; these handlers ignore it, so that we set the exit code.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        with self._reporter():
            self.run()
        if isinstance(self._failure, GrpoError):
            raise self._failure
        if self._failure is not None:
            logger.error("Cannot serve: %s", self._failure)
            return 1
        return 0

    def _reporter(self) -> Reporter:
        """Tells the supervisor that the server sleeps, where it may."""
        if not self._can_sleep:
            return Reporter()
        reporter = Reporter.from_environment(os.environ)

        def asleep() -> Waiting | None:
            since = self._engine.info().sleeps_since
            return None if since is None else Waiting(what=WaitsFor.STEP, since=since)

        reporter.ask_waiting = asleep
        return reporter

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self._wait_for_handover()
        if self.should_exit:
            return
        self._engine.start()
        loading = asyncio.ensure_future(asyncio.to_thread(self._engine.wait_loaded))
        while not loading.done() and not self.should_exit:
            await asyncio.wait({loading}, timeout=_POLL_S)
        if not self.should_exit and (error := loading.exception()) is not None:
            self._fail(error)
        if self.should_exit:
            await self._engine.close()
            loading.add_done_callback(lambda _: loading.cancelled() or loading.exception())  # nobody asks for it
            return
        await super().startup(sockets)
        logger.info("Ready: %s", self._engine.info())
        self._watcher = asyncio.get_running_loop().create_task(self._watch())

    async def _wait_for_handover(self) -> None:
        """Return when the newest weights are on this machine, where they are awaited."""
        if self._in_step is None or _can_be_read(self._in_step):
            return
        logger.info(WAITING_FOR_WEIGHTS.text, self._in_step)
        while not (_can_be_read(self._in_step) or self.should_exit):  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(_POLL_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._engine.close()
        await super().shutdown(sockets)

    async def _watch(self) -> None:
        try:
            await self._engine.wait_failed()
        except Exception as error:  # any error of the engine ends the process
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        self.should_exit = True

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.should_exit = True


def _can_be_read(path: Path) -> bool:
    """Whether a file is there, which NFS says for certain only as it is opened."""
    try:
        path.open("rb").close()
    except OSError:
        return False
    return True
