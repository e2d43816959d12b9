"""`scripts/slurm_cluster.sh` beside other users of the machines, with Slurm, Ray and our command faked."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "slurm_cluster.sh"
FAKES = {
    "scontrol": "echo machine",
    "hostname": "echo 127.0.0.1",
    # Runs the command, without its own options, as on one machine.
    "srun": 'while [ "${1#-}" != "$1" ]; do [ "$1" = -w ] && shift; shift; done; exec "$@"',
    "ray": """case "$1" in
        list) until [ -s started ]; do sleep 0.01; done; echo '"ALIVE"' ;;
        start) folder=${*##*--temp-dir=}; stat -c '%a %n' "$folder" "$RAY_AUTH_TOKEN_PATH" > started ;;
    esac""",
    "grpo-tui": "exit 3",
}


def test_ray_starts_in_a_folder_that_no_other_user_can_have_made_and_its_token_is_removed(tmp_path: Path) -> None:
    """In `/tmp/ray-JOB` of another user Ray's logs went through links of theirs into a file of whoever started it."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in FAKES.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    job = f"test{os.getpid()}"
    variables = {"SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": "machine", "SLURM_NNODES": "1"}
    environment = {**os.environ, **variables, "PATH": f"{programs}:{os.environ['PATH']}"}
    try:
        done = subprocess.run(["bash", SCRIPT], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 3, done.stderr
        folder, token = ((line.split()) for line in (tmp_path / "started").read_text().splitlines())
        assert folder[0] == "700"
        assert folder[1].startswith(f"/tmp/ray-{job}-")
        assert len(folder[1]) == len(f"/tmp/ray-{job}-") + 16
        assert token[0] == "600"
        assert not Path(token[1]).exists()
    finally:
        for left in Path("/tmp").glob(f"ray-{job}*"):
            shutil.rmtree(left)
