"""Names of the files in a run folder and of checkpoints; each name stands here only.

Names and listings: what is in a file is said by the module that writes it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

PLAN_FILE = "plan.json"
"""The launch plan, written before the supervisor starts; a folder without one is no run folder."""
RESOLVED_FILE = "resolved.json"
"""The profile after overlays, written beside the plan; read by the screen."""
SETTINGS_FILE = "settings.json"
"""The profile and its overrides as they were written, from which the run is resumed and branched. Of a trainer that was
started by hand: all of its settings, which `--config` takes."""
LIVES = "lives"
"""A folder per earlier life of a run that was resumed: its plan, settings and state, keepers and crash reports."""
PARENT_FILE = "parent.json"
"""Of a run that branched off another: its `ParentRun`; written by the command, read by the screen."""
SWEEP_FILE = "sweep.json"
"""Of a run that is a point of a sweep: its `SweepMark`; written by the sweep, which finds its runs by it."""
SWEEPS = "sweeps"
"""In the folder of all runs: a folder for each sweep."""
POLICIES = "policies"
"""Of a run that trains several policies: a folder for each but the first, with its metrics, rollouts, store, bridge
file, hand-over folder and checkpoints by the names that they have here."""
STATE_FILE = "state.json"
"""The status document, and what a later supervisor must know; written by the supervisor."""
ADDRESS_FILE = "daemon.json"
"""Pid and socket of the supervisor; read by clients, and by a trainer that has its inference server restarted."""
BROKER_FILE = "broker.address"
"""Of a run on a cluster: path of the broker's socket; written by the broker."""
PLACES_FILE = "machines.json"
"""Of a run on a cluster: which service runs where; written by the broker, for the next one."""
MACHINE_ENDED = ".ended"
"""Ending of a note in the run folder, named by a machine's id in its cluster: no process of the run is left there;
written by its agent, removed by the broker."""
LOCK_FILE = "daemon.lock"
"""Locked by the supervisor while it lives."""
TOKEN_FILE = "access.token"
"""The token without which services refuse what would steer the run (`access_token`); readable by its owner only."""
START_LOCK_FILE = ".start.lock"
"""In the folder of all runs: locked while a run is started."""
SUPERVISOR_LOG = "supervisor.log"
TIMELINE_FILE = "events.jsonl"
"""State changes and usage samples; written by the supervisor, read by the screen."""
METRICS_FILE = "metrics.jsonl"
"""Measurements of every step; written by the trainer's recorder, or by the supervisor from a program's console."""
ROLLOUTS_FILE = "rollouts.jsonl"
"""Sampled groups; written by the trainer's recorder, read by the screen."""
ROLLOUT_STORE = "rollouts.sqlite"
"""The rollout API's store."""
BRIDGE_FILE = "vllm_bridge_config.json"
"""Where the weights of the inference server are mapped; the name that users of Atropos know."""
HANDOVER_FOLDER = "handover"
"""`current` in it is the newest checkpoint that the trainer handed to inference."""
HANDOVER_CURRENT, HANDOVER_NOTE, HANDOVER_SENDER = "current", "handover.json", "sender.json"
"""In the hand-over folder: a symlink to the newest checkpoint. In each checkpoint: its `HandoverNote`, written last."""
HANDOVER_IN_STEP, HANDOVER_PORTS = "in-step", "ports.json"
"""In the hand-over folder of a machine: a file that its parameter service makes once `current` is the newest version
of its source; and the ports of services that are placed there (`PlacedPorts`), which the broker of a cluster writes."""
TURN_LOCK = "turn.lock"
"""In the hand-over folder: locked by the trainer while it steps, and by a server that loads, where they take turns."""
CHECKPOINTS = "checkpoints"
"""Where the trainer saves checkpoints to resume from, unless a setting says otherwise."""
CHECKPOINTS_LOCK = f".{CHECKPOINTS}.lock"
"""Beside them: locked by the trainer that saves there."""
CHECKPOINT_MARKER = "checkpoint.json"
"""In a checkpoint: its `CheckpointMarker`, written last; a folder without one is incomplete."""
JOURNAL = "journal"
"""Among the checkpoints: the batches of the steps since the newest one."""
USED_VERSIONS_FILE = "used_versions.json"
"""Among the checkpoints: the highest policy version of steps that were set aside (`UsedVersions`)."""
SERVED_FILE = "served.json"
"""Among the checkpoints: the version that inference was sent last (`ServedNote`)."""
SET_ASIDE = "set-aside"
"""Among the checkpoints: those of steps that a run went back from, in a folder per life."""
KEEPERS = "keepers"
"""State files of keepers, one an attempt."""
_SPEC = ".spec.json"
_CHECKPOINT = re.compile(r"step_(\d+)")
_JOURNAL_FILE = re.compile(r"step_(\d+)\.jsonl")


