"""`python -m grpo_tui` is `grpo-tui`."""

from grpo_tui.cli import main

raise SystemExit(main())
