"""Resume a run that is over in its own folder, or begin a new run at one of its checkpoints.

The settings are those with which the run was started, not those of a profile that was edited since; overrides come on
top. What can be refused is refused here, before anything is moved or started.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_engine.config import MAX_FILE_BYTES, RawTable, parsed_table
from grpo_engine.errors import ConfigError, PeerError
from grpo_engine.wire.access_token import write_token
from grpo_engine.wire.checkpoints import ParentRun
from grpo_engine.wire.codec import write_json_atomically
from grpo_engine.wire.run_folder import (
    CHECKPOINTS,
    LIVES,
    PARENT_FILE,
    ROLLOUT_STORE,
    SETTINGS_FILE,
    checkpoint_folder,
    checkpoint_step,
    checkpoint_steps,
    item_state_file,
    journal_steps,
    policy_folder,
)
from grpo_engine.wire.supervisor import RunState
from grpo_tui.client.launch import (
    OpenedRun,
    alone_on_host,
    ensure_daemon,
    make_folder,
    own_token,
    run_files,
    starting,
    wait_if_ending,
    write_files,
)
from grpo_tui.client.lives import (
    close_to_others,
    copy_checkpoint,
    copy_item_state,
    end_life,
    go_back,
    new_life,
    refuse_links,
    refuse_no_files,
    set_store_aside,
    used_versions,
)
from grpo_tui.client.local import Run, StartRefused, find_run, look_at, recorded_processes, stored_status
from grpo_tui.client.new_daemon import NewDaemon
from grpo_tui.paths import LOGS, require_own, runtime_folder
from grpo_tui.run_files.whole_file import read_whole
from grpo_tui.services.base import PLACES

BEGINNING = frozenset({"resume", "fresh"})
"""Settings by which the trainer and the rollout API begin anew: they were for the first start."""
MAX_SETTINGS_BYTES = 4 * MAX_FILE_BYTES
"""A file of settings as JSON is longer than as TOML."""
QUEUE_HINT = "`grpo-tui ps` lists the starts that wait; try again when this one has begun"

if TYPE_CHECKING:
    from grpo_tui.profile.loaded import LoadedProfile
    from grpo_tui.services.trainer import Trainer


def resume_run(
    run_id: str,
    overrides: Sequence[str] = (),
    *,
    daemon: NewDaemon,
    steps: str | None = None,
    back_to: str | None = None,
    take_ports: bool = False,
    shares_gpus: bool = False,
    moves_ports: bool = False,
    logs: Path = LOGS,
) -> OpenedRun:
    """Start a run that is over again in its folder; a live one is joined where nothing is to change.

    Args:
        steps: steps of the whole run, or `+N` for so many more than are done.
        back_to: the checkpoint (`step_50`) to go back to; what was trained after it is set aside.
        shares_gpus: whether to start also where other live runs use its GPUs.
        moves_ports: whether ports of it that are in use are replaced by free ones.

    Raises:
        NoSuchRun: no run, or more than one, has this id.
        ConfigError: a setting is wrong or cannot change, or there is no such checkpoint; nothing was changed.
        StartRefused: the run is live, or one of its id in another folder, another live run uses its ports, GPUs,
            checkpoints or store, another process listens on a port, or a link in its folder leads out of it.
        StartFailed: the supervisor did not start.
    """
    from grpo_tui.client.gpu_leases import crowded_gpus, require_gpus
    from grpo_tui.client.second_run import (
        chosen_ports,
        free_ports,
        live_runs_anywhere,
        require_free_ports,
        require_own_files,
        require_own_id,
        require_own_ports,
    )

    run = find_run(run_id, logs, also_ended=True)
    require_own(run.folder)
    from grpo_tui.client.start_queue import refuse_before, start_of, waiting_starts
    from grpo_tui.profile.plan_file import Plan

    runtime_folder()
    with starting(logs), ExitStack() as until_started:
        run = look_at(run.folder)
        require_own_id(run)
        if run.is_live and not wait_if_ending(run):
            if overrides or steps or back_to:
                raise StartRefused(
                    f"run {run.id} is live and its settings cannot change: `grpo-tui down {run.id}` ends it first"
                )
            ensure_daemon(run.folder)
            return OpenedRun(folder=run.folder, is_new=False)
        refuse_links(run.folder)
        refuse_no_files(run.folder)
        until_started.enter_context(alone_on_host(daemon))
        before = _load(run.folder)
        moves = free_ports(before, logs) if moves_ports else {}
        chosen = chosen_ports(before, moves, logs)
        loaded = _load(run.folder, overrides, moved_ports=moves, chosen_ports=chosen)
        step = None if back_to is None else _checkpoint(run.id, before, _save_path(run.folder, loaded), back_to)
        if steps is not None:
            more = _steps_overrides(run, loaded, steps, step)
            loaded = _load(run.folder, [*overrides, *more], moved_ports=moves, chosen_ports=chosen)
        _refuse_changes(run.id, before, loaded)
        note = _refuse_or_say(run, before, loaded, step)
        shares = shares_gpus or loaded.profile.share_gpus
        refuse_before(start_of(loaded, moves=moves_ports, shares=shares), waiting_starts(), hint=QUEUE_HINT)
        require_own_files(loaded, logs)
        require_own_ports(loaded, logs, is_resumed=True)
        require_free_ports(loaded, take_ports=take_ports, is_resumed=True)
        crowds = crowded_gpus(loaded, live_runs_anywhere(logs), logs)
        require_gpus(crowds, shares=shares, is_resumed=True)
        tags = Plan.of(run.folder).tags
        files, token = run_files(loaded, run.folder, take_ports=take_ports, tags=tags), own_token(loaded)
        used = None if step is None else used_versions(run.folder, _save_path(run.folder, loaded))
        close_to_others(run.folder)
        refuse_links(run.folder)  # again: until now others could put one into a subfolder that they may write to
        refuse_no_files(run.folder)
        _clear(run)
        life = new_life(run.folder)
        if step is not None and used is not None:
            set_store_aside(_store(run.folder, loaded), life)  # first: without a store the run still goes on as it was
            go_back(_save_path(run.folder, loaded), step, used=used, life=life)
        write_token(run.folder, token)  # a new one, which nobody who had the folder before knows
        write_files(run.folder, files)
        end_life(run.folder, life)
        daemon.supervise(run.folder)
    return OpenedRun(
        folder=run.folder,
        is_new=True,
        is_resumed=True,
        note="\n".join([*([note] if note else []), *(crowd.words for crowd in crowds)]) or None,
    )


def branch_run(
    run_id: str,
    overrides: Sequence[str] = (),
    *,
    daemon: NewDaemon,
    back_to: str,
    steps: str | None = None,
    take_ports: bool = False,
    logs: Path = LOGS,
) -> OpenedRun:
    """Start a new run that goes on from a checkpoint of another, which may be live.

    Args:
        back_to: the checkpoint (`step_50`) to go on from.
        steps: the step to train to, or `+N` for so many steps after the checkpoint.

    Raises:
        NoSuchRun, ConfigError, StartFailed: as `resume_run`.
        CheckpointError: the checkpoint cannot be copied; nothing was started.
    """
    from grpo_tui.client.gpu_leases import crowded_gpus, require_gpus
    from grpo_tui.client.second_run import (
        chosen_ports,
        free_ports,
        live_runs_anywhere,
        note_on_ports,
        require_own_files,
    )
    from grpo_tui.client.start_queue import refuse_before, start_of, waiting_starts

    parent = find_run(run_id, logs, also_ended=True)
    require_own(parent.folder)
    runtime_folder()
    before = _load(parent.folder)
    loaded = _load(parent.folder, overrides, in_own_places=True)
    _refuse_changes(parent.id, before, loaded)
    saved = _save_path(parent.folder, before)
    step = _checkpoint(parent.id, before, saved, back_to)
    if steps is not None:
        overrides = [*overrides, *_steps_overrides(parent, loaded, steps, step)]
        loaded = _load(parent.folder, overrides, in_own_places=True)
    (trainer,) = _trainers(loaded).values()
    if trainer.training_steps <= step:
        raise ConfigError(
            f"step_{step} is the last of {trainer.training_steps} steps: give the branch more with --steps +N "
            f"(services.{next(iter(_trainers(loaded)))}.training_steps)"
        )

    def fill(folder: Path) -> None:
        save_path = _save_path(folder, loaded)
        if checkpoint_steps(save_path):
            raise ConfigError(f"{save_path} has checkpoints of another run: choose another save_path")
        for name, state in _item_states(parent.folder, before).items():
            if state.exists():  # else the environment would draw the first items again
                copy_item_state(state, item_state_file(folder, name))
        write_json_atomically(folder / PARENT_FILE, ParentRun(run=parent.id, step=step), mode=0o600)
        copy_checkpoint(checkpoint_folder(saved, step), save_path)  # last: it may be outside the folder of the run

    with starting(logs), alone_on_host(daemon):
        refuse_before(start_of(loaded, moves=True, shares=True), waiting_starts(), hint=QUEUE_HINT)
        moves = free_ports(loaded, logs)
        chosen = chosen_ports(loaded, moves, logs)
        loaded = _load(parent.folder, overrides, in_own_places=True, moved_ports=moves, chosen_ports=chosen)
        require_own_files(loaded, logs)
        crowds = crowded_gpus(loaded, live_runs_anywhere(logs), logs)
        require_gpus(crowds, shares=True)
        notes = [*(crowd.words for crowd in crowds), *note_on_ports(moves)]
        folder = make_folder(loaded, logs, take_ports=take_ports, fill=fill)
        daemon.supervise(folder)
    note = f"goes on from step_{step} of {parent.id}, to step {trainer.training_steps}"
    return OpenedRun(folder=folder, is_new=True, note="\n".join([note, *notes]))


def _load(
    folder: Path,
    overrides: Sequence[str] = (),
    *,
    in_own_places: bool = False,
    moved_ports: Mapping[int, int] | None = None,
    chosen_ports: Mapping[str, int] | None = None,
) -> LoadedProfile:
    """The settings of a run as they were written, with overrides on top.

    Args:
        in_own_places: for another run: without the files that this one was told to write.
        moved_ports: for another run: ports of this one with others for it.
        chosen_ports: where a service has 0; unset: those that the run had.

    Raises:
        ConfigError: the settings are missing or damaged, or an override is wrong.
    """
    from grpo_tui.profile.loading import load_table
    from grpo_tui.profile.plan_file import Plan

    plan = Plan.of(folder)
    path = folder / SETTINGS_FILE
    try:
        table = parsed_table(read_whole(path, max_bytes=MAX_SETTINGS_BYTES), path)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror}; a run of an earlier version has none: start a new one with "
            "`grpo-tui up` and services.trainer.save_path set to the checkpoints of this one"
        ) from None
    except ConfigError as error:
        raise ConfigError(f"{error}; {folder / LIVES} may have an earlier one") from None
    if not isinstance(table.get("services"), dict):
        raise ConfigError(f"{path}: damaged: it has no table of services; {folder / LIVES} may have an earlier one")
    table = _without(BEGINNING | PLACES if in_own_places else BEGINNING, table)
    file = plan.profile_file or plan.profile_folder / f"{plan.profile_name}.toml"
    chosen = plan.chosen_ports if chosen_ports is None else chosen_ports
    loaded = load_table(table, file, overrides, moved_ports=moved_ports, chosen_ports=chosen)
    before = {port: loaded.moved_ports.get(moved, moved) for port, moved in plan.moved_ports.items()}
    return replace(loaded, moved_ports={**loaded.moved_ports, **before})


def _without(keys: frozenset[str], table: RawTable) -> RawTable:
    """Settings without these keys of services and of the bridge."""

    def stripped(value: Any) -> Any:
        return {key: each for key, each in value.items() if key not in keys} if isinstance(value, dict) else value

    bridge = {"bridge": stripped(table["bridge"])} if "bridge" in table else {}
    return {**table, **bridge, "services": {name: stripped(each) for name, each in table["services"].items()}}


def _trainers(loaded: LoadedProfile) -> dict[str, Trainer]:
    from grpo_tui.services.trainer import Trainer

    return {name: each for name, each in loaded.profile.services.items() if isinstance(each, Trainer)}


def _only_trainer(loaded: LoadedProfile, option: str) -> tuple[str, Trainer]:
    trainers = _trainers(loaded)
    if len(trainers) != 1:
        raise ConfigError(f"{option} needs one service of kind trainer; {loaded.name} has {len(trainers)}")
    return next(iter(trainers.items()))


def _steps_overrides(run: Run, loaded: LoadedProfile, steps: str, step: int | None) -> list[str]:
    """The number of steps of every trainer: the same, or so many more than each has done."""
    digits = steps.removeprefix("+")
    if not digits.isdecimal() or not int(digits):
        raise ConfigError(f"--steps {steps}: write a number of steps, or +N for so many more")
    overrides = []
    for name, trainer in _trainers(loaded).items():
        saved, journal = _done(_checkpoints_of(run.folder, trainer), step)
        total = int(digits) + (max([saved, *journal]) if steps.startswith("+") else 0)
        overrides.append(f"services.{name}.training_steps={total}")
    if not overrides:
        raise ConfigError(f"--steps needs a service of kind trainer; {loaded.name} has none")
    return overrides


def _checkpoints_of(run_folder: Path, trainer: Trainer) -> Path:
    return trainer.save_path or policy_folder(run_folder, trainer.policy) / CHECKPOINTS


def _done(save_path: Path, step: int | None) -> tuple[int, list[int]]:
    """The step of the checkpoint that training goes on from, and the steps after it that the journal has.

    Args:
        step: of the checkpoint that is gone back to; None: the newest.
    """
    if step is not None:
        return step, []
    saved = max(checkpoint_steps(save_path), default=0)
    return saved, [each for each in journal_steps(save_path) if each > saved]


def _save_path(folder: Path, loaded: LoadedProfile) -> Path:
    return _checkpoints_of(folder, _only_trainer(loaded, "--from")[1])


def _store(folder: Path, loaded: LoadedProfile) -> Path:
    from grpo_tui.services.rollout_api import RolloutApi

    stores = [each.store for each in loaded.profile.services.values() if isinstance(each, RolloutApi)]
    return next((store for store in stores if store is not None), folder / ROLLOUT_STORE)


def _item_states(folder: Path, loaded: LoadedProfile) -> dict[str, Path]:
    """Where each environment of a run, or the trainer in its place, keeps its place in the items."""
    from grpo_tui.services.environment import sampled_by

    sampled = {name: own[1] for name, each in loaded.profile.services.items() if (own := sampled_by(name, each))}
    return {name: getattr(each, "state_file", None) or item_state_file(folder, name) for name, each in sampled.items()}


def _checkpoint(run: str, before: LoadedProfile, save_path: Path, name: str) -> int:
    """The step of a checkpoint that is there.

    Args:
        before: the settings with which the run was trained.
    """
    step = int(name) if name.isdecimal() else checkpoint_step(Path(name))
    there = checkpoint_steps(save_path)
    if step not in there or step is None:
        names = ", ".join(f"step_{each}" for each in there) or "none"
        trainer = _only_trainer(before, "--from")[1]
        raise ConfigError(
            f"--from {name}: run {run} has no such checkpoint; there are: {names} (written every "
            f"{trainer.checkpoint_interval} steps, the newest {trainer.keep_checkpoints} kept: set checkpoint_interval "
            "and keep_checkpoints before the run for others)"
        )
    return step


def _refuse_changes(run: str, before: LoadedProfile, now: LoadedProfile) -> None:
    """Refuse settings with which the state of a trainer cannot be loaded."""
    from grpo_engine.train.resumable import changed_settings, decisive_settings, refused_changes

    trainers = _trainers(now)
    for name, trainer in _trainers(before).items():
        if name not in trainers:
            continue
        changes = changed_settings(decisive_settings(trainer), decisive_settings(trainers[name]))
        if refused := refused_changes(changes):
            raise ConfigError(
                f"services.{name}: cannot change in a run that goes on: {', '.join(refused)}; start a new run with "
                f"`grpo-tui up`, or leave it as it was in {run}"
            )


def _refuse_or_say(run: Run, before: LoadedProfile, loaded: LoadedProfile, step: int | None) -> str | None:
    """Refuse a run with nothing left to do; else say where its trainer goes on."""
    trainers = _trainers(loaded)
    if len(trainers) != 1:
        return None
    ((name, trainer),) = trainers.items()
    saved, journal = _done(_checkpoints_of(run.folder, trainer), step)
    if saved >= trainer.training_steps or (_has_finished(run) and not saved and not journal):
        raise ConfigError(
            f"run {run.id} has done {saved} of {trainer.training_steps} steps: --steps +N adds some, "
            "--from step_N goes back to a checkpoint"
        )
    start = f"step_{saved}" if saved else "the untrained model"
    repeated = f", the batches of steps {journal[0]} to {journal[-1]} from the journal" if journal else ""
    num_before = _trainers(before)[name].training_steps
    is_rescheduled = trainer.lr_schedule != "constant" and trainer.training_steps != num_before
    schedule = (
        f"; lr_schedule {trainer.lr_schedule!r} over {trainer.training_steps} steps, not {num_before}, changes lr"
    )
    return f"goes on from {start}{repeated}, to step {trainer.training_steps}{schedule if is_rescheduled else ''}"


def _has_finished(run: Run) -> bool:
    try:
        return stored_status(run).state is RunState.FINISHED
    except PeerError:  # it has not started yet, or its state is damaged
        return False


def _clear(run: Run) -> None:
    """Remove what a run that was killed with its supervisor left: processes, shared memory, its temporary folder."""
    from grpo_tui.supervisor import teardown

    ledger = recorded_processes(run.folder)
    sweeping = teardown.sweep(run.id, None, ports=(), report=lambda _: None, ledger=ledger, run_folder=run.folder)
    asyncio.run(sweeping)
