"""The lives of a run folder: what moves aside before a run that is over is started again in its folder.

Each launch of a folder is a life. Its plan, settings, state, keepers and crash reports belong to it alone and move to
`lives/<n>` before the next one begins, so that a supervisor finds the folder of a new run. Logs, timeline, metrics,
rollouts, checkpoints, the store of the rollout API and the token go on. A move that is interrupted leaves a folder that
can be resumed: what is still there moves with the next one.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

from pydantic import ValidationError

from grpo_engine.bridges.memory.shared_names import stem_of
from grpo_engine.errors import CheckpointError
from grpo_engine.wire.checkpoints import CheckpointMarker, JournalHead, UsedVersions, read_journal_head
from grpo_engine.wire.codec import first_fault, write_atomically, write_json_atomically
from grpo_engine.wire.run_folder import (
    ADDRESS_FILE,
    BRIDGE_FILE,
    CHECKPOINT_MARKER,
    CHECKPOINTS,
    CHECKPOINTS_LOCK,
    HANDOVER_CURRENT,
    HANDOVER_FOLDER,
    JOURNAL,
    KEEPERS,
    LIVES,
    LOCK_FILE,
    METRICS_FILE,
    PLAN_FILE,
    POLICIES,
    RESOLVED_FILE,
    ROLLOUT_STORE,
    ROLLOUTS_FILE,
    SET_ASIDE,
    SETTINGS_FILE,
    STATE_FILE,
    SUPERVISOR_LOG,
    TIMELINE_FILE,
    TOKEN_FILE,
    TURN_LOCK,
    USED_VERSIONS_FILE,
    checkpoint_folder,
    checkpoint_steps,
    journal_file,
    journal_steps,
    restarts_file,
)
from grpo_tui.client.local import StartRefused
from grpo_tui.run_files.metrics import newest_lines
from grpo_tui.run_files.whole_file import read_whole

_OF_POLICY = (
    *(f"{name}/*" for name in (CHECKPOINTS, HANDOVER_FOLDER)),
    *(f"{CHECKPOINTS}/{name}/*" for name in (JOURNAL, SET_ASIDE)),
)
_WRITTEN = (
    "*",
    *(f"{name}/*" for name in (KEEPERS, LIVES)),
    *_OF_POLICY,
    f"{POLICIES}/*",
    *(f"{POLICIES}/*/{place}" for place in ("*", *_OF_POLICY)),
)
"""Where a run and its commands write, below its folder."""
_FILES = frozenset(
    {
        *(LOCK_FILE, ADDRESS_FILE, TOKEN_FILE, STATE_FILE, PLAN_FILE, RESOLVED_FILE, SETTINGS_FILE, SUPERVISOR_LOG),
        *(TIMELINE_FILE, METRICS_FILE, ROLLOUTS_FILE, ROLLOUT_STORE, BRIDGE_FILE),
    }
)
_LOCKS_OF_SERVICES = frozenset({TURN_LOCK, CHECKPOINTS_LOCK})
MAX_DEPTH = 64
"""Of folders below that of a run: with trackers' caches they have about ten."""


def refuse_links(run_folder: Path) -> None:
    """Refuse a folder in which a link stands where a run that goes on writes: it would write elsewhere.

    Links that stay within the folder, those that trackers make in folders of their own, and the trainer's own link to
    the newest checkpoint that it handed over are none of these.

    Raises:
        StartRefused: there is such a link; nothing was changed.
    """
    inside = os.path.realpath(run_folder)
    of_policies = (run_folder, *run_folder.glob(f"{POLICIES}/*"))
    handed_over = {folder / HANDOVER_FOLDER / HANDOVER_CURRENT for folder in of_policies}
    for link in (path for places in _WRITTEN for path in run_folder.glob(places) if path.is_symlink()):
        target = Path(os.path.realpath(link))
        is_handed_over = link in handed_over and target.parent.name.startswith(stem_of(run_folder.name))
        if not target.is_relative_to(inside) and not is_handed_over:
            raise StartRefused(
                f"{link} is a link to {target}, outside of the run, and a run that goes on would write there: put a "
                "file or folder in its place (checkpoints elsewhere: --set services.trainer.save_path=…)"
            )


