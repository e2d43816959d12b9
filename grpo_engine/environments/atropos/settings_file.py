"""The YAML file with which an Atropos environment is served, and warnings about its settings. Pure.

`serve` ignores the inference server's address if the environment's `config_init` has a single server, and uses ports
9004 to 9007 instead; two or more entries below `openai:` are used unchanged, so a single one is written twice. Among
several, an environment sends each request to the one with the most free slots.
"""

from __future__ import annotations

import ast
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


def name_for(source: str) -> str | None:
    """The name for an environment whose file gives it none, which an API refuses: `name` of its class, or the class's.

    Atropos means to do so too, but its `serve` does not pass the name on. None where the file gives one, where it does
    not show which class it serves, or where the settings of that class come from another file.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return None  # its Python says so
    nodes = list(ast.walk(tree))
    if any(map(_sets_name, nodes)):
        return None
    served = {
        node.func.value.id
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "cli"
        if isinstance(node.func.value, ast.Name)
    }
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in served]
    if len(classes) != 1 or not _has_own_settings(classes[0]):
        return None
    stated = (
        node.value.value
        for node in classes[0].body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if any(isinstance(target, ast.Name) and target.id == "name" for target in node.targets)
    )
    return next(filter(None, stated), classes[0].name)


def _sets_name(node: ast.AST) -> bool:
    """Whether it may give `wandb_name` a value; the value None is none."""
    match node:
        case ast.keyword(arg="wandb_name", value=value):
            return not (isinstance(value, ast.Constant) and value.value is None)
        case ast.Constant(value="wandb_name"):  # of a dictionary, or `setattr`
            return True
        case ast.Name(id="wandb_name", ctx=ast.Store()) | ast.Attribute(attr="wandb_name", ctx=ast.Store()):
            return True
    return False


def _has_own_settings(node: ast.ClassDef) -> bool:
    methods = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
    bases = {base.id if isinstance(base, ast.Name) else getattr(base, "attr", None) for base in node.bases}
    return "config_init" in methods or bases == {"BaseEnv"}


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
