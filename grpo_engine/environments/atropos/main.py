"""Serve an environment of Atropos until it ends, and say so when it talks to the wrong inference server."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from grpo_engine.environments.atropos.child import child, exit_code
from grpo_engine.environments.atropos.config import AtroposEnvConfig
from grpo_engine.environments.atropos.serve_file import batch_traps, serve_text, traps
from grpo_engine.environments.atropos.silence import Scene, Silence, words
from grpo_engine.environments.atropos.witnesses import Api, Connections, Server, Want
from grpo_engine.errors import ConfigError, ModelError
from grpo_engine.models.local import LOCAL_MODELS, local_model_folder

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.5
"""Between two looks at the connections of an environment that is silent."""
_ASK_EVERY_S = 5.0
"""Between two questions to the servers."""
_TIMEOUT_S = 5.0
_STOCK_GROUP_SIZE = 4
"""Where nobody says another."""


def run(config: AtroposEnvConfig) -> int:
    """Work until the environment ends; returns its exit code.

    Raises:
        ConfigError: its file, its Python or atroposlib is not there, or the rollout API asks for a token.
        ModelError: a locally made model is not made yet.
    """
    _check_files(config)
    tokenizer = _tokenizer(config.model_name)
    for trap in traps(config):
        log.warning("%s", trap)
    with httpx.Client(timeout=_TIMEOUT_S, trust_env=False) as client:
        api = Api(client, config.rollout_server_url)
        _wait_for(api)
        with _written(config, tokenizer) as yaml_file:
            code = _serve(config, yaml_file, api)
        if code == 0:
            _say_if_too_early(config, api)
        return code


def _serve(config: AtroposEnvConfig, yaml_file: Path, api: Api) -> int:
    """Run the environment and look on; returns its exit code."""
    argv = [str(config.python), str(config.file), "serve", "--config", str(yaml_file)]
    # In blocks of some kilobytes its lines would come minutes late: it prints little.
    with child(argv, {**os.environ, "PYTHONUNBUFFERED": "1"}) as process:
        log.info("environment %s started as process %d, with %s", config.file.name, process.pid, yaml_file)
        is_over = threading.Event()
        watch = threading.Thread(target=_watch, args=(config, process.pid, api, is_over), daemon=True)
        watch.start()
        code = exit_code(process.wait())
        is_over.set()
        watch.join()
    return code


def _check_files(config: AtroposEnvConfig) -> None:
    for flag, path in {"file": config.file, "python": config.python}.items():
        if unset := re.search(r"\$\{?(\w+)\}?", str(path)):
            raise ConfigError(f"--{flag} {path}: ${unset[1]} is not set: export {unset[1]}=…, or write the path out")
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
    """What a stock client finds the tokenizer by: it knows folders and hub names, not models that we make."""
    if model_name not in LOCAL_MODELS:
        return os.path.abspath(model_name) if Path(model_name).is_dir() else model_name
    folder = local_model_folder(model_name)
    if not folder.is_dir():
        raise ModelError(f"{model_name}: not made yet; the inference server makes it: start that first")
    return str(folder)


@contextmanager
def _written(config: AtroposEnvConfig, tokenizer: str) -> Iterator[Path]:
    """The environment's YAML file."""
    with tempfile.TemporaryDirectory(prefix="atropos-env-") as folder:
        path = config.yaml_file or Path(folder) / "serve.yaml"
        try:
            path.write_text(serve_text(config, tokenizer))
        except OSError as error:
            raise ConfigError(f"--yaml-file {path}: cannot be written: {error.strerror}: name another") from None
        yield path


def _wait_for(api: Api) -> None:
    """Return once the rollout API answers: the environment itself would give up within seconds."""
    has_said = False
    while (refuses := api.asks_for_a_token()) is None:
        if not has_said:
            log.info("waiting for the rollout API at %s", api.url)
            has_said = True
        time.sleep(_LOOK_EVERY_S)
    if refuses:
        raise ConfigError(
            f"--rollout-server-url {api.url}: asks for a token, which environments of Atropos cannot send: start that "
            "API without one (on 127.0.0.1, where it listens by default, only this machine reaches it)"
        )


def _watch(config: AtroposEnvConfig, pid: int, api: Api, is_over: threading.Event) -> None:
    """Look on until `is_over`, and say what goes wrong without a word of the environment's."""
    server = Server(api.client, config.inference_url)
    connections = Connections(pid, config.inference_url, config.rollout_server_url)
    silence = Silence(config.silent_after_s)
    group_size = config.group_size or _STOCK_GROUP_SIZE
    told_batch_size = 0
    seen: tuple[float | None, float | None] = (None, None)
    want: Want | None = None
    asked_at = float("-inf")
    while not is_over.wait(_LOOK_EVERY_S):
        has_asked, now = False, time.monotonic()
        if now - asked_at >= min(_ASK_EVERY_S, config.silent_after_s / 2):
            asked_at, before = now, seen
            want = api.want(group_size)
            if want is not None and want.batch_size not in (told_batch_size, -1):
                told_batch_size = want.batch_size
                for trap in batch_traps(config, want.batch_size):
                    log.warning("%s", trap)
            if want is None or not want.is_starving:
                seen = (None, None)
            else:
                is_alone = want.environments is None or len(want.environments) <= 1
                seen = (api.num_groups(config.name), server.num_requests() if is_alone else None)
                has_asked = any(a is not None and b is not None and a != b for a, b in zip(before, seen, strict=True))
        is_wanted = want is not None and want.is_starving
        has_asked = has_asked or (is_wanted and connections.has_one_to_the_server())
        was_told = silence.is_told
        is_registered = None if want is None else want.knows(config.name)
        silent_s = silence.note(now, is_wanted=is_wanted, has_asked=has_asked, is_registered=is_registered)
        if silent_s is not None and want is not None:
            scene = _scene(config, pid, want, server, connections, seen[1])
            log.warning("%s", words(scene, silent_s))
        elif was_told and has_asked:
            log.info("requests reach the inference server %s", config.inference_url)


def _scene(
    config: AtroposEnvConfig,
    pid: int,
    want: Want,
    server: Server,
    connections: Connections,
    num_requests: float | None,
) -> Scene:
    return Scene(
        file=str(config.file),
        pid=pid,
        inference_url=config.inference_url,
        rollout_server_url=config.rollout_server_url,
        queued=want.queued,
        batch_size=want.batch_size,
        is_server_well=server.is_well(),
        is_registered=want.knows(config.name),
        uses_wandb=bool(config.settings.get("use_wandb")),
        elsewhere=tuple(sorted(connections.elsewhere)),
        counters=None if num_requests is None else f"its /metrics still count {num_requests:g} requests",
    )


def _say_if_too_early(config: AtroposEnvConfig, api: Api) -> None:
    want = api.want(_STOCK_GROUP_SIZE)
    if config.total_steps is None:  # endless: it did not end because its steps were done
        log.warning(
            "%s has ended by itself, with exit code 0, and nothing makes groups any more: where it never began, look "
            "whether it ends with `if __name__ == '__main__': YourEnv.cli()`",
            config.file,
        )
    elif want is not None and want.num_steps is not None and want.step < want.num_steps and want.is_starving:
        log.warning(
            "the environment has ended at its total_steps, with the trainer at step %d of %d, which will wait for "
            "groups: raise total_steps, or leave it out",
            want.step,
            want.num_steps,
        )
