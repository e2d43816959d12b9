"""`benchmarks/random_kills.py` for less than a minute: what it asserts, that it kills, and that the run goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_tui.profile.cluster import has_ray

pytestmark = [
    pytest.mark.skipif(not has_ray(), reason="Ray is not installed"),
    pytest.mark.slow,
    pytest.mark.extended("test_cluster_broker.py, test_rollouts_kills.py, test_survival.py: each kill alone"),
    pytest.mark.timeout(900),
]
PROGRAM = Path(__file__).parents[2] / "benchmarks" / "random_kills.py"


def test_a_run_on_a_cluster_trains_each_group_once_whatever_is_killed(tmp_path: Path) -> None:
    argv = [sys.executable, str(PROGRAM), "--seconds", "40", "--seed", "3", "--json"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout)
    assert sum(kind["kills"] for kind in summary["kills"].values()) >= 2
    assert summary["groups"]["trained"] > summary["steps"] > 20
