"""Seconds in which vLLM's loaders read a model's weights from the page cache into a GPU, by turns.

    python benchmarks/reading.py [--gigabytes 16] [--folder /tmp/grpo-reading] [--rounds 2]

The loaders are vLLM's own iterators: `safetensors` is its default, `instanttensor` what our server starts with; the
second one without `INSTANTTENSOR_BACKEND=BUFFERED` reads past the page cache. Files have a gigabyte each.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from vllm.model_executor.model_loader import weight_utils

Weights = Iterable[tuple[str, Tensor]]
NUM_TENSORS = 8
"""In each file of a gigabyte."""


def main() -> None:
    options = flags().parse_args()
    ways: dict[str, Callable[[list[str]], Weights]] = {
        "safetensors": lambda files: weight_utils.safetensors_weights_iterator(files, False),
        "instanttensor, buffered": lambda files: instant_tensor(files, "BUFFERED"),
        "instanttensor, direct": lambda files: instant_tensor(files, "URING,AIO"),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    try:
        files, weights = written(options.folder, options.gigabytes)
        for _ in range(options.rounds):
            for name, read in ways.items():
                began = time.perf_counter()
                for key, tensor in read(files):
                    weights[key].copy_(tensor)
                torch.cuda.synchronize()
                taken[name].append(time.perf_counter() - began)
                assert all(bool((weights[key] == number).all()) for number, key in enumerate(sorted(weights)))
                for tensor in weights.values():
                    tensor.zero_()
    finally:
        shutil.rmtree(options.folder, ignore_errors=True)
    peer = statistics.median(taken["safetensors"])
    for name, each in taken.items():
        median = statistics.median(each)
        print(f"{name:<26}{median:8.2f} s  {options.gigabytes / median:6.1f} GB/s  {peer / median:5.1f} ×", flush=True)


def written(folder: Path, num_files: int) -> tuple[list[str], dict[str, Tensor]]:
    """Files of weights, read once so that they are in the page cache, and memory of the GPU for them."""
    folder.mkdir(parents=True)
    shape = (8, 10**9 // NUM_TENSORS // 16)
    names = [f"{number:03d}" for number in range(num_files * NUM_TENSORS)]
    files = []
    for file in range(num_files):
        part = range(file * NUM_TENSORS, (file + 1) * NUM_TENSORS)
        path = folder / f"{file:03d}.safetensors"
        save_file({names[number]: torch.full(shape, float(number), dtype=torch.bfloat16) for number in part}, path)
        path.read_bytes()
        files.append(str(path))
    return files, {name: torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for name in names}


def instant_tensor(files: list[str], backend: str) -> Weights:
    os.environ["INSTANTTENSOR_BACKEND"] = backend
    return weight_utils.instanttensor_weights_iterator(files, False)  # type: ignore[no-any-return]


def flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=int, default=16)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/grpo-reading"), help="is made, and removed")
    parser.add_argument("--rounds", type=int, default=2)
    return parser


if __name__ == "__main__":
    main()
