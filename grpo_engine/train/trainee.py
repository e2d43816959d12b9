"""The model in training: the bridge's tensors, their fp32 masters, and the optimizer over the masters.

Inference may read the model's own parameters, so they change only in `write_weights`, which the bridge calls while it
holds the weight lock. Gradients, clipping and updates are applied to the masters.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_engine.bridges import BridgeModel
from grpo_engine.bridges.transport.saving import own_tensors
from grpo_engine.data.batching import Batch
from grpo_engine.errors import CheckpointError, GrpoError
from grpo_engine.models.config import OptimizerSettings, parse_layer_indices
from grpo_engine.models.execution import compile_layers, recompute_layers, silence
from grpo_engine.models.layers import freeze_except_layers
from grpo_engine.models.loading import load_model
from grpo_engine.models.optimizer_state import fault_of_state
from grpo_engine.models.optimizers import MasterWeights, build_optimizer
from grpo_engine.models.places import add_up_copies, equalize_copies, is_split, whole_shape
from grpo_engine.models.sharded import begin_micro_batch, compute_device, is_sharded, part_of, part_of_state
from grpo_engine.ranks.group import RankGroup
from grpo_engine.train.checkpointing import checkpoints
from grpo_engine.train.checkpointing.sharded_state import is_sharded_state, read_sharded, stored_parts
from grpo_engine.train.checkpointing.staged_state import BackgroundWriter, StagedState
from grpo_engine.train.checkpointing.staging import StagingMemory, copy_bytes
from grpo_engine.train.config import TrainConfig
from grpo_engine.train.reference import load_reference
from grpo_engine.train.scoring import Scorer
from grpo_engine.train.unused_settings import settings_without_effect
from grpo_engine.train.utilization import ModelFlops, peak_flops
from grpo_engine.wire.checkpoints import CheckpointMarker
from grpo_engine.wire.log_lines import PARAMETERS_TRAINED

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WriteState:
    """Work of all ranks: `Trainee.write_state` into a folder."""

    folder: Path

    def __str__(self) -> str:
        return f"writing {self.folder.name}"


@dataclass(frozen=True, slots=True)
class CopyState:
    """Work of all ranks: `Trainee.begin_write` of a copy of the state into a folder."""

    folder: Path

    def __str__(self) -> str:
        return f"copying the state for {self.folder.name}"


@dataclass(frozen=True, slots=True)
class RestoreState:
    """Work of all ranks: `Trainee.restore` from a checkpoint."""

    folder: Path

    def __str__(self) -> str:
        return f"restoring {self.folder.name}"


class LoadUntrained:
    """Work of all ranks: `Trainee.load_untrained`."""

    def __str__(self) -> str:
        return "loading the untrained weights"


class TrainingDiverged(GrpoError):
    """Several steps in a row had a loss or gradient that is not finite."""


class Trainee:
    """A model in training."""

    def __init__(self, attached: BridgeModel, config: TrainConfig, ranks: RankGroup | None = None) -> None:
        """Prepare a model that a bridge has loaded; on all ranks at once.

        Args:
            ranks: those that train it together; None: this process alone.
        """
        self.config = config
        self.ranks = ranks or RankGroup()
        self.loss_config = config.loss_config
        for sentence in settings_without_effect(config):
            log.warning("%s", sentence)
        self.model = attached.model
        self._prepare_save, self._save_model = attached.prepare_save, attached.save
        self._tensors_to_save = attached.tensors or partial(own_tensors, attached.model)
        self._staging = StagingMemory(is_pinned=config.checkpoint_async_mode != "async")
        self._writer = BackgroundWriter()
        self._is_shared = attached.is_shared
        self.asleep_bytes = attached.asleep_bytes
        """See `BridgeModel.asleep_bytes`."""
        self.unmerged = attached.unmerged
        """See `BridgeModel.unmerged`."""
        self.device = compute_device(self.model)
        self._is_split = is_split(self.model)
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
        self._scaler = torch.amp.GradScaler(
            self.device.type, enabled=any(each.dtype is torch.float16 for each in self.model.parameters())
        )
        self._scorer = Scorer(self.model, self.ranks)
        self._model_flops = ModelFlops(self.model)
        self._num_flops = 0.0
        if config.gradient_checkpointing:
            recompute_layers(self.model, keep_attention=config.keep_attention)
        if config.compile_layers:
            compile_layers(self._scorer.causal_lm)
        self.reference = load_reference(config, self.model)
        self._bad_steps = 0
        self.has_overflowed = False
        """Whether the last update was left out because scaled gradients were beyond float16; the scale is lower now."""
        silence(self.model)
        self.model.train()  # layers are computed again in this mode alone
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)  # the metric is for steps
        num_trained = sum(math.prod(whole_shape(parameter)) for parameter in self._parameters().values())
        log.info(PARAMETERS_TRAINED.text, num_trained, sum(math.prod(whole_shape(p)) for p in self.model.parameters()))

    @property
    def shares_prompts(self) -> bool:
        """Whether completions of one prompt are best kept together in a micro-batch."""
        return self._scorer.shares_prompts

    @property
    def num_copies(self) -> int:
        """Ranks that compute each row of a batch."""
        return self.ranks.size if self.config.identical_data or self._is_split else 1

    @property
    def num_shares(self) -> int:
        """Parts into which the ranks divide a batch."""
        return self.ranks.size // self.num_copies

    @property
    def num_summed(self) -> int:
        """Those of them whose gradients are added up: all, but of a split model each has the gradient of its part."""
        return 1 if self._is_split else self.num_copies

    def agreed(self, values: Tensor) -> Tensor:
        """Values that every rank has computed; of a split model those of rank 0, since losses must be the same."""
        if self._is_split:
            self.ranks.copy_from_leader([values])
        return values

    @property
    def vocab_size(self) -> int:
        """Rows of the input embedding."""
        return whole_shape(self.model.get_input_embeddings().weight)[0]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer over the masters."""
        return self._optimizer

    def logprobs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies (B, T) of the labels, 0 where not trained, with their graph."""
        before, lengths = self._scorer.num_positions, batch.lengths.double()
        scores = self._scorer.logprobs(batch)
        self._num_flops += self._model_flops.of(
            positions=self._scorer.num_positions - before,
            labels=int(batch.mask.sum()),
            mean_length=float(lengths.square().sum() / lengths.sum()),
        )
        return scores

    def begin_micro_batch(self, *, is_last: bool) -> None:
        """Before the forward pass of each: what ranks do once a step, they do after the last one."""
        if is_sharded(self._scorer.causal_lm):
            kept = self.config.keeps_gathered
            begin_micro_batch(self._scorer.causal_lm, is_last=is_last, keeps_gathered=kept)

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss to go backward from: scaled for a float16 model, so that small gradients are not rounded to 0."""
        return self._scaler.scale(loss)

    def update(self, rate: float, *, is_finite: bool) -> float:
        """Clip the gradients, step the masters at this learning rate, and clear; returns the norm before clipping.

        The weights stay as they are when the loss (`is_finite`) or the norm is not finite.

        Raises:
            TrainingDiverged: `max_bad_steps` updates in a row were not finite.
        """
        if self._is_split:
            add_up_copies(self._masters.placed_gradients, self.ranks)
        elif not self._masters.are_parts:
            self.ranks.sum_each(self._masters.gradients)  # those of shards are summed as they are computed
        own = self._masters.gradient_norm()
        over_ranks = self.ranks.norm(own) if self._masters.are_parts else own
        loss_scale = self._scaler.get_scale()
        with self.ranks.position.waiting("reading the gradient norm"):
            norm = float(over_ranks) / loss_scale
        has_norm = norm < float("inf")  # false for NaN too
        if self._scaler.is_enabled():
            if not has_norm:  # on any rank: all lower their scale
                torch._foreach_mul_(self._masters.gradients, float("nan"))
            self._scaler.unscale_(self._optimizer)
            self._scaler.update()
        self.has_overflowed = is_finite and not has_norm and loss_scale > 1
        is_finite = is_finite and has_norm
        if is_finite:
            if not self.config.chooses_own_rate:
                for group in self._optimizer.param_groups:
                    group["lr"] = rate
            scale = min(1.0, self.config.max_grad_norm / (norm + 1e-6))  # 1e-6 as in torch's clipping
            self._masters.step(self._optimizer, gradient_scale=scale)
            equalize_copies(self._masters.placed_values, self.ranks)
        self._optimizer.zero_grad()
        if not self.has_overflowed:
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
        marker = self._marker(step, policy_version, lease, settings)
        return checkpoints.save(save_path, marker, self.write_state, keep=self.config.keep_checkpoints)

    def begin_save(
        self, save_path: Path, *, step: int, policy_version: int, lease: str, settings: Mapping[str, Any]
    ) -> Future[float]:
        """Copy the state, and write it as `save` does in a thread; on rank 0, when nothing else is being written.

        The result is how many seconds the thread took, or its error as of `save`.
        """
        marker = self._marker(step, policy_version, lease, settings)
        folder = checkpoints.unfinished_folder(save_path, step)
        self._prepare_save()
        with self.ranks.together(CopyState(folder)):
            staged, ranks = self._staged(self._staging), self.ranks.in_background()
        has_folder = False

        def write(folder: Path) -> None:
            nonlocal has_folder
            has_folder = True
            staged.write(folder, ranks)

        def save() -> None:
            try:
                checkpoints.save(save_path, marker, write, keep=self.config.keep_checkpoints)
            finally:
                if not has_folder:
                    staged.abandon(ranks)

        return self._writer.start(save, device=self.device)

    def begin_write(self, folder: Path) -> None:
        """Take part in `begin_save`, on a rank other than 0."""
        self.finish_writing()
        staged, ranks = self._staged(self._staging), self.ranks.in_background()

        def write() -> None:
            with suppress(OSError):  # rank 0 has an error too, and logs it
                staged.write(folder, ranks)

        self._writer.start(write, device=self.device)

    def finish_writing(self) -> None:
        """Wait for the thread of `begin_write`; raises what it raised."""
        self._writer.wait()

    def num_copied_bytes(self) -> int:
        """What the copies of `begin_save` take, on all ranks of a machine; at least, where the model is gathered."""
        state: dict[str, Any] = {"masters": self._masters.state_dict(), "optimizer": self._optimizer.state_dict()}
        if not self._masters.are_parts:
            return copy_bytes({**state, "model": self._tensors_to_save()})
        whole: int = sum(math.prod(whole_shape(each)) * each.element_size() for each in self.model.parameters())
        return whole + copy_bytes(state) * math.ceil(self.ranks.size / self.config.nodes)

    def write_state(self, folder: Path) -> None:
        """Write the model and all that `restore` needs into an empty folder.

        Raises:
            OSError, SafetensorError: a rank could not write; on all ranks.
        """
        if self.ranks.leads:
            self._prepare_save()
        else:
            self.finish_writing()
        with self.ranks.together(WriteState(folder)):
            self._staged().write(folder, self.ranks)

    def _marker(self, step: int, policy_version: int, lease: str, settings: Mapping[str, Any]) -> CheckpointMarker:
        return CheckpointMarker(
            step=step,
            policy_version=policy_version,
            model_name=self.config.model_name,
            bridge=self.config.bridge.mode,
            lease=lease,
            settings=dict(settings),
        )

    def _staged(self, memory: StagingMemory | None = None) -> StagedState:
        """The state as it is now, on all ranks; copied into memory that outlasts the next step, if given."""
        self.ranks.position.at("the model")
        model = self._tensors_to_save() if self._masters.are_parts or self.ranks.leads else {}
        masters, optimizer = self._masters.state_dict(), self._optimizer.state_dict()
        are_parts, parts = self._masters.are_parts, None
        if memory is not None:
            own, masters, optimizer = memory.copy(({} if are_parts else model, masters, optimizer))
            model = model if are_parts else own  # gathered: in main memory already
        if are_parts:
            by_name = {name: optimizer["state"].get(number, {}) for number, name in enumerate(self._stepped_names())}
            parts = stored_parts(self._parameters(), masters, by_name, self.ranks.rank)
            masters, optimizer = {}, {}
        return StagedState(
            model=model,
            save_model=self._save_model,
            parts=parts,
            files={
                "masters": masters,
                "optimizer": optimizer,
                "random": self.ranks.gather(checkpoints.random_state(self.device)),
                "bad_steps": self._bad_steps,
                "loss_scale": self._scaler.state_dict(),
            },
            config=self.config,
        )

    def restore(self, state: checkpoints.TrainerState) -> CheckpointMarker:
        """Load the state of a checkpoint; the model's parameters change with the next `write_weights`.

        It may be of another number of ranks.

        Raises:
            CheckpointError: the optimizer lacks an entry, or it has another shape. Damaged values raise many classes.
        """
        with self.ranks.together(RestoreState(state.folder)):
            parameters, own = self._parameters(), self._masters.state_dict()
            if is_sharded_state(state.folder):
                masters, by_name = read_sharded(state.folder, parameters, own, self.ranks)
                saved = {number: by_name[name] for number, name in enumerate(self._stepped_names()) if by_name[name]}
            else:
                masters = {name: part_of(whole, parameters[name]) for name, whole in state.masters.items()}
                saved = {
                    number: {kind: part_of_state(value, parameters[name]) for kind, value in values.items()}
                    for number, values in state.optimizer["state"].items()
                    for name in [self._stepped_names()[number]]
                }
            for number, (name, master) in enumerate(self._stepped()):
                if (fault := fault_of_state(self._optimizer, master, saved.get(number, {}))) is not None:
                    raise CheckpointError(
                        f"{state.folder}: the optimizer's state of {name}: {fault}; "
                        f"remove {state.folder} to resume from the previous checkpoint"
                    )
            self._masters.load_state_dict(masters)
            groups = self._optimizer.state_dict()["param_groups"]  # settings are of this run, the state is restored
            self._optimizer.load_state_dict({"state": saved, "param_groups": groups})
            if self.ranks.rank < len(state.random):
                checkpoints.restore_random_state(state.random[self.ranks.rank], self.device)
            self._bad_steps = state.bad_steps
            if state.loss_scale:
                self._scaler.load_state_dict(state.loss_scale)
        return state.marker

    def _parameters(self) -> Mapping[str, Tensor]:
        """The trained parameters by name; sharded ones as such, also while their layer is gathered."""
        return self._masters.live_parameters

    def _stepped_names(self) -> list[str]:
        return [name for name, _ in self._stepped()]

    def _stepped(self) -> list[tuple[str, Tensor]]:
        """The parameters in the optimizer's order, by which it numbers its state, with their names."""
        names = {id(master): name for name, master in self._masters.named_parameters()}
        return [(names[id(master)], master) for group in self._optimizer.param_groups for master in group["params"]]

    def load_untrained(self) -> None:
        """Load the weights of the untrained model into the masters, rounded as inference has them at first."""
        with self.ranks.together(LoadUntrained()):
            untrained = dict(load_model(self.config.model_name, dtype="float32", device="cpu").named_parameters())
            served = {
                name: part_of(untrained[name].detach(), live).to(live.dtype)
                for name, live in self._parameters().items()
            }
            self._masters.load_state_dict(served)

    def scale_metrics(self) -> dict[str, float]:
        """The scale of the loss of a float16 model; nothing of another."""
        return {"train/loss_scale": self._scaler.get_scale()} if self._scaler.is_enabled() else {}

    def utilization(self, step_s: float) -> dict[str, float]:
        """`train/mfu` of this rank: what its passes since the last call reached of the GPU's peak, if known."""
        num_flops, self._num_flops = self._num_flops, 0.0
        peak = peak_flops(self.device, next(self.model.parameters()).dtype)
        return {} if peak is None else {"train/mfu": num_flops / step_s / peak}

    def memory_metrics(self) -> dict[str, float]:
        """Peak GPU memory of this process in GB; nothing on a CPU."""
        return {} if self.device.type != "cuda" else {"train/gpu_memory_gb": self.peak_bytes() / 1e9}

    def peak_bytes(self) -> int:
        """Most memory of the GPU that tensors here had in steps or the rehearsal, without an engine that slept."""
        return torch.cuda.max_memory_allocated(self.device) - self.asleep_bytes()
