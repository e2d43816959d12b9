"""Starts a training run: builds the objects that the loop works with from the settings, and closes them.

On SIGTERM or SIGINT the current step is finished, a checkpoint is saved, and the process exits with 0.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch

from grpo_engine.bridges import BridgeContext
from grpo_engine.data.source import RolloutSource
from grpo_engine.errors import PeerUnavailable
from grpo_engine.models.config import LoraSettings
from grpo_engine.models.devices import require_device
from grpo_engine.models.loading import load_tokenizer
from grpo_engine.retrying import never
from grpo_engine.train.checkpointing import checkpoints
from grpo_engine.train.config import TrainConfig
from grpo_engine.train.loop import train
from grpo_engine.train.memory.dry_run import dry_run, log_plan
from grpo_engine.train.recording.recorder import Recorder
from grpo_engine.train.recording.trackers import build_trackers
from grpo_engine.wire.run_folder import CHECKPOINTS

DEFAULT_SAVE_PATH = Path("trained_model_checkpoints")
"""As the stock trainer; for runs without a run folder."""

log = logging.getLogger(__name__)


def run(config: TrainConfig) -> int:
    """Train until the last step or a stop signal; returns the exit code."""
    if config.dry_run:
        return dry_run(config)
    if config.debug_loading:
        logging.getLogger("grpo_engine.models").setLevel(logging.DEBUG)
    require_device(config.device)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    by_hand = config.run_folder is None
    folder = config.run_folder or config.log_dir / time.strftime("train-%m%d-%H%M%S")
    save_path = config.save_path or (DEFAULT_SAVE_PATH if by_hand else folder / CHECKPOINTS)
    checkpoints.require_folder(save_path.absolute())
    stop = StopRequest()
    log_plan(config)
    bridge = config.bridge.build(bridge_context(config, folder / "bridge", is_stopping=stop))
    decode = load_tokenizer(config.model_name).decode
    recorder = Recorder(
        folder,
        total_steps=config.training_steps,
        show_times=config.benchmark,
        trackers=build_trackers(config, folder),
        max_rollout_bytes=config.rollouts_max_mb * 2**20,
    )
    with (
        recorder,
        checkpoints.locked(save_path.absolute()),
        RolloutSource(config.atropos_url, reach_timeout_s=config.api_timeout_s) as source,
    ):
        try:
            train(config, source, bridge, recorder, decode=decode, save_path=save_path.absolute(), stop=stop)
        except PeerUnavailable as error:  # stopped while waiting for a peer before the first step
            if not stop():
                raise
            log.info("stopped while waiting: %s", error)
        finally:
            bridge.close()
    return 0


def bridge_context(config: TrainConfig, folder: Path, *, is_stopping: Callable[[], bool] = never) -> BridgeContext:
    """What a bridge with these settings is built from; it may write into `folder`."""
    return BridgeContext(
        model_name=config.model_name,
        dtype=config.dtype,
        device=config.device,
        server_url=f"http://127.0.0.1:{config.vllm_port}",
        folder=folder.absolute(),
        server_flags=(
            *("--model-name", config.model_name, "--port", str(config.vllm_port), "--dtype", config.dtype),
            *("--gpu-memory-utilization", str(config.gpu_memory_utilization)),
            *("--max-model-len", str(config.max_model_len)),
        ),
        server_environment={} if config.vllm_gpu is None else {"CUDA_VISIBLE_DEVICES": str(config.vllm_gpu)},
        is_stopping=is_stopping,
        lora=LoraSettings(
            rank=config.lora_r,
            alpha=config.lora_alpha,
            dropout=config.lora_dropout,
            target_modules=config.lora_target_modules,
            layer_indices=config.lora_layer_indices,
        ),
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
