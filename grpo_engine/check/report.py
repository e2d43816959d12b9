"""How findings reach whoever started a check: each on the terminal when it is there, or all as JSON at the end."""

from __future__ import annotations

import json
import os
import shutil
import sys

from grpo_engine.check.config import CheckConfig
from grpo_engine.check.findings import Finding, as_table, finding_lines, summary_line

_MOST_COLUMNS = 100


class Report:
    """Shows each finding when it is there, or all of them as JSON at the end."""

    def __init__(self, config: CheckConfig) -> None:
        self.findings: list[Finding] = []
        self._as_json = config.as_json
        self._has_colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        self._width = min(shutil.get_terminal_size().columns, _MOST_COLUMNS)
        self._say(f"{config.model_name} by {config.bridge.mode}, server on port {config.vllm_port}\n")

    def add(self, *findings: Finding) -> None:
        """Take findings."""
        for finding in findings:
            self.findings.append(finding)
            self._say("\n".join(finding_lines(finding, width=self._width, has_colour=self._has_colour)))

    def end(self) -> None:
        """Say how it stands."""
        if self._as_json:
            sys.stdout.write(json.dumps(as_table(self.findings), ensure_ascii=False) + "\n")
        self._say(f"\n{summary_line(self.findings, has_colour=self._has_colour)}")

    def _say(self, text: str) -> None:
        if not self._as_json:
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()
