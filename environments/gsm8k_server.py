"""`grpo-engine env --task gsm8k` for a checkout: `python environments/gsm8k_server.py serve …`."""

from grpo_engine.aliases import gsm8k_server

if __name__ == "__main__":
    raise SystemExit(gsm8k_server())
