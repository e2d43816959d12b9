"""`run-colocated-grpo` for a checkout: `python run_colocated_grpo.py --gpus 4`."""

from grpo_engine.aliases import run_colocated_grpo

if __name__ == "__main__":
    raise SystemExit(run_colocated_grpo())
