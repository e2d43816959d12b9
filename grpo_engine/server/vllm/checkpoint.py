"""Whether a checkpoint can replace the served weights, decided without reading its weights.

Reads the headers of safetensors files, and builds the model in transformers without memory to know its parameters.
Other formats are refused: vLLM would notice only after it began to overwrite the old weights.
"""

from __future__ import annotations

import importlib.util
import warnings
from dataclasses import dataclass
from pathlib import Path

from accelerate import init_empty_weights
from safetensors import SafetensorError, safe_open

from grpo_engine.errors import ModelError
from grpo_engine.models.auto import AutoModelForCausalLM
from grpo_engine.models.loading import load_config
from grpo_engine.wire.codec import require_regular


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """The parameters of a model as transformers names them."""

    shapes: dict[str, tuple[int, ...]]
    """A tied parameter is listed once, under its first name."""
    aliases: dict[str, str]
    """The other names of tied parameters → the first."""


def parameters_of(model_name: str) -> Parameters:
    """The parameters of a model according to its configuration.

    Raises:
        ModelError: no such model.
    """
    config = load_config(model_name)
    with init_empty_weights(include_buffers=False), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*no-op.*meta.*")  # initialising tensors without memory is intended
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    shapes: dict[str, tuple[int, ...]] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        if known == name:
            shapes[name] = tuple(parameter.shape)
        else:
            aliases[name] = known
    return Parameters(shapes=shapes, aliases=aliases)


def can_reload_below_adapters() -> bool:
    """Whether this vLLM can reload layers that adapters wrap (`….base_layer.…`): 0.26 cannot, 0.32 can."""
    spec = importlib.util.find_spec("vllm")  # a file is looked up: finding a submodule would import half of vLLM
    folders = spec.submodule_search_locations if spec is not None else None
    return any((Path(folder) / "model_executor/model_loader/reload/inplace.py").is_file() for folder in folders or ())


def check_fits(folder: Path, served: Parameters) -> None:
    """Refuse a checkpoint that is incomplete or of another model than the served one.

    Raises:
        ModelError: names the first difference.
    """
    found = _shapes_in(folder)
    for name, shape in served.shapes.items():
        names = (name, *(alias for alias, source in served.aliases.items() if source == name))
        stored = next((found[known] for known in names if known in found), None)
        if stored is None:
            raise ModelError(f"{folder}: does not fit the served model: {name} is only in the served model")
        if stored != shape:
            raise ModelError(f"{folder}: does not fit the served model: {name} is {stored}, but {shape} is served")
    for name in found.keys() - served.shapes.keys() - served.aliases.keys():
        if not name.endswith("rotary_emb.inv_freq"):  # a buffer in old checkpoints
            raise ModelError(f"{folder}: does not fit the served model: {name} is only in the checkpoint")


def _shapes_in(folder: Path) -> dict[str, tuple[int, ...]]:
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ModelError(f"{folder}: no *.safetensors there; vLLM can reload only this format in place")
    shapes: dict[str, tuple[int, ...]] = {}
    for path in paths:
        try:
            require_regular(path)
            with safe_open(path, framework="pt") as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: cannot be read: {error}; is the file complete?") from None
    return shapes
