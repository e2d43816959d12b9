"""Starts a trainer that samples itself: engines in all ranks, and problems of a task on rank 0."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from grpo_engine.bridges import Bridge, Colocate
from grpo_engine.bridges.protocol import Placement, RankPlacement
from grpo_engine.bridges.transport.in_process import InProcessBridge
from grpo_engine.colocate.config import TrainerConfig
from grpo_engine.colocate.rounds import RoundInference, Rounds
from grpo_engine.colocate.source import OwnSource
from grpo_engine.data.rollout_source import RolloutSource
from grpo_engine.environments.sampling.prompts import Tokenizer, check_template
from grpo_engine.models.loading import load_tokenizer
from grpo_engine.ranks.group import RankGroup
from grpo_engine.ranks.place import rank_place
from grpo_engine.server.config import ServerConfig
from grpo_engine.server.in_process import SamplingEngine
from grpo_engine.server.preloading import preload_in_process
from grpo_engine.serving.turn import begin_in_turn
from grpo_engine.train import main as trainer
from grpo_engine.train.config import TrainConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ITEMS_FILE = "items.json"
"""In the folder of checkpoints, unless there is a run folder: the place in the items."""


def run(config: TrainerConfig, *, tokenizer: PreTrainedTokenizerBase | None = None) -> int:
    """Train until the last step or a stop signal; returns the exit code.

    Args:
        tokenizer: what `prepare` has returned, if it was called.

    Raises:
        GrpoError: the task or the model is missing, or training fails.
    """
    if config.dry_run:
        return trainer.run(config)
    tokenizer = begin_in_turn(partial(prepare, config), os.environ) or tokenizer
    config = trainer.of_model(config)
    place = rank_place(os.environ)
    if place is None or place.rank == 0:
        config.own_environment.task.check()  # before anything is loaded
    return trainer.run(config, partial(_sampling, config), tokenizer=tokenizer)


def prepare(config: TrainerConfig) -> PreTrainedTokenizerBase | None:
    """Import what is imported until training begins, with the engine; the tokenizer. Touches no GPU."""
    tokenizer = trainer.prepare(config)
    preload_in_process(config.own_server)
    return tokenizer


def _sampling(config: TrainerConfig, of_rank: TrainConfig, ranks: RankGroup) -> OwnSampling:
    return OwnSampling(config.model_copy(update={"device": of_rank.device}), ranks)


class OwnSampling:
    """See `grpo_engine.train.main.Sampling`; of one rank."""

    def __init__(self, config: TrainerConfig, ranks: RankGroup) -> None:
        self._config = config
        self._ranks = ranks
        self.engine = engine_of(config.own_server)

    def source(self, bridge: Bridge, save_path: Path) -> AbstractContextManager[RolloutSource]:
        """The problems of rank 0.

        Raises:
            ConfigError: the tokenizer does not support the prompts.
        """
        environment = self._config.own_environment
        if environment.state_file is None:
            environment = environment.model_copy(update={"state_file": save_path / ITEMS_FILE})
        tokenizer: Tokenizer = load_tokenizer(self._config.model_name)
        check_template(environment, tokenizer)
        own_bridge = cast(InProcessBridge, bridge)
        rounds = Rounds(self.engine, own_bridge.engines, self._ranks)
        return OwnSource(environment, tokenizer, RoundInference(rounds.sample), own_bridge)

    def works(self, placement: RankPlacement) -> Mapping[type, Callable[[Any], None]]:
        """What the other ranks do."""
        bridge = self._config.bridge
        assert isinstance(bridge, Colocate)
        engines = bridge.engines(self.engine, cast(Placement, placement), self._ranks)
        return {**engines.works, **Rounds(self.engine, engines, self._ranks).works}


def engine_of(config: ServerConfig) -> SamplingEngine:
    """The engine of the settings, not started."""
    if config.engine == "torch":
        from grpo_engine.server.torch.in_process import TorchInProcess

        return TorchInProcess(config)
    from grpo_engine.server.vllm.in_process import VllmInProcess

    return VllmInProcess(config)