def refuse_no_files(run_folder: Path) -> None:
    """Refuse a folder in which something else stands in place of a file that a run that goes on reads or writes.

    Raises:
        StartRefused: there is a pipe or a device, or a folder in place of a file; nothing was changed.
    """
    for entry in _entries_below(run_folder):
        is_in_place_of_file = entry.is_dir(follow_symlinks=False) and _is_file_of_run(Path(entry.path), run_folder)
        if is_in_place_of_file or _is_pipe_or_device(entry):
            raise StartRefused(f"{entry.path} is no regular file, and a run that goes on would use it: remove it")


def _entries_below(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Everything below a folder; no link is followed. Its kind is known without a call for each entry.

    Raises:
        StartRefused: it is nested deeper than any run: Python's functions that copy and remove call themselves for
            each level.
    """
    pending = [(str(folder), 1)]
    while pending:
        path, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise StartRefused(f"{folder}: folders are nested deeper than {MAX_DEPTH} in it, as in no run: remove them")
        with suppress(FileNotFoundError), os.scandir(path) as entries:  # removed meanwhile
            for entry in entries:
                yield entry
                if entry.is_dir(follow_symlinks=False):
                    pending.append((entry.path, depth + 1))


def _is_file_of_run(path: Path, run_folder: Path) -> bool:
    is_of_run = path.parent == run_folder or path.parent.parent == run_folder / POLICIES
    return is_of_run and (path.name in _FILES or path.suffix == ".log")


def _is_pipe_or_device(entry: os.DirEntry[str]) -> bool:
    if entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False) or entry.is_symlink():
        return False
    try:
        return not stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode)
    except FileNotFoundError:  # removed meanwhile
        return False


def close_to_others(run_folder: Path) -> None:
    """Take from other users what the modes of a folder from elsewhere allow them; no link is followed.

    A lock file that is another user's, or that others could open and so hold, is removed: `has_daemon` ignores that of
    the supervisor, and the others would keep a trainer from starting, or from its first step. Other files of another
    user stay as they are.
    """
    run_folder.chmod(0o700)  # first: from here on others can change only what they have open already
    with suppress(FileNotFoundError):
        if not _is_closed((run_folder / LOCK_FILE).lstat()):
            (run_folder / LOCK_FILE).unlink()
    for _, folders, files, descriptor in os.fwalk(run_folder):
        for name in (*folders, *files):
            status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
            if name in _LOCKS_OF_SERVICES and stat.S_ISREG(status.st_mode) and not _is_closed(status):
                os.unlink(name, dir_fd=descriptor)
                continue
            is_ours = status.st_uid == os.getuid() and not stat.S_ISLNK(status.st_mode)
            if is_ours and not _is_closed(status):
                os.chmod(name, stat.S_IMODE(status.st_mode) & ~0o077, dir_fd=descriptor)


def _is_closed(status: os.stat_result) -> bool:
    return status.st_uid == os.getuid() and not status.st_mode & 0o077


def new_life(run_folder: Path) -> Path:
    """Make the folder for the life that is over, with copies of its plan and settings."""
    names = [path.name for path in (run_folder / LIVES).glob("*")]
    numbers = [int(name) for name in names if name.isascii() and name.isdecimal()]
    life = run_folder / LIVES / str(max(numbers, default=0) + 1)
    life.mkdir(mode=0o700, parents=True)
    for name in (SETTINGS_FILE, RESOLVED_FILE, PLAN_FILE):
        if (run_folder / name).exists():
            shutil.copy2(run_folder / name, life / name)
            (life / name).chmod(0o600)
    return life


def end_life(run_folder: Path, life: Path) -> None:
    """Move the state of the life that is over to its folder; `state.json` last: with it the run counts as over."""
    for path in run_folder.glob(f"{POLICIES}/*/{BRIDGE_FILE}"):
        of_policy = life / path.relative_to(run_folder)
        of_policy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.rename(of_policy)
    for path in _of_one_life(run_folder):
        if path.exists():
            path.rename(life / path.name)


def _of_one_life(run_folder: Path) -> Iterator[Path]:
    yield run_folder / KEEPERS
    yield from run_folder.glob("crash-*.txt")
    yield from run_folder.glob(restarts_file(run_folder, "*").name)
    yield run_folder / BRIDGE_FILE
    yield run_folder / STATE_FILE


def read_marker(folder: Path) -> CheckpointMarker:
    """What a checkpoint says about itself.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    try:
        return CheckpointMarker.model_validate_json(read_whole(folder / CHECKPOINT_MARKER))
    except OSError as error:
        raise CheckpointError(f"{folder}: no complete checkpoint: {error.strerror or error}") from None
    except ValidationError as error:
        raise CheckpointError(f"{folder / CHECKPOINT_MARKER}: damaged: {first_fault(error)}") from None


def go_back(save_path: Path, step: int, *, used: UsedVersions, life: Path) -> None:
    """Set the checkpoints after a step aside, and the journal; nothing is deleted.

    The trainer sets the records of later steps aside when it starts. It takes version numbers that no weights of those
    steps had (`used_versions`), which are noted here first.
    """
    write_json_atomically(save_path / USED_VERSIONS_FILE, used)
    aside = save_path / SET_ASIDE / life.name
    others = (aside.with_name(f"{life.name}.{number}") for number in count(2))  # runs may share a save_path
    while aside.exists():
        aside = next(others)
    aside.mkdir(parents=True)
    if (save_path / JOURNAL).exists():
        (save_path / JOURNAL).rename(aside / JOURNAL)
    for later in checkpoint_steps(save_path):
        if later > step:
            folder = checkpoint_folder(save_path, later)
            folder.rename(aside / folder.name)


def copy_checkpoint(checkpoint: Path, save_path: Path) -> None:
    """Copy a checkpoint to another run by hard links where the file system allows: its files are never changed.

    A copy that fails or is interrupted leaves no checkpoint.

    Raises:
        CheckpointError: it was removed meanwhile, the disk is full, or there is a link in it, whose target may be any
            file or folder of ours.
    """
    what_of_link = "is a link, and its target would be copied to the branch: put a copy in its place"
    if checkpoint.is_symlink():
        raise CheckpointError(f"{checkpoint} {what_of_link}")
    for entry in _entries_below(checkpoint):
        if entry.is_symlink():
            raise CheckpointError(f"{entry.path} {what_of_link}")
        if _is_pipe_or_device(entry):
            raise CheckpointError(f"{entry.path} is no regular file, and a trainer would wait for it: remove it")
    partial = save_path / f".{checkpoint.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)  # of a command that was killed
    try:
        shutil.copytree(checkpoint, partial, copy_function=_link_or_copy)
        partial.rename(save_path / checkpoint.name)
    except OSError as error:
        raise CheckpointError(f"{checkpoint}: cannot be copied to {save_path}: {error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)


def copy_item_state(source: Path, target: Path) -> None:
    """Copy an environment's place in its items to another run, which others can read no more than the rest of it.

    Raises:
        StartRefused: it cannot be read, or is a link, which could name any file of ours.
    """
    if source.is_symlink():
        raise StartRefused(f"{source} is a link, and its target would be copied to the branch: put a file in its place")
    try:
        write_atomically(target, read_whole(source), mode=0o600)
    except OSError as error:
        raise StartRefused(f"{source}: cannot be copied to {target}: {error.strerror or error}") from None


def set_store_aside(store: Path, life: Path) -> None:
    """Move the store of the rollout API to the life that is over: its groups are of versions that were set aside."""
    for path in (store, *(store.with_name(f"{store.name}{ending}") for ending in ("-wal", "-shm"))):
        if path.exists():
            shutil.move(path, life / path.name)


def used_versions(run_folder: Path, save_path: Path) -> UsedVersions:
    """The policy versions that weights of this run have had.

    Raises:
        CheckpointError: a checkpoint, the journal or the note of an earlier life is damaged.
    """
    before = _noted_versions(save_path / USED_VERSIONS_FILE).through
    saved = [read_marker(checkpoint_folder(save_path, step)).policy_version for step in checkpoint_steps(save_path)]
    recorded = [line.policy_version for line in newest_lines(run_folder)]
    # A step that was begun may have published its weights, under the number after that of its head.
    begun = [_read_head(journal_file(save_path, step)).policy_version + 1 for step in journal_steps(save_path)]
    return UsedVersions(through=max((before, *saved, *recorded, *begun)))


def _noted_versions(path: Path) -> UsedVersions:
    try:
        return UsedVersions.model_validate_json(read_whole(path))
    except FileNotFoundError:
        return UsedVersions()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except ValidationError as error:
        raise CheckpointError(
            f'{path}: damaged: {first_fault(error)}; write {{"through": N}} into it, with the highest policy '
            "version in metrics-set-aside.jsonl"
        ) from None


def _read_head(path: Path) -> JournalHead:
    try:
        return read_journal_head(path)
    except (OSError, ValidationError) as error:
        why = first_fault(error) if isinstance(error, ValidationError) else error.strerror
        raise CheckpointError(f"{path}: damaged ({why}): move it away") from None
