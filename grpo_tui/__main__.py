"""`python -m grpo_tui`: the command line, for where its script is not on the path."""

from __future__ import annotations

from grpo_tui.cli import main

if __name__ == "__main__":
    main()
