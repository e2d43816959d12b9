"""What the ranks other than 0 do: wait for the next work that rank 0 announces, and take their part in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from grpo_engine.bridges.protocol import RankPlacement
from grpo_engine.ranks.group import RankGroup
from grpo_engine.train.checkpointing import checkpoints
from grpo_engine.train.config import TrainConfig
from grpo_engine.train.memory.rehearsal import Rehearsal, rehearse_step
from grpo_engine.train.step import GradientStep, gradient_step
from grpo_engine.train.trainee import CopyState, LoadUntrained, RestoreState, Trainee, TrainingDiverged, WriteState


class Finished:
    """Work of all ranks: exit."""

    def __str__(self) -> str:
        return "the end of training"


def follow(
    config: TrainConfig,
    placement: RankPlacement,
    ranks: RankGroup,
    further: Mapping[type, Callable[[Any], None]] | None = None,
) -> None:
    """Train as rank 0 announces, until it has finished.

    Args:
        further: what else may be announced, by its type.

    Raises:
        RanksFailed: another rank has exited.
    """
    further = further or {}
    while type(first := ranks.next_work()) in further:
        with ranks.together(first):
            further[type(first)](first)
    if isinstance(first, Finished):  # rank 0 was stopped while it waited for the servers
        with ranks.together(first):
            return
    with ranks.together(first):
        attached = placement.join(first)
    trainee = Trainee(attached, config, ranks)
    checkpoints.seed_everything(config.seed + ranks.rank)  # dropout of adapters differs between rows
    while True:
        work = ranks.next_work()
        with ranks.together(work):
            match work:
                case Rehearsal():
                    rehearse_step(trainee)
                case GradientStep():
                    with suppress(TrainingDiverged):  # rank 0 has the same error, and ends the training
                        gradient_step(trainee, work.batch, step=work.step, policy_version=work.policy_version)
                case WriteState():
                    with suppress(OSError):  # rank 0 has an error too, and logs it
                        trainee.write_state(work.folder)
                case CopyState():
                    trainee.begin_write(work.folder)
                case RestoreState():
                    trainee.restore(checkpoints.load(work.folder, model_name=config.model_name))
                case LoadUntrained():
                    trainee.load_untrained()
                case Finished():
                    trainee.finish_writing()
                    return
                case _ if type(work) in further:
                    further[type(work)](work)
                case _:
                    placement.take_part(work, trainee.write_weights)
