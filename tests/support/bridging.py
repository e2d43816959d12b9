"""Inference servers with bridges beside them, for the tests of all modes."""

from __future__ import annotations

import base64
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import torch
from pydantic import TypeAdapter
from serving import RunningServer, free_port, model_logprobs, our_segments, running_server
from training import ListedSource, settings

from grpo_engine.bridges import BY_MODE, ON_SHARED_MEMORY, AnyBridge, Bridge, BridgeContext
from grpo_engine.bridges.memory.shared_tensors import SEGMENT_PREFIX
from grpo_engine.bridges.memory.weight_lock import WeightLock
from grpo_engine.models.config import LoraSettings
from grpo_engine.train.config import TrainConfig
from grpo_engine.train.loop import train
from grpo_engine.train.recording.recorder import Recorder
from grpo_engine.wire.bridge_file import CudaHandle

PROMPT = [10, 20, 30]
RUN_STEPS = 6
MODES: list[dict[str, object]] = [
    {"mode": mode, **({"every_steps": 1} if "every_steps" in kind.model_fields else {})}
    for mode, kind in BY_MODE.items()
    if not kind.samples_in_process
]
"""Settings of every mode that has a server, by which each publish reaches it."""
SERVER_FLAGS = {
    mode: [f"--{setting.replace('_', '-')}" for setting in kind.server_settings] for mode, kind in BY_MODE.items()
}


class Serving:
    """An inference server that can be stopped and started again on its port."""

    def __init__(self, model: Path, folder: Path, *flags: str, dtype: str = "float32") -> None:
        self.model, self.folder, self.dtype = model, folder, dtype
        self.bridge_file = folder / "bridge.json"
        self.port = free_port()
        self._flags = flags
        self._stack = ExitStack()
        self._segments: set[str] = set()
        self.now: RunningServer

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        flags = ("--bridge-file", str(self.bridge_file), "--dtype", self.dtype, *self._flags)
        server = running_server(self.model, *flags, folder=self.folder, port=self.port)
        before = our_segments()
        self.now = self._stack.enter_context(server)
        self._segments |= our_segments() - before

    def end(self, number: int = signal.SIGTERM) -> int:
        return self.now.stop(number)

    def reset(self) -> None:
        """Serve the model's own weights as version 0, without an adapter; a server that has ended is started."""
        if self.now.process.poll() is not None:
            self.start()
        with self.now.client as client:
            client.post("/bridge/resume").raise_for_status()
            client.post("/lora/unload").raise_for_status()
            body = {"path": str(self.model), "policy_version": 0}
            client.post("/bridge/reload", json=body).raise_for_status()

    def left_segments(self) -> set[str]:
        """Shared memory of the server that is still there."""
        return self._segments & our_segments()

    def close(self) -> None:
        if self.now.process.poll() == -signal.SIGKILL:
            self.start()  # it removes what the killed server left
        self._stack.close()


@contextmanager
def serving(model: Path, folder: Path, *flags: str, dtype: str = "float32") -> Iterator[Serving]:
    """A started server, which leaves neither shared memory nor its bridge file."""
    server = Serving(model, folder, *flags, dtype=dtype)
    server.start()
    try:
        yield server
    finally:
        server.close()
    assert not server.left_segments()
    assert not server.bridge_file.exists()


def bridge_to(server: Serving, settings: str | dict[str, object], run: Path, **more: object) -> Bridge:
    """The bridge of a trainer beside the server; `settings` may be the mode alone."""
    settings = {"mode": settings} if isinstance(settings, str) else settings
    if settings["mode"] in ON_SHARED_MEMORY:
        settings = {**settings, "config_path": server.bridge_file}
    return make_bridge(settings, server.model, server.url, run, **{"dtype": server.dtype, **more})


def make_bridge(settings: dict[str, object], model: Path, url: str, folder: Path, **more: object) -> Bridge:
    return TypeAdapter(AnyBridge).validate_python(settings).build(bridge_context(model, url, folder, **more))


def bridge_context(model: Path, url: str, folder: Path, **more: object) -> BridgeContext:
    context: dict[str, object] = {
        "model_name": str(model),
        "dtype": "float32",
        "device": "cpu",
        "server_urls": (url,),
        "folder": folder / "run",
        "lora": LoraSettings(rank=4, target_modules=("q_proj", "v_proj")),
        "patience_s": 60,
        **more,
    }
    return BridgeContext(**context)  # type: ignore[arg-type]


def served_logprobs(server: RunningServer, completion_tokens: int = 6) -> tuple[dict, list[int], torch.Tensor]:
    answer = server.generate(prompt={"prompt_token_ids": PROMPT}, max_tokens=completion_tokens, logprobs=0)
    values = [next(iter(position[0].values())) for position in answer["logprobs"][0]]
    return answer, answer["token_ids"][0], torch.tensor(values)


def assert_agreement(server: RunningServer, model: torch.nn.Module, version: int, tolerance: float = 1e-4) -> None:
    answer, tokens, values = served_logprobs(server)
    assert answer["policy_version"] == version
    assert answer["policy_versions"] == [[version] * len(tokens)]
    torch.testing.assert_close(values, model_logprobs(model, PROMPT, tokens), atol=tolerance, rtol=0)


def mapped_segments() -> set[str]:
    """Shared memory of inference servers that this process maps, also where its name is gone."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split("/dev/shm/")[1] for line in lines if f"/dev/shm/{SEGMENT_PREFIX}" in line}


def config_for(server: Serving, mode: str = "shared_vllm", **changes: object) -> TrainConfig:
    base = {"model_name": str(server.model), "training_steps": RUN_STEPS, "checkpoint_interval": RUN_STEPS}
    return settings(**{**base, "bridge": {"mode": mode}, **changes})


def train_beside(
    server: Serving, folder: Path, config: TrainConfig, source: ListedSource, *, torch_seed: int = 0, **more: object
) -> int:
    """Train beside the server; the number of steps.

    Args:
        torch_seed: decides the random numbers with which a new adapter begins.
    """
    torch.manual_seed(torch_seed)
    bridge = bridge_to(server, config.bridge.mode, folder, lora=LoraSettings())
    with closing(bridge), Recorder(folder, total_steps=config.training_steps, show_times=False) as recorder:
        return train(config, source, bridge, recorder, decode=str, save_path=folder / "checkpoints", **more)  # type: ignore[arg-type]


def cuda_handle(name: str = "", *, device_index: int = 0, num_bytes: int = 4, offset: int = 0) -> CudaHandle:
    """A handle of CUDA memory that exists nowhere; `name` can be read from it again."""
    return CudaHandle(
        device_index=device_index,
        gpu_uuid="GPU-x",
        ipc_handle_b64=base64.b64encode(name.encode()).decode(),
        storage_size=num_bytes,
        storage_offset_orig=512,
        ref_counter_handle_b64="cmM=",
        ref_counter_offset=3,
        event_handle_b64="ZXY=",
        event_sync_required=True,
        tensor_storage_offset=offset,
    )


def write_and_wait(segment: str, version: int, has_all: bool) -> None:
    """A trainer that has written once, and lives until it is killed."""
    with WeightLock.attach(segment).writing(version, has_all=has_all):
        pass
    time.sleep(600)
