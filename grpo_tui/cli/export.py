"""`grpo-tui export`: a checkpoint of a run as a folder that other programs load. The engine writes it, in a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer

from grpo_engine.errors import ConfigError, GrpoError, first_of
from grpo_engine.export.config import ExportConfig
from grpo_engine.flags import to_flags
from grpo_engine.python_command import module_command
from grpo_engine.wire.checkpoints import ADAPTER_CONFIG, files_of, open_regular
from grpo_engine.wire.metrics import MetricsLine
from grpo_engine.wire.run_folder import CHECKPOINTS, checkpoint_folder, checkpoint_steps
from grpo_tui.cli.arguments import PolicyOption, folder_of_policy, run_to_read
from grpo_tui.cli.printing import write_line
from grpo_tui.client.api import Run
from grpo_tui.exit_codes import ExitCode
from grpo_tui.profile.plan_file import Plan
from grpo_tui.run_files.resolved import read_resolved
from grpo_tui.services.base import Launch
from grpo_tui.supervisor.report.machine_facts import installed_versions
from grpo_tui.view.metrics.other_runs import read_lineage, read_parent
from grpo_tui.view.model_card import CardFacts, model_card
from grpo_tui.view.settings import services_of

CHAT_TEMPLATE = "chat_template.jinja"
"""File of a tokenizer that has one, beside its others."""
MODEL_FOLDERS = frozenset({"CUDA_VISIBLE_DEVICES", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE"})
"""Variables of a trainer that an export takes over."""


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command("export")(export_command)


def export_command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run id, its beginning or its last part.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new or empty folder.")],
    step: Annotated[int | None, typer.Option("--step", min=0, help="Of the checkpoint; default: the newest.")] = None,
    merge_lora: Annotated[
        bool, typer.Option("--merge-lora", help="A whole model instead of the adapter, for runs with LoRA.")
    ] = False,
    device: Annotated[
        str, typer.Option("--device", metavar="cpu|cuda", help="Where it is merged and checked.")
    ] = "cpu",
    policy: PolicyOption = None,
) -> None:
    """Write a checkpoint as a Hugging Face folder, with a model card. Works for live runs too.

    The folder has weights, tokenizer, chat template, generation config and README.md; it is loaded and sampled from
    once before it gets its name. Prints the folder.
    """
    found = run_to_read(run)
    of_policy = folder_of_policy(found, policy)
    resolved = _of_policy(_resolved(found), policy)
    launch = _trainer(found, resolved)
    save_path = _save_path(of_policy, launch, resolved)
    with tempfile.TemporaryDirectory(prefix="grpo-export-") as temporary, ExitStack() as opened:
        of_step = _step(found, save_path, step)
        checkpoint = Path(temporary) / f"step_{of_step}"
        files = _pin(checkpoint_folder(save_path, of_step), checkpoint, opened)
        facts = CardFacts(
            name=folder.absolute().name,
            run=_origin(found),
            resolved=resolved,
            lines=[line for line in _lines(found, of_policy) if line.step <= of_step],
            step=of_step,
            is_adapter=(checkpoint / ADAPTER_CONFIG).exists() and not merge_lora,
            has_chat_template=(checkpoint / CHAT_TEMPLATE).exists(),
            versions=installed_versions(),
        )
        card = Path(temporary) / "README.md"
        card.write_text(_card(found, facts), encoding="utf-8")
        config = ExportConfig(
            checkpoint=checkpoint, folder=folder.absolute(), merge_lora=merge_lora, card=card, device=device
        )
        code = _run_engine(config, launch, temporary, files)
    if code:
        raise typer.Exit(code)
    write_line(folder.absolute())


def _of_policy(resolved: dict[str, object], policy: str | None) -> dict[str, object]:
    """The settings without trainers and servers of other policies."""
    services = services_of(resolved)
    kept = {
        name: each for name, each in services.items() if each.get("policy") == policy or "environment" in each["kind"]
    }
    return {**resolved, "services": kept} if services else resolved


def _trainer(run: Run, resolved: dict[str, object]) -> Launch:
    """The service that writes checkpoints.

    Raises:
        ConfigError: the run has none of that kind.
    """
    plan = Plan.of(run.folder)
    trainers = [launch for launch in plan.launches if launch.kind == "trainer"]
    of_policy = services_of(resolved)
    for launch in trainers:
        if launch.name in of_policy or len(trainers) == 1:
            return launch
    raise ConfigError(
        f"{run.id}: no service of kind trainer, so it is not known where checkpoints are: export one by hand with "
        "`grpo-engine export --checkpoint FOLDER`, or use what its own trainer saved"
    )


def _resolved(run: Run) -> dict[str, object]:
    try:
        return read_resolved(run.folder)
    except ValueError as error:
        write_line(f"{run.id}: {error}; the model card has no settings", to_stderr=True)
        return {}


def _card(run: Run, facts: CardFacts) -> str:
    try:
        return model_card(facts)
    except (LookupError, ValueError, TypeError, AttributeError, OverflowError) as error:  # no profile has such settings
        write_line(f"{run.id}: its settings are damaged: {error!r}; the model card has none", to_stderr=True)
        return model_card(replace(facts, resolved={}))


def _origin(run: Run) -> str:
    """The run, and for a branch where it comes from."""
    parent = read_parent(run.folder)
    return run.id if parent is None else f"{run.id}, a branch of {parent.run} from step {parent.step} on"


def _lines(run: Run, folder: Path) -> Sequence[MetricsLine]:
    """The steps that made the model: of a branch, those of its parent too."""
    try:
        return read_lineage(folder).lines
    except OSError as error:
        write_line(f"{run.id}: no metrics ({error.strerror}); the model card has no curve", to_stderr=True)
        return ()


def _save_path(folder: Path, launch: Launch, resolved: dict[str, object]) -> Path:
    configured = services_of(resolved).get(launch.name, {}).get("save_path")
    return launch.cwd / configured if configured else folder / CHECKPOINTS


def _step(run: Run, save_path: Path, step: int | None) -> int:
    """The step whose checkpoint is exported.

    Raises:
        GrpoError: there is none, or none of this step.
    """
    steps = checkpoint_steps(save_path)
    if not steps:
        raise GrpoError(
            f"{run.id}: no checkpoint in {save_path} yet; the trainer saves one every checkpoint_interval steps"
        )
    if step is not None and step not in steps:
        known = first_of(map(str, reversed(steps)))
        raise ConfigError(f"--step {step}: {run.id} has no checkpoint of that step; there are {known}")
    return steps[-1] if step is None else step


def _pin(checkpoint: Path, links: Path, opened: ExitStack) -> list[int]:
    """Open the files of a checkpoint, which the trainer may remove, and link to the descriptors, which are returned.

    Raises:
        GrpoError: it was removed already, belongs to another user, or has a link or a pipe.
    """
    descriptors: list[int] = []
    try:
        for name, path in files_of(checkpoint).items():
            descriptors.append(opened.enter_context(open_regular(path)).fileno())
            (links / name).parent.mkdir(parents=True, exist_ok=True)
            (links / name).symlink_to(f"/proc/self/fd/{descriptors[-1]}")
    except FileNotFoundError:
        raise GrpoError(f"{checkpoint}: was removed this moment (keep_checkpoints): run the command again") from None
    except OSError as error:
        raise GrpoError(f"{error.filename}: cannot be read: {error.strerror}; only its owner exports a run") from None
    return descriptors


def _run_engine(config: ExportConfig, launch: Launch, temporary: str, files: list[int]) -> int:
    """Run `grpo-engine export` where the trainer ran; returns the exit code.

    Args:
        temporary: takes what libraries leave in a temporary folder.
        files: descriptors that it inherits.
    """
    argv = module_command("grpo_engine", "export", *to_flags(config))
    environment = {**os.environ, **_harmless(launch.env), "TMPDIR": temporary}
    before = signal.signal(signal.SIGTERM, _interrupt)
    engine = subprocess.Popen(
        argv, cwd=launch.cwd, env=environment, stdin=subprocess.DEVNULL, process_group=0, pass_fds=files
    )
    try:
        code = engine.wait()
    except BaseException:  # Ctrl-C, which the engine does not get, being of another process group
        engine.terminate()
        engine.wait()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    if code < 0:
        name = signal.Signals(-code).name
        raise GrpoError(f"the export was killed by {name}: it needs main memory for the model; nothing was exported")
    return code


def _harmless(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of a trainer that only say where models are.

    The run folder may be somebody else's work: another variable (PYTHONPATH, LD_PRELOAD, HF_ENDPOINT), like a package
    in the working directory, would have the export run foreign code or send it a token.
    """
    return {name: environment[name] for name in MODEL_FOLDERS & environment.keys()}


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(ExitCode.INTERRUPTED)
