"""The trainer's side for `gpu.py`: a real bridge without a training loop.

    python benchmarks/_gpu_trainer.py --mode shared_vllm --server URL --model PATH --folder FOLDER …

Reads one JSON object a line on stdin and answers each with one on stdout: {"do": "masters"} makes fp32 masters as the
trainer has them (and moves adapters off zero), {"do": "publish", "times": 20, "write": "masters" | "nothing"}
hands over so often and gives the milliseconds of each: until the bridge let it write (the pause), of writing, and after
it (resume, or saving and swapping); {"do": "turns", "times": 20, "write": …} puts the server to sleep and publishes so
often, and gives the milliseconds of both and the card's memory in between; {"do": "save", "folder": …} writes what is
trained. It closes when stdin does.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import torch
from pydantic import TypeAdapter

from grpo_engine.bridges import AnyBridge, Bridge, BridgeContext, BridgeModel
from grpo_engine.bridges.placement.own import OwnModel
from grpo_engine.bridges.protocol import Update
from grpo_engine.models.config import LoraSettings
from grpo_engine.models.optimizers import MasterWeights
from grpo_engine.wire.run_folder import HANDOVER_FOLDER

STOCK = "stock-nccl"
"""In place of a mode: stock vLLM's own transfer."""


class Worker:
    """A bridge and the model attached by it."""

    def __init__(self, bridge: Bridge | StockTransfer, attached: BridgeModel) -> None:
        self._bridge = bridge
        self._attached = attached
        self._version = attached.policy_version
        self._masters: MasterWeights | None = None
        self.tasks: dict[str, Callable[..., dict[str, Any]]] = {
            "masters": self.masters,
            "publish": self.publish,
            "turns": self.turns,
            "save": self.save,
        }

    def masters(self) -> dict[str, Any]:
        """Create the masters that an optimizer would step."""
        self._masters = MasterWeights(
            self._attached.model.named_parameters(), are_shared=self._attached.is_shared, kind="float32"
        )
        with torch.no_grad():
            for master in self._masters.parameters:
                if not master.any():  # the second factor of a fresh adapter
                    master.normal_(std=1e-3)
        return {"parameters": sum(master.numel() for master in self._masters.parameters), **memory()}

    def publish(self, times: int, write: str, every_s: float) -> dict[str, Any]:
        """Publish `times` times, with a pause before each in place of a training step."""
        if write == "masters" and self._masters is None:
            self.masters()
        publishes = []
        for _ in range(times):
            time.sleep(every_s)
            publishes.append(self._publish_once(write))
        return {"publishes": publishes, "version": self._version}

    def turns(self, times: int, write: str) -> dict[str, Any]:
        """Sleep and wake, as around a training step."""
        assert not isinstance(self._bridge, StockTransfer)
        turns = []
        for _ in range(times):
            synchronize()
            began = time.perf_counter()
            self._bridge.prepare_step()
            asleep = {"sleep_ms": 1e3 * (time.perf_counter() - began), **card_memory()}
            published = self._publish_once(write)
            turns.append({**asleep, "wake_ms": published["total_ms"] - published["write_ms"]})
        return {"turns": turns, "version": self._version}

    def save(self, folder: str) -> dict[str, Any]:
        """Write the trained weights in the format that vLLM loads."""
        self._attached.save(Path(folder))
        return {"folder": folder}

    def _publish_once(self, write: str) -> dict[str, float]:
        marks: list[float] = []

        def write_weights() -> None:
            marks.append(time.perf_counter())
            if write == "masters" and self._masters is not None:
                self._masters.publish()
                synchronize()
            marks.append(time.perf_counter())

        synchronize()
        self._version += 1
        began = time.perf_counter()
        update = self._bridge.publish(self._version, write_weights)
        ended = time.perf_counter()
        first, last = (marks[0], marks[-1]) if marks else (ended, ended)
        spans = {"total_ms": ended - began, "before_ms": first - began, "write_ms": last - first}
        spans |= {"after_ms": ended - last} | ({} if update is None else {"pause_ms": update.pause_s})
        return {name: 1e3 * span for name, span in spans.items()}


