"""Seconds to write a model that is sharded over ranks as it is gathered, beside gathered whole and then written.

    python -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/sharded_writing.py --model FOLDER

By turns, into the same folder; both must give the same files. `gathered` is a pass that drops every layer: what neither
can be faster than. Main memory is what rank 0 took beside the files, at most, more than before.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from grpo_engine.bridges.placement.sharded import ShardedModel
from grpo_engine.bridges.protocol import BridgeContext, Sharding
from grpo_engine.models.config import LoraSettings
from grpo_engine.ranks.group import RankGroup
from grpo_engine.ranks.place import rank_place
from grpo_engine.train.following import Finished


def main() -> None:
    options = flags().parse_args()
    place = rank_place(os.environ)
    assert place is not None, "start it by torch.distributed.run"
    device = f"cuda:{place.local_rank}" if options.device == "cuda" else "cpu"
    torch.set_num_threads(1)
    ranks = RankGroup(place, device=device)
    context = BridgeContext(
        model_name=str(options.model),
        dtype="bfloat16",
        device=device,
        server_urls=(),
        folder=options.folder,
        lora=LoraSettings(),
        ranks=ranks,
        sharding=Sharding(rounds_weights=True),
    )
    placement = ShardedModel(context)
    if ranks.leads:
        placement.load()
        try:
            compare(placement, options.folder, options.rounds)
        finally:
            shutil.rmtree(options.folder, ignore_errors=True)
        with ranks.together(Finished()):
            pass
    else:
        follow(placement, ranks)
    ranks.close()


def follow(placement: ShardedModel, ranks: RankGroup) -> None:
    """Take part as rank 0 announces."""
    with ranks.together(first := ranks.next_work()):
        placement.join(first)
    while not isinstance(work := ranks.next_work(), Finished):
        with ranks.together(work):
            placement.take_part(work, lambda: None)
    with ranks.together(work):
        pass


def compare(placement: ShardedModel, folder: Path, rounds: int) -> None:
    """Measure all ways by turns, and print the median of each."""
    ways: dict[str, Callable[[], None]] = {
        "gathered": lambda: placement.stream(lambda layer: None),
        "gathered whole, then written": lambda: placement.save(folder, placement.tensors()),
        "written layer by layer": lambda: placement.write(folder, folder),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    memory: dict[str, list[int]] = {name: [] for name in ways}
    sizes: list[dict[str, int]] = []
    for _ in range(rounds):
        for name, way in ways.items():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            Path("/proc/self/clear_refs").write_text("5")  # the peak is the present value
            before, began = peak_bytes(), time.perf_counter()
            way()
            taken[name].append(time.perf_counter() - began)
            memory[name].append(peak_bytes() - before)
            if name != "gathered":
                sizes.append({path.name: path.stat().st_size for path in folder.iterdir()})
    assert all(each == sizes[0] for each in sizes), "the ways write different files"
    for name, each in taken.items():
        held = max(memory[name]) / 1e9  # later rounds take again what the first has freed
        print(f"{name:<32}{statistics.median(each):8.2f} s  {held:6.2f} GB of main memory", flush=True)
    print(f"{sum(sizes[0].values()) / 1e9:.2f} GB in {len(sizes[0])} files", flush=True)


def peak_bytes() -> int:
    """Most main memory that this process has had."""
    [line] = [each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def flags() -> argparse.ArgumentParser:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/grpo-sharded-writing"), help="made and removed")
    parser.add_argument("--rounds", type=int, default=5)
    return parser


if __name__ == "__main__":
    main()
