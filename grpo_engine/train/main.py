"""Starts a training run: builds the objects that the loop works with from the settings, and closes them.

On SIGTERM or SIGINT the current step is finished, a checkpoint is saved, and the process exits with 0.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from grpo_engine.bridges import OVER_RANKS, Bridge, BridgeContext
from grpo_engine.bridges.engine import InProcessEngine
from grpo_engine.bridges.protocol import RankPlacement, Sharding
from grpo_engine.data.rollout_source import RolloutSource
from grpo_engine.data.source import RolloutApiSource
from grpo_engine.errors import ConfigError, PeerUnavailable
from grpo_engine.installed import is_on_cpu
from grpo_engine.models.config import LoraSettings
from grpo_engine.models.devices import avoid_fragments, limit_threads, require_device, trainable_device
from grpo_engine.models.inductor import import_inductor
from grpo_engine.models.loading import fitting_length, is_at_hand, load_config, load_tokenizer, modeling_module
from grpo_engine.ranks.group import RankGroup, RanksFailed
from grpo_engine.ranks.place import RankPlace, rank_place
from grpo_engine.ranks.watching import write_stacks_on_signal
from grpo_engine.retrying import never
from grpo_engine.serving.reporting import Reporter
from grpo_engine.serving.turn import begin_in_turn
from grpo_engine.train.checkpointing import checkpoints
from grpo_engine.train.checkpointing.resuming import has_steps_left
from grpo_engine.train.config import TrainConfig
from grpo_engine.train.following import Finished, follow
from grpo_engine.train.loop import train
from grpo_engine.train.memory.dry_run import dry_run, log_plan
from grpo_engine.train.recording.recorder import Recorder
from grpo_engine.train.recording.trackers import build_trackers
from grpo_engine.wire.codec import write_json_atomically
from grpo_engine.wire.log_lines import STOPPED
from grpo_engine.wire.run_folder import CHECKPOINTS, SERVED_FILE, SETTINGS_FILE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_SAVE_PATH = Path("trained_model_checkpoints")
"""As the stock trainer; for runs without a run folder."""
OUTPUTS = Path("outputs")
"""Where `output_layout` dated makes folders, unless log_dir says otherwise; as Hydra."""

log = logging.getLogger(__name__)

AnyTrainConfig = TypeVar("AnyTrainConfig", bound=TrainConfig)


class Sampling(Protocol):
    """What a rank of a trainer has that samples itself, where there is no rollout API."""

    @property
    def engine(self) -> InProcessEngine:
        """Of this rank, not started."""

    def source(self, bridge: Bridge, save_path: Path) -> AbstractContextManager[RolloutSource]:
        """Groups of the problems that rank 0 takes, sampled by the engines of all ranks."""

    def works(self, placement: RankPlacement) -> Mapping[type, Callable[[Any], None]]:
        """What the other ranks do, by what rank 0 announces."""


def run(
    config: TrainConfig,
    sampling: Callable[[TrainConfig, RankGroup], Sampling] | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> int:
    """Train until the last step or a stop signal; returns the exit code.

    Args:
        sampling: builds, for a rank with its settings, what it samples with; None: groups come from a rollout API.
        tokenizer: what `prepare` has returned, if it was called.
    """
    if config.dry_run:
        return dry_run(config)
    if config.debug_loading:
        for package in ("models", "bridges"):
            logging.getLogger(f"grpo_engine.{package}").setLevel(logging.DEBUG)
    tokenizer = begin_in_turn(partial(prepare, config), os.environ) or tokenizer
    config = of_model(config)
    place = rank_place(os.environ)
    if place is not None:
        config = of_rank(config, place)
        write_stacks_on_signal()
    require_device(config.device)
    device = trainable_device(config.device)
    if device.startswith("cuda") and not config.bridge.takes_turns:
        avoid_fragments(os.environ)  # nothing of this process is exported, and no engine in it sleeps
    limit_threads("cpu" if config.cpu_offload else device, config.threads)
    torch.manual_seed(config.seed)
    ranks = RankGroup(place, device=device, timeout_s=config.rank_timeout_s, num_replicas=config.num_replicas)
    own = None if sampling is None else sampling(config, ranks)
    with _closing(*([] if own is None else [own.engine.close]), ranks.close):
        try:
            return _lead(config, ranks, own, tokenizer) if ranks.leads else _follow(config, ranks, own)
        except RanksFailed:
            ranks.abandon()
            raise


@contextmanager
def _closing(*closes: Callable[[], None]) -> Iterator[None]:
    """Call these at the end; where another rank has exited none, as if this one had been killed as well.

    An engine and the group would wait for that rank, and the checkpoint that servers load is kept for the next trainer.
    """
    with ExitStack() as closing:
        for close in reversed(closes):
            closing.callback(close)
        try:
            yield
        except RanksFailed:
            closing.pop_all()
            raise


def prepare(config: TrainConfig) -> PreTrainedTokenizerBase | None:
    """Import what is imported until training begins; the tokenizer, if the model exists. Touches no GPU.

    Not bitsandbytes, whose import asks the driver for the GPU.
    """
    modules = ["httpcore", "grpo_engine.models.same_model"]
    if config.bridge.trains_adapter:
        modules.append("grpo_engine.models.lora")
    tokenizer = None
    if is_at_hand(config.model_name):
        tokenizer = load_tokenizer(config.model_name)
        modules.append(modeling_module(config.model_name) or "transformers")
    for module in modules:
        importlib.import_module(module)
    if config.compile_layers:
        import_inductor(is_cpu=is_on_cpu(config.device))
    return tokenizer


def _follow(config: TrainConfig, ranks: RankGroup, sampling: Sampling | None) -> int:
    """Take part in the training that rank 0 leads; its stop signals are announced by it."""
    StopRequest()
    placement = config.bridge.rank_placement(bridge_context(config, Path("unused"), ranks=ranks))
    follow(config, placement, ranks, None if sampling is None else sampling.works(placement))
    return 0


def _lead(
    config: TrainConfig, ranks: RankGroup, sampling: Sampling | None, tokenizer: PreTrainedTokenizerBase | None
) -> int:
    folder, save_path = output_folders(config, time.localtime())
    checkpoints.require_folder(save_path)
    if config.run_folder is None and not has_steps_left(config, save_path):
        with ranks.together(Finished()):
            return 0
    stop = StopRequest()
    is_sure_to_fit = log_plan(config)
    engine = None if sampling is None else sampling.engine
    context = bridge_context(config, folder / "bridge", ranks=ranks, engine=engine, is_stopping=stop)
    context = replace(context, served_file=save_path / SERVED_FILE)
    bridge = config.bridge.build(context)
    decode = (load_tokenizer(config.model_name) if tokenizer is None else tokenizer).decode
    reporter = Reporter.from_environment(os.environ)
    recorder = Recorder(
        folder,
        total_steps=config.training_steps,
        show_times=config.benchmark,
        trackers=build_trackers(config, folder),
        max_rollout_bytes=config.rollouts_max_mb * 2**20,
        reporter=reporter,
    )
    if config.run_folder is None:  # else the supervisor writes those of the whole run
        with suppress(OSError):  # a full disk, which the recorder reports
            write_json_atomically(folder / SETTINGS_FILE, config, mode=0o600)
    with (
        reporter,
        recorder,
        checkpoints.locked(save_path),
        _source(config, sampling, bridge, save_path) as source,
        _closing(bridge.close),
    ):
        try:
            train(
                config,
                source,
                bridge,
                recorder,
                decode=decode,
                save_path=save_path,
                ranks=ranks,
                is_sure_to_fit=is_sure_to_fit,
                stop=stop,
                reporter=reporter,
            )
        except PeerUnavailable as error:  # stopped while waiting for a peer before the first step
            if not stop():
                raise
            log.info(STOPPED.text, f" while waiting: {error}")
    with ranks.together(Finished()):
        return 0


def _source(
    config: TrainConfig, sampling: Sampling | None, bridge: Bridge, save_path: Path
) -> AbstractContextManager[RolloutSource]:
    if sampling is not None:
        return sampling.source(bridge, save_path)
    return RolloutApiSource(
        config.atropos_url, reach_timeout_s=config.api_timeout_s, register_timeout_s=config.batch_timeout_s
    )


def output_folders(config: TrainConfig, now: time.struct_time) -> tuple[Path, Path]:
    """The folder for records of a trainer that starts now, and the absolute one for its checkpoints."""
    if config.run_folder is not None:
        folder, checkpoints_folder = config.run_folder, config.run_folder / CHECKPOINTS
    elif config.output_layout == "flat":
        folder, checkpoints_folder = config.log_dir / time.strftime("train-%m%d-%H%M%S", now), DEFAULT_SAVE_PATH
    else:
        is_given = "log_dir" in config.model_fields_set
        folder = (config.log_dir if is_given else OUTPUTS) / time.strftime("%Y-%m-%d/%H-%M-%S", now)
        checkpoints_folder = folder / CHECKPOINTS
    return folder, (config.save_path or checkpoints_folder).absolute()


def of_model(config: AnyTrainConfig) -> AnyTrainConfig:
    """The settings with a length of sequences for which the model has positions.

    Raises:
        ModelError: its configuration cannot be found or read.
    """
    length = fitting_length(load_config(config.model_name), config.seq_len, "seq_len")
    return config.model_copy(update={"seq_len": length})


def of_rank(config: TrainConfig, place: RankPlace) -> TrainConfig:
    """The settings with the device of a rank: the visible GPU with its number on the machine, or the CPU.

    Raises:
        ConfigError: the bridge cannot be used by several ranks.
    """
    if not config.bridge.trains_over_ranks:
        raise ConfigError(
            f"bridge mode {config.bridge.mode} trains in one process, and {place.world_size} ranks were started: "
            f"choose {' or '.join(OVER_RANKS)}, or start one process"
        )
    device = trainable_device(config.device)
    if device.startswith("cuda"):
        device = f"cuda:{place.local_rank}"
    return config.model_copy(update={"device": device})


def bridge_context(
    config: TrainConfig,
    folder: Path,
    *,
    ranks: RankGroup | None = None,
    engine: InProcessEngine | None = None,
    is_stopping: Callable[[], bool] = never,
) -> BridgeContext:
    """What a bridge with these settings is built from; it may write into `folder`."""
    return BridgeContext(
        model_name=config.model_name,
        dtype=config.dtype,
        device=config.device,
        server_urls=config.server_urls or (f"http://127.0.0.1:{config.vllm_port}",),
        parameter_urls=config.parameter_urls,
        folder=folder.absolute(),
        server_flags=(
            *("--model-name", config.model_name, "--port", str(config.vllm_port), "--dtype", config.dtype),
            *("--gpu-memory-utilization", str(config.gpu_memory_utilization)),
            *("--max-model-len", str(config.max_model_len)),
        ),
        server_environment={} if config.vllm_gpu is None else {"CUDA_VISIBLE_DEVICES": str(config.vllm_gpu)},
        ranks=ranks,
        engine=engine,
        sharding=sharding_of(config),
        is_stopping=is_stopping,
        lora=LoraSettings(
            rank=config.lora_r,
            alpha=config.lora_alpha,
            dropout=config.lora_dropout,
            target_modules=config.lora_target_modules,
            layer_indices=config.lora_layer_indices,
        ),
    )


def sharding_of(config: TrainConfig) -> Sharding:
    """How ranks share the model under these settings."""
    return Sharding(
        rounds_weights=config.master_weights == "stochastic_rounding",
        keeps_gathered=config.keeps_gathered,
        offloads=config.cpu_offload,
    )


class StopRequest:
    """Whether SIGTERM or SIGINT was received; read between steps and while waiting for a batch."""

    def __init__(self) -> None:
        self._signal: int | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def __call__(self) -> bool:
        return self._signal is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None:  # a second signal has its default action
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._signal = number
