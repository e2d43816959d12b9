#!/usr/bin/env python3
"""Write grade-school word problems as a JSON Lines file, for the task `jsonl` on a machine without reasoning-gym.

Where reasoning-gym is installed, the task `reasoning_gym:gsm_symbolic` needs no file. The same seed gives the same
problems; a question is written once.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

DRAWN_PER_PROBLEM = 2
"""Some questions come twice; so many are drawn for each that is wanted."""


def problems(count: int, seed: int, difficulty: float) -> Iterator[dict[str, str]]:
    """So many problems as records of `question` and `answer`, no question twice; fewer where there are no more."""
    import reasoning_gym

    size = DRAWN_PER_PROBLEM * count
    dataset = reasoning_gym.create_dataset("gsm_symbolic", seed=seed, size=size, difficulty=difficulty)
    entries = (dataset[index] for index in range(size))
    different = {entry["question"]: str(entry["answer"]) for entry in entries}
    for question, answer in islice(different.items(), count):
        yield {"question": question, "answer": answer}


def main() -> None:
    """Write the file that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="file to write, e.g. gsm_symbolic.jsonl")
    parser.add_argument("--count", type=int, default=2000, help="problems (default: 2000, half a megabyte)")
    parser.add_argument("--seed", type=int, default=0, help="which problems (default: 0)")
    parser.add_argument("--difficulty", type=float, default=1.0, help="of reasoning-gym (default: 1.0)")
    options = parser.parse_args()
    try:
        import reasoning_gym  # noqa: F401
    except ImportError:
        parser.error("reasoning-gym is not installed here: pip install 'grpo-tui[data]', or make the file elsewhere")
    if options.count < 1:
        parser.error(f"--count {options.count}: at least one problem")
    with options.path.open("w", encoding="utf-8") as file:
        for record in problems(options.count, options.seed, options.difficulty):
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
