"""CPU seconds of the commands that users and scripts run most, beside an empty Python program.

    .venv/bin/python benchmarks/commands.py

`status` asks the daemon of a live run (one `sleep`), `plan` lays out the largest profile. The median of the
runs counts; the target of both is 0.4 s of CPU.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

RUNS = 7
TARGET_S = 0.4
GRPO_TUI = (sys.executable, "-m", "grpo_tui")
SLEEPER = '[services.sleeper]\nkind = "command"\nargv = ["sleep", "600"]\n'


def cpu_seconds(argv: Sequence[str], folder: Path) -> float:
    """User and system seconds of one command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(argv, cwd=folder, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sleeper.toml").write_text(SLEEPER)
        os.environ["XDG_RUNTIME_DIR"] = name
        subprocess.run(
            [*GRPO_TUI, "up", "--profile", "sleeper.toml", "--detach", "--wait", "ready"], cwd=folder, check=True
        )
        try:
            commands = {
                "python -c pass": (sys.executable, "-c", "pass"),
                "grpo-tui status": (*GRPO_TUI, "status"),
                "grpo-tui status --json": (*GRPO_TUI, "status", "--json"),
                "grpo-tui ps": (*GRPO_TUI, "ps"),
                "grpo-tui plan": (*GRPO_TUI, "plan", "--profile", "hermes8b-shared"),
            }
            for title, argv in commands.items():
                cpu_seconds(argv, folder)  # compiled files and caches are warm
                median = statistics.median(cpu_seconds(argv, folder) for _ in range(RUNS))
                verdict = (
                    ""
                    if title.startswith("python")
                    else f"  (target {TARGET_S}: {'met' if median < TARGET_S else 'missed'})"
                )
                print(f"{title:<24}{median:6.3f} s CPU{verdict}")
        finally:
            subprocess.run([*GRPO_TUI, "down"], cwd=folder, check=True)


if __name__ == "__main__":
    main()
