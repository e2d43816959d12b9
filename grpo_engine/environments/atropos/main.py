"""Run an Atropos environment until it exits, and warn when it uses another inference server."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType

from grpo_engine.environments.atropos.config import AtroposEnvConfig
from grpo_engine.environments.atropos.observers import Api, Connections, RunStatus, Servers
from grpo_engine.environments.atropos.settings_file import batch_warnings, name_for, serve_text, setting_warnings
from grpo_engine.environments.atropos.silence import Observation, SilenceDetector, silence_message
from grpo_engine.errors import ConfigError, ModelError
from grpo_engine.models.local import LOCAL_MODELS, local_model_folder
from grpo_engine.processes import ProcessTree, die_with_parent, kill, terminate
from grpo_engine.serving.turn import begin_in_turn
from grpo_engine.wire.access_token import find_token
from grpo_engine.wire.codec import write_atomically
from grpo_engine.wire.environment_variables import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE
from grpo_engine.wire.token_clients import open_client

log = logging.getLogger(__name__)

_CHECK_EVERY_S = 0.5
"""Interval at which the connections of a silent environment are checked."""
_POLL_EVERY_S = 5.0
"""Interval of requests to the servers."""
_TIMEOUT_S = 5.0
_GRACE_S = 5.0
"""From SIGTERM to SIGKILL, for processes that the environment started and did not end."""
_KILL_WITHIN_S = 5.0
_STOCK_GROUP_SIZE = 4
"""Group size of stock environments by default."""


def run(config: AtroposEnvConfig) -> int:
    """Run until the environment exits; returns its exit code.

    Raises:
        ConfigError: its file, its Python or atroposlib is missing, or the rollout API requires another token.
        ModelError: a locally made model does not exist yet.
    """
    begin_in_turn(lambda: None, os.environ)  # the environment's own process imports what takes long
    _check_files(config)
    if config.name is None:
        config = config.model_copy(update={"name": name_for(config.file.read_text(errors="replace"))})
    tokenizer = _tokenizer(config.model_name)
    for warning in setting_warnings(config):
        log.warning("%s", warning)
    token = find_token(os.environ)
    with open_client(token, timeout=_TIMEOUT_S) as client:
        api = Api(client, config.rollout_server_url)
        _wait_for(api)
        with _settings_file(config, tokenizer, token) as yaml_file:
            code = _serve(config, yaml_file, api)
        if code == 0:
            _warn_if_ended_early(config, api)
        return code


def _serve(config: AtroposEnvConfig, yaml_file: Path, api: Api) -> int:
    """Run and watch the environment; returns its exit code."""
    argv = [str(config.python), str(config.file), "serve", "--config", str(yaml_file)]
    # Unbuffered: it prints little, so lines would arrive minutes late in full blocks.
    with _child(argv, {**os.environ, "PYTHONUNBUFFERED": "1"}) as process:
        log.info("environment %s started as process %d, with %s", config.file.name, process.pid, yaml_file)
        is_over = threading.Event()
        watch = threading.Thread(target=_watch, args=(config, process.pid, api, is_over), daemon=True)
        watch.start()
        code = _exit_code(process.wait())
        is_over.set()
        watch.join()
    return code


def _check_files(config: AtroposEnvConfig) -> None:
    for flag, path in {"file": config.file, "python": config.python}.items():
        if unset := re.search(r"\$\{?(\w+)\}?", str(path)):
            raise ConfigError(f"--{flag} {path}: ${unset[1]} is not set: export {unset[1]}=…, or write the full path")
    if not config.file.is_file():
        raise ConfigError(f"--file {config.file}: no such file: give the environment that `python FILE serve` runs")
    seek = "import importlib.util, sys; sys.exit(importlib.util.find_spec('atroposlib') is None)"
    try:
        found = subprocess.run([config.python, "-c", seek], cwd=config.file.parent, capture_output=True, check=False)
    except OSError as error:
        raise ConfigError(
            f"--python {config.python}: cannot be run: {error.strerror}: give the Python that has atroposlib, e.g. "
            "~/atropos/.venv/bin/python"
        ) from None
    if found.returncode:
        raise ConfigError(
            f"--python {config.python}: has no atroposlib: install it there (pip install atroposlib==0.4.0), or give "
            "the Python that has it"
        )


def _tokenizer(model_name: str) -> str:
    """Tokenizer name for a stock client, which accepts folders and hub names, but not locally made models."""
    if model_name not in LOCAL_MODELS:
        return os.path.abspath(model_name) if Path(model_name).is_dir() else model_name
    folder = local_model_folder(model_name)
    if not folder.is_dir():
        raise ModelError(f"{model_name}: not made yet: start the inference server first, which makes it")
    return str(folder)


@contextmanager
def _settings_file(config: AtroposEnvConfig, tokenizer: str, token: str | None) -> Iterator[Path]:
    """Write the environment's YAML file, which holds the token."""
    with tempfile.TemporaryDirectory(prefix="atropos-env-") as folder:
        path = config.yaml_file or Path(folder) / "serve.yaml"
        try:
            write_atomically(path, serve_text(config, tokenizer, token).encode(), mode=0o600)
        except OSError as error:
            raise ConfigError(f"--yaml-file {path}: cannot be written: {error.strerror}: choose another path") from None
        yield path


