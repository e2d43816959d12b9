"""Seconds of every test file, in tests/durations.json, and the time that `make test` and `make test-all` may take.

    scripts/test_durations.py record FAST.xml EXTENDED.xml     # from pytest --junitxml, of a quiet machine
    scripts/test_durations.py report fast FAST.xml 312         # after `make test`, which took 312 s

A tier takes what its files take by the number of workers; `make test` has format, lint, types and contracts besides.
"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILE = ROOT / "tests" / "durations.json"
TIERS = ("fast", "extended")
BUDGETS_S = {"fast": 600.0, "extended": 1200.0}
"""`make test`, and what `make test-all` runs besides, on two quiet cores without installation."""
CHECKS_S = 75.0
"""Of the first: ruff, mypy without a cache, lint-imports."""
NUM_WORKERS = 2
NOTICE_FROM_S = 5.0
"""Files that take less are not worth a line."""

Durations = dict[str, dict[str, float]]
"""By file, by tier."""


def load() -> Durations:
    return dict(json.loads(FILE.read_text())["files"])


def expected_s(files: Durations, tier: str) -> float:
    """How long a tier takes with the recorded durations."""
    tests_s = sum(by_tier.get(tier, 0.0) for by_tier in files.values()) / NUM_WORKERS
    return tests_s + (CHECKS_S if tier == "fast" else 0.0)


def read_xml(path: Path) -> Counter[str]:
    """Seconds of each test file, set-up and tear-down included."""
    seconds: Counter[str] = Counter()
    for case in ET.parse(path).iter("testcase"):
        words = case.attrib.get("classname", "").split(".")  # a file that cannot be collected has none
        while words and not (ROOT / Path(*words)).with_suffix(".py").is_file():
            words.pop()  # the name of a test class
        if words:
            seconds[str(Path(*words).with_suffix(".py"))] += float(case.attrib["time"])
    return seconds


def grown(before: Mapping[str, float], now: Mapping[str, float]) -> list[str]:
    """A line for each file that takes over twice its recorded time."""
    return [
        f"{name}: {seconds:.0f} s, recorded {before.get(name, 0.0):.0f} s"
        for name, seconds in sorted(now.items(), key=lambda item: -item[1])
        if seconds > max(NOTICE_FROM_S, 2 * before.get(name, 0.0))
    ]


def record(paths: list[Path]) -> None:
    """Write the durations of one run per tier, and print the files that grew."""
    before, files = load(), Durations()
    for tier, path in zip(TIERS, paths, strict=True):
        for name, seconds in read_xml(path).items():
            files.setdefault(name, {})[tier] = round(seconds, 1)
    lines = [f"    {json.dumps(name)}: {json.dumps(files[name])}" for name in sorted(files)]
    FILE.write_text('{\n  "files": {\n' + ",\n".join(lines) + "\n  }\n}\n")
    for tier in TIERS:
        old, new = ({name: times.get(tier, 0.0) for name, times in each.items()} for each in (before, files))
        print(
            f"{tier}: {expected_s(files, tier):.0f} s expected, budget {BUDGETS_S[tier]:.0f} s",
            *grown(old, new),
            sep="\n  ",
        )


def report(tier: str, path: Path, wall_s: float) -> None:
    """Print what a tier took beside its budget; a slow machine is no failure."""
    print(f"{tier} tests: {wall_s:.0f} s, budget {BUDGETS_S[tier]:.0f} s on two quiet cores")
    if path.is_file():
        recorded = {name: times.get(tier, 0.0) for name, times in load().items()}
        for line in grown(recorded, read_xml(path)):
            print(f"  took over twice its recorded time: {line}")


def main() -> None:
    match sys.argv[1:]:
        case ["record", fast, extended]:
            record([Path(fast), Path(extended)])
        case ["report", tier, path, wall_s]:
            report(tier, Path(path), float(wall_s))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
