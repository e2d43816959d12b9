"""Settings by the names that other trainers give them: which setting here each is, of which command.

The names are those of TorchRL's GRPO and torchtune's recipes (`optimizer.lr`, dotted, as Hydra takes them) and of files
with `vllm_config` and `fsdp_config`, as those of co-located trainers. Names without a dot, as TRL's, are answered with
ours by `did_you_mean_setting`. Pure, and torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_engine.errors import ConfigError

BARE_OVERRIDE = re.compile(r"[A-Za-z_]\w*(\.[\w-]+)*=")
"""How a word begins that sets a setting without a flag, as `optimizer.lr=2e-5`."""
_DOTTED_OVERRIDE = re.compile(r"[A-Za-z_]\w*(\.[\w-]+)+=")
_SECTIONS = frozenset(
    [
        "vllm_config",
        "fsdp_config",
        "optimizer",
        "lr_scheduler",
        "loss",
        "model",
        "policy",
        "train",
        "env",
        "inference_model",
        "train_model",
        "ref_model",
    ]
)


COLOCATE = "colocate"
"""In place of the command `train`, for a trainer that samples itself."""


@dataclass(frozen=True, slots=True)
class Named:
    """What a setting of another trainer is here."""

    train: str = ""
    """Its name among the settings of the trainer; empty: not a setting of it. The others likewise."""
    server: str = ""
    env: str = ""
    colocate: str = ""
    """Among those of a trainer that samples itself, where it is another than `train`."""
    value: Callable[[Any], Mapping[str, Any] | Any] = field(default=lambda value: value)
    """The value here; a mapping is of several settings."""
    profile: tuple[str, str] = ("", "")
    """In a profile: the kind of service and its setting, where that is another one than the command's."""
    note: str = ""
    """Why there is none, and what to do instead; or what is different."""

    def of(self, command: str) -> str:
        """Its name among the settings of a command of grpo-engine; empty where it is none of them."""
        own = {"train": self.train, "check": self.train, "server": self.server, "env": self.env}
        own[COLOCATE] = self.colocate or self.train
        return own.get(command, "")

    @property
    def commands(self) -> list[str]:
        """The commands that have it."""
        return [command for command in ("train", "server", "env") if self.of(command)]


