"""vLLM's own arguments from a profile's `vllm` table or the command line, checked against the installed vLLM.

vLLM's parser reads them, so that they mean the same as for `vllm serve`. Arguments that duplicate one of our settings
or would break this server are refused. Imports vLLM only inside functions.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from grpo_engine.config import did_you_mean, setting_names
from grpo_engine.errors import ConfigError
from grpo_engine.server.config import ServerConfig

if TYPE_CHECKING:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

_RENAMED = {
    "max_num_seqs": "max_batch_size",
    "cudagraph_capture_sizes": "cuda_graph_sizes",
    "model": "model_name",
    "tokenizer": "model_name",
    "model_tag": "model_name",
}
"""vLLM's name → ours."""
_REFUSED = {
    "worker_extension_cls": "this server's own extension shares the weights and exits with the server",
    "generation_config": "a checkpoint's sampling defaults would silently change top_p or penalties",
    "lora_modules": "adapters are served by /lora/load",
    "default_mm_loras": "adapters are served by /lora/load",
    "weight_transfer_config": "weights come by /bridge/*",
    "api_key": "/generate does not check one: put an authenticating proxy in front of the server",
    "data_parallel_size": "this server runs one engine: start one server for each",
    "api_server_count": "this server has one API process: start another server",
    "headless": "this server always serves HTTP",
    "config": "use this server's --config, or put the keys into the vllm table",
    "uds": "this server listens on a TCP port",
    "grpc": "this server serves HTTP",
    "grpc_port": "this server serves HTTP",
}
"""Arguments of vLLM that this server refuses → why."""
_WITHOUT_EFFECT = frozenset(
    {
        *("enable_ssl_refresh", "ssl_ciphers", "uvicorn_log_level", "disable_uvicorn_access_log"),
        *("disable_access_log_for_endpoints", "h11_max_incomplete_event_size", "h11_max_header_count"),
    }
)
"""Arguments of vLLM's HTTP server, which this server replaces."""

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VllmArguments:
    """A `vllm` table with vLLM's types."""

    engine: dict[str, Any]
    """Arguments of `AsyncEngineArgs`."""
    frontend: dict[str, Any]
    """Arguments of `FrontendArgs`, which configure vLLM's routes."""


def vllm_arguments(table: Mapping[str, Any]) -> VllmArguments:
    """Read a `vllm` table.

    Raises:
        ConfigError: a name that vLLM does not know or that is refused here, or a value that vLLM refuses.
    """
    if not table:
        return VllmArguments(engine={}, frontend={})
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.exceptions import VLLMValidationError

    cli_args = _cli_args()
    parser = _parser(cli_args)
    actions = {action.dest: action for action in parser._actions}
    names = {key: _checked_name(key, actions) for key in table}
    argv = [word for key, value in table.items() for word in _words(key, value, actions[names[key]])]
    namespace = parser.parse_args(argv)
    try:
        cli_args.validate_parsed_serve_args(namespace)
    except (TypeError, ValueError, VLLMValidationError) as error:
        raise ConfigError(f"vllm: {str(error).removeprefix('Error: ')}") from None

    def given_to(kind: type) -> dict[str, Any]:
        fields = {field.name for field in dataclasses.fields(kind)}
        return {name: getattr(namespace, name) for name in names.values() if name in fields}

    return VllmArguments(engine=given_to(AsyncEngineArgs), frontend=given_to(cli_args.FrontendArgs))


def frontend_of(config: ServerConfig) -> Any:
    """vLLM's `FrontendArgs`, complete."""
    # vLLM's default allows every origin; here it must be configured.
    values = {"allowed_origins": [], "root_path": config.root_path, **vllm_arguments(config.vllm).frontend}
    return _cli_args().FrontendArgs(**values)


def _cli_args() -> Any:
    """vLLM's module of flags, which was moved in 0.29 and 0.33."""
    for package in ("common", "launchers"):
        with suppress(ImportError):
            return importlib.import_module(f"vllm.entrypoints.{package}.cli_args")
    return importlib.import_module("vllm.entrypoints.openai.cli_args")


def _parser(cli_args: Any) -> FlexibleArgumentParser:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        """Raises instead of exiting."""

        def error(self, message: str) -> NoReturn:
            raise ConfigError(f"vllm: {message}")

    return cli_args.make_arg_parser(Parser(add_help=False))


def _checked_name(key: str, known: Iterable[str]) -> str:
    """vLLM's argument for a key: `max_logprobs`, `no_enable_prefix_caching`, `compilation_config.mode`."""
    import vllm

    name = key.partition(".")[0]
    if name not in known:
        name = name.removeprefix("no_")
    if (ours := _RENAMED.get(name, name)) in ServerConfig.model_fields:
        raise ConfigError(f"vllm.{name}: use this server's own setting {ours} instead")
    if name in _REFUSED:
        raise ConfigError(f"vllm.{name}: not supported here: {_REFUSED[name]}")
    if name not in known:
        hint = did_you_mean(name, [*known, *setting_names(ServerConfig)])
        raise ConfigError(f"vllm.{name}: no argument of vLLM {vllm.__version__} or this server{hint}")
    if name in _WITHOUT_EFFECT:
        logger.warning("vllm.%s has no effect: it configures vLLM's HTTP server, which is not used here", name)
    return name


def _words(key: str, value: Any, action: argparse.Action) -> Iterator[str]:
    """A key of the table as arguments of vLLM's command line."""
    name, dot, inner = key.partition(".")
    flag = f"--{name.replace('_', '-')}{dot}{inner}"
    if isinstance(value, bool):
        yield flag if value else flag.replace("--", "--no-", 1)
    elif isinstance(value, list) and action.nargs in ("+", "*"):
        yield from (flag, *map(_text, value))
    elif isinstance(value, list) and isinstance(action, argparse._AppendAction):
        yield from (f"{flag}={_text(item)}" for item in value)
    else:
        yield f"{flag}={_text(value)}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
