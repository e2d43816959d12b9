"""Adapters on disk: whether one can be served, decided before it is loaded, and the newest one of a run.

vLLM accepts more than it can use: factors of layers that the model does not have, or of other shapes than the model's,
are ignored or misapplied without an error. Reads the configuration and the header of the safetensors file.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from grpo_engine.bridges.memory.shared_names import LeftAdapter, newest_adapter, run_of
from grpo_engine.errors import GrpoError, ModelError, first_of
from grpo_engine.models.same_model import is_same_model
from grpo_engine.server.config import ServerConfig
from grpo_engine.wire.checkpoints import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from grpo_engine.wire.codec import open_file, read_whole, shortened

_NAMES_SHOWN = 4
_HEADER_BYTES = 1 << 20
"""Of a file of factors: its metadata and padding."""
_ENTRY_BYTES = 256
"""Of a factor in the header, beside the name of the parameter: prefix, type, shape and offsets."""
_FACTOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")
_UNSERVED = {
    "use_dora": "is weight-decomposed (DoRA)",
    "modules_to_save": "replaces whole modules",
    "trainable_token_indices": "trains embeddings of tokens",
    "lora_bias": "has biases",
    "layer_replication": "repeats layers",
    "alora_invocation_tokens": "is an activated one (aLoRA)",
    "rank_pattern": "has different ranks for some modules",
    "alpha_pattern": "has different scales for some modules",
    "use_qalora": "pools its inputs (QALoRA)",
    "use_bdlora": "is block-diagonal (BD-LoRA)",
    "kasa_config": "changes the base model too (KaSA)",
    "monteclora_config": "samples its factors (MonteCLoRA)",
    "arrow_config": "routes between adapters (Arrow)",
}
"""Settings of PEFT that must be unset or empty → what they do, as the error says it."""
_PLAIN_INITS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights`; the others (PiSSA, OLoRA, …) change the base model too."""

logger = logging.getLogger(__name__)


def check_adapter(
    path: Path, *, model_name: str, shapes: Mapping[str, tuple[int, ...]], aliases: Mapping[str, str], max_rank: int
) -> list[str]:
    """Refuse an adapter that cannot be served, or was made for another model.

    Args:
        shapes: of the served model's parameters, as transformers names them.
        aliases: other names of tied parameters → the one in `shapes`.

    Returns:
        The modules that it changes, as transformers names them.

    Raises:
        ModelError: the adapter cannot be served.
    """
    from grpo_engine.models.loading import resolve_model

    config = read_config(path)
    rank = _checked_rank(path, config, max_rank)
    if problems := [words for name, words in _UNSERVED.items() if config.get(name)]:
        raise ModelError(
            f"{path}: the adapter {', '.join(problems)}, which cannot be served: train a plain LoRA adapter"
        )
    bias, init = config.get("bias", "none"), config.get("init_lora_weights")
    if bias != "none" or init not in _PLAIN_INITS:
        raise ModelError(
            f"{path}: bias {shortened(repr(bias))}, init_lora_weights {shortened(repr(init))}: such adapters change "
            "the base model too, which cannot be served: train a plain LoRA adapter"
        )
    base = str(config.get("base_model_name_or_path") or model_name)
    if not is_same_model(base, resolve_model(model_name)) and not is_same_model(base, model_name):
        raise ModelError(
            f"{path}: made for {shortened(base)}, but {model_name} is served; serve that model, or where both names "
            f"mean the same weights, correct base_model_name_or_path in its {ADAPTER_CONFIG}"
        )
    return _checked_modules(path / ADAPTER_WEIGHTS, rank, shapes, aliases)


def refuse_unbound(path: Path, modules: Iterable[str], model: str) -> None:
    """Refuse an adapter with factors for `modules` for which the loaded model has no layer.

    Raises:
        ModelError: there are such modules.
    """
    if names := list(modules):
        raise ModelError(
            f"{path}: {model} has no layer for {first_of(names, _NAMES_SHOWN)}: inference would ignore these factors; "
            "put the adapter on other modules (--lora-target-modules)"
        )


