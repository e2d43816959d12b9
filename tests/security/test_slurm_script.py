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
    "ray": """folder=${*##*--temp-dir=}
        stat -c '%a %n' "$folder" "$RAY_AUTH_TOKEN_PATH" "$RAY_TLS_SERVER_KEY" > started
        openssl x509 -in "$RAY_TLS_CA_CERT" -noout -ext subjectAltName >> started
        echo "$RAY_USE_TLS" >> started""",
    # Asks how many machines have joined.
    "python": "until [ $(wc -l < started) = 6 ]; do sleep 0.01; done",
    "grpo-tui": "exit 3",
}


def run(folder: Path, **fakes: str) -> tuple[subprocess.CompletedProcess[str], str]:
    """The script on one machine, and the name of its job."""
    programs = folder / "bin"
    programs.mkdir()
    for name, text in {**FAKES, **fakes}.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    job = f"test{os.getpid()}"
    variables = {"SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": "machine", "SLURM_NNODES": "1"}
    environment = {**os.environ, **variables, "PATH": f"{programs}:{os.environ['PATH']}"}
    try:
        return subprocess.run(["bash", SCRIPT], cwd=folder, env=environment, capture_output=True, text=True), job
    finally:
        for left in Path("/tmp").glob(f"ray-{job}*"):
            shutil.rmtree(left)


def test_ray_starts_in_a_folder_that_no_other_user_can_have_made_and_its_secrets_are_removed(tmp_path: Path) -> None:
    """In `/tmp/ray-JOB` of another user Ray's logs went through links of theirs into a file of whoever started it."""
    done, job = run(tmp_path)
    assert done.returncode == 3, done.stderr
    folder, token, key = (line.split() for line in (tmp_path / "started").read_text().splitlines()[:3])
    assert folder[0] == "700"
    assert folder[1].startswith(f"/tmp/ray-{job}-")
    assert len(folder[1]) == len(f"/tmp/ray-{job}-") + 16
    for mode, path in (token, key):
        assert mode == "600"
        assert not Path(path).parent.exists()


def test_ray_talks_only_to_processes_with_the_certificate_of_the_job(tmp_path: Path) -> None:
    """Another user who listened at the port of the head first was sent the token, and machines joined their cluster."""
    run(tmp_path, hostname="echo 10.0.0.1 fd00::1")
    names, uses_tls = (tmp_path / "started").read_text().splitlines()[-2:]
    assert uses_tls == "1"
    assert names.split(", ") == [
        "    IP Address:127.0.0.1",
        *2 * ["IP Address:10.0.0.1", "IP Address:FD00:0:0:0:0:0:0:1"],
    ]


def test_a_job_whose_head_of_ray_has_ended_ends_too(tmp_path: Path) -> None:
    """It waited for the end of its time, where another process had the port."""
    done, _ = run(tmp_path, ray="exit 1", python="exit 1", sleep="exit 0")
    assert done.returncode == 1
    assert "RAY_PORT" in done.stderr