class StockTransfer:
    """Stock vLLM's weight transfer over NCCL with packed tensors, used as its documentation shows (0.26 and 0.27).

    Source: https://github.com/vllm-project/vllm, `vllm/distributed/weight_transfer/nccl_engine.py`.
    """

    BUFFERS = 1
    """More are overwritten while a layer still reads them (0.26)."""

    def __init__(self, context: BridgeContext) -> None:
        self._placement = OwnModel(context)
        self._server = httpx.Client(base_url=context.server_urls[0], timeout=120)
        self._pool = ThreadPoolExecutor(1)

    def attach(self) -> BridgeModel:
        """Load the model, and meet the server."""
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

        model = self._placement.load()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            where = {"master_address": "127.0.0.1", "master_port": free.getsockname()[1], "world_size": 2}
        answer = self._pool.submit(
            self._post, "/init_weight_transfer_engine", json={"init_info": where | {"rank_offset": 1}}
        )
        self._group = NCCLWeightTransferEngine.trainer_init(where)
        answer.result()
        parameters = dict(model.named_parameters())
        self._send_flags = {"packed": True, "packed_num_buffers": self.BUFFERS}
        self._update = {
            "names": list(parameters),
            "dtype_names": [str(each.dtype).removeprefix("torch.") for each in parameters.values()],
            "shapes": [list(each.shape) for each in parameters.values()],
            **self._send_flags,
        }
        self._model = model
        return BridgeModel(model=model, is_shared=False, policy_version=0, save=self._placement.save)

    def publish(self, version: int, write: Callable[[], None]) -> Update:
        """Send all parameters; running requests are kept."""
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerSendWeightsArgs, NCCLWeightTransferEngine

        write()
        self._post("/pause", params={"mode": "keep"})
        began = time.perf_counter()
        self._post("/start_weight_update")
        received = self._pool.submit(self._post, "/update_weights", json={"update_info": self._update})
        NCCLWeightTransferEngine.trainer_send_weights(
            iter(self._model.named_parameters()), NCCLTrainerSendWeightsArgs(group=self._group, **self._send_flags)
        )
        received.result()
        self._post("/finish_weight_update")
        self._post("/resume")
        num_bytes = sum(each.nbytes for each in self._model.parameters())
        return Update(pause_s=time.perf_counter() - began, num_bytes=num_bytes, num_servers=1)

    def close(self) -> None:
        """Close the connection."""
        self._server.close()

    def _post(self, path: str, **more: Any) -> None:
        self._server.post(path, **more).raise_for_status()


def synchronize() -> None:
    """Wait for the GPU's queue."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def memory() -> dict[str, float]:
    """Memory that this process has from torch's allocator."""
    if not torch.cuda.is_available():
        return {}
    return {
        "allocated_mb": torch.cuda.memory_allocated() / 1e6,
        "reserved_mb": torch.cuda.memory_reserved() / 1e6,
    }


def card_memory() -> dict[str, float]:
    """Memory of the card that is in use, by all processes, and what this one has of it."""
    if not torch.cuda.is_available():
        return {}
    free, total = torch.cuda.mem_get_info()
    return {"card_used_mb": (total - free) / 1e6, "trainer_reserved_mb": torch.cuda.memory_reserved() / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", required=True)
    parser.add_argument("--server", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--bridge-file", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    answers = sys.stdout
    sys.stdout = sys.stderr  # output of libraries must not mix with the answers
    settings: dict[str, Any] = {"mode": options.mode}
    if options.mode == "turns":
        settings["handover"] = options.folder / HANDOVER_FOLDER
    if options.bridge_file is not None:
        settings["config_path"] = options.bridge_file
    context = BridgeContext(
        model_name=options.model,
        dtype=options.dtype,
        device=options.device,
        server_urls=(options.server,),
        folder=options.folder,
        lora=LoraSettings(rank=16, target_modules=("q_proj", "v_proj")),
        patience_s=60,
    )
    began = time.perf_counter()
    bridge: Bridge | StockTransfer = (
        StockTransfer(context)
        if options.mode == STOCK
        else TypeAdapter(AnyBridge).validate_python(settings).build(context)
    )
    try:
        worker = Worker(bridge, bridge.attach())
        synchronize()
        print(json.dumps({"attach_s": time.perf_counter() - began, **memory()}), file=answers, flush=True)
        for line in sys.stdin:
            question = json.loads(line)
            print(json.dumps(worker.tasks[question.pop("do")](**question)), file=answers, flush=True)
    finally:
        bridge.close()


if __name__ == "__main__":
    main()
