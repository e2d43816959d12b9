"""Devices that settings name. Torch-free to import."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from grpo_engine.errors import ConfigError

THREADS_BESIDE_GPU = 2
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""From which torch reads how it allocates memory of a GPU, when it is first used."""
_IN_PIECES = "expandable_segments:True"


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


def avoid_fragments(environment: MutableMapping[str, str]) -> None:
    """Have torch map memory of a GPU piece by piece; what the user set is kept. To be called before CUDA is in use.

    Else it requests whole segments, and one can be freed only when nothing in it is used: an 8B model with 8-bit Adam,
    planned at 52 GB, did not get 55 of a card, since its optimizer's state lay in segments of the first step. Tensors
    in such memory cannot be exported to other processes, nor can vLLM's sleep mode free it.
    """
    if not any(environment.get(name) for name in ALLOCATOR_VARIABLES):
        environment[ALLOCATOR_VARIABLES[0]] = _IN_PIECES


def asked_for_pieces(environment: Mapping[str, str]) -> str | None:
    """The first variable, with its value, that has torch allocate so: `NAME=value`."""
    told = ((name, environment.get(name, "")) for name in ALLOCATOR_VARIABLES)
    return next((f"{name}={value}" for name, value in told if _IN_PIECES.lower() in value.lower()), None)


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
