"""The training loop, top to bottom: attach, fetch, score, step, publish, record, save.

One loop for every bridge: bridges differ in how weights get across, not in what training is. Ordering is the whole
point here, so it reads in the order in which things happen; the arithmetic is in `step` and in `grpo_engine.algo`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from grpo_engine.bridges import Bridge
from grpo_engine.data.source import RolloutSource
from grpo_engine.errors import GrpoError, PeerUnavailable
from grpo_engine.train import checkpoints
from grpo_engine.train.config import TrainConfig
from grpo_engine.train.recorder import Recorder
from grpo_engine.train.samples import Decode, sampled_rollouts
from grpo_engine.train.step import drop_stale, fitting_batch, gradient_step
from grpo_engine.train.trainee import Trainee

log = logging.getLogger(__name__)

StopRequest = Callable[[], bool]
"""Whether to end after the step in hand."""


def train(
    config: TrainConfig,
    source: RolloutSource,
    bridge: Bridge,
    recorder: Recorder,
    *,
    decode: Decode,
    save_path: Path,
    stop: StopRequest = lambda: False,
) -> int:
    """Train to `config.training_steps`, or until `stop()`; returns the number of steps done.

    Raises:
        GrpoError: the API, the server or a checkpoint is not what it should be, or the steps stop being finite.
    """
    attached = bridge.attach()
    trainee = Trainee(attached, config)
    step, version = 0, 0
    if not config.resume:
        checkpoints.set_aside(save_path)
    checkpoint = checkpoints.newest(save_path)
    if checkpoint is not None:
        marker = trainee.restore(checkpoints.load(checkpoint, model_name=config.model_name))
        step, version = marker.step, marker.policy_version
        log.info("resumed from %s", checkpoint)
    elif attached.is_shared and attached.policy_version > 0:
        trainee.start_anew()  # the memory holds what an earlier trainer made of the model
    if attached.policy_version > 0:  # a version names one set of weights, also across trainers
        version = max(version, attached.policy_version) + 1
    # Whatever inference holds now (an earlier run's weights, or none of ours), it serves exactly this policy next.
    bridge.publish(version, trainee.write_weights)

    source.register(
        batch_size=config.sequences_per_batch,
        max_token_len=config.seq_len,
        checkpoint_dir=str(save_path),
        save_checkpoint_interval=config.checkpoint_interval,
        starting_step=step,
        num_steps=config.training_steps,
    )
    log.info(
        "trainer ready: %s by %s, step %d of %d", config.model_name, config.bridge.mode, step, config.training_steps
    )

    saved_step = step
    try:
        while step < config.training_steps and not stop():
            began = time.perf_counter()
            groups = source.next_batch(timeout_s=config.batch_timeout_s, stop=stop, meanwhile=bridge.keep_up)
            if groups is None:
                break
            groups = drop_stale(groups, version, config.max_staleness)
            if not groups:
                continue
            batch = fitting_batch(groups, config.seq_len)
            fetched = time.perf_counter()

            bridge.ensure_current()  # the step reads what is mapped of a server: that must be a living one's
            result = gradient_step(trainee, batch, step=step, policy_version=version)
            source.mark_used()
            step += 1
            stepped = time.perf_counter()

            if result.applied:
                version += 1
                bridge.publish(version, trainee.write_weights)
            published = time.perf_counter()

            times = {
                "train/data_fetch_time": fetched - began,
                "train/sync_time": published - stepped,
                "train/step_time": published - began,
                "train/tokens_per_second": batch.num_inputs / (published - began),
            }
            recorder.step(step, version, {**result.metrics, **times, **trainee.memory_metrics()})
            if config.rollouts_every and step % config.rollouts_every == 0:
                recorder.rollouts(sampled_rollouts(batch, result, decode, step=step, count=config.rollouts_groups))
            if config.checkpoint_interval and step % config.checkpoint_interval == 0:
                trainee.save(save_path, step=step, policy_version=version)
                saved_step = step
    except GrpoError as error:  # a peer that stays away, a group that cannot be trained on: what was done is kept
        if step != saved_step:
            trainee.save(save_path, step=step, policy_version=version)
        if not (stop() and isinstance(error, PeerUnavailable)):
            raise
        log.info("stopped after step %d while waiting: %s", step, error)
        return step

    if step != saved_step:
        trainee.save(save_path, step=step, policy_version=version)
    log.info(
        "Training finished." if step >= config.training_steps else f"stopped after step {step}; resumes from there"
    )
    return step
