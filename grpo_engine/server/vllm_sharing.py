"""Sharing vLLM's weights: its worker exports them, this process announces them and guards them with a fence."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_engine.bridges.bridge_files import bridge_file_path
from grpo_engine.bridges.fence import Fence
from grpo_engine.bridges.process_identity import ProcessIdentity
from grpo_engine.bridges.shared_tensors import map_tensors, segments_of, unlink_segments
from grpo_engine.bridges.stock_bridge_file import stock_form
from grpo_engine.errors import BridgeError
from grpo_engine.models.loading import load_config
from grpo_engine.models.stored_weights import checkpoint_folder
from grpo_engine.server.config import ServerConfig
from grpo_engine.server.exports import Adopted, Owner, adopt, awaited_trainer, withdraw, write_bridge_file
from grpo_engine.server.vllm_checkpoint import Parameters
from grpo_engine.wire.bridge_file import BridgeFile, SharedTensor

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

_FENCE_POLL_S = 0.002

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """An export that is announced."""

    fence: Fence
    path: Path
    file: BridgeFile
    owner: Owner
    awaits: ProcessIdentity | None
    """The trainer that has newer weights, and brings them; nothing is to be sampled before it has."""

    def withdraw(self) -> None:
        """Take it back, where it goes with this server."""
        withdraw(self.path, self.file, self.owner)


async def share(
    llm: AsyncLLM, parameters: Parameters, *, config: ServerConfig, instance: str, environment: Mapping[str, str]
) -> Sharing:
    """Export the weights of a vLLM that serves nobody yet, and announce them.

    What a predecessor of the same run left in shared memory is newer than the checkpoint: it is copied over.

    Raises:
        BridgeError: the weights cannot be shared, or another server holds the bridge file.
    """
    path = bridge_file_path(config.bridge_file, environment)
    owner = Owner.of(instance, environment)
    fingerprint = _fingerprint(config)
    trainer = awaited_trainer(path)
    adopted = adopt(path, owner, fingerprint)
    stem = f"{owner.stem}{instance}"
    try:
        manifest, fused = await _exported(llm, parameters, f"{stem}-weights", checkpoint_folder(config.model_name))
        version = 0 if adopted is None else await take_over(adopted, manifest)
        fence = Fence.create(f"{stem}-fence", policy_version=version)
        file = write_bridge_file(
            path,
            owner=owner,
            model=config.model_name,
            fingerprint=fingerprint,
            fence=fence,
            manifest=manifest,
            aliases=parameters.aliases,
            stock=stock_form(config.model_name, fused),
        )
    except BaseException:
        unlink_segments([f"{stem}-fence", f"{stem}-weights"])
        raise
    logger.info("✓ Exported %d params to %s", len(manifest), path)
    awaits = None if adopted is not None else trainer
    return Sharing(fence=fence, path=path, file=file, owner=owner, awaits=awaits)


async def _exported(
    llm: AsyncLLM, parameters: Parameters, segment: str, folder: Path | None
) -> tuple[dict[str, SharedTensor], dict[str, SharedTensor]]:
    """The weights under the names of transformers, and under vLLM's where they are in CUDA memory."""
    expected = {name: list(shape) for name, shape in parameters.shapes.items()}
    answers: list[Any] = await llm.collective_rpc(
        "grpo_share", args=(segment, expected, parameters.aliases, None if folder is None else str(folder))
    )
    (answer,) = answers
    if problem := answer.get("problem"):
        raise BridgeError(str(problem))
    if answer["num_compared"] < len(expected):
        logger.warning(
            "%d of %d shared tensors could be compared with the checkpoint", answer["num_compared"], len(expected)
        )
    tensors, fused = (
        {name: SharedTensor.model_validate(entry) for name, entry in answer[which].items()}
        for which in ("tensors", "fused")
    )
    return tensors, fused


async def take_over(adopted: Adopted, manifest: Mapping[str, SharedTensor]) -> int:
    """Copy what a predecessor left into the exported weights; gives its version.

    A trainer may still be writing there, which has not seen yet that the predecessor ended: it is waited for.

    Raises:
        HalfWritten: it died meanwhile.
    """
    own = map_tensors(manifest)
    while True:
        before = adopted.fence.check()
        if not before.is_writing:
            for name, tensor in own.items():
                tensor.copy_(adopted.tensors[name])
            if adopted.fence.read().sequence == before.sequence:
                break
        await asyncio.sleep(_FENCE_POLL_S)
    unlink_segments({adopted.file.fence_segment} | segments_of(adopted.file.tensors))
    logger.info("Took over the weights of version %d from shared memory", before.policy_version)
    return before.policy_version


def _fingerprint(config: ServerConfig) -> str:
    parts = ("vllm", config.model_name, config.dtype, load_config(config.model_name).to_json_string(use_diff=False))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
