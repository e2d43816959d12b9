"""Settings as environments of Atropos write them: tables `env` and `openai` of a YAML file, or `--env.…` flags.

`serve_settings` makes ours of them, `serve_tables` those of `grpo-engine atropos-env`. Settings without an effect here
are known by name, and a warning says why; any other name is an error.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from grpo_engine.config import RawTable, did_you_mean
from grpo_engine.errors import ConfigError

TABLES = ("env", "openai")

SAME_NAMES = (
    "group_size",
    "max_token_length",
    "max_batches_offpolicy",
    "total_steps",
    "worker_timeout",
    "min_batch_allocation",
    "ensure_scores_are_not_same",
    "rollout_server_url",
    "use_wandb",
    "steps_per_eval",
)
"""Below `env` there, and here."""
OTHER_NAMES = {
    "wandb_name": "name",
    "inference_weight": "weight",
    "max_num_workers": "max_workers",
    "max_num_workers_per_node": "max_workers",
}
"""Below `env` there → here."""
NO_LIMIT = ("total_steps", "worker_timeout", "max_num_workers", "inference_weight", "steps_per_eval")
"""Settings in which -1 means what leaving them out means here."""
NO_EFFECT = {
    **dict.fromkeys(("batch_size",), "batches have the trainer's size, as there"),
    **dict.fromkeys(
        ("eval_handling", "eval_limit_ratio", "max_eval_workers"), "held-out prompts are asked before training ones"
    ),
    **dict.fromkeys(
        ("num_rollouts_to_keep", "num_rollouts_per_group_for_logging", "min_items_sent_before_logging"),
        "rollouts.jsonl of the trainer has sampled groups",
    ),
    **dict.fromkeys(
        ("data_path_to_save_groups", "data_dir_to_save_evals"), "the rollout API and the trainer keep both"
    ),
    **dict.fromkeys(("include_messages",), "tokens are sent"),
    **dict.fromkeys(("start_tok_length",), "max_tokens is the limit of a completion, from the first step on"),
    **dict.fromkeys(("mask_too_long_completions",), "set mask_truncated of the trainer"),
    **dict.fromkeys(("percent_length_penalty",), "set overlong_buffer of the trainer"),
    **dict.fromkeys(("run_evaluation",), "steps_per_eval 0 evaluates never"),
}
"""Below `env`, and why."""
SERVER_NO_EFFECT = dict.fromkeys(
    (
        *("weight", "timeout", "num_max_requests_at_once", "num_requests_for_eval", "rolling_buffer_length"),
        *("n_kwarg_is_ignored", "health_check", "tokenizer_name"),
    ),
    "requests go to the server with the fewest open tokens, up to max_workers groups at a time",
)
"""Below `openai`, and why."""


def serve_settings(table: RawTable) -> RawTable:
    """Our settings of a table in that layout; keys beside `env` and `openai` are ours already, and win.

    Raises:
        ConfigError: a table is none, a name is unknown, or servers have different keys.
    """
    environment, servers, own = _parts(table)
    result: RawTable = {}
    for key, value in environment.items():
        name = key if key in SAME_NAMES else OTHER_NAMES.get(key)
        if key == "tokenizer_name":
            result["model_name"] = value
        elif name is not None:
            if not (key in NO_LIMIT and str(value) in ("-1", "-1.0")):
                result[name] = value
        else:
            _without_effect("env", key, NO_EFFECT, (*SAME_NAMES, *OTHER_NAMES, "tokenizer_name"))
    for server in servers:
        for key, value in server.items():
            match key:
                case "base_url":
                    result.setdefault("inference_urls", []).append(value)
                case "model_name":
                    result.setdefault("model_name", value)
                case "api_key" | "server_type":
                    if result.setdefault(key, value) != value:
                        raise ConfigError(f"openai.{key}: differs between servers: give all of them the same")
                case _:
                    _without_effect("openai", key, SERVER_NO_EFFECT, ("base_url", "model_name", "api_key"))
    return {**result, **own}


def serve_tables(table: RawTable, own_settings: Mapping[str, str]) -> RawTable:
    """The settings of `atropos-env` of a table in that layout.

    Args:
        own_settings: its settings that are below `env` there, with their names there.

    Raises:
        ConfigError: a table is none, or servers differ in more than their address.
    """
    environment, servers, own = _parts(table)
    ours = {theirs: name for name, theirs in own_settings.items()}
    result: RawTable = {}
    settings: RawTable = {}
    for key, value in environment.items():
        if key in ours:
            result[ours[key]] = value
        else:
            settings[key] = value
    urls = [server["base_url"] for server in servers if "base_url" in server]
    rest = [{key: value for key, value in server.items() if key != "base_url"} for server in servers]
    if any(each != rest[0] for each in rest):
        raise ConfigError("openai: servers differ in more than base_url: give all of them the same settings")
    server = rest[0] if rest else {}
    model_name = server.pop("model_name", None) or settings.get("tokenizer_name")
    if model_name is not None:
        result["model_name"] = model_name
        if settings.get("tokenizer_name") == model_name:
            del settings["tokenizer_name"]
    found = {"inference_urls": urls, "settings": settings, "server": server}
    return {**result, **{name: value for name, value in found.items() if value}, **own}


def _parts(table: RawTable) -> tuple[dict[str, Any], list[dict[str, Any]], RawTable]:
    """`env`, each of `openai`, and the other keys but those of Slurm."""
    environment, servers = table.get("env", {}), table.get("openai", {})
    servers = [dict(each) if isinstance(each, dict) else each for each in _listed(servers)]
    if not isinstance(environment, dict) or not all(isinstance(each, dict) for each in servers):
        raise ConfigError("env and openai must be tables, as `env: {group_size: 4}`; openai may be a list of them")
    own = {key: value for key, value in table.items() if key not in (*TABLES, "slurm", "testing")}
    return environment, servers, own


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value] if value else []


def _without_effect(table: str, key: str, known: Mapping[str, str], others: tuple[str, ...]) -> None:
    if key not in known:
        raise ConfigError(f"{table}.{key}: unknown setting{did_you_mean(key, [*known, *others])}")
    sys.stderr.write(f"warning: {table}.{key} has no effect here: {known[key]}\n")
