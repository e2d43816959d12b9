"""`grpo-engine api | server | env | atropos-env | reference | train | launch | check | export`: services, and others.

Imports only the chosen command.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from gc import unfreeze  # `keep_imports_frozen` replaces it in the module
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from grpo_engine.compilers import CODE_CACHES, settle_assembler
from grpo_engine.config import Config, ConfigT
from grpo_engine.errors import BridgeError, GrpoError, ModelError
from grpo_engine.flags import flags_of, parse_flags
from grpo_engine.forking import keep_forkable
from grpo_engine.importing import collecting_nothing
from grpo_engine.other_names import COLOCATE
from grpo_engine.own_file import open_own_file
from grpo_engine.python_command import module_command
from grpo_engine.ranks.launching import launch_ranks, share_cores
from grpo_engine.ranks.place import rank_place
from grpo_engine.ranks.restarting import RankRestarts
from grpo_engine.streams import open_streams, outlive_readers, show_no_progress_bars
from grpo_engine.wire.environment_variables import RESTARTS_VARIABLE
from grpo_engine.wire.fork_server import RESTART_SIGNAL
from grpo_engine.wire.secrets import masked_text, with_secrets
from grpo_engine.wire.terminal_text import log_to_stderr, printable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpo_engine.colocate.config import TrainerConfig
    from grpo_engine.train.config import TrainConfig

log = logging.getLogger(__name__)

FINAL_ERROR = 2
"""For an error that a restart does not change: a wrong setting, as argparse, or code of the user that fails."""

COMPILE = frozenset({"server", "train", "launch", "check", "reference"})
"""Commands in which torch may compile code."""
USER_CODE = frozenset({"env", "atropos-env"})
"""Commands that run code of the user, whose child processes find modules as they always do."""
PRINT_RESULTS = frozenset({"check", "export"})
"""Commands whose stdout is what they are run for: one that cannot be written is their error."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one service until it exits; returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    open_streams()
    if not words or words[0] in {"-h", "--help"}:
        print(_usage())
        return 0 if words else FINAL_ERROR
    command = COMMANDS.get(words[0])
    if command is None:
        print(f"grpo-engine: {words[0]!r} is not one of {', '.join(COMMANDS)}", file=sys.stderr)
        return FINAL_ERROR
    if argv is None:  # else this process is not ours alone
        _close_to_others(words[0])
        outlive_readers(["stderr"] if words[0] in PRINT_RESULTS else ["stdout", "stderr"])
        show_no_progress_bars(os.environ)
    log_to_stderr()
    logging.getLogger("httpx").setLevel(logging.WARNING)  # one line per request adds nothing to the metrics
    logging.getLogger("huggingface_hub").propagate = False  # it prints its lines on its own
    try:
        code = _exit_code(words[0], partial(command, words[1:]))
        if argv is None and (command is _server or (code and command is _train)):
            _leave(code)
    finally:
        unfreeze()  # else Triton's bindings report all that was imported as leaks
    return code


def _exit_code(name: str, run: Callable[[], int]) -> int:
    """The exit code of a service, whose error is printed."""
    try:
        return run()
    except GrpoError as error:
        who = f"grpo-engine {name}: "  # messages about settings have the prefix already, on each line
        print(printable(masked_text(who + str(error).removeprefix(who)), keep="\n\t"), file=sys.stderr)
        return FINAL_ERROR if error.is_final else 1
    except KeyboardInterrupt:
        return 130


def _log_from(level: str) -> None:
    """Log lines of this level and above; of libraries none below info, which would be thousands."""
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.getLogger("grpo_engine").setLevel(number)
    logging.getLogger().setLevel(max(number, logging.INFO))


