"""The longest micro-batch once before training, so that a lack of memory shows at once and not an hour later.

It goes the way of every batch, through `gradient_step`, but its gradients are dropped: weights, optimizer, random
numbers and metrics are afterwards what they were. Also here: what is said when memory runs out, then or later.
"""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch

from grpo_engine.data.batching import Batch, make_batch
from grpo_engine.errors import GrpoError, ModelError
from grpo_engine.train.config import TrainConfig
from grpo_engine.train.dry_run import card_now, gb, in_a_sentence, model_shape
from grpo_engine.train.fitting import advice
from grpo_engine.train.memory_plan import longest_micro_batch, memory_plan, state_bytes
from grpo_engine.train.step import gradient_step
from grpo_engine.train.trainee import Trainee
from grpo_engine.wire.rollouts import ScoredGroup

log = logging.getLogger(__name__)


class OutOfGpuMemory(GrpoError):
    """A step does not fit on the GPU."""


def probe(trainee: Trainee) -> None:
    """Rehearse a step with the longest rows, on a GPU and unless the settings say not to.

    Raises:
        OutOfGpuMemory: it does not fit.
    """
    if not trainee.config.probe or trainee.device.type != "cuda":
        return
    torch.cuda.reset_peak_memory_stats(trainee.device)
    with explaining_lack_of_memory(trainee, "in a rehearsal before training"), _room_for_optimizer(trainee):
        rehearse(trainee)
        peak = torch.cuda.max_memory_allocated(trainee.device)
    torch.cuda.reset_peak_memory_stats(trainee.device)  # the metric is of real steps
    rows, row_tokens = longest_micro_batch(trainee.config)
    log.info("the longest micro-batch fits: %d x %d tokens, %s at the peak", rows, row_tokens, gb(peak))


def rehearse(trainee: Trainee) -> None:
    """Run a step on the longest rows that the settings allow, and forget it."""
    devices = [trainee.device] if trainee.device.type == "cuda" else []
    understudy = cast(Trainee, _Understudy(trainee))
    with torch.random.fork_rng(devices=devices):
        gradient_step(understudy, longest_batch(trainee.config), step=0, policy_version=0)


def longest_batch(config: TrainConfig) -> Batch:
    """Two micro-batches of the longest rows, every token trained: the second meets the gradients of the first."""
    rows, row_tokens = longest_micro_batch(config)
    num_rows = min(2 * rows, config.sequences_per_batch)
    length = row_tokens + 1  # with the last token, which is a label only
    group = ScoredGroup(  # of one row, so that no prompt is shared
        tokens=[[0] * length],
        masks=[[-100] + [0] * row_tokens],
        scores=[0.0],
        advantages=[[1.0] * length],
        inference_logprobs=[[1.0] + [-1.0] * row_tokens],
        generation_params={"temperature": 1.0, "logprobs_mode": "processed"},
    )
    return make_batch([group] * num_rows, seq_len=config.seq_len)


@contextmanager
def explaining_lack_of_memory(trainee: Trainee, when: str) -> Iterator[None]:
    """Say what to do when the GPU's memory runs out within, and give back what the step in hand has taken.

    Args:
        when: for the message, as in "in step 7".

    Raises:
        OutOfGpuMemory: in place of torch's error.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        message = _explanation(error, trainee, when)
        traceback.clear_frames(error.__traceback__)  # they hold what the step had computed
        trainee.optimizer.zero_grad()
        raise OutOfGpuMemory(message) from None


class _Understudy:
    """A trainee that does all but learn."""

    def __init__(self, trainee: Trainee) -> None:
        self._trainee = trainee
        self.config = trainee.config.model_copy(update={"num_iterations": 1})  # the others are alike

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainee, name)

    def update(self, rate: float, *, is_finite: bool) -> float:
        """Drop the gradients."""
        self._trainee.optimizer.zero_grad()
        return 0.0


def _room_for_optimizer(trainee: Trainee) -> AbstractContextManager[Any]:
    """Holds the memory that the optimizer will take with its first update, and keep."""
    missing = sum(
        state_bytes(tuple(parameter.shape), trainee.config)
        for group in trainee.optimizer.param_groups
        for parameter in group["params"]
        if parameter not in trainee.optimizer.state
    )
    return nullcontext(torch.empty(missing, dtype=torch.uint8, device=trainee.device))


def _explanation(error: torch.OutOfMemoryError, trainee: Trainee, when: str) -> str:
    """What was asked for, what there was, and what to do."""
    config = trainee.config
    rows, row_tokens = longest_micro_batch(config)
    asked = re.search(r"Tried to allocate ([\d.]+) (\w)iB", str(error))
    said = f"the GPU's memory ran out {when}, with micro-batches of up to {rows} x {row_tokens} tokens"
    asked_bytes = int(float(asked[1]) * 2 ** {"K": 10, "M": 20, "G": 30, "T": 40}[asked[2]]) if asked else 0
    if asked:
        said += f": {gb(asked_bytes)} more were asked for"
    card = card_now(config)
    if card is None:
        return said
    free, _ = torch.cuda.mem_get_info(trainee.device)
    held = torch.cuda.memory_allocated(trainee.device)
    said += f"; of the {gb(card.total_bytes)} of {card.name} {gb(free)} are free, and the trainer holds {gb(held)}"
    try:
        model = model_shape(trainee.model.config, config)
    except ModelError:
        return said
    # Whatever the plan says, that much was missing.
    short = memory_plan(model, config).needed_bytes - max(asked_bytes, 1)
    what = advice(model, config, replace(card, free_bytes=min(card.free_bytes, short)))
    return f"{said}. {in_a_sentence(what)}"
