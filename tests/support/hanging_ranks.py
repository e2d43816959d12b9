"""A program that trains a small model on two Gloo ranks, of which rank 1 hangs in its loss while a file exists.

`python hanging_ranks.py FOLDER MODEL` starts both ranks; each is this program with a place in its environment.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

STALL_S, TIMEOUT_S = 2.0, 15.0
HANG, GO_ON, WAITS = "hang", "go on", "waits.txt"
"""Files: rank 1 hangs while it exists; training goes on while it exists; the `wait_time` of rank 0, a step a line."""


def main(folder: Path, model: str) -> int:
    """Start both ranks, or be one of them."""
    from grpo_engine.ranks.launching import launch_ranks
    from grpo_engine.ranks.place import rank_place
    from grpo_engine.serving.reporting import ranks_report

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    place = rank_place(os.environ)
    if place is None:
        argv = [sys.executable, *sys.argv]
        return launch_ranks(argv, num_local=2, stall_s=STALL_S, report=ranks_report(os.environ)).code
    return _train(folder, model)


def _train(folder: Path, model: str) -> int:
    import torch
    from rank_training import Training, batch_of
    from training import settings

    from grpo_engine.bridges import BridgeModel
    from grpo_engine.bridges.placement.sharded import ShardedModel
    from grpo_engine.bridges.protocol import BridgeContext
    from grpo_engine.models.config import LoraSettings
    from grpo_engine.ranks.group import RankGroup
    from grpo_engine.ranks.place import rank_place
    from grpo_engine.ranks.watching import write_stacks_on_signal
    from grpo_engine.train import step as steps
    from grpo_engine.train.following import Finished, follow
    from grpo_engine.train.trainee import Trainee

    torch.set_num_threads(1)
    write_stacks_on_signal()
    config = settings(model_name=model)
    with closing(RankGroup(rank_place(os.environ), timeout_s=TIMEOUT_S)) as ranks:
        context = BridgeContext(
            model_name=model,
            dtype="float32",
            device="cpu",
            server_urls=("",),
            folder=folder,
            lora=LoraSettings(),
            ranks=ranks,
        )
        if not ranks.leads:
            compute = steps.policy_loss

            def hang_in_loss(*arguments: Any) -> Any:
                while (folder / HANG).exists():
                    time.sleep(0.02)
                return compute(*arguments)

            steps.policy_loss = hang_in_loss
            follow(config, config.bridge.rank_placement(context), ranks)
            return 0
        placement = ShardedModel(context)
        attached = BridgeModel(
            model=placement.load(), is_shared=False, policy_version=0, save=placement.save, tensors=placement.tensors
        )
        trainee = Trainee(attached, config, ranks)
        training = Training(model=Path(model), folder=folder, num_ranks=2)
        step = 0
        while (folder / GO_ON).exists():
            metrics = steps.gradient_step(trainee, batch_of(training, 0), step=step, policy_version=step).metrics
            step += 1
            _note(folder, metrics, step)
        with ranks.together(Finished()):
            return 0


def _note(folder: Path, metrics: Mapping[str, float], step: int) -> None:
    with (folder / WAITS).open("a") as file:
        file.write(f"{metrics['rank/0/wait_time']}\n")
    if step == 1:
        logging.info("up")
    time.sleep(0.02)


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), sys.argv[2]))
