"""`grpo-tui export` of a run that trains on: by real processes, interrupted, and without what is half written."""

from __future__ import annotations

import json
import signal

import pytest
from stage import free_ports
from workplace import Workplace, until

from grpo_engine.wire.run_folder import checkpoint_steps

SETTINGS = {
    "services.env.group_size": 4,
    "services.trainer.training_steps": 100_000,
    "services.trainer.batch_size": 16,
    "services.trainer.checkpoint_interval": 1,
    "services.trainer.keep_checkpoints": 2,
    "services.trainer.eval_every": 0,
}
"""Checkpoints are removed long before an export has read them."""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.extended("test_bridge_restart exports a run that is over, test_export what leaves nothing half")
def test_a_live_run_is_exported_while_it_removes_checkpoints_and_an_interrupted_export_leaves_nothing(
    place: Workplace,
) -> None:
    api, vllm = place.ports = free_ports(2)
    settings = {**SETTINGS, "services.api.port": api, "services.vllm.port": vllm}
    flags = [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    run = place.succeed("up", "--profile", "tiny-cpu", *flags, "--detach", "--wait", "ready").strip()
    checkpoints = place.run_folder() / "checkpoints"
    until(lambda: len(checkpoint_steps(checkpoints)) == 2)
    before = checkpoint_steps(checkpoints)[-1]
    place.succeed("export", run, "model")
    until(lambda: before not in checkpoint_steps(checkpoints))  # training goes on
    model = place.folder / "model"
    assert {"model.safetensors", "tokenizer.json", "README.md"} <= {path.name for path in model.iterdir()}
    assert "## Curve" in (model / "README.md").read_text()
    refused = place.grpo("export", run, "model")
    assert refused.returncode == 2
    assert "is not empty" in refused.stderr

    interrupted = place.start("export", run, "other")
    until((place.folder / ".other.partial").is_dir)
    interrupted.send_signal(signal.SIGINT)
    output, errors = interrupted.communicate(timeout=60)
    assert (interrupted.returncode, output) == (130, ""), errors
    place.succeed("down")
    assert sorted(path.name for path in place.folder.iterdir() if path.name != "logs") == ["model"]
