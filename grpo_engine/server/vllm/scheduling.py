"""vLLM's scheduler with a prefix cache that can be forgotten while requests run.

vLLM clears its prefix cache only once no request holds a block of it. With `keep_kv_cache` requests run on over a
weight update with the blocks that they hold, and those which wait were given their cache keys before: they would read
the prompts of others, computed by earlier weights. vLLM imports this module in the engine core (`scheduler_cls`, 0.26
to 0.33), and nothing else does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class _Forgetting(Scheduler):  # type: ignore[misc]  # vLLM is not installed where types are checked
    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached prefixes; those that run keep their blocks, unless they are to be preempted."""
        if reset_running_requests:
            return bool(super().reset_prefix_cache(reset_running_requests, reset_connector))
        pool = self.kv_cache_manager.block_pool
        pool.evict_blocks({block.block_id for block in pool.blocks if block.block_hash is not None})
        return True


class _ForgettingAsync(_Forgetting, AsyncScheduler):  # type: ignore[misc]
    pass


def forgetting_scheduler(*, vllm_config: VllmConfig, **others: Any) -> Scheduler:
    """The scheduler of these settings, as vLLM's engine core makes it."""
    kind = _ForgettingAsync if vllm_config.scheduler_config.async_scheduling else _Forgetting
    return kind(vllm_config=vllm_config, **others)
