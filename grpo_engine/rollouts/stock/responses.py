"""Answers in the form of the stock Atropos API, which its clients parse by these keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_engine.rollouts.state.outcomes import Placed
from grpo_engine.rollouts.state.records import EnvironmentRecord, RunRecord

EMPTY_EXAMPLE: dict[str, list[object]] = {
    "tokens": [],
    "masks": [],
    "scores": [],
    "advantages": [],
    "ref_logprobs": [],
    "generation_params": [],
    "inference_logprobs": [],
    "messages": [],
    "images": [],
}
"""`GET /latest_example` before the first group."""
NOT_REGISTERED = {"status": "error", "message": "Trainer not registered: POST /register first", "batch": []}
"""`GET /batch` before a trainer registered."""


def info(run: RunRecord | None) -> dict[str, int]:
    """`GET /info`; -1 before a trainer registered."""
    return {
        "batch_size": run.request.batch_size if run else -1,
        "max_token_len": run.request.max_token_len if run else -1,
    }


def wandb_info(run: RunRecord | None) -> dict[str, str | None]:
    """`GET /wandb_info`."""
    return {
        "group": run.request.wandb_group if run else None,
        "project": run.request.wandb_project if run else None,
    }


def environment_registered(record: EnvironmentRecord | None, run: RunRecord | None) -> dict[str, Any]:
    """`POST /register-env`; without a record the client asks again."""
    if record is None or run is None:
        return {"status": "wait for trainer to start"}
    return {
        "status": "success",
        "env_id": record.id,
        "wandb_name": record.name,
        "checkpoint_dir": run.request.checkpoint_dir,
        "starting_step": run.step,
        "checkpoint_interval": run.request.save_checkpoint_interval,
        "num_steps": run.request.num_steps,
    }


def group_received(small: Sequence[Placed]) -> dict[str, Any]:
    """`POST /scored_data`; `small` holds the group if it is smaller than its environment's group size."""
    return {"status": "buffered", "buffer_size": small[0].num_buffered} if small else {"status": "received"}


def groups_received(num_groups: int, small: Sequence[Placed]) -> dict[str, Any]:
    """`POST /scored_data_list`; `small` are the groups that are smaller than their environment's group size."""
    buffered = {"buffered": len(small), "last_buffer_size": small[-1].num_buffered} if small else {}
    return {"status": "received", "groups_processed": num_groups, **buffered}
