"""The state of one rank at one moment, and how it is written into the folder of a checkpoint."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from grpo_engine.train.checkpointing import checkpoints
from grpo_engine.train.checkpointing.sharded_state import WritingRanks, write_sharded
from grpo_engine.train.config import TrainConfig
from grpo_engine.wire.checkpoints import TRAINER_SETTINGS
from grpo_engine.wire.codec import write_json_atomically
from grpo_engine.wire.secrets import masked_settings

WRITER_THREAD = "checkpoint-writer"


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedState:
    """What a rank writes: the trainer's own tensors, or copies of them that any thread may write."""

    model: Mapping[str, Tensor]
    """By the names of `BridgeModel.tensors`; empty on ranks other than 0."""
    save_model: Callable[[Path, Mapping[str, Tensor]], None]
    parts: Mapping[str, Any] | None
    """Of a model that ranks share out: see `stored_parts`."""
    files: Mapping[str, Any]
    """The arguments of `write_state_files`."""
    config: TrainConfig

    def write(self, folder: Path, ranks: WritingRanks) -> None:
        """Write into an empty folder; on all ranks.

        Raises:
            OSError, SafetensorError: a rank could not write; on all ranks.
        """
        failure: OSError | SafetensorError | None = None
        if ranks.leads:
            try:
                self.save_model(folder, self.model)
            except (OSError, SafetensorError) as error:
                failure = error
        if any(ranks.gather(failure is not None)):  # the others are about to write their parts
            raise failure or OSError("rank 0 could not write the model")
        if self.parts is not None:
            write_sharded(folder, self.parts, ranks)
        if ranks.leads:
            checkpoints.write_state_files(folder, **self.files)
            settings = masked_settings(json.loads(self.config.model_dump_json()))  # checkpoints are copied elsewhere
            write_json_atomically(folder / TRAINER_SETTINGS, settings, mode=0o600)

    def abandon(self, ranks: WritingRanks) -> None:
        """In place of `write`, on a rank 0 that has no folder to write into."""
        ranks.gather(True)


class BackgroundWriter:
    """Writes one checkpoint at a time in a thread."""

    def __init__(self) -> None:
        self._written: Future[float] | None = None

    def start(self, write: Callable[[], object], *, device: torch.device) -> Future[float]:
        """Begin to write; the result is how many seconds it took. The one before has been waited for.

        Args:
            device: of this rank: what torch writes parts with takes the thread's GPU.
        """
        written: Future[float] = Future()

        def run() -> None:
            began = time.perf_counter()
            try:
                if device.type == "cuda":
                    torch.cuda.set_device(device)
                write()
            except BaseException as error:
                written.set_exception(error)
            else:
                written.set_result(time.perf_counter() - began)

        # No thread that the interpreter waits for: after a rank has failed it may wait for ever.
        threading.Thread(target=run, name=WRITER_THREAD, daemon=True).start()
        self._written = written
        return written

    def wait(self) -> None:
        """Wait until what was started is written; raises what the thread raised."""
        if self._written is not None:
            written, self._written = self._written, None
            written.result()
