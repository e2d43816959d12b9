"""`python -m grpo_engine` is `grpo-engine`."""

from grpo_engine.cli import main

raise SystemExit(main())
