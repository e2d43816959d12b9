"""Whether torch can use the device that a setting names."""

from __future__ import annotations

import torch

from grpo_engine.errors import ConfigError


def require_device(name: str) -> None:
    """Look whether torch can use the device that was asked for.

    Raises:
        ConfigError: it cannot.
    """
    if not name.startswith("cuda"):
        return
    index, count = name.partition(":")[2], torch.cuda.device_count()
    number = int(index) if index.isdigit() else 0
    if number >= count:
        raise ConfigError(
            f"device {name!r}: torch {torch.__version__} finds {count} GPUs here: choose another --device, look at "
            "CUDA_VISIBLE_DEVICES, or install a torch that is built for this machine's GPUs"
        )
