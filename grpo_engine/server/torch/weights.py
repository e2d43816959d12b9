"""The served model: loaded or adopted from shared memory, shared with a trainer, reloaded in place, adapted.

Everything here runs on the engine's only worker thread, between batches, and so needs no lock. Checkpoints and adapters
are read and checked completely before served weights change.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from grpo_engine.bridges.memory.bridge_files import bridge_file_path
from grpo_engine.bridges.memory.weight_lock import WeightLock
from grpo_engine.bridges.transport.checkpoint_folder import newest_checkpoint
from grpo_engine.errors import ModelError
from grpo_engine.models.devices import require_device
from grpo_engine.models.loading import load_config, load_model, load_model_on_shared, load_tokenizer, resolve_model
from grpo_engine.processes import AnyProcess
from grpo_engine.server.adapter_files import check_adapter, read_config, resuming_newest_adapter
from grpo_engine.server.config import ServerConfig
from grpo_engine.server.engine import Adapter
from grpo_engine.server.exports import Owner, export, fingerprint_of, take_over, withdraw, write_bridge_file
from grpo_engine.server.receiving import Part, WeightReceiver, awaited_sender, joined
from grpo_engine.server.staged import StagedReceiver
from grpo_engine.wire.bridge_file import BridgeFile
from grpo_engine.wire.codec import require_regular
from grpo_engine.wire.inference import JoinRequest, ReceiveRequest, WakeRequest
from grpo_engine.wire.log_lines import WEIGHTS_EXPORTED

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class ServedWeights:
    """A model in memory, with the weight lock of its parameters."""

    model: Any
    """A causal model of transformers, in evaluation mode."""
    model_name: str
    tokenizer: Any
    lock: WeightLock
    parameters: dict[str, Tensor]
    """The model's parameters without adapters; a tied one is listed once."""
    aliases: dict[str, str]
    """Tied parameters: the second name → the first."""
    awaits: AnyProcess | None = None
    """The trainer that has newer weights and will publish them; nothing may be sampled before."""
    shapes: dict[str, torch.Size] = field(default_factory=dict)
    """Of the parameters; kept while they are freed."""
    adapter: Adapter | None = None
    _receiver: WeightReceiver | None = None
    _staged: StagedReceiver = field(default_factory=StagedReceiver)
    _num_adapters: int = 0
    _announced: tuple[Path, BridgeFile, Owner] | None = None

    @property
    def is_sharing(self) -> bool:
        """Whether a trainer can map the weights."""
        return self._announced is not None

    def reload(self, path: Path, policy_version: int) -> None:
        """Copy the weights of a checkpoint over the served ones.

        Raises:
            ModelError: the checkpoint is missing or does not fit; the served weights are unchanged.
        """
        try:
            for file in path.iterdir():
                if not file.is_dir():
                    require_regular(file)
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error}") from None
        fresh = _parameters_of(load_model(str(path), dtype="auto", device="cpu"))
        _check_same_shapes(path, fresh, self.parameters)
        with self.lock.writing(policy_version), torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(fresh[name])
            _synchronize(self.model)

    def join(self, request: JoinRequest) -> None:
        """Begin to meet the members of a weight group; the earlier group is left.

        Raises:
            BridgeError: other tensors are served.
        """
        self._leave()
        self._receiver = WeightReceiver(request, {name: Part(tensor) for name, tensor in self.parameters.items()})

    def receive(self, request: ReceiveRequest) -> list[int]:
        """Take the weights that are sent now; the checksum, if it is asked for.

        Raises:
            BridgeError: no such group was joined, or the transfer failed; the weights may be half-written then.
        """
        receiver = joined(self._receiver, request)
        with self.lock.writing(request.policy_version):
            checksum = receiver.receive(with_checksum=request.with_checksum)
        return [] if checksum is None else [checksum]

    def free(self) -> None:
        """Free the memory of all parameters; their values are lost."""
        self._leave()
        if not self.shapes:
            self.shapes = {name: parameter.shape for name, parameter in self.parameters.items()}
        for parameter in self.model.parameters():
            parameter.data = parameter.data.new_empty(0)
        self.parameters = _parameters_of(self.model)

    def allocate(self) -> None:
        """Allocate all parameters again, without values."""
        for name, parameter in self.model.named_parameters():
            parameter.data = parameter.data.new_empty(self.shapes[name])
        self.parameters = _parameters_of(self.model)

    def begin_staged(self, request: WakeRequest) -> None:
        """Make ready to take the parameters; errors as of `StagedReceiver.begin`."""
        self._staged.begin(request, {name: Part(tensor) for name, tensor in self.parameters.items()})

    def take_staged(self, number: int) -> None:
        """Copy what the staging memory holds; errors as of `StagedReceiver.take`."""
        self._staged.take(number)

    def end_staged(self, policy_version: int, *, with_checksum: bool) -> int | None:
        """Serve what was taken; errors as of `StagedReceiver.end`."""
        with self.lock.writing(policy_version):
            return self._staged.end(with_checksum=with_checksum)

    def _leave(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    def load_adapter(self, path: Path, name: str | None, policy_version: int | None, max_rank: int) -> Adapter:
        """Load an adapter beside the served one, and switch once it is loaded.

        Raises:
            ModelError: it cannot be loaded, or is for another model; the old adapter is still served.
        """
        shapes = {name: tuple(parameter.shape) for name, parameter in self.parameters.items()}
        modules = check_adapter(
            path, model_name=self.model_name, shapes=shapes, aliases=self.aliases, max_rank=max_rank
        )
        number = self._num_adapters + 1
        inner_name = f"adapter_{number}"
        version = self.lock.read().policy_version + 1 if policy_version is None else policy_version
        from peft import LoraConfig  # imported late: a server without adapters does not need it

        try:
            # Of its settings only those that a served adapter has, and the modules that its tensors have: others may be
            # patterns that match without end, or have PEFT make tensors of any size.
            given = read_config(path)
            settings = LoraConfig(
                task_type="CAUSAL_LM",
                inference_mode=True,
                target_modules=set(modules),
                **{name: given[name] for name in ("r", "lora_alpha", "use_rslora", "fan_in_fan_out") if name in given},
            )
            self.model.load_adapter(str(path), adapter_name=inner_name, peft_config=settings)
        except Exception as error:  # peft and safetensors raise many types for a broken folder
            if inner_name in getattr(self.model, "peft_config", {}):
                self.model.delete_adapter(inner_name)
            if self.adapter is not None:
                self.model.set_adapter(f"adapter_{self.adapter.number}")
            raise ModelError(f"{path}: not an adapter for this model: {type(error).__name__}: {error}") from error
        with self.lock.writing(version):
            self.model.set_adapter(inner_name)
            self.model.enable_adapters()
            if self.adapter is not None:
                self.model.delete_adapter(f"adapter_{self.adapter.number}")
        self.model.eval()
        self._num_adapters = number
        self.adapter = Adapter(name=name or path.name, path=str(path), number=number)
        return self.adapter

    def unload_adapter(self) -> Adapter | None:
        """Serve the model without an adapter again."""
        previous = self.adapter
        if previous is not None:
            with self.lock.writing(self.lock.read().policy_version + 1):
                self.model.delete_adapter(f"adapter_{previous.number}")
            self.adapter = None
        return previous

    def close(self) -> None:
        """Leave the weight group, and remove what was shared, unless it belongs to the run."""
        self._leave()
        self._staged.close()
        if self._announced is not None:
            withdraw(*self._announced)
            self._announced = None


def open_weights(
    config: ServerConfig, *, instance: str, environment: Mapping[str, str], before_export: Callable[[], None]
) -> ServedWeights:
    """Load the model, or adopt the shared memory of the previous server, and share it if configured.

    Args:
        before_export: called before anything is created that outlives the process; may raise to prevent it.

    Raises:
        ModelError: no such model.
        BridgeError: the weights cannot be shared.
    """
    device = resolve_device(config.device)
    tokenizer = load_tokenizer(config.model_name)
    if not config.shared_weights:
        model, version = _newest_weights(config, device)
        lock = WeightLock.private(policy_version=version)
        weights = ServedWeights(
            model=model,
            model_name=config.model_name,
            tokenizer=tokenizer,
            lock=lock,
            parameters=_parameters_of(model),
            aliases=_aliases_of(model),
            awaits=awaited_sender(config),
        )
        with resuming_newest_adapter(config, environment) as newest:
            if newest is not None:
                weights.load_adapter(newest.path, newest.path.name, newest.policy_version, config.max_lora_rank)
        return weights
    path = bridge_file_path(config.bridge_file, environment)
    owner = Owner.of(instance, environment)
    fingerprint = fingerprint_of(config)
    adopted, awaited_trainer = take_over(path, owner, fingerprint)
    if adopted is not None:
        before_export()
        model = _on_adopted(config.model_name, adopted.tensors, adopted.file.aliases)
        lock, manifest, aliases = adopted.lock, adopted.file.tensors, adopted.file.aliases
        logger.info("Adopted the weights of version %d from shared memory", lock.read().policy_version)
    else:
        model = load_model(config.model_name, dtype=config.dtype, device=str(device))
        aliases = _aliases_of(model)
        before_export()
        lock, manifest, shared = export(_parameters_of(model), owner)
        for name, parameter in model.named_parameters():
            parameter.data = shared[name]
    model.eval()
    file = write_bridge_file(
        path,
        owner=owner,
        model=config.model_name,
        fingerprint=fingerprint,
        lock=lock,
        manifest=manifest,
        aliases=aliases,
    )
    logger.info(WEIGHTS_EXPORTED.text, len(manifest), path)
    return ServedWeights(
        model=model,
        model_name=config.model_name,
        tokenizer=tokenizer,
        lock=lock,
        parameters=_parameters_of(model),
        aliases=aliases,
        awaits=awaited_trainer,
        _announced=(path, file, owner),
    )


def _newest_weights(config: ServerConfig, device: torch.device) -> tuple[Any, int]:
    """The newest checkpoint that a trainer handed over, with its version; else the model's own weights, version 0."""
    folder = config.handover
    handed_over = newest_checkpoint(folder, resolve_model(config.model_name)) if folder is not None else None
    if handed_over is not None:
        try:
            model = load_model(str(handed_over.path), dtype=config.dtype, device=str(device)).eval()
        except ModelError as error:
            logger.warning("%s; serving the model's own weights", error)
        else:
            logger.info("Loaded version %d from %s", handed_over.policy_version, handed_over.path)
            return model, handed_over.policy_version
    return load_model(config.model_name, dtype=config.dtype, device=str(device)).eval(), 0


def resolve_device(text: str) -> torch.device:
    """The device that a setting names; `auto` is the GPU if there is one.

    Raises:
        ConfigError: torch cannot use it.
    """
    require_device(text)
    if text == "auto":
        text = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(text)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", 0)
    return device


def _on_adopted(model_name: str, tensors: dict[str, Tensor], aliases: dict[str, str]) -> Any:
    model = load_model_on_shared(load_config(model_name), tensors, aliases)
    source = resolve_model(model_name)
    try:  # a new model has only the end tokens of its configuration; the checkpoint may name more
        model.generation_config = GenerationConfig.from_pretrained(source)
    except OSError:
        logger.info("%s has no generation_config.json", model_name)
    return model


def _parameters_of(model: Any) -> dict[str, Tensor]:
    return {name: parameter.data for name, parameter in model.named_parameters()}


def _aliases_of(model: Any) -> dict[str, str]:
    """Tied parameters: the second name → the first."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        if known != name:
            aliases[name] = known
    return aliases


def _check_same_shapes(path: Path, fresh: Mapping[str, Tensor], served: Mapping[str, Tensor]) -> None:
    for name in served.keys() ^ fresh.keys():
        where = "the checkpoint" if name in fresh else "the served model"
        raise ModelError(f"{path}: does not fit the served model: {name} is only in {where}")
    for name, tensor in served.items():
        if tensor.shape != fresh[name].shape:
            raise ModelError(
                f"{path}: does not fit the served model: {name} is {tuple(fresh[name].shape)}, "
                f"but {tuple(tensor.shape)} is served"
            )


def _synchronize(model: Any) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


def tokenizer_for_another_thread(tokenizer: Any) -> Any:
    """A copy, because fast tokenizers must not be used from two threads at once."""
    return copy.deepcopy(tokenizer)
