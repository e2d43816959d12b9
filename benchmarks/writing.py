"""Seconds to write a model's weights for inference, ours beside safetensors' own writer, by turns.

    python benchmarks/writing.py [--device cuda] [--gigabytes 16] [--folder /dev/shm/grpo-writing] [--rounds 2]

transformers writes file after file with safetensors; ours writes several at a time, and what lies on a GPU through a
little pinned memory. Safetensors by as many threads stands between them. Files have a gigabyte each.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from grpo_engine.models.tensor_files import WRITERS, write_tensors

Files = dict[str, dict[str, Tensor]]
NUM_TENSORS = 8
"""In each file of a gigabyte."""


def main() -> None:
    options = flags().parse_args()
    shape = (8, 10**9 // NUM_TENSORS // 16)
    files: Files = {
        f"{file}.safetensors": {
            f"{file}.{number}": torch.randn(shape, device=options.device).bfloat16() for number in range(NUM_TENSORS)
        }
        for file in range(options.gigabytes)
    }
    ways: dict[str, tuple[Callable[[dict[str, Tensor], Path], None], int]] = {
        "safetensors, as transformers does it": (save_file, 1),
        f"safetensors, {WRITERS} threads": (save_file, WRITERS),
        "ours": (write_tensors, WRITERS),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    try:
        for _ in range(options.rounds):
            for name, (write, num_threads) in ways.items():
                taken[name].append(seconds(files, options.folder, write, num_threads))
                check(files, options.folder)
                shutil.rmtree(options.folder)
    finally:
        shutil.rmtree(options.folder, ignore_errors=True)
    peer = statistics.median(next(iter(taken.values())))
    for name, each in taken.items():
        median = statistics.median(each)
        print(f"{name:<40}{median:8.2f} s  {options.gigabytes / median:6.1f} GB/s  {peer / median:5.1f} ×")


def seconds(files: Files, folder: Path, write: Callable[[dict[str, Tensor], Path], None], num_threads: int) -> float:
    """How long writing all files takes."""
    folder.mkdir(parents=True)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.monotonic()
    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(lambda name: write(files[name], folder / name), files))
    return time.monotonic() - began


def check(files: Files, folder: Path) -> None:
    """See that one of them holds what was to be written."""
    name, tensors = next(iter(files.items()))
    assert all(torch.equal(tensor, tensors[key].cpu()) for key, tensor in load_file(folder / name).items())


def flags() -> argparse.ArgumentParser:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--gigabytes", type=int, default=16)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/grpo-writing"), help="is made and removed")
    parser.add_argument("--rounds", type=int, default=2)
    return parser


if __name__ == "__main__":
    main()