@contextmanager
def resuming_newest_adapter(config: ServerConfig, environment: Mapping[str, str]) -> Iterator[LeftAdapter | None]:
    """The newest adapter that a living trainer of this run published to the previous server; None without one.

    The block loads it. An adapter that cannot be loaded is logged, and the server starts without an adapter.
    """
    newest = newest_adapter(run_of(environment)) if config.enable_lora else None
    try:
        yield newest
    except GrpoError as error:
        logger.warning("%s; serving without an adapter until the trainer publishes the next one", error)
        return
    if newest is not None:
        logger.info("Loaded version %d from %s", newest.policy_version, newest.path)


def read_config(path: Path) -> dict[str, Any]:
    """The configuration of an adapter.

    Raises:
        ModelError: it has none, or another kind than LoRA.
    """
    try:
        config = json.loads(read_whole(path / ADAPTER_CONFIG))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not an adapter: {ADAPTER_CONFIG} cannot be read: {error}") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise ModelError(
            f"{path}: not an adapter: {ADAPTER_CONFIG} has peft_type {shortened(repr(kind))}; only LORA can be served"
        )
    return config


def _checked_rank(path: Path, config: Mapping[str, Any], max_rank: int) -> int:
    rank = config.get("r")
    if not isinstance(rank, int) or rank < 1:
        raise ModelError(f"{path}: not an adapter: {ADAPTER_CONFIG} has rank {shortened(repr(rank))}")
    if rank > max_rank:
        raise ModelError(
            f"{path}: rank {rank} is above --max-lora-rank {max_rank}: start the server with a higher one, or train "
            "with a lower --lora-r"
        )
    return rank


def _check_header(path: Path, parameters: Iterable[str]) -> None:
    """Refuse a header that is longer than two factors of every parameter: safetensors would read hundreds of MB of it.

    Raises:
        ModelError: it is longer.
        OSError: the file cannot be read, or is no regular one.
    """
    most = _HEADER_BYTES + sum(2 * (len(name) + _ENTRY_BYTES) for name in parameters)
    with open_file(path) as file:
        length = int.from_bytes(file.read(8), "little")
    if length > most:
        raise ModelError(
            f"{path}: its header has {length:,} bytes, but one with factors for every layer of the served model has at "
            f"most {most:,}: it was made for another model, or is damaged"
        )


def _checked_modules(
    path: Path, rank: int, shapes: Mapping[str, tuple[int, ...]], aliases: Mapping[str, str]
) -> list[str]:
    try:
        _check_header(path, [*shapes, *aliases])
        with safe_open(path, framework="pt") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: cannot be read: {error}; is the file complete?") from None
    factors: dict[str, dict[str, tuple[int, ...]]] = {}
    for name in found:
        match = _FACTOR.fullmatch(name)
        if match is None:
            raise ModelError(
                f"{path}: {name} is no factor of a linear layer; an adapter with other tensors cannot be served"
            )
        factors.setdefault(match["module"], {})[match["factor"]] = found[name]
    if not factors:
        raise ModelError(f"{path}: the adapter has no factors")
    served = {module: shapes.get(aliases.get(f"{module}.weight", f"{module}.weight")) for module in factors}
    if unknown := [module for module, shape in served.items() if shape is None or len(shape) != 2]:
        raise ModelError(
            f"{path}: made for another model: {first_of(unknown, _NAMES_SHOWN)} are no layers of the served model"
        )
    for module, shape in served.items():
        assert shape is not None
        if factors[module] != {"A": (rank, shape[1]), "B": (shape[0], rank)}:
            raise ModelError(
                f"{path}: {module} has factors {factors[module]}, but the served layer of {shape} takes rank {rank}: "
                "it was made for another model, or its configuration has the wrong rank"
            )
    return list(factors)
