"""The YAML file with which an Atropos environment is served, and warnings about its settings. Pure.

`serve` ignores the inference server's address if the environment's `config_init` has a single server, and uses ports
9004 to 9007 instead; two or more entries below `openai:` are used unchanged, so a single one is written twice. Among
several, an environment sends each request to the one with the most free slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from grpo_engine.environments.atropos.config import OWN_SETTINGS, AtroposEnvConfig
from grpo_engine.serving.access import token_for
from grpo_engine.wire.access_token import url_with_token

ENDLESS = 1_000_000_000
"""`total_steps` of an environment that runs until it is stopped: Atropos has no value for that."""
TYPE_WITH_LOGPROBS = "vllm"
_TRUE = frozenset({"true", "1", "yes", "on", "t", "y"})
"""Words that pydantic takes as true."""


def serve_text(config: AtroposEnvConfig, tokenizer: str, token: str | None) -> str:
    """The file's text; `tokenizer` is the name for `AutoTokenizer.from_pretrained`.

    Environments of Atropos send no token of their own; they do send the password of a URL, and the key of a server.
    """
    given = {theirs: getattr(config, ours) for ours, theirs in OWN_SETTINGS.items()}
    environment: dict[str, Any] = {
        "tokenizer_name": tokenizer,
        "use_wandb": False,
        **{name: value for name, value in given.items() if value is not None},
        **config.settings,
        "rollout_server_url": url_with_token(config.rollout_server_url, token),
    }
    environment.setdefault("total_steps", ENDLESS)
    urls = config.inference_urls * (2 if len(config.inference_urls) == 1 else 1)
    servers = [
        {
            "model_name": config.model_name,
            "tokenizer_name": tokenizer,
            "base_url": f"{url}/v1",
            "server_type": TYPE_WITH_LOGPROBS,
            "api_key": token_for(url, token) or "x",
            **config.server,
        }
        for url in urls
    ]
    document = {"env": environment, "openai": servers}
    text: str = yaml.safe_dump(document, sort_keys=False)
    return f"# Written at every start: change settings in the profile.\n{text}"


def setting_warnings(config: AtroposEnvConfig) -> Iterator[str]:
    """Warnings about settings with unexpected effects; those of flags are text, which the environment reads."""
    if str(config.settings.get("use_wandb")).lower() in _TRUE:
        yield (
            "settings.use_wandb = true: the environment waits without a message until a trainer registers with a "
            "W&B project: start the trainer with --use-wandb and --wandb-project, or remove it here"
        )
    kind = config.server.get("server_type", TYPE_WITH_LOGPROBS)
    if kind != TYPE_WITH_LOGPROBS:
        yield (
            f"server.server_type = {kind!r}: groups have no log-probabilities, which the trainer needs: remove it, "
            f"for {TYPE_WITH_LOGPROBS!r}"
        )
    for name in ("steps_per_eval",):
        if str(config.settings.get(name)) == "1":
            yield f"settings.{name} = 1: has no effect, only an interval of 2 or more has: set 2"


def batch_warnings(config: AtroposEnvConfig, batch_size: int) -> Iterator[str]:
    """Warnings about the trainer's batch size, known once it has registered."""
    size = config.group_size
    if size is not None and size > batch_size:
        yield (
            f"group_size = {size} is more than the trainer's batch of {batch_size} sequences, so the environment "
            f"exits: lower group_size or raise batch_size"
        )
    elif size is not None and batch_size % size:
        yield (
            f"group_size = {size} does not divide the trainer's batch of {batch_size} sequences, which is made of "
            f"whole groups: no batch can form from this environment alone; change one of them"
        )
