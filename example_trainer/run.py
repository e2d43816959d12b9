"""`atropos-grpo-run` for a checkout: `python -m example_trainer.run …`."""

from grpo_engine.aliases import atropos_grpo_run

if __name__ == "__main__":
    raise SystemExit(atropos_grpo_run())
