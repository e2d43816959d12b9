"""Where a trainer starts: untrained, or where the previous one was stopped or killed.

The newest checkpoint has the state after some step; the journal has the batches of the steps since then. Repeated under
the same settings, they give the same weights, so they keep their version numbers. Under changed settings, and where
later steps were set aside (`UsedVersions`), they get numbers that were never used: a version names one set of weights.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from grpo_engine.bridges import BridgeModel
from grpo_engine.errors import CheckpointError, ConfigError
from grpo_engine.train.checkpointing import checkpoints
from grpo_engine.train.checkpointing.journal import Journal
from grpo_engine.train.config import TrainConfig
from grpo_engine.train.resumable import changed_settings, decisive_settings, refused_changes
from grpo_engine.train.trainee import Trainee
from grpo_engine.wire.checkpoints import CheckpointMarker, JournalHead, UsedVersions
from grpo_engine.wire.codec import read_whole
from grpo_engine.wire.log_lines import RESUMED
from grpo_engine.wire.run_folder import CHECKPOINT_MARKER, JOURNAL, USED_VERSIONS_FILE

_DAMAGED = (LookupError, TypeError, ValueError, RuntimeError, AttributeError, AssertionError, ArithmeticError)
"""Raised by torch and by readers of ours for values that no trainer writes."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a trainer starts."""

    step: int
    """Optimizer steps in the weights."""
    policy_version: int
    """Of these weights."""
    lease: str
    """Lease of the last batch that was trained on or is in the journal."""
    journaled_through: int
    """Last step that the journal holds; `step` where it holds none."""
    recorded_through: int
    """Last step whose records stay valid: later ones have other groups or other settings."""
    repeated: range
    """Versions that inference may serve meanwhile; the last is the one to which the journal leads."""


def find_start(
    trainee: Trainee, attached: BridgeModel, journal: Journal, save_path: Path, settings: Mapping[str, Any]
) -> Start:
    """Load the state from which the run resumes; the weights that inference reads are not touched.

    Args:
        settings: `decisive_settings` of this run.

    Raises:
        CheckpointError: the checkpoint is damaged, or of another model or other fixed settings.
    """
    checkpoints.tidy(save_path)
    checkpoints.require_own(save_path / JOURNAL)
    folder, compared = checkpoints.newest(save_path), None
    if folder is not None:
        checkpoints.require_own(folder)
        state = checkpoints.load(folder, model_name=trainee.config.model_name)
        compared = state.marker.settings
        _compare(folder, compared, settings)
        try:
            marker = trainee.restore(state)
        except _DAMAGED as error:
            raise CheckpointError(
                f"{folder}: cannot be restored ({checkpoints.read_failure(error)}); "
                "remove it to resume from the previous checkpoint"
            ) from error
        step, version, lease = marker.step, marker.policy_version, marker.lease
        log.info(RESUMED.text, folder)
    else:
        step, version, lease = 0, 0, ""
        if attached.is_shared and attached.policy_version > 0:
            trainee.load_untrained()  # the shared memory has weights that an earlier trainer wrote
        checkpoints.seed_everything(trainee.config.seed)  # loading may have drawn random numbers
    version_saved = version
    journal.forget(through=step)

    used = used_versions(save_path).through
    heads = journal.heads(after=step)
    if heads:
        if heads[0].settings != compared:
            _compare(save_path / JOURNAL, heads[0].settings, settings)
        version, lease = heads[0].policy_version, heads[-1].lease
    last = step + len(heads)
    if num_lost := journal.forget_later(last):
        log.warning("the journal has a gap after step %d; %d later steps are lost", last, num_lost)
    highest = max([version, *(head.policy_version + 1 for head in heads)])
    oldest = _oldest_of_this_way([version_saved, *(head.policy_version for head in heads)], after=used)
    same = len(list(takewhile(lambda head: not changed_settings(head.settings, settings), heads)))
    if same < len(heads):
        log.warning("steps %d to %d are repeated under the new settings", step + same + 1, last)
        first_new = max(highest, attached.policy_version) + 1
        journal.restate(_renumbered(heads[same:], first_new, settings))
        version = first_new if same == 0 else version
        highest = max(highest, first_new + len(heads) - same)
    elsewhere = max(attached.policy_version, used)
    if elsewhere > highest:  # inference has weights of another run, or the run went back
        oldest = version = elsewhere + 1
        highest = version + len(heads)
        journal.restate(_renumbered(journal.heads(after=step), version, settings))
    if heads:
        log.info("steps %d to %d are repeated from the journal", step + 1, last)
    return Start(
        step=step,
        policy_version=version,
        lease=lease,
        journaled_through=last,
        recorded_through=step + same,
        # Under new settings each version is measured, so it must be served.
        repeated=range(oldest, highest + 1) if same == len(heads) else range(version, version + 1),
    )


