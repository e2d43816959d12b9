"""Runs the longest micro-batch once before training, so that out-of-memory errors come first and not an hour later.

It uses `gradient_step` like every batch, but drops the gradients: weights, optimizer, random numbers and metrics are
unchanged. Also here: the message for out-of-memory errors, in the rehearsal and in later steps.
"""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from grpo_engine.data.batching import Batch, make_batch
from grpo_engine.errors import GrpoError, ModelError
from grpo_engine.train.config import TrainConfig
from grpo_engine.train.memory.advice import advice
from grpo_engine.train.memory.dry_run import advice_text, card_now, gb, model_shape
from grpo_engine.train.memory.plan import longest_micro_batch, memory_plan, state_bytes
from grpo_engine.train.step import gradient_step
from grpo_engine.train.trainee import Trainee
from grpo_engine.wire.log_lines import GPU_MEMORY_MISSING, OUT_OF_GPU_MEMORY, REHEARSAL_BEGINS, REHEARSED
from grpo_engine.wire.rollouts import ScoredGroup

LEAST_ROW_TOKENS = 16
"""Below it there is nothing worth compiling for."""

log = logging.getLogger(__name__)


class OutOfGpuMemory(GrpoError):
    """A step does not fit on the GPU."""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """Work of all ranks: `rehearse_step`."""

    def __str__(self) -> str:
        return "the rehearsal before training"


def rehearse_step(trainee: Trainee) -> None:
    """Rehearse a step with the longest rows; only on a GPU, and only with the setting `probe`.

    Raises:
        OutOfGpuMemory: it does not fit.
    """
    if not trainee.config.probe or trainee.device.type != "cuda":
        return
    with trainee.ranks.together(Rehearsal()):
        _rehearse_measured(trainee)


def _rehearse_measured(trainee: Trainee) -> None:
    if trainee.ranks.leads:
        log.info(REHEARSAL_BEGINS.text)
    torch.cuda.reset_peak_memory_stats(trainee.device)
    with out_of_memory_explained(trainee, "in the rehearsal before training"), _room_for_optimizer(trainee):
        rehearse(trainee)
        peak = trainee.peak_bytes()
    torch.cuda.reset_peak_memory_stats(trainee.device)  # the metric is for real steps
    rows, row_tokens = longest_micro_batch(trainee.config)
    if trainee.ranks.leads:
        log.info(REHEARSED.text, rows, row_tokens, gb(peak))


def rehearse(trainee: Trainee) -> None:
    """Run steps on the longest rows that the settings allow, and on rows that make other kernels, without an update."""
    devices = [trainee.device] if trainee.device.type == "cuda" else []
    without_updates = cast(Trainee, _WithoutUpdates(trainee))
    shares = trainee.num_shares
    with torch.random.fork_rng(devices=devices):
        for batch in [longest_batch(trainee.config, shares), *batches_to_compile(trainee, shares)]:
            gradient_step(without_updates, batch, step=0, policy_version=0)


def longest_batch(config: TrainConfig, shares: int = 1) -> Batch:
    """Two micro-batches of the longest rows, every token trained; the first one's gradients exist during the second.

    Args:
        shares: number of ranks that divide a batch; each gets two.
    """
    rows, row_tokens = longest_micro_batch(config)
    num_rows = min(2 * rows * shares, config.sequences_per_batch)
    # Groups of one row, so that no prompt is shared; the last token is a label only.
    return make_batch([_group(1, prompt=1, completion=row_tokens)] * num_rows, seq_len=config.seq_len)


