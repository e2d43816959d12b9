"""Inference servers with bridges beside them, for the tests of all modes."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from pydantic import TypeAdapter
from serving import RunningServer, free_port, model_logprobs, running_server, save_tiny_model
from training import settings

from grpo_engine.bridges import KINDS, ON_SHARED_MEMORY, AnyBridge, Bridge, BridgeContext
from grpo_engine.bridges.memory.shared_tensors import SEGMENT_PREFIX
from grpo_engine.models.config import LoraSettings
from grpo_engine.retrying import never
from grpo_engine.train.config import TrainConfig
from grpo_engine.wire.metrics import MetricsLine

PROMPT = [10, 20, 30]
RUN_STEPS = 6
MODES: list[dict[str, object]] = [
    {"mode": kind.model_fields["mode"].default, **({"every_steps": 1} if "every_steps" in kind.model_fields else {})}
    for kind in KINDS
]
"""Settings of every mode, by which each publish reaches the server."""
SERVER_FLAGS: dict[str, list[str]] = {
    kind.model_fields["mode"].default: ["--shared-weights"]
    if kind.shares_memory
    else ["--enable-lora"]
    if "adapter_folder" in kind.model_fields
    else []
    for kind in KINDS
}


@contextmanager
def stack(
    tmp_path: Path, settings: dict[str, object], *flags: str, tied: bool = False
) -> Iterator[tuple[RunningServer, Bridge]]:
    """A server and the bridge of a trainer beside it."""
    folder = save_tiny_model(tmp_path / "model", seed=1, tied=tied)
    bridge_file = tmp_path / "bridge.json"
    flags = ("--bridge-file", str(bridge_file), *SERVER_FLAGS[str(settings["mode"])], *flags)
    if settings["mode"] in ON_SHARED_MEMORY:
        settings = {**settings, "config_path": bridge_file}
    with running_server(folder, *flags, folder=tmp_path) as server:
        bridge = make_bridge(settings, folder, server.url, tmp_path)
        try:
            yield server, bridge
        finally:
            bridge.close()
    assert not bridge_file.exists()


def make_bridge(
    settings: dict[str, object], model: Path, url: str, tmp_path: Path, dtype: str = "float32", **more: object
) -> Bridge:
    context = BridgeContext(
        model_name=str(model),
        dtype=dtype,
        device="cpu",
        server_url=url,
        folder=tmp_path / "run",
        lora=LoraSettings(rank=4, target_modules=("q_proj", "v_proj")),
        patience_s=60,
        **more,  # type: ignore[arg-type]
    )
    return TypeAdapter(AnyBridge).validate_python(settings).build(context)


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


class Serving:
    """An inference server with shared weights that can be stopped and started again on its port."""

    def __init__(self, model: Path, folder: Path, dtype: str) -> None:
        self.model, self.folder, self.dtype = model, folder, dtype
        self.port = free_port()
        self._stack = ExitStack()
        self.now: RunningServer

    def start(self) -> None:
        flags = ("--shared-weights", "--bridge-file", str(self.folder / "bridge.json"), "--dtype", self.dtype)
        server = running_server(self.model, *flags, folder=self.folder, port=self.port)
        self.now = self._stack.enter_context(server)

    def end(self, number: int = signal.SIGTERM) -> None:
        self.now.stop(number)

    def close(self) -> None:
        self._stack.close()


def bridge_to(serving: Serving, mode: str = "shared_vllm", is_stopping: Callable[[], bool] = never) -> Bridge:
    context = BridgeContext(
        model_name=str(serving.model),
        dtype=serving.dtype,
        device="cpu",
        server_url=f"http://127.0.0.1:{serving.port}",
        folder=serving.folder / "run",
        lora=LoraSettings(),
        is_stopping=is_stopping,
    )
    settings = {"mode": mode, "config_path": serving.folder / "bridge.json"}
    return TypeAdapter(AnyBridge).validate_python(settings).build(context)


def config_for(serving: Serving, mode: str = "shared_vllm", **changes: object) -> TrainConfig:
    base = {"model_name": str(serving.model), "training_steps": RUN_STEPS, "checkpoint_interval": RUN_STEPS}
    return settings(**{**base, "bridge": {"mode": mode}, **changes})


def curve(folder: Path) -> list[tuple[int, int, dict[str, float]]]:
    """Step, version and every metric that is not a time."""
    lines = [MetricsLine.model_validate_json(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    is_time = ("_time", "per_second")
    return [
        (line.step, line.policy_version, {k: v for k, v in line.metrics.items() if not k.endswith(is_time)})
        for line in lines
    ]
