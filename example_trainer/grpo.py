"""`atropos-grpo` for a checkout: `python -m example_trainer.grpo …`, or `python example_trainer/grpo.py …`."""

from grpo_engine.aliases import atropos_grpo

if __name__ == "__main__":
    raise SystemExit(atropos_grpo())
