"""A plan as people read it: what would start, in which order, with which command. Pure."""

from __future__ import annotations

import shlex

from grpo_tui.profile.loading import LoadedProfile
from grpo_tui.profile.plan import Plan, shown_env


def plan_text(plan: Plan, loaded: LoadedProfile) -> str:
    """Every service with what it waits for, its ports, GPUs, environment, and a command that can be pasted."""
    rows = [f"{plan.profile_name}  {loaded.profile.description}".rstrip()]
    for index, launch in enumerate(plan.launches, start=1):
        needs = ", ".join(f"{name} {condition}" for name, condition in launch.needs.items())
        ports = " ".join(str(port) for port in launch.ports)
        gpus = ",".join(str(gpu) for gpu in launch.gpus)
        facts = [
            f"after {needs}" if needs else "at once",
            f"port {ports}" if ports else "",
            f"GPU {gpus}" if gpus else "",
        ]
        rows.append(f"\n{index}. {launch.name} ({launch.kind}): {' · '.join(fact for fact in facts if fact)}")
        rows += [f"   {variable}={shlex.quote(value)}" for variable, value in shown_env(launch).items()]
        rows.append(f"   {_folded(launch.argv)}")
    return "\n".join(rows)


def _folded(argv: tuple[str, ...]) -> str:
    """A command that can be pasted into a shell, one flag a line."""
    words = [shlex.quote(word) for word in argv]
    lines = [words[0]]
    for word in words[1:]:
        if word.startswith("--"):
            lines.append(f"      {word}")
        else:
            lines[-1] += f" {word}"
    return " \\\n".join(lines)
