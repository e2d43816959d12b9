"""Which loader reads the model's files when vLLM starts."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import Version
from safetensors import SafetensorError, safe_open

from grpo_engine.installed import installed_version
from grpo_engine.models.stored_weights import checkpoint_folder
from grpo_engine.server.config import ServerConfig

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs

INSTANT_TENSOR = "instanttensor"
"""A package, and vLLM's `load_format` that uses it (0.26 to 0.33)."""
_READS_PAGE_CACHE_SINCE = Version("0.2.2")

logger = logging.getLogger(__name__)


def reads_with_instant_tensor(config: ServerConfig, arguments: AsyncEngineArgs) -> bool:
    """Whether InstantTensor reads the files, which it does from the page cache five times as fast as vLLM's own loader
    (`benchmarks/reading.py`): on one GPU, from files of safetensors, with nothing else asked for.

    It takes up to 1.5 GB of the GPU meanwhile, which a vLLM that starts has, and one beside a trainer may not.
    """
    from vllm.platforms import current_platform

    version, folder = installed_version(INSTANT_TENSOR), checkpoint_folder(config.model_name)
    return (
        version is not None
        and Version(version) >= _READS_PAGE_CACHE_SINCE
        and bool(current_platform.is_cuda())
        and "load_format" not in config.vllm
        and not arguments.model_loader_extra_config
        and arguments.quantization is None
        and arguments.speculative_config is None
        and not arguments.enable_sleep_mode  # whose pool of memory keeps what is taken while weights load
        and arguments.tensor_parallel_size == arguments.pipeline_parallel_size == arguments.data_parallel_size == 1
        and folder is not None
        and not any(folder.glob("consolidated*.safetensors"))  # Mistral's layout, which vLLM itself looks for
        and _has_sound_headers(folder)
    )


def _has_sound_headers(folder: Path) -> bool:
    """Whether there are files of safetensors, and each is one; vLLM's own loader reports what is wrong."""
    paths = list(folder.glob("*.safetensors"))
    for path in paths:
        try:
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            logger.debug("%s: %s", path, error)
            return False
    return bool(paths)
