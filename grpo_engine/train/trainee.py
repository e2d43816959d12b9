"""The model in training: the bridge's tensors, their fp32 masters, and the optimizer over the masters.

Inference may read the model's own parameters, so they change only in `write_weights`, which the bridge calls while it
holds the weight lock. Gradients, clipping and updates are applied to the masters.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_engine.bridges import BridgeModel
from grpo_engine.data.batching import Batch
from grpo_engine.errors import GrpoError
from grpo_engine.models.config import OptimizerSettings, parse_layer_indices
from grpo_engine.models.execution import compile_layers, recompute_layers, silence
from grpo_engine.models.layers import freeze_except_layers
from grpo_engine.models.loading import load_model
from grpo_engine.models.optimizers import MasterWeights, build_optimizer
from grpo_engine.train.checkpointing import checkpoints
from grpo_engine.train.config import TrainConfig
from grpo_engine.train.reference import load_reference
from grpo_engine.train.scoring import Scorer
from grpo_engine.train.unused_settings import settings_without_effect
from grpo_engine.wire.log_lines import PARAMETERS_TRAINED

log = logging.getLogger(__name__)


class TrainingDiverged(GrpoError):
    """Several steps in a row had a loss or gradient that is not finite."""


class Trainee:
    """A model in training."""

    def __init__(self, attached: BridgeModel, config: TrainConfig) -> None:
        self.config = config
        self.loss_config = config.loss_config
        for sentence in settings_without_effect(config):
            log.warning("%s", sentence)
        self.model = attached.model
        self._save_model = attached.save
        self._is_shared = attached.is_shared
        self.unmerged = attached.unmerged
        """See `BridgeModel.unmerged`."""
        self.device = next(self.model.parameters()).device
        if config.train_layer_indices is not None:
            freeze_except_layers(self.model, parse_layer_indices(config.train_layer_indices))
        self._masters = MasterWeights(
            self.model.named_parameters(),
            are_shared=attached.is_shared,
            kind=config.master_weights,
            gradient_dtype=config.gradient_dtype,
        )
        if config.gradient_dtype == "bfloat16" and not self._masters.have_bf16_gradients:
            log.warning(
                "gradient_dtype bfloat16 has no effect: no trained parameter is bfloat16 (adapters are float32), and "
                "other gradients are float32; leave it out"
            )
        if config.master_weights == "stochastic_rounding" and not self._masters.are_rounded:
            log.warning(
                "master_weights stochastic_rounding has no effect: no trained parameter is bfloat16 (adapters are "
                "float32), and other types need no masters; leave it out"
            )
        self._optimizer = build_optimizer(
            self._masters.parameters,
            OptimizerSettings(
                name=config.optimizer,
                lr=config.lr,
                weight_decay=config.weight_decay,
                adafactor_scale_parameter=config.adafactor_scale_parameter,
                adafactor_relative_step=config.adafactor_relative_step,
            ),
        )
        self._scorer = Scorer(self.model)
        if config.gradient_checkpointing:
            recompute_layers(self.model, keep_attention=config.keep_attention)
        if config.compile_layers:
            compile_layers(self._scorer.causal_lm)
        self.reference = load_reference(config, self.model)
        self._bad_steps = 0
        silence(self.model)
        self.model.train()  # layers are computed again in this mode alone
        num_trained = sum(master.numel() for master in self._masters.parameters)
        log.info(PARAMETERS_TRAINED.text, num_trained, sum(p.numel() for p in self.model.parameters()))

    @property
    def shares_prompts(self) -> bool:
        """Whether completions of one prompt are best kept together in a micro-batch."""
        return self._scorer.shares_prompts

    @property
    def vocab_size(self) -> int:
        """Rows of the input embedding."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer over the masters."""
        return self._optimizer

    def logprobs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies (B, T) of the labels, 0 where not trained, with their graph."""
        return self._scorer.logprobs(batch)

    def update(self, rate: float, *, is_finite: bool) -> float:
        """Clip the gradients, step the masters at this learning rate, and clear; returns the norm before clipping.

        The weights stay as they are when the loss (`is_finite`) or the norm is not finite.

        Raises:
            TrainingDiverged: `max_bad_steps` updates in a row were not finite.
        """
        norm = float(self._masters.gradient_norm())
        is_finite = is_finite and norm < float("inf")  # false for NaN too
        if is_finite:
            if not self.config.chooses_own_rate:
                for group in self._optimizer.param_groups:
                    group["lr"] = rate
            scale = min(1.0, self.config.max_grad_norm / (norm + 1e-6))  # 1e-6 as in torch's clipping
            self._masters.step(self._optimizer, gradient_scale=scale)
        self._optimizer.zero_grad()
        self._bad_steps = 0 if is_finite else self._bad_steps + 1
        if self._bad_steps >= self.config.max_bad_steps:
            raise TrainingDiverged(
                f"{self._bad_steps} steps in a row had a loss or gradient that is not finite; lower --lr "
                f"(now {self.config.lr:g}), raise --warmup-steps, or look at the rewards in rollouts.jsonl"
            )
        return norm

    def drop_gradients(self) -> None:
        """Clear the accumulated gradients without an update."""
        self._optimizer.zero_grad()

    def write_weights(self) -> None:
        """Copy the masters into the parameters that inference reads; called under the weight lock."""
        self._masters.publish()

    @contextmanager
    def private_weights(self) -> Iterator[None]:
        """Within, `write_weights` writes to private memory, for several updates between two weight updates.

        Parameters that inference reads are replaced by copies; afterwards they have their earlier values.
        """
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        seen = [(parameter, parameter.data) for parameter in trained if self._is_shared]
        for parameter, values in seen:
            parameter.data = values.clone()
        try:
            with self.unmerged():
                yield
        finally:
            for parameter, values in seen:
                parameter.data = values

    def save(self, save_path: Path, *, step: int, policy_version: int, lease: str, settings: Mapping[str, Any]) -> Path:
        """Write a checkpoint; `lease` and `settings` as its marker has them.

        Raises:
            CheckpointError: the disk is full or a write fails.
        """
        marker = checkpoints.CheckpointMarker(
            step=step,
            policy_version=policy_version,
            model_name=self.config.model_name,
            bridge=self.config.bridge.mode,
            lease=lease,
            settings=dict(settings),
        )
        state = checkpoints.TrainerState(
            marker=marker,
            masters=self._masters.state_dict(),
            optimizer=self._optimizer.state_dict(),
            random=checkpoints.random_state(self.device),
            bad_steps=self._bad_steps,
        )
        return checkpoints.save(save_path, state, self._save_model, keep=self.config.keep_checkpoints)

    def restore(self, state: checkpoints.TrainerState) -> checkpoints.CheckpointMarker:
        """Load the state of a checkpoint; the model's parameters change with the next `write_weights`."""
        self._masters.load_state_dict(state.masters)
        groups = self._optimizer.state_dict()["param_groups"]  # settings are of this run, only the state is restored
        self._optimizer.load_state_dict({**state.optimizer, "param_groups": groups})
        checkpoints.restore_random_state(state.random, self.device)
        self._bad_steps = state.bad_steps
        return state.marker

    def load_untrained(self) -> None:
        """Load the weights of the untrained model into the masters, rounded as inference has them at first."""
        untrained = dict(load_model(self.config.model_name, dtype="float32", device="cpu").named_parameters())
        served = {name: untrained[name].detach().to(live.dtype) for name, live in self.model.named_parameters()}
        self._masters.load_state_dict({name: served[name] for name in self._masters.state_dict()})

    def memory_metrics(self) -> dict[str, float]:
        """Peak GPU memory of this process in GB; nothing on a CPU."""
        if self.device.type != "cuda":
            return {}
        return {"train/gpu_memory_gb": torch.cuda.max_memory_allocated(self.device) / 1e9}
