"""The plan of a run and the file it travels in: launches in start order, and nothing about how they came to be.

A plan is all that the daemon needs. It is written beside the run's logs, so that a daemon or its successor never reads
a profile that was edited in the meantime. Loads no engine setting, which keeps the daemon small.
"""

from __future__ import annotations

import dataclasses
import json
import signal
from dataclasses import dataclass
from pathlib import Path

from grpo_tui.services.base import Launch, NeedCondition, Probe, RestartPolicy

PLAN_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Services in start order, as the daemon carries them out."""

    profile_name: str
    launches: tuple[Launch, ...]

    def to_json(self) -> str:
        """The plan for the daemon; `from_json` gives it back."""
        launches = [
            {
                **{f.name: getattr(launch, f.name) for f in dataclasses.fields(launch)},
                "cwd": str(launch.cwd),
                "env": dict(launch.env),
                "needs": {name: str(condition) for name, condition in launch.needs.items()},
                "ready": launch.ready.model_dump(mode="json", exclude_defaults=True) if launch.ready else None,
                "live": launch.live.model_dump(mode="json", exclude_defaults=True) if launch.live else None,
                "restart": str(launch.restart),
                "stop_signal": launch.stop_signal.name,
            }
            for launch in self.launches
        ]
        return json.dumps({"version": PLAN_VERSION, "profile": self.profile_name, "launches": launches}, indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read a plan that `to_json` wrote."""
        document = json.loads(text)
        if document.get("version") != PLAN_VERSION:
            raise ValueError(f"a plan of version {document.get('version')}, this program reads {PLAN_VERSION}")
        return Plan(
            profile_name=document["profile"],
            launches=tuple(
                Launch(
                    **{
                        **raw,
                        "argv": tuple(raw["argv"]),
                        "cwd": Path(raw["cwd"]),
                        "needs": {name: NeedCondition(condition) for name, condition in raw["needs"].items()},
                        "ready": Probe.model_validate(raw["ready"]) if raw["ready"] else None,
                        "live": Probe.model_validate(raw["live"]) if raw["live"] else None,
                        "restart": RestartPolicy(raw["restart"]),
                        "stop_signal": signal.Signals[raw["stop_signal"]],
                        "ports": tuple(raw["ports"]),
                        "gpus": tuple(raw["gpus"]),
                        "followers": tuple(raw["followers"]),
                    }
                )
                for raw in document["launches"]
            ),
        )