def _of_one_step(num_sequences: Any) -> Mapping[str, int]:
    """`batch_size` of a whole step, as micro-batches of two."""
    count = int(num_sequences)
    size = 2 - count % 2
    return {"batch_size": size, "gradient_accumulation_steps": count // size}


def _lower(name: Any) -> Any:
    return name.lower() if isinstance(name, str) else name


_REFERENCE = (
    "one `grpo-engine reference` on each device has the reference model, and reference_urls of the trainer names them: "
    "give it to grpo-tui with a profile that has a service of kind reference, or leave it out: the reference model is "
    "then on the ranks of the trainer"
)
_GPUS = "choose GPUs by services.%s.gpus of a profile, or by CUDA_VISIBLE_DEVICES"

DOTTED: Mapping[str, Named] = {
    "optimizer.lr": Named(train="lr"),
    "optimizer.weight_decay": Named(train="weight_decay"),
    "lr_scheduler.num_warmup_steps": Named(train="warmup_steps"),
    "loss.kl_coeff": Named(train="kl_coef"),
    "loss.epsilon": Named(train="clip_eps"),
    "model.name": Named(train="model_name", server="model_name", env="model_name"),
    "policy.kl_coef": Named(train="kl_coef"),
    "env.dataset": Named(env="task"),
    "env.num_envs": Named(env="max_workers"),
    "train.total_dialog_turns": Named(train="total_dialog_turns"),
    "checkpoint.async_mode": Named(train="checkpoint_async_mode"),
    "train.checkpoint_frequency": Named(train="checkpoint_interval"),
    "train.optim_batch_size": Named(train="batch_size", note="sequences that are computed at once"),
    "train.gradient_accumulation_steps": Named(train="gradient_accumulation_steps"),
    "inference_model.gpu_memory_utilization": Named(train="gpu_memory_utilization", server="gpu_memory_utilization"),
    "inference_model.num_devices": Named(server="tensor_parallel_size", profile=("inference", "num_devices")),
    "inference_model.devices": Named(profile=("inference", "gpus"), note=_GPUS % "vllm"),
    "train_model.num_devices": Named(train="processes", profile=("trainer", "num_devices")),
    "train_model.devices": Named(profile=("trainer", "gpus"), note=_GPUS % "trainer"),
    "ref_model.num_devices": Named(profile=("reference", "num_devices"), note=_REFERENCE),
    "ref_model.devices": Named(profile=("reference", "gpus"), note=_REFERENCE),
    "vllm_config.tensor_parallel_size": Named(server="tensor_parallel_size"),
    "vllm_config.max_num_seqs": Named(server="max_batch_size", colocate="inference.max_num_seqs"),
    "vllm_config.max_model_len": Named(server="max_model_len", colocate="seq_len"),
    "vllm_config.gpu_memory_utilization": Named(train="gpu_memory_utilization", server="gpu_memory_utilization"),
    "vllm_config.enforce_eager": Named(server="enforce_eager", colocate="inference.enforce_eager"),
    "vllm_config.disable_log_stats": Named(note="the server logs no statistics: leave it out"),
    "fsdp_config.sharding_strategy": Named(train="sharding_strategy", value=_lower),
    "fsdp_config.cpu_offload": Named(train="cpu_offload"),
    "fsdp_config.mixed_precision": Named(
        train="mixed_precision", value=lambda on: on if isinstance(on, str) else "bf16" if on else "fp32"
    ),
}
"""By dotted name. None is a setting here of the same name, but for `model.name` of a profile."""
BESIDE_SECTIONS: Mapping[str, Named] = {
    "learning_rate": Named(train="lr"),
    "batch_size": Named(train="batch_size", value=_of_one_step, note="sequences of a step"),
    "max_iterations": Named(train="training_steps"),
    "sync_frequency": Named(
        train="bridge.every_steps",
        colocate="bridge.sync_frequency",
        note="for modes that update inference every few steps",
    ),
}
"""At the top of a file that has `vllm_config` or `fsdp_config`."""
FLAGS: Mapping[str, str] = {
    "--multirun": "several values of a setting are several runs: `grpo-tui sweep --profile NAME --multirun KEY=A,B`",
    "--config-name": "a configuration is a profile, as `grpo-tui --profile gsm8k-async` or `ifeval-async`, or a file "
    "with settings of this command, by --config FILE",
}
"""Flags of other trainers (Hydra's) that no command of grpo-engine has, and what to type instead."""


def bare_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words without those that are dotted overrides, and these; a word after a flag is its value.

    >>> bare_overrides(["--lr", "1", "optimizer.weight_decay=0.01"])
    (['--lr', '1'], ['optimizer.weight_decay=0.01'])
    """
    rest: list[str] = []
    overrides: list[str] = []
    for word in words:
        is_value = bool(rest) and rest[-1].startswith("--") and "=" not in rest[-1]
        (overrides if _DOTTED_OVERRIDE.match(word) and not is_value else rest).append(word)
    return rest, overrides


def own_override(override: str, command: str) -> tuple[str, str]:
    """The override of a command's own setting that an override by another name means, and what to tell of it.

    One that is by no other trainer's name is returned as it is, with nothing to tell.

    Raises:
        ConfigError: it is no setting of this command.
    """
    name, _, text = override.partition("=")
    named = DOTTED.get(name.strip())
    if named is None:
        return override, ""
    own = named.of(command)
    if not own:
        raise ConfigError(f"{override}: {_elsewhere(named)}")
    value = named.value(text)
    return f"{own}={value}", f"{override}: {own}={value} here{_note(named)}"


def _elsewhere(named: Named) -> str:
    places = [f"{named.of(command)} of grpo-engine {command}" for command in named.commands]
    return f"{' and '.join(places)}: give it there" if places else named.note


def _note(named: Named) -> str:
    return f" ({named.note})" if named.note else ""


def own_table(table: Mapping[str, Any], command: str) -> tuple[dict[str, Any], list[str]]:
    """A file's settings by the names of a command here, and what to tell of each that has another name there.

    Settings of other commands are left out. A file that has no section of another trainer is returned as it is.
    """
    sections = {key: value for key, value in table.items() if key in _SECTIONS and isinstance(value, Mapping)}
    if not any(f"{section}.{key}" in DOTTED for section, inner in sections.items() for key in inner):
        return dict(table), []
    is_of_sections = not {"vllm_config", "fsdp_config"}.isdisjoint(sections)
    own: dict[str, Any] = {}
    told: list[str] = []
    for name, value, named in _settings(table, sections, is_of_sections):
        if named is None and name in sections and command != "env":  # whose own files have such a table, `env`
            own |= {f"{name}.{key}": each for key, each in value.items()}
        elif named is None:
            own[name] = value
        elif here := named.of(command):
            converted = named.value(value)
            inner = converted if isinstance(converted, Mapping) else {here: converted}
            for dotted, each in inner.items():
                _put(own, dotted, each)
            values = ", ".join(f"{dotted} = {each}" for dotted, each in inner.items())
            told.append(f"{name}: {values} here{_note(named)}")
        else:
            told.append(f"{name}: {_elsewhere(named)}" if not named.commands else f"{name}: {_where(named)}")
    return own, told


def _where(named: Named) -> str:
    return "of " + " and ".join(f"grpo-engine {command}" for command in named.commands)


def _settings(
    table: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any]], is_of_sections: bool
) -> Iterator[tuple[str, Any, Named | None]]:
    """Each setting of a file by its dotted name; what is unknown stays in its section, which is refused by name."""
    for key, value in table.items():
        if key not in sections:
            yield key, value, BESIDE_SECTIONS.get(key) if is_of_sections else None
            continue
        unknown = {}
        for inner, each in sections[key].items():
            named = DOTTED.get(f"{key}.{inner}")
            if named is None:
                unknown[inner] = each
            else:
                yield f"{key}.{inner}", each, named
        if unknown:
            yield key, unknown, None


def _put(table: dict[str, Any], dotted: str, value: Any) -> None:
    *path, last = dotted.split(".")
    for key in path:
        table = table.setdefault(key, {})
    table[last] = value
