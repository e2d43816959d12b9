"""Devices that settings name. Torch-free to import."""

from __future__ import annotations

from grpo_engine.errors import ConfigError

THREADS_BESIDE_GPU = 2


def require_device(name: str) -> None:
    """Check that torch can use a device.

    Raises:
        ConfigError: it cannot.
    """
    import torch

    if not name.startswith("cuda"):
        return
    index, count = name.partition(":")[2], torch.cuda.device_count()
    number = int(index) if index.isdigit() else 0
    if number >= count:
        raise ConfigError(
            f"device {name!r}: torch {torch.__version__} finds {count} GPUs here: choose another --device, look at "
            "CUDA_VISIBLE_DEVICES, or install a torch that is built for this machine's GPUs"
        )


def limit_threads(device: str, wanted: int | None) -> None:
    """Set the threads of operations on the CPU: `wanted`, or few where a GPU computes.

    Beside a GPU the CPU lays out batches, in tensors of some 100 kB. Two ranks with 32 threads each on 32 cores took
    16 ms for one such operation, and the GPU waited 70 ms a micro-batch.
    """
    import torch

    if wanted is not None:
        torch.set_num_threads(wanted)
    elif device.startswith("cuda"):
        torch.set_num_threads(min(torch.get_num_threads(), THREADS_BESIDE_GPU))


def trainable_device(text: str) -> str:
    """The device of a setting; `auto` is the GPU if there is one."""
    import torch

    if text != "auto":
        return text
    return "cuda" if torch.cuda.is_available() else "cpu"
