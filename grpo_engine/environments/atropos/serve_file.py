"""The YAML file that an Atropos environment is served with, and what is known to go wrong with its settings. Pure.

`serve` ignores the inference server's address where the environment's `config_init` has a single server, and asks
ports 9004 to 9007 instead; two or more entries below `openai:` are taken as they stand, so ours stands there twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from grpo_engine.environments.atropos.config import OWN_SETTINGS, AtroposEnvConfig

ENDLESS = 1_000_000_000
"""`total_steps` of an environment that goes on until it is stopped: Atropos has no word for that."""
TYPE_WITH_LOGPROBS = "vllm"


def serve_text(config: AtroposEnvConfig, tokenizer: str) -> str:
    """The file's text; `tokenizer` is what `AutoTokenizer.from_pretrained` finds the model by."""
    given = {theirs: getattr(config, ours) for ours, theirs in OWN_SETTINGS.items()}
    environment: dict[str, Any] = {
        "tokenizer_name": tokenizer,
        "use_wandb": False,
        **{name: value for name, value in given.items() if value is not None},
        **config.settings,
    }
    environment.setdefault("total_steps", ENDLESS)
    server = {
        "model_name": config.model_name,
        "tokenizer_name": tokenizer,
        "base_url": f"{config.inference_url}/v1",
        "server_type": TYPE_WITH_LOGPROBS,
        "api_key": "x",
        **config.server,
    }
    document = {"env": environment, "openai": [server, dict(server)]}
    text: str = yaml.safe_dump(document, sort_keys=False)
    return f"# Written at each start: settings belong into the profile.\n{text}"


def traps(config: AtroposEnvConfig) -> Iterator[str]:
    """What will not go as one would think, in words."""
    if config.settings.get("use_wandb"):
        yield (
            "settings.use_wandb = true: the environment waits, silently and for ever, until a trainer registers with a "
            "W&B project: start the trainer with --use-wandb and --wandb-project, or leave it out here"
        )
    kind = config.server.get("server_type", TYPE_WITH_LOGPROBS)
    if kind != TYPE_WITH_LOGPROBS:
        yield (
            f"server.server_type = {kind!r}: groups come without log-probabilities, which the trainer needs: leave it "
            f"out, for {TYPE_WITH_LOGPROBS!r}"
        )
    for name in ("steps_per_eval",):
        if config.settings.get(name) == 1:
            yield f"settings.{name} = 1: never happens, because only an interval of 2 or more is noticed: say 2"


def batch_traps(config: AtroposEnvConfig, batch_size: int) -> Iterator[str]:
    """The same, of a trainer's batch size, which is known once it has registered."""
    size = config.group_size
    if size is not None and size > batch_size:
        yield (
            f"group_size = {size} is more than the trainer's batch of {batch_size} sequences, at which the environment "
            f"ends: lower the one or raise the other"
        )
    elif size is not None and batch_size % size:
        yield (
            f"group_size = {size} does not divide the trainer's batch of {batch_size} sequences, which is made of "
            f"whole groups: none can form of this environment alone; change one of them"
        )