def service_log(run_folder: Path, service: str) -> Path:
    """The log of a service."""
    return run_folder / f"{service}.log"


def policy_folder(run_folder: Path, policy: str | None) -> Path:
    """The folder of a policy's files; that of the run for the policy without a name."""
    return run_folder if policy is None else run_folder / POLICIES / policy


def restarts_file(run_folder: Path, service: str) -> Path:
    """Of the restarts in place of a service; written by its fork server or launcher, read by the supervisor."""
    return run_folder / f"{service}.restarts.json"


def speeds_file(run_folder: Path, service: str) -> Path:
    """How fast an inference server was (`ServerSpeeds`); written by the server, read by simulations."""
    return run_folder / f"{service}.speeds.json"


def item_state_file(run_folder: Path, service: str) -> Path:
    """An environment's place in its items, unless a setting says otherwise; written and read by the environment."""
    return run_folder / f"{service}.items.json"


def logged_services(run_folder: Path) -> list[str]:
    """Everything that has a log, by name; the supervisor and the hooks too."""
    return sorted(path.stem for path in run_folder.glob("*.log"))


def keeper_state_file(run_folder: Path, service: str, attempt: int) -> Path:
    """What the keeper of an attempt writes about it."""
    return run_folder / KEEPERS / f"{service}.{attempt}.json"


def keeper_spec_file(run_folder: Path, service: str, attempt: int) -> Path:
    """What the keeper of an attempt is given to start."""
    return run_folder / KEEPERS / f"{service}.{attempt}{_SPEC}"


def console_offset_file(run_folder: Path, service: str, attempt: int) -> Path:
    """Where in `METRICS_FILE` the lines of an attempt begin, for a service whose console is read."""
    return run_folder / KEEPERS / f"{service}.{attempt}.metrics"


def keeper_state_files(run_folder: Path) -> list[Path]:
    """The state files of all keepers of a run."""
    return [path for path in (run_folder / KEEPERS).glob("*.json") if not path.name.endswith(_SPEC)]


def last_attempt(run_folder: Path, service: str) -> int:
    """Number of the latest attempt that was started; 0 when there was none."""
    return _latest_number(run_folder, service, ".json")


def last_begun_attempt(run_folder: Path, service: str) -> int:
    """Number of the latest attempt for which a keeper was to be started, also where it was killed before it wrote."""
    return _latest_number(run_folder, service, _SPEC)


def _latest_number(run_folder: Path, service: str, ending: str) -> int:
    names = [path.name for path in (run_folder / KEEPERS).glob(f"*{ending}")]
    numbers = [name.removeprefix(f"{service}.").removesuffix(ending) for name in names]
    return max((int(number) for number in numbers if number.isascii() and number.isdecimal()), default=0)


def crash_report_file(run_folder: Path, service: str, attempt: int) -> Path:
    """The report on an attempt that failed."""
    return run_folder / f"crash-{service}-{attempt}.txt"


def crash_report_files(run_folder: Path, service: str) -> dict[int, Path]:
    """The reports on a service by attempt, the oldest first."""
    name = re.compile(rf"crash-{re.escape(service)}-(\d+)\.txt")
    paths = run_folder.iterdir() if run_folder.is_dir() else ()
    found = {int(match[1]): path for path in paths if (match := name.fullmatch(path.name))}
    return dict(sorted(found.items()))


def newest_crash_report(run_folder: Path, service: str) -> Path | None:
    """The report on the latest attempt of a service that failed; None when there is none."""
    return next(reversed(crash_report_files(run_folder, service).values()), None)


def checkpoint_folder(save_path: Path, step: int) -> Path:
    """The checkpoint after a step."""
    return save_path / f"step_{step}"


def checkpoint_step(folder: Path) -> int | None:
    """The step of a checkpoint, by the name of its folder; None where it is no checkpoint."""
    match = _CHECKPOINT.fullmatch(folder.name)
    return int(match[1]) if match else None


def checkpoint_steps(save_path: Path) -> list[int]:
    """Steps of the complete checkpoints, ascending."""
    if not save_path.is_dir():
        return []
    steps = ((checkpoint_step(folder), folder) for folder in save_path.iterdir())
    return sorted(step for step, folder in steps if step is not None and os.path.isfile(folder / CHECKPOINT_MARKER))


def journal_steps(save_path: Path) -> list[int]:
    """Steps whose batches are in the journal, ascending."""
    folder = save_path / JOURNAL
    files = folder.iterdir() if folder.is_dir() else ()
    return sorted(int(match[1]) for path in files if (match := _JOURNAL_FILE.fullmatch(path.name)))


def journal_file(save_path: Path, step: int) -> Path:
    """The batch of a step."""
    return save_path / JOURNAL / f"step_{step}.jsonl"