def _wait_for(api: Api) -> None:
    """Wait until the rollout API answers: the environment itself would exit within seconds."""
    has_logged = False
    while (is_refused := api.refuses_token()) is None:
        if not has_logged:
            log.info("waiting for the rollout API at %s", api.url)
            has_logged = True
        time.sleep(_CHECK_EVERY_S)
    if is_refused:
        raise ConfigError(
            f"--rollout-server-url {api.url}: requires another token: set ${TOKEN_VARIABLE} to that of the API, or "
            f"${TOKEN_FILE_VARIABLE} to the file that holds it"
        )


def _watch(config: AtroposEnvConfig, pid: int, api: Api, is_over: threading.Event) -> None:
    """Watch until `is_over`, and log problems that the environment does not report."""
    servers = Servers(api.client, config.inference_urls)
    connections = Connections(pid, config.inference_urls, config.rollout_server_url)
    silence = SilenceDetector(config.silent_after_s)
    group_size = config.group_size or _STOCK_GROUP_SIZE
    checked_batch_size = 0
    seen: tuple[float | None, float | None] = (None, None)
    status: RunStatus | None = None
    asked_at = float("-inf")
    while not is_over.wait(_CHECK_EVERY_S):
        has_requested, now = False, time.monotonic()
        if now - asked_at >= min(_POLL_EVERY_S, config.silent_after_s / 2):
            asked_at, before = now, seen
            status = api.run_status(group_size)
            if status is not None and status.batch_size not in (checked_batch_size, -1):
                checked_batch_size = status.batch_size
                for warning in batch_warnings(config, status.batch_size):
                    log.warning("%s", warning)
            if status is None or not status.is_short_of_groups:
                seen = (None, None)
            else:
                is_alone = status.environments is None or len(status.environments) <= 1
                seen = (api.num_groups(config.name), servers.num_requests() if is_alone else None)
                has_requested = any(
                    a is not None and b is not None and a != b for a, b in zip(before, seen, strict=True)
                )
        is_wanted = status is not None and status.is_short_of_groups
        has_requested = has_requested or (is_wanted and connections.has_connection_to_server())
        was_reported = silence.is_reported
        is_registered = None if status is None else status.has_environment(config.name)
        silent_s = silence.note(now, is_wanted=is_wanted, has_requested=has_requested, is_registered=is_registered)
        if silent_s is not None and status is not None:
            scene = _observation(config, pid, status, servers, connections, seen[1])
            log.warning("%s", silence_message(scene, silent_s))
        elif was_reported and has_requested:
            log.info("requests reach the inference server %s again", ", ".join(config.inference_urls))


def _observation(
    config: AtroposEnvConfig,
    pid: int,
    status: RunStatus,
    servers: Servers,
    connections: Connections,
    num_requests: float | None,
) -> Observation:
    return Observation(
        file=str(config.file),
        pid=pid,
        inference_url=", ".join(config.inference_urls),
        rollout_server_url=config.rollout_server_url,
        queued=status.queued,
        batch_size=status.batch_size,
        is_server_healthy=servers.are_healthy(),
        is_registered=status.has_environment(config.name),
        uses_wandb=bool(config.settings.get("use_wandb")),
        other_peers=tuple(sorted(connections.other_peers)),
        counters=None if num_requests is None else f"its /metrics still count {num_requests:g} requests",
    )


def _warn_if_ended_early(config: AtroposEnvConfig, api: Api) -> None:
    status = api.run_status(_STOCK_GROUP_SIZE)
    if config.total_steps is None:  # it would run forever: it did not reach its last step
        log.warning(
            "%s exited with code 0, and no groups are generated any more: if it never started, check "
            "that its file ends with `if __name__ == '__main__': YourEnv.cli()`",
            config.file,
        )
    elif (
        status is not None
        and status.num_steps is not None
        and status.step < status.num_steps
        and status.is_short_of_groups
    ):
        log.warning(
            "the environment exited at its total_steps, with the trainer at step %d of %d waiting for groups: "
            "raise total_steps, or remove it",
            status.step,
            status.num_steps,
        )


@contextmanager
def _child(argv: Sequence[str], environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in its own process group, forward SIGTERM and SIGINT to it, and end the whole group at the end."""
    end_with_parent = partial(die_with_parent, os.getpid(), signal.SIGTERM)
    process = subprocess.Popen(argv, env=environment, process_group=0, preexec_fn=end_with_parent)

    def forward(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    tree = ProcessTree([process.pid])
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)
        if not terminate(tree.living, grace_s=_GRACE_S):
            kill(tree.living, within_s=_KILL_WITHIN_S)


def _exit_code(returncode: int) -> int:
    """The exit code as a shell reports it: 128 plus the signal's number where a signal ended the process."""
    return returncode if returncode >= 0 else 128 - returncode
