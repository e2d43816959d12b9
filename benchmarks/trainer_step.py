"""CPU seconds that our trainer takes for a step of 16 prompts × 8 completions, with TRL's beside it in the same run.

    .venv/bin/pip install -c constraints.txt -e '.[peers]'
    .venv/bin/python benchmarks/trainer_step.py [STEPS]

Ours is the trainer's process of a whole supervised `tiny-cpu` run: fetching, checking, forward, backward, update,
hand-over of weights and records, read from /proc at two steps. TRL generates in its own process, so its step is printed
whole and without generation; the ratio is against the latter, which is the harder comparison. One torch thread each.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WARM_UP = 10
TARGET_S = 0.13


def ours(steps: int) -> float:
    """CPU seconds a step of the trainer's process, from step `WARM_UP` to the last."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = {**os.environ, "XDG_RUNTIME_DIR": name}
        overrides = [f"services.trainer.training_steps={steps}", "services.api.port=18000", "services.vllm.port=19001"]
        command = [sys.executable, "-m", "grpo_tui", "up", "--profile", "tiny-cpu", "--wait", "finished"]
        overrides.append("services.trainer.eval_every=0")
        command += [word for override in overrides for word in ("--set", override)]
        run = subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.DEVNULL)
        pid, first, last = None, None, None
        while run.poll() is None:
            time.sleep(0.05)
            metrics = next(iter(folder.glob("logs/*/metrics.jsonl")), None)
            step = _last_step(metrics) if metrics else 0
            if step >= WARM_UP and metrics is not None:
                pid = pid or _trainer_pid(metrics.parent)
                seconds = _cpu_seconds(pid)
                if seconds is not None:
                    first = first or (step, seconds)
                    last = (step, seconds)
        if run.returncode or first is None or last is None:
            raise SystemExit(f"the tiny-cpu run failed with exit code {run.returncode}")
        return (last[1] - first[1]) / (last[0] - first[0])


def theirs(steps: int) -> dict[str, float] | None:
    """TRL's figures; None where it is not installed."""
    if importlib.util.find_spec("trl") is None:
        return None
    script = Path(__file__).with_name("_trl_step.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), str(steps), str(WARM_UP)], env=environment, stdout=subprocess.PIPE, check=True
    )
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    own = ours(steps)
    print(
        f"trainer, 16 × 8 samples a step: {own:.3f} s CPU (target {TARGET_S}: {'met' if own <= TARGET_S else 'missed'})"
    )
    peer = theirs(steps)
    if peer is None:
        print("TRL: not installed here (.venv/bin/pip install -c constraints.txt -e '.[peers]')")
        return
    print(f"TRL, whole step:                {peer['whole']:.3f} s CPU")
    print(f"TRL, without its generation:    {peer['training']:.3f} s CPU, {peer['training'] / own:.1f} × ours")


def _last_step(metrics: Path) -> int:
    lines = metrics.read_bytes().splitlines()
    return int(json.loads(lines[-1])["step"]) if lines else 0


def _trainer_pid(run_folder: Path) -> int:
    state = json.loads((run_folder / "state.json").read_text())
    return next(int(service["pid"]) for service in state["services"] if service["name"] == "trainer")


def _cpu_seconds(pid: int) -> float | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
