"""The main memory that the copy of a checkpoint takes, from the model's shape and the settings alone. Torch-free."""

from __future__ import annotations

from grpo_engine.train.config import TrainConfig
from grpo_engine.train.memory.plan import BF16, FP32, ModelShape, state_bytes, trained_parameters


def checkpoint_copy_bytes(model: ModelShape, config: TrainConfig) -> int:
    """On a machine, of all its ranks: the model as it is saved, masters that are not its own values, and the state of
    the optimizer; 0 where nothing is copied."""
    if config.checkpoint_async_mode == "disabled" or not config.save_checkpoints:
        return 0
    trained = list(trained_parameters(model, config))
    saved = trained if config.bridge.trains_adapter else model.parameters
    masters = 0
    for parameter in trained:
        if parameter.bytes_each == BF16 and config.master_weights == "float32":
            masters += FP32 * parameter.numel
        elif config.bridge.shares_memory and not config.bridge.trains_adapter:
            masters += parameter.num_bytes
    state = sum(state_bytes(parameter.shape, config) for parameter in trained)
    of_ranks = masters + state
    if config.num_ranks > 1:  # the model is gathered, so the shards that are its masters are copied beside it
        own_values = 0 if masters or config.bridge.trains_adapter else sum(p.num_bytes for p in trained)
        of_ranks = (of_ranks + own_values) // config.num_replicas
        of_ranks = of_ranks * (config.processes or 1) // (config.num_ranks // config.num_replicas)
    return sum(parameter.num_bytes for parameter in saved) + of_ranks
