"""Settings of `grpo-engine train`: those of the trainer, and of its own sampling with colocate. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from grpo_engine.bridges import IN_PROCESS
from grpo_engine.config import Config
from grpo_engine.environments.config import EnvironmentConfig, SamplingConfig
from grpo_engine.flags import WithoutPrefix
from grpo_engine.installed import is_on_cpu
from grpo_engine.server.config import ServerConfig, table_of
from grpo_engine.train.config import TrainConfig

ALL_AT_ONCE = 2**20
"""Prompts of a round: all that there are."""


class OwnEnvironment(SamplingConfig):
    """What a trainer samples that has no environment beside it."""

    state_file: Path | None = None
    """JSON file that keeps the place in the items, the curriculum and the solve rates over a restart; unset: beside the
    checkpoints."""


class OwnInference(Config):
    """The inference engine in each rank of a trainer; its share of the GPU is `gpu_memory_utilization`."""

    engine: Literal["torch", "vllm"] | None = None
    """What computes; unset: vLLM on a GPU, plain torch on a CPU."""
    max_num_seqs: int = Field(256, ge=1)
    """Sequences that are decoded together."""
    enforce_eager: bool = False
    """vLLM without CUDA graphs: starts sooner, generates slower."""
    cuda_graph_sizes: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(None, min_length=1)
    """Batch sizes for which vLLM captures CUDA graphs; default: vLLM's own."""
    vllm: Annotated[dict[str, Any], BeforeValidator(table_of)] = Field(default_factory=dict)
    """Further arguments of vLLM's `LLM`: a table with underscores (`{ block_size = 32 }`), on the command line as
    JSON."""


class TrainerConfig(TrainConfig):
    """A trainer, with what it needs to sample itself."""

    environment: Annotated[OwnEnvironment | None, WithoutPrefix()] = None
    """What is sampled, where the trainer does it (bridge mode colocate)."""
    inference: Annotated[OwnInference | None, WithoutPrefix()] = None
    """How, where the trainer does it; unset: as it is by default."""

    @property
    def sampled_task(self) -> str | None:
        """The task that it samples, with its settings: `python module='rewards' functions=['score']`."""
        if self.environment is None:
            return None
        task = self.environment.task
        settings = task.model_dump(mode="json", exclude_defaults=True)
        name = settings.pop("name", task.name)
        return " ".join([name, *(f"{key}={value!r}" for key, value in settings.items())])

    @property
    def own_engine(self) -> Literal["torch", "vllm"] | None:
        """What samples in the trainer; None where nothing does."""
        if not self.bridge.samples_in_process:
            return None
        chosen = None if self.inference is None else self.inference.engine
        return chosen or ("torch" if is_on_cpu(self.device) else "vllm")

    @property
    def own_environment(self) -> EnvironmentConfig:
        """The settings of its environment, with what it shares with the trainer."""
        assert self.environment is not None
        own = {name: getattr(self.environment, name) for name in OwnEnvironment.model_fields}
        return EnvironmentConfig(
            **own,
            model_name=self.model_name,
            seed=self.seed,
            seed_completions=True,
            max_token_length=self.seq_len,
            max_workers=ALL_AT_ONCE,
        )

    @property
    def own_server(self) -> ServerConfig:
        """The settings of its inference engine, with what it shares with the trainer."""
        own = self.inference or OwnInference()
        return ServerConfig(
            model_name=self.model_name,
            engine=self.own_engine or "torch",
            dtype=self.dtype,
            device=self.device,
            max_model_len=self.seq_len,
            gpu_memory_utilization=self.gpu_memory_utilization,
            logprobs_mode="processed",
            max_batch_size=own.max_num_seqs,
            enforce_eager=own.enforce_eager,
            cuda_graph_sizes=own.cuda_graph_sizes,
            receives_weights=True,
            seed=self.seed,
            vllm=own.vllm,
        )

    @field_validator("environment", "inference", mode="before")
    @classmethod
    def _has_an_effect(cls, table: Any, info: ValidationInfo) -> Any:
        """Before its own fields are read: `--group-size 8` alone is not told that a task is missing."""
        bridge = info.data.get("bridge")
        if table is None or bridge is None or bridge.samples_in_process:
            return table
        given = ", ".join(sorted(table if isinstance(table, Mapping) else table.model_fields_set)) or info.field_name
        whose = "grpo-engine env (services.env of a profile)"
        if info.field_name == "inference":
            whose = "grpo-engine server (services.vllm of a profile)"
        raise ValueError(
            f"({given}) has no effect with weight_bridge_mode {bridge.mode}: give it to {whose}, or choose "
            f"{' or '.join(IN_PROCESS)}"
        )

    @model_validator(mode="after")
    def _samples_itself_or_not(self) -> Self:
        if not self.bridge.samples_in_process:
            return self
        if self.environment is None:
            raise ValueError(
                f"weight_bridge_mode {self.bridge.mode} samples in the trainer, and no task is set: set "
                "environment.task, or --task"
            )
        size, num_seats = self.environment.group_size, self.environment.num_groups_per_item
        if self.sequences_per_batch % (size * num_seats):
            seats = f" of {num_seats} seats" if num_seats > 1 else ""
            raise ValueError(
                f"batch_size {self.batch_size} × gradient_accumulation_steps {self.gradient_accumulation_steps} = "
                f"{self.sequences_per_batch} sequences a step, not a multiple of group_size {size}{seats}: change one "
                "of them"
            )
        if self.environment.max_tokens >= self.seq_len:
            raise ValueError(
                f"environment.max_tokens {self.environment.max_tokens} leaves no room for a prompt within seq_len "
                f"{self.seq_len}: lower it, or raise seq_len (model.max_model_len of a profile)"
            )
        return self
