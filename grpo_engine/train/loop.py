"""The training loop, top to bottom: attach, resume, fetch, score, step, publish, evaluate, record, save.

One loop for every bridge: bridges differ in how weights reach inference, not in what training is. The code is in the
order in which things happen; the arithmetic is in `step` and in `grpo_engine.algo`. A trainer that was killed repeats
the steps since its last checkpoint from the journal; meanwhile servers with weights of their own stay at the version
that they have, and a server or engine that takes turns with the trainer sleeps. With shared memory each is published.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from grpo_engine.bridges import Bridge
from grpo_engine.data.rollout_source import RolloutSource
from grpo_engine.errors import DataError, GrpoError, PeerUnavailable
from grpo_engine.ranks.group import RankGroup, RanksFailed
from grpo_engine.retrying import never
from grpo_engine.serving.reporting import Reporter
from grpo_engine.train.batch import drop_stale, metrics_by_environment, trainable_batch
from grpo_engine.train.checkpointing import checkpoints
from grpo_engine.train.checkpointing.journal import Journal, JournalEntry
from grpo_engine.train.checkpointing.resuming import find_start
from grpo_engine.train.checkpointing.writing import CheckpointWriter
from grpo_engine.train.config import TrainConfig
from grpo_engine.train.evaluation import Evaluator
from grpo_engine.train.memory.rehearsal import out_of_memory_explained, rehearse_step
from grpo_engine.train.recording.recorder import Recorder
from grpo_engine.train.recording.samples import Decode, sampled_rollouts
from grpo_engine.train.resumable import decisive_settings
from grpo_engine.train.step import gradient_step
from grpo_engine.train.trainee import Trainee
from grpo_engine.wire.checkpoints import JournalHead
from grpo_engine.wire.log_lines import STOPPED, TRAINER_READY
from grpo_engine.wire.supervisor import WaitsFor

log = logging.getLogger(__name__)


def train(
    config: TrainConfig,
    source: RolloutSource,
    bridge: Bridge,
    recorder: Recorder,
    *,
    decode: Decode,
    save_path: Path,
    ranks: RankGroup | None = None,
    is_sure_to_fit: bool = False,
    stop: Callable[[], bool] = never,
    reporter: Reporter | None = None,
) -> int:
    """Train to `config.training_steps`, or until `stop()`; returns the number of steps done.

    Args:
        ranks: of a trainer of several ranks; this is rank 0, and the others `follow`.
        is_sure_to_fit: the step on the GPU; else it is tried before environments begin to sample.
        stop: whether to end after the current step.
        reporter: takes what training waits for, and what it cannot write.

    Raises:
        GrpoError: the rollout API, the server or a checkpoint fails, or losses stay non-finite.
    """
    reporter = reporter or Reporter()
    attached = bridge.attach()
    trainee = Trainee(attached, config, ranks)
    if not config.resume:
        checkpoints.move_away(save_path)
    journal = Journal(
        save_path, is_kept=config.journal, num_tokens=config.batch_size * config.seq_len, reporter=reporter
    )
    settings = decisive_settings(config)
    start = find_start(trainee, attached, journal, save_path, settings)
    is_rehearsed = start.journaled_through > 0  # one that goes on has done steps; it compiles only what it meets again
    if not is_rehearsed and (config.bridge.takes_turns or not is_sure_to_fit):
        rehearse_step(trainee)
        is_rehearsed = True
    step, version, lease = start.step, start.policy_version, start.lease
    recorder.resume_after(start.recorded_through)
    # Inference may hold weights of an earlier run; from here on it serves this policy, or what the journal leads to.
    attached.repeat(start.repeated)
    bridge.publish(version, trainee.write_weights)

    source.register(
        wandb_group=config.wandb_group or "",
        wandb_project=config.wandb_project or "",
        batch_size=config.sequences_per_batch,
        max_token_len=config.seq_len,
        checkpoint_dir=str(save_path),
        save_checkpoint_interval=config.checkpoint_interval,
        starting_step=start.journaled_through,
        num_steps=config.training_steps,
        eval_every=config.eval_every if step < config.training_steps else 0,
        max_staleness=config.max_staleness,
        is_served=not is_rehearsed,  # environments sample during the rehearsal; one that goes on repeats steps first
        stop=stop,
    )
    evaluator = Evaluator(config, source, stop=stop, meanwhile=bridge.poll_server)
    source.resume_after(lease)
    log.info(TRAINER_READY.text, config.model_name, config.bridge.mode, step, config.training_steps)

    writer = CheckpointWriter(trainee, journal, save_path, saved_step=step, settings=settings, reporter=reporter)
    try:
        if not is_rehearsed:  # while groups are sampled for the first step
            with reporter.waiting_for(WaitsFor.UPDATE):
                bridge.prepare_step()  # as before every step: the server may have exited since it was attached to
            with reporter.waiting_for(WaitsFor.REHEARSAL):
                rehearse_step(trainee)
        if start.recorded_through == 0:
            recorder.record_untrained(version, evaluator.measure_if_due(0, version))
        while step < config.training_steps and not stop():
            writer.poll()
            began = time.perf_counter()
            entry = journal.read(step + 1)  # the batch of this step, if a trainer was killed in or after it
            waits: Mapping[str, float] = {}
            if entry is None:
                with reporter.waiting_for(WaitsFor.BATCH):
                    groups = source.next_batch(
                        timeout_s=config.batch_timeout_s,
                        policy_version=version,
                        stop=stop,
                        meanwhile=bridge.poll_server,
                    )
                if groups is None:
                    break
                groups = drop_stale(groups, version, config.max_staleness)
                if not groups:
                    continue
                waits = source.time_metrics()
                head = JournalHead(
                    step=step + 1,
                    policy_version=version,
                    lease=source.lease,
                    environments=source.environments,
                    settings=settings,
                )
                entry = JournalEntry(head=head, groups=groups)
            environments = entry.head.environments
            try:
                batch = trainable_batch(
                    entry.groups, config.seq_len, vocab_size=trainee.vocab_size, environment_names=environments
                )
            except DataError:
                source.mark_used()  # else the next trainer gets the same batch and fails on it
                raise
            recorder.found_logprobs(int(batch.lengths[0]) + 1)
            journal.keep(entry)
            version = entry.head.policy_version
            fetched = time.perf_counter()

            with reporter.waiting_for(WaitsFor.UPDATE):
                bridge.prepare_step()  # a server whose memory it maps must be alive, an engine here asleep
            with out_of_memory_explained(trainee, f"in step {step + 1}"):
                result = gradient_step(trainee, batch, step=step, policy_version=version)
            source.mark_used()
            step, lease = step + 1, entry.head.lease
            stepped = time.perf_counter()

            update, failure = None, None
            try:
                if result.applied:
                    version += 1
                    with reporter.waiting_for(WaitsFor.UPDATE):
                        update = bridge.publish(version, trainee.write_weights)
                source.report_served(lease, version)
            except RanksFailed:
                raise
            except GrpoError as error:  # the step is kept in a checkpoint, so that no later trainer would record it
                failure = error
            published = time.perf_counter()

            if not recorder.has(step):
                if config.rollouts_every and step % config.rollouts_every == 0:
                    sampled = sampled_rollouts(
                        batch, result, decode, environments=environments, step=step, count=config.rollouts_groups
                    )
                    recorder.rollouts(sampled)
                evaluated: Mapping[str, float] = {}
                if failure is None:
                    with reporter.waiting_for(WaitsFor.EVALUATION):
                        evaluated = evaluator.measure_if_due(step, version)
                times = {
                    "train/data_fetch_time": fetched - began,
                    "train/sync_time": published - stepped,
                    "train/step_time": published - began,
                    "train/tokens_per_second": batch.num_inputs / (published - began),
                    "train/busy_fraction": (published - fetched) / (published - began),
                    **trainee.utilization(published - began),
                    **waits,
                    **writer.metrics(),
                }
                sent = update.metrics() if update is not None else {}
                measured = {**result.metrics, **metrics_by_environment(batch, environments), **times, **sent}
                recorder.step(step, version, {**measured, **trainee.memory_metrics(), **evaluated})
            if failure is not None:
                raise failure
            if config.checkpoint_interval and step % config.checkpoint_interval == 0:
                writer.save(step, policy_version=version, lease=lease)
    except RanksFailed:
        writer.abandon()  # the rank that failed may never write its part
        raise
    except GrpoError as error:  # the steps until now are kept
        if not (stop() and isinstance(error, PeerUnavailable)):
            writer.save_last(step, policy_version=version, lease=lease, required=False)
            raise
        log.info(STOPPED.text, f" while waiting: {error}")
    finally:
        writer.wait()

    writer.save_last(step, policy_version=version, lease=lease)
    if step >= config.training_steps:
        log.info("Training finished.")
    else:
        log.info(STOPPED.text, f" after step {step}; a restart resumes there")
    return step