def has_steps_left(config: TrainConfig, save_path: Path) -> bool:
    """Whether there is anything to train; else the log says how to train all the same.

    For trainers that were started by hand: one that only registered would drop the groups that wait.

    Raises:
        ConfigError: there is nothing, and it would have been under other settings.
    """
    newest = checkpoints.newest(save_path) if config.resume else None
    if newest is None:
        return True
    try:
        marker = CheckpointMarker.model_validate_json(read_whole(newest / CHECKPOINT_MARKER))
    except (OSError, ValidationError):
        return True  # loading it says what is wrong
    if marker.step < config.training_steps or marker.model_name != config.model_name:
        return True
    what = (
        f"nothing to do: {newest} has {marker.step} steps, and --training-steps is {config.training_steps}: raise it "
        f"to go on from there, or begin anew with --no-resume ({save_path.name} is then moved aside) or another "
        "--save-path"
    )
    changes = changed_settings(marker.settings, decisive_settings(config)) if marker.settings else {}
    if changes:
        raise ConfigError(f"{what}. Changed since then: {', '.join(changes.values())}")
    log.warning("%s", what)
    return False


def used_versions(save_path: Path) -> UsedVersions:
    """The versions of steps that were set aside.

    Raises:
        CheckpointError: the file is damaged.
    """
    path = save_path / USED_VERSIONS_FILE
    try:
        return UsedVersions.model_validate_json(read_whole(path))
    except FileNotFoundError:
        return UsedVersions()
    except (OSError, ValidationError) as error:
        raise CheckpointError(
            f"{path}: unreadable ({checkpoints.read_failure(error)}); "
            'write {"through": N} into it, with the highest policy version in metrics-set-aside.jsonl'
        ) from error


def _compare(where: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Log the changed settings, and refuse those that cannot change.

    Raises:
        CheckpointError: the state is of another model, optimizer or set of parameters.
    """
    changes = changed_settings(before, now) if before else {}
    if refused := refused_changes(changes):
        raise CheckpointError(
            f"{where}: these settings cannot change in a resumed run: {', '.join(refused)}; set them back, "
            "choose another --save-path, or start from the beginning with --no-resume"
        )
    if changes.pop("task", None) is not None:
        log.warning(
            "%s was trained on the task %s, and training goes on from there with %s: another --save-path, or "
            "--no-resume, begins anew",
            *(where, before.get("task"), now.get("task", "batches of the rollout API")),
        )
    if changes:
        log.warning("%s: settings have changed: %s", where, ", ".join(changes.values()))


def _oldest_of_this_way(versions: list[int], *, after: int) -> int:
    """The oldest version from which the last of `versions` follows: they are consecutive, unless some were renumbered.

    Args:
        after: the highest version that was set aside.
    """
    later = [two for one, two in pairwise(versions) if two > one + 1]
    return max([after + 1 if after else 0, *later[-1:]])


def _renumbered(heads: list[JournalHead], version: int, settings: Mapping[str, Any]) -> list[JournalHead]:
    return [
        head.model_copy(update={"policy_version": version + number, "settings": dict(settings)})
        for number, head in enumerate(heads)
    ]
