"""The training loop, top to bottom: attach, resume, fetch, score, step, publish, evaluate, record, save.

One loop for every bridge: bridges differ in how weights get across, not in what training is. Ordering is the whole
point here, so it reads in the order in which things happen; the arithmetic is in `step` and in `grpo_engine.algo`.
Steps that a killed trainer had made since its last checkpoint are made again on the same path, only that their groups
come from the journal. Inference gets each of them, as it got it before: where memory is shared it cannot be otherwise,
and elsewhere it costs a hand-over.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from grpo_engine.bridges import Bridge
from grpo_engine.bridges.protocol import never
from grpo_engine.data.source import RolloutSource
from grpo_engine.errors import CheckpointError, DataError, GrpoError, PeerUnavailable
from grpo_engine.train import checkpoints
from grpo_engine.train.by_environment import metrics_by_environment
from grpo_engine.train.config import TrainConfig
from grpo_engine.train.evaluation import Evaluator
from grpo_engine.train.journal import Journal, JournalEntry, JournalHead
from grpo_engine.train.probe import explaining_lack_of_memory, probe
from grpo_engine.train.recorder import Recorder
from grpo_engine.train.resuming import decisive_settings, find_start
from grpo_engine.train.samples import Decode, sampled_rollouts
from grpo_engine.train.step import drop_stale, fitting_batch, gradient_step
from grpo_engine.train.trainee import Trainee

log = logging.getLogger(__name__)


def train(
    config: TrainConfig,
    source: RolloutSource,
    bridge: Bridge,
    recorder: Recorder,
    *,
    decode: Decode,
    save_path: Path,
    stop: Callable[[], bool] = never,
) -> int:
    """Train to `config.training_steps`, or until `stop()`; returns the number of steps done.

    Args:
        stop: whether to end after the step in hand.

    Raises:
        GrpoError: the API, the server or a checkpoint is not what it should be, or the steps stop being finite.
    """
    attached = bridge.attach()
    trainee = Trainee(attached, config)
    probe(trainee)
    if not config.resume:
        checkpoints.set_aside(save_path)
    journal = Journal(save_path, is_kept=config.journal)
    settings = decisive_settings(config)
    start = find_start(trainee, attached, journal, save_path, settings)
    step, version, lease = start.step, start.policy_version, start.lease
    recorder.begin_after(start.recorded_through)
    # Whatever inference holds now (an earlier run's weights, or none of ours), it serves exactly this policy next.
    bridge.publish(version, trainee.write_weights)

    source.register(
        batch_size=config.sequences_per_batch,
        max_token_len=config.seq_len,
        checkpoint_dir=str(save_path),
        save_checkpoint_interval=config.checkpoint_interval,
        starting_step=start.journaled_through,
        num_steps=config.training_steps,
        eval_every=config.eval_every if step < config.training_steps else 0,
        max_staleness=config.max_staleness,
        stop=stop,
    )
    evaluator = Evaluator(config, source, stop=stop, meanwhile=bridge.keep_up)
    source.go_on_after(lease)
    log.info(
        "trainer ready: %s by %s, step %d of %d", config.model_name, config.bridge.mode, step, config.training_steps
    )

    saved_step = step

    def save(*, or_go_on: bool) -> None:
        """Write a checkpoint of the steps until now. A full disk ends no run that can still make room."""
        nonlocal saved_step
        if step == saved_step or not config.save_checkpoints:
            return
        try:
            trainee.save(save_path, step=step, policy_version=version, lease=lease, settings=settings)
        except CheckpointError as error:
            if not or_go_on:
                raise
            log.error("%s; training goes on, and the next checkpoint is tried when it is due", error)
        else:
            saved_step = step
            journal.forget(through=step)

    try:
        if start.recorded_through == 0:
            recorder.before_the_first(version, evaluator.measure_if_due(0, version))
        while step < config.training_steps and not stop():
            began = time.perf_counter()
            entry = journal.read(step + 1)  # what a trainer that was killed had made this step of
            if entry is None:
                groups = source.next_batch(
                    timeout_s=config.batch_timeout_s, policy_version=version, stop=stop, meanwhile=bridge.keep_up
                )
                if groups is None:
                    break
                groups = drop_stale(groups, version, config.max_staleness)
                if not groups:
                    continue
                head = JournalHead(
                    step=step + 1,
                    policy_version=version,
                    lease=source.lease,
                    environments=source.environments,
                    settings=settings,
                )
                entry = JournalEntry(head=head, groups=groups)
            try:
                batch = fitting_batch(
                    entry.groups,
                    config.seq_len,
                    vocab_size=trainee.vocab_size,
                    environment_names=entry.head.environments,
                )
            except DataError:
                source.mark_used()  # the next trainer would fail at the same batch
                raise
            journal.keep(entry)
            version = entry.head.policy_version
            fetched = time.perf_counter()

            bridge.ensure_current()  # the step reads what is mapped of a server: that must be a living one's
            with explaining_lack_of_memory(trainee, f"in step {step + 1}"):
                result = gradient_step(trainee, batch, step=step, policy_version=version)
            source.mark_used()
            step, lease = step + 1, entry.head.lease
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
            if not recorder.has(step):
                names = entry.head.environments
                if config.rollouts_every and step % config.rollouts_every == 0:
                    count = config.rollouts_groups
                    recorder.rollouts(
                        sampled_rollouts(batch, result, decode, environments=names, step=step, count=count)
                    )
                evaluated = evaluator.measure_if_due(step, version)
                measured = {**result.metrics, **metrics_by_environment(batch, names), **times}
                recorder.step(step, version, {**measured, **trainee.memory_metrics(), **evaluated})
            if config.checkpoint_interval and step % config.checkpoint_interval == 0:
                save(or_go_on=True)
    except GrpoError as error:  # a peer that stays away, a group that cannot be trained on: what was done is kept
        if not (stop() and isinstance(error, PeerUnavailable)):
            save(or_go_on=True)
            raise
        log.info("stopped while waiting: %s", error)

    save(or_go_on=False)
    log.info(
        "Training finished." if step >= config.training_steps else f"stopped after step {step}; resumes from there"
    )
    return step
