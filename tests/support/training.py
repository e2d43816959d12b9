"""A trainer without processes: a small random model on a bridge that hands over nothing, and made-up groups."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from grpo_engine.bridges import Bridge, BridgeModel
from grpo_engine.train.config import TrainConfig
from grpo_engine.train.loop import train
from grpo_engine.train.recording.recorder import Recorder
from grpo_engine.train.trainee import Trainee
from grpo_engine.wire.metrics import MetricsLine
from grpo_engine.wire.rollouts import ScoredGroup

VOCABULARY = 32


def small_model(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """A random Llama; `changes` are of its configuration."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **changes}))


def saving(model: PreTrainedModel, **options: Any) -> Callable[[Path, Mapping[str, torch.Tensor]], None]:
    """Writes a model without a tokenizer, as `BridgeModel.save` does."""
    return lambda folder, tensors: model.save_pretrained(folder, state_dict=dict(tensors), **options)


def attached(model: PreTrainedModel, *, is_shared: bool = True, **changes: Any) -> BridgeModel:
    """The model as a bridge hands it to a trainer."""
    return BridgeModel(
        **{"model": model, "is_shared": is_shared, "policy_version": 0, "save": saving(model), **changes}
    )


def settings(**changes: object) -> TrainConfig:
    base: dict[str, object] = {
        "model_name": "test/model",
        "batch_size": 4,
        "gradient_accumulation_steps": 2,
        "seq_len": 32,
        "lr": 1e-2,
        "optimizer": "adamw",
        "dtype": "float32",
        "device": "cpu",
        "training_steps": 6,
        "checkpoint_interval": 2,
        "checkpoint_async_mode": "disabled",  # so that what is on the disk after a step depends on no thread
    }
    return TrainConfig.model_validate({**base, **changes})


def trainee(config: TrainConfig | None = None, seed: int = 0) -> Trainee:
    return Trainee(attached(small_model(seed)), config or settings())


def made_up_groups(seed: int, *, groups: int = 2, size: int = 4, version: int = 0) -> list[ScoredGroup]:
    """Groups of different lengths with different rewards; log-probabilities near those of a random model."""
    rng = random.Random(seed)
    result = []
    for _ in range(groups):
        prompt = [rng.randrange(3, VOCABULARY) for _ in range(rng.randrange(2, 6))]
        completions = [[rng.randrange(3, VOCABULARY) for _ in range(rng.randrange(1, 8))] for _ in range(size)]
        result.append(
            scored_group(
                prompt,
                completions,
                scores=[rng.random() for _ in completions],
                logprobs=[[-3.4 + rng.random() / 5 for _ in c] for c in completions],
                policy_versions=[[0] * len(prompt) + [version] * len(c) for c in completions],
                truncated=[False] * size,
                generation_params={"temperature": 1.0, "logprobs_mode": "processed"},
                env_id=0,
            )
        )
    return result


def scored_group(
    prompt: list[int],
    completions: list[list[int]],
    *,
    scores: list[float] | None = None,
    logprobs: list[list[float]] | None = None,
    **more: Any,
) -> ScoredGroup:
    """Completions of one prompt, trained on all tokens; scores are 0, 1, … and log-probabilities -1 by default."""
    return ScoredGroup(
        tokens=[prompt + c for c in completions],
        masks=[[-100] * len(prompt) + c for c in completions],
        scores=[float(i) for i in range(len(completions))] if scores is None else scores,
        inference_logprobs=[[1.0] * len(prompt) + row for row in logprobs or [[-1.0] * len(c) for c in completions]],
        **more,
    )


class ListedSource:
    """Hands out the batches that it is given, one after the other, as `RolloutSource` does."""

    def __init__(self, batches: Sequence[list[ScoredGroup]], environments: Mapping[int, str] | None = None) -> None:
        self._batches = list(batches)
        self.environments = dict(environments or {})
        self.registered: dict[str, object] = {}
        self.lease = ""
        self.num_used = 0
        self.served: list[int] = []

    def resume_after(self, lease: str) -> None:
        self.lease = lease

    def register(self, **registration: object) -> None:
        self.registered = registration

    def next_batch(
        self,
        timeout_s: float,
        *,
        policy_version: int | None = None,
        stop: Callable[[], bool] = lambda: False,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> list[ScoredGroup] | None:
        meanwhile()
        return None if stop() or not self._batches else self._batches.pop(0)

    def time_metrics(self) -> dict[str, float]:
        return {}

    def mark_used(self) -> None:
        self.num_used += 1

    def report_served(self, lease: str, policy_version: int) -> None:
        self.served.append(policy_version)


class ListeningBridge:
    """Notes what is published, with the first weight that inference would then read."""

    def __init__(self, model: LlamaForCausalLM, *, serves: int = 0) -> None:
        self.model = model
        self.published: list[tuple[int, float]] = []
        self.repeated: list[range] = []
        self._serves = serves

    def attach(self) -> BridgeModel:
        return attached(self.model, policy_version=self._serves, repeat=self.repeated.append)

    def publish(self, version: int, write: Callable[[], None]) -> None:
        write()
        self.published.append((version, float(self.model.model.embed_tokens.weight.detach()[3, 0])))

    def poll_server(self) -> None:
        pass

    def prepare_step(self) -> None:
        pass

    def close(self) -> None:
        pass


def train_in(
    folder: Path,
    config: TrainConfig,
    source: ListedSource,
    bridge: Bridge | ListeningBridge | None = None,
    *,
    decode: Callable[[Sequence[int]], str] = str,
    stop: Callable[[], bool] = lambda: False,
    is_sure_to_fit: bool = False,
) -> int:
    """Run the training loop in this process; returns the number of steps."""
    with Recorder(folder, total_steps=config.training_steps, show_times=False) as recorder:
        return train(
            config,
            source,  # type: ignore[arg-type]
            bridge or ListeningBridge(small_model()),
            recorder,
            decode=decode,
            save_path=folder / "checkpoints",
            is_sure_to_fit=is_sure_to_fit,
            stop=stop,
        )


def metrics_lines(folder: Path) -> list[MetricsLine]:
    """The records of all steps in a run folder."""
    return [MetricsLine.model_validate_json(line) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return dict(LlamaForCausalLM.from_pretrained(folder).state_dict())
