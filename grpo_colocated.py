"""`run-colocated-grpo` for the ranks of torchrun: `torchrun --nproc_per_node=4 grpo_colocated.py`."""

from grpo_engine.aliases import run_colocated_grpo

if __name__ == "__main__":
    raise SystemExit(run_colocated_grpo())
