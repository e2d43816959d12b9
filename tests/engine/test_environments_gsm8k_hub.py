"""gsm8k where there is no network: it says so at once, and what to do."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("datasets"), reason="the `data` extra")


@pytest.mark.slow
def test_a_hub_that_cannot_be_reached_is_not_asked_again_and_again(tmp_path: Path) -> None:
    with socket.socket() as nobody:  # bound and not listening: whoever connects is refused
        nobody.bind(("127.0.0.1", 0))
        hub = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        done = subprocess.run(
            [sys.executable, "-m", "grpo_engine", "env", "--task", "gsm8k", "--model-name", "unused"],
            env={**environment, "HF_ENDPOINT": hub, "HF_HOME": str(tmp_path), "NO_PROXY": "127.0.0.1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
    assert done.returncode == 2
    assert done.stderr.count(f"{hub} cannot be reached") == 1
    assert "give task.path = a folder with train.jsonl" in done.stderr
    assert "Retry" not in done.stderr