def _redirect_output(path: Path) -> None:
    """Append stdout and stderr of this process, and of those that it starts, to a file that only its owner can read.

    Raises:
        ConfigError: see `open_own_file`.
    """
    descriptor = open_own_file(path, f"--redirect-output {path}")
    if not os.path.sameopenfile(descriptor, sys.stderr.fileno()):  # the same where a rank inherits it
        print(f"stdout and stderr go to {path}", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(descriptor, stream.fileno())
    os.close(descriptor)


def _close_to_others(name: str) -> None:
    """Keep other users from the files that a command writes, and from writing code that it would load.

    Torch and vLLM start interpreters of their own (`-c`, `-m`), which look for modules in the working directory first.

    An export is meant to be passed on, and keeps the umask. Torch's own folder for compiled code is in /tmp, where any
    user can make it first: it is not used.
    """
    if name == "export":
        return
    os.umask(0o077)
    if name not in USER_CODE:
        os.environ["PYTHONSAFEPATH"] = "1"
    if name not in COMPILE:
        return
    for variable, kind in CODE_CACHES.items():
        if variable not in os.environ:
            os.environ[variable] = str(_compiled_code(kind))
    settle_assembler(os.environ)


def _compiled_code(kind: str) -> Path:
    """Where one kind is kept, as `settle_environment` of vLLM has it; of this process without a home of ours."""
    from grpo_engine.models.local import cache_folder

    with suppress(OSError, RuntimeError, ModelError):
        folder = cache_folder(os.environ) / kind
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    return Path(tempfile.mkdtemp(prefix=f"{kind}_"))


def _leave(code: int) -> NoReturn:
    """Exit a server, which has closed all that outlives it, or a failed trainer, without destructors of torch and vLLM.

    They take a second; after an error Triton's bindings report leaks there, in sixty lines, and NCCL waits for ranks
    that are gone.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _api(argv: Sequence[str]) -> int:
    """Collects scored groups from environments, hands batches to the trainer."""
    from grpo_engine.rollouts.config import ApiConfig

    config = _parsed(ApiConfig, argv, "api", _api)
    from grpo_engine.rollouts.main import run

    return run(config)


def _server(argv: Sequence[str]) -> int:
    """Samples completions with their log-probabilities, and takes new weights."""
    from grpo_engine.server.config import ServerConfig

    config = _parsed(ServerConfig, argv, "server", _server)
    _log_from(config.log_level)
    with collecting_nothing():
        from grpo_engine.server.main import run

    return run(config)


def _env(argv: Sequence[str]) -> int:
    """Turns the items of a task into scored groups."""
    from grpo_engine.environments.config import EnvironmentConfig

    config = _parsed(EnvironmentConfig, _without_serve(argv), "env", _env)
    _log_from(config.log_level)
    with collecting_nothing():
        from grpo_engine.environments.main import run

    return run(config)


def _atropos_env(argv: Sequence[str]) -> int:
    """Runs an environment of Atropos, and reports when it uses the wrong inference server."""
    from grpo_engine.environments.atropos.config import AtroposEnvConfig

    config = _parsed(AtroposEnvConfig, _without_serve(argv), "atropos-env", _atropos_env)
    from grpo_engine.environments.atropos.main import run

    return run(config)


def _reference(argv: Sequence[str]) -> int:
    """Holds the reference model, and answers its log-probabilities to the trainer."""
    from grpo_engine.reference.config import ReferenceConfig

    config = _parsed(ReferenceConfig, argv, "reference", _reference)
    _log_from(config.log_level)
    with collecting_nothing():
        from grpo_engine.reference.main import run

    return run(config)


def _parameters(argv: Sequence[str]) -> int:
    """Holds the newest weights in host memory, and gives them to inference servers one after another."""
    from grpo_engine.parameters.config import ParametersConfig

    config = _parsed(ParametersConfig, argv, "parameters", _parameters)
    _log_from(config.log_level)
    from grpo_engine.parameters.main import run

    return run(config)


def _without_serve(argv: Sequence[str]) -> Sequence[str]:
    """Drop the `serve` of `python environment.py serve …`, which is all that an environment does here."""
    return argv[1:] if argv[:1] == ["serve"] else argv


def _train(argv: Sequence[str]) -> int:
    """Trains on batches from the rollout API and hands new weights to inference."""
    from grpo_engine.colocate.config import TrainerConfig

    names_of = COLOCATE if _is_colocated(argv) else None
    config = _parsed(TrainerConfig, argv, "train", _train, names_of=names_of)
    _log_from(config.log_level)
    num_ranks = num_parts_of_server(config, os.environ)
    if num_ranks > 1:
        log.info("the inference server has its weights in %d processes: as many ranks are started", num_ranks)
        argv = [*argv, "--processes", str(num_ranks)]
        config = _parsed(TrainerConfig, argv, "train", _train, names_of=names_of)
    if config.redirect_output is not None:
        _redirect_output(config.redirect_output)
    if config.num_ranks > 1 and not config.dry_run and rank_place(os.environ) is None:
        return _start_ranks(config, argv)
    if config.bridge.samples_in_process:
        with collecting_nothing():
            from grpo_engine.colocate.main import run as run_sampling
        return run_sampling(config)
    with collecting_nothing():
        from grpo_engine.train.main import run
    return run(config)


def _start_ranks(config: TrainerConfig, argv: Sequence[str]) -> int:
    """Import once what all ranks of this machine need, and fork them."""
    num_local = config.processes or 1
    restarts_file = os.environ.pop(RESTARTS_VARIABLE, None)
    restarts = RankRestarts(Path(restarts_file)) if restarts_file else None
    share_cores(os.environ, num_local)
    keep_forkable(os.environ)
    from grpo_engine.serving.reporting import ranks_report
    from grpo_engine.serving.turn import begin_in_turn

    prepare: Callable[[TrainerConfig], PreTrainedTokenizerBase | None]
    run: Callable[..., int]
    with collecting_nothing():
        if config.bridge.samples_in_process:
            from grpo_engine.colocate.main import prepare, run
        else:
            from grpo_engine.train.main import prepare, run
    tokenizer = begin_in_turn(partial(prepare, config), os.environ, always=True)
    launch = partial(
        launch_ranks,
        module_command("grpo_engine", "train", *argv),
        num_local=num_local,
        run=partial(_run_rank, partial(run, config, tokenizer=tokenizer)),
        num_nodes=config.nodes,
        node_rank=config.node_rank,
        master_addr=config.master_addr,
        master_port=config.master_port,
        stall_s=config.rank_stall_s,
        report=ranks_report(os.environ),
        restart_signal=None if restarts is None else RESTART_SIGNAL,
    )
    return launch().code if restarts is None else restarts.run(launch)


def _run_rank(run: Callable[[], int]) -> int:
    """What `main` does for a rank that is a program."""
    code = _exit_code("train", run)
    if code:
        _leave(code)
    return code


def num_parts_of_server(config: TrainConfig, environment: Mapping[str, str]) -> int:
    """Ranks that a trainer by hand needs on one copy of the weights: one for each process of a tensor parallel server.

    0 where that is not known: its ranks are stated, its mode is another, or no such server runs yet.
    """
    from grpo_engine.bridges.memory.bridge_files import bridge_file_path, is_server_alive, read_bridge_file

    is_stated = config.processes is not None or config.nodes > 1 or rank_place(environment) is not None
    if is_stated or not (config.bridge.shares_memory and config.bridge.trains_over_ranks):
        return 0
    try:
        file = read_bridge_file(bridge_file_path(getattr(config.bridge, "config_path", None), environment))
    except BridgeError:  # the trainer waits for it, or says what is wrong with it
        return 0
    return len(file.parts) if is_server_alive(file) else 0


def _launch(argv: Sequence[str]) -> int:
    """Starts an inference server and trains with it; takes the flags of train, and of the server."""
    from grpo_engine.train.launch import LaunchConfig, run

    config = _parsed(LaunchConfig, argv, "launch", _launch)
    _log_from(config.log_level)
    if config.redirect_output is not None:
        _redirect_output(config.redirect_output)
    return run(config)


def _check(argv: Sequence[str]) -> int:
    """Checks before training whether sampler and trainer agree; takes the flags of train."""
    from grpo_engine.check.config import CheckConfig

    config = _parsed(CheckConfig, argv, "check", _check)
    _log_from(config.log_level)
    from grpo_engine.check.main import run

    return run(config)


def _export(argv: Sequence[str]) -> int:
    """Writes a checkpoint as a folder that transformers, PEFT and vLLM load, and checks that it loads."""
    from grpo_engine.export.config import ExportConfig

    config = _parsed(ExportConfig, argv, "export", _export)
    from grpo_engine.export.main import run

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that nothing half is left
    return run(config)


def _is_colocated(argv: Sequence[str]) -> bool:
    """Whether a command line of train chooses the mode in which the trainer samples itself."""
    text = " ".join(argv)
    return any(
        f"{name}{COLOCATE}" in text for name in ("--weight-bridge-mode ", "--weight-bridge-mode=", "bridge.mode=")
    )


def _parsed(
    model: type[ConfigT],
    argv: Sequence[str],
    name: str,
    command: Callable[..., int],
    *,
    names_of: str | None = None,
) -> ConfigT:
    return parse_flags(
        model,
        with_secrets(argv, os.environ),
        prog=f"grpo-engine {name}",
        description=command.__doc__ or "",
        whose=_command_with,
        command=names_of,
    )


def _command_with(flag: str) -> str | None:
    """The service whose command takes a flag."""
    from grpo_engine.colocate.config import TrainerConfig
    from grpo_engine.environments.config import EnvironmentConfig
    from grpo_engine.reference.config import ReferenceConfig
    from grpo_engine.rollouts.config import ApiConfig
    from grpo_engine.server.config import ServerConfig

    models: dict[str, type[Config]] = {
        "train": TrainerConfig,
        "server": ServerConfig,
        "env": EnvironmentConfig,
        "api": ApiConfig,
        "reference": ReferenceConfig,
    }
    return next((f"`grpo-engine {name}`" for name, model in models.items() if flag in flags_of(model)), None)


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "api": _api,
    "server": _server,
    "env": _env,
    "atropos-env": _atropos_env,
    "reference": _reference,
    "parameters": _parameters,
    "train": _train,
    "launch": _launch,
    "check": _check,
    "export": _export,
}


def _usage() -> str:
    lines = [f"  {name:<13}{command.__doc__}" for name, command in COMMANDS.items()]
    return "\n".join(["usage: grpo-engine COMMAND [flags]   (grpo-engine COMMAND --help)", "", *lines])


if __name__ == "__main__":
    raise SystemExit(main())