def batches_to_compile(trainee: Trainee, shares: int = 1) -> list[Batch]:
    """Batches besides the longest for which kernels are compiled, so that no step of training waits for that.

    Rows with a shared prompt have an attention of their own; compiled layers of models that cannot have such rows
    distinguish one row from several.

    Args:
        shares: number of ranks that divide a batch; each compiles.
    """
    config = trainee.config
    rows_of_longest, row_tokens = longest_micro_batch(config)
    row_tokens = min(row_tokens, (config.micro_batch_tokens or config.seq_len) // 3)
    if row_tokens < LEAST_ROW_TOKENS:
        return []
    if trainee.shares_prompts:
        groups = [_group(2, prompt=row_tokens // 2, completion=row_tokens // 2)]
    elif config.compile_layers:
        groups = [_group(1, prompt=1, completion=row_tokens)] * (1 if rows_of_longest > 1 else 2)
    else:
        return []
    return [make_batch(groups * shares, seq_len=config.seq_len)]


def _group(num_rows: int, *, prompt: int, completion: int) -> ScoredGroup:
    """Rows of one prompt, every token of their completions trained."""
    length = prompt + completion
    return ScoredGroup(
        tokens=[[0] * length] * num_rows,
        masks=[[-100] * prompt + [0] * completion] * num_rows,
        scores=[0.0] * num_rows,
        advantages=[[1.0] * length] * num_rows,
        inference_logprobs=[[1.0] * prompt + [-1.0] * completion] * num_rows,
        generation_params={"temperature": 1.0, "logprobs_mode": "processed"},
    )


@contextmanager
def out_of_memory_explained(trainee: Trainee, when: str) -> Iterator[None]:
    """Replace torch's out-of-memory error by a message with advice, and free the memory of the step.

    Args:
        when: for the message, as in "in step 7".

    Raises:
        OutOfGpuMemory: in place of torch's error.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        message = _explanation(error, trainee, when)
        traceback.clear_frames(error.__traceback__)  # they keep the activations of the step alive
        trainee.optimizer.zero_grad()
        raise OutOfGpuMemory(message) from None


class _WithoutUpdates:
    """A trainee whose `update` drops the gradients."""

    def __init__(self, trainee: Trainee) -> None:
        self._trainee = trainee
        self.config = trainee.config.model_copy(update={"num_iterations": 1})  # further iterations take the same memory

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainee, name)

    def update(self, rate: float, *, is_finite: bool) -> float:
        """Drop the gradients."""
        self._trainee.optimizer.zero_grad()
        return 0.0


def _room_for_optimizer(trainee: Trainee) -> AbstractContextManager[Any]:
    """Allocate the memory of the optimizer state, which the first update allocates."""
    missing = sum(
        state_bytes(tuple(parameter.shape), trainee.config)
        for group in trainee.optimizer.param_groups
        for parameter in group["params"]
        if parameter not in trainee.optimizer.state
    )
    return nullcontext(torch.empty(missing, dtype=torch.uint8, device=trainee.device))


def _explanation(error: torch.OutOfMemoryError, trainee: Trainee, when: str) -> str:
    """What was requested, what was free, and what to do."""
    config = trainee.config
    rows, row_tokens = longest_micro_batch(config)
    asked = re.search(r"Tried to allocate ([\d.]+) (\w)iB", str(error))
    said = OUT_OF_GPU_MEMORY.text % (when, rows, row_tokens)
    asked_bytes = int(float(asked[1]) * 2 ** {"K": 10, "M": 20, "G": 30, "T": 40}[asked[2]]) if asked else 0
    if asked:
        said += f": {GPU_MEMORY_MISSING.text % gb(asked_bytes)}"
    card = card_now(config)
    if card is None:
        return said
    free, _ = torch.cuda.mem_get_info(trainee.device)
    held = torch.cuda.memory_allocated(trainee.device) - trainee.asleep_bytes()
    said += f"; {gb(free)} of the {gb(card.total_bytes)} of {card.name} are free, the trainer holds {gb(held)}"
    try:
        model = model_shape(trainee.model.config, config)
    except ModelError:
        return said
    # The plan may underestimate: this much was missing in fact.
    short = memory_plan(model, config).needed_bytes - max(asked_bytes, 1)
    what = advice(model, config, replace(card, free_bytes=min(card.free_bytes, short)))
    return f"{said}. {advice_text(what)}"
