"""The plan of the usual stack, `screen_fakes.four_services`."""

from __future__ import annotations

from pathlib import Path

from launches import launch

from grpo_engine.wire.run_folder import PLAN_FILE
from grpo_tui.profile.plan_file import Plan
from grpo_tui.services.base import Launch, NeedCondition, Probe

READY = NeedCondition.READY


def four_launches() -> tuple[Launch, ...]:
    """In start order; vLLM's has a secret, and a limit that progress extends."""
    vllm = launch(
        "vllm",
        needs={"api": READY},
        argv=("python", "-m", "grpo_engine", "server", "--api-key", "sk-in-the-command", "--port", "9001"),
        env={"HF_TOKEN": "hf-in-the-environment", "LEVEL": "of-a-file", "OMP_NUM_THREADS": "4"},
        env_from_files=("LEVEL",),
        ready=Probe(http="http://127.0.0.1:9001/health", within_s=300, stalled_s=120),
    )
    api = launch("api", ready=Probe(tcp="127.0.0.1:8002", within_s=60))
    env = launch("env", needs={"api": READY, "vllm": READY})
    return api, vllm, env, launch("trainer", needs={"api": READY, "vllm": READY, "env": READY})


def write_plan(run_folder: Path) -> None:
    """Put the plan of `four_launches` into the run folder."""
    plan = Plan(profile_name="usual", profile_folder=run_folder, launches=four_launches())
    (run_folder / PLAN_FILE).write_text(plan.to_json())
