"""Devices that settings name. Torch-free to import."""

from __future__ import annotations

from grpo_engine.errors import ConfigError


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


def trainable_device(text: str) -> str:
    """The device of a setting; `auto` is the GPU if there is one."""
    import torch

    if text != "auto":
        return text
    return "cuda" if torch.cuda.is_available() else "cpu"
